"""fedminimax benchmark: the default and the main methods on tables with rare positives."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedminimax.report.benchmark import benchmark, read_contents
from fedminimax.report.benchmark_page import write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--budget", choices=("quick", "full"), default="quick", help="how much")
    parser.add_argument(
        "--entries", type=Path, default=Path("experiments/benchmark"), help="their folder"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("runs/benchmark"),
        help="where to write the page, its diagram and records (default: %(default)s)",
    )


def command(options: argparse.Namespace) -> int:
    """Runs what is left of the benchmark, and writes its page."""
    contents = read_contents(options.entries, options.budget)
    place = options.output / "records" / "benchmark" / options.budget
    found = benchmark(contents, place, lambda text: print(text, flush=True))
    if not found:
        raise ValueError("no set could be read: set FEDMINIMAX_DATA to the folder that holds them")
    page = write_page(found, contents, options.budget, options.output)
    print(f"page: {page}")
    return 0
