"""fedminimax demo: four hospitals train one classifier."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedminimax.cli.common import RUNS, next_free
from fedminimax.report.demo import demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--folder", type=Path, help="where to write (default: runs/demo-N)")
    parser.add_argument("--splits", type=int, default=3, help="random splits to average over")


def command(options: argparse.Namespace) -> int:
    """Plays the demonstration."""
    return demo(options.folder or next_free(RUNS, "demo"), options.splits)
