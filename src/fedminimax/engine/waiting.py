"""torch is imported with a setting for how long a thread of an operation stays awake while it waits
for the others.

GNU's OpenMP, which torch brings on Linux, lets it turn in circles for longer than most operations
here take. Where another process has a core, or the system puts two threads on the same one, a
thread that waits then keeps off the one that it waits for, and rounds take several times as long.
The library looks at the variable once, when torch is imported: so the setting is made there,
whoever imports it, and taken back.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SPINS = "GOMP_SPINCOUNT"


class _TorchFinder(MetaPathFinder):
    """Finds torch where the others do, and has it loaded with the setting."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        found: Any = find_spec("torch")
        if found is not None and SPINS not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
            load = found.loader.exec_module

            def load_with_setting(module: ModuleType) -> None:
                os.environ[SPINS] = "3000"
                try:
                    load(module)
                finally:
                    del os.environ[SPINS]  # no business of programs started from here
                    del found.loader.exec_module

            found.loader.exec_module = load_with_setting
        return found


if "torch" not in sys.modules:
    sys.meta_path.insert(0, _TorchFinder())
