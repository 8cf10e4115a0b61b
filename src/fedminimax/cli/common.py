"""What commands share: where runs are, and how one ends that is stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

RUNS = Path("runs")


class Stopped(KeyboardInterrupt):
    """A run that Ctrl-C ended between two rounds: where it stands, and how it goes on."""


def tell_note(text: str) -> None:
    """Prints what a user should see before a run."""
    print(f"note: {text}")


def next_free(parent: Path, name: str) -> Path:
    """The first of name-1, name-2, ... that is not there yet."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def to_resume(options: argparse.Namespace, suffix: str = "") -> Path:
    """The folder that --resume means: the one given, or the last of the file's."""
    if options.folder is not None:
        return options.folder
    if options.config.is_dir():
        return options.config
    name = options.config.stem + suffix
    made = [p for p in RUNS.glob(f"{name}-*") if p.name.removeprefix(f"{name}-").isdigit()]
    if not made:
        raise ValueError(f"there is no run of {name} in {RUNS}/: give --folder")
    return max(made, key=lambda path: path.stat().st_mtime)
