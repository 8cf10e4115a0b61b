"""torch is imported with a setting for how long a thread of an operation stays awake while it waits
for the others.

GNU's OpenMP, which torch brings on Linux, lets it turn in circles for longer than most operations
here take. Where another process has a core, or the system puts two threads on the same one, a
thread that waits then keeps off the one that it waits for, and rounds take several times as long.
The library looks at the variable once, when torch is imported.
"""

from __future__ import annotations

import os
import sys

SPINS = "GOMP_SPINCOUNT"

if "torch" not in sys.modules and SPINS not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
    os.environ[SPINS] = "3000"
    import torch  # noqa: F401

    del os.environ[SPINS]  # nobody else's business, such as that of other programs started here
