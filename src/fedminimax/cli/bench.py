"""fedminimax bench: how fast this is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import fedminimax


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--quick", action="store_true", help="short measurements: a few minutes")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROW", help="a row or a group of them"
    )
    parser.add_argument(
        "--peers", action="store_true", help="also the same jobs in other libraries"
    )
    parser.add_argument(
        "--peers-folder", type=Path, help="of their environments (default: in the cache)"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("-o", "--output", type=Path, help="also write it here, and beside as JSON")


def command(options: argparse.Namespace) -> int:
    """Measures, and prints the table."""
    checkout = Path(fedminimax.__file__).resolve().parents[2]
    if not (checkout / "bench" / "__init__.py").is_file():
        raise ValueError(
            "the bench is not part of the installed package: clone the repository, install it with "
            "pip install -e . and call fedminimax bench again"
        )
    sys.path.insert(0, str(checkout))
    from bench import bench

    return bench(
        options.quick,
        options.only,
        options.peers,
        options.peers_folder,
        options.output,
        options.json,
    )
