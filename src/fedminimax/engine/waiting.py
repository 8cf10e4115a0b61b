"""How long a thread of an operation turns in circles while it waits for the others.

GNU's OpenMP, which torch brings on Linux, does so for about a millisecond before it sleeps. That is
longer than most operations here take, and where another process has a core, or the system puts two
threads on the same one, a thread that waits keeps off the one that it waits for: rounds then take
several times as long. It looks at this variable once, when torch is imported.
"""

from __future__ import annotations

import os

CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either says it

if not any(name in os.environ for name in CHOSEN):
    os.environ["GOMP_SPINCOUNT"] = "3000"
