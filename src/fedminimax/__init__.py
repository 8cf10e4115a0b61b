"""Federated optimisation of objectives that are not plain averages."""

# The public names are listed once, in `__init__.pyi`. Each is imported when it is first used,
# because importing torch takes seconds.

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import fedminimax.engine.waiting  # noqa: F401  before torch is imported

__version__ = "0.1.0"


def _modules() -> dict[str, str]:
    """The module that each public name of `__init__.pyi` is imported from."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_MODULES = _modules()
__all__ = list(_MODULES)  # type: ignore[reportUnsupportedDunderAll]  # checkers read the stub


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fedminimax' has no attribute {name!r}")
    if _MODULES[name] == "fedminimax":
        return import_module(f"fedminimax.{name}")
    globals()[name] = found = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
