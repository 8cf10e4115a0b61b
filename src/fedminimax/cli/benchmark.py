"""fedminimax benchmark: the default and the main methods on tables with rare positives."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedminimax.report.benchmark import read_contents, read_records, run_split
from fedminimax.report.benchmark_page import write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--budget", choices=("quick", "full"), default="quick", help="how much")
    parser.add_argument(
        "--entries", type=Path, default=Path("experiments/benchmark"), help="their folder"
    )
    parser.add_argument(
        "--kept-out", action="store_true", help="run the sets too by which nothing is decided"
    )
    parser.add_argument("--page", action="store_true", help="run nothing, write the page only")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("runs/benchmark"),
        help="where to write the page, its diagram and records (default: %(default)s)",
    )


def command(options: argparse.Namespace) -> int:
    """Runs what is left of the benchmark, and writes its page as it goes."""
    contents = read_contents(options.entries, options.budget)
    place = options.output / "records" / "benchmark" / options.budget

    def write() -> Path:
        return write_page(read_records(contents, place), contents, options.budget, options.output)

    if options.page:
        print(f"page: {write()}")
        return 0
    sets = [each for each in contents.sets if options.kept_out or not each.kept_out]
    for split in range(contents.budget.splits):
        for each in sets:
            run_split(each, contents, split, place, lambda text: print(text, flush=True))
            write()
    if not read_records(contents, place):
        raise ValueError("no set could be read: set FEDMINIMAX_DATA to the folder that holds them")
    if not options.kept_out and (left := [s.name for s in contents.sets if s.kept_out]):
        print(f"kept out: {', '.join(left)}; --kept-out runs them, once all is decided")
    print(f"page: {write()}")
    return 0
