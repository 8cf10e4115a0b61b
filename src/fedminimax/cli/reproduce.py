"""fedminimax reproduce: the papers' tables and figures."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fedminimax.cli.common import RUNS, Stopped
from fedminimax.config import suggest
from fedminimax.engine.device import share_of_cores, stay_on, usable_cores
from fedminimax.report.figures import matplotlib_or
from fedminimax.report.papers import (
    BudgetName,
    Entry,
    read_contents,
    read_entries,
    read_queue,
)
from fedminimax.report.reproduce import BUDGETS, Order, contents_table, reproduce
from fedminimax.report.summaries import write_summaries
from fedminimax.report.tables import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries (default: all)")
    parser.add_argument(
        "--queue",
        action="store_true",
        help="the entries of queue.toml in their order, on one core at the lowest priority",
    )
    parser.add_argument("--list", action="store_true", help="every table and figure, and no more")
    parser.add_argument("--budget", choices=BUDGETS, default="full", help="how long runs are")
    parser.add_argument("--seeds", type=int, help="runs of each (default: what the entry says)")
    parser.add_argument("--workers", type=int, default=1, help="runs of an entry at the same time")
    parser.add_argument(
        "--done", action="store_true", help="begin nothing: write down what is finished"
    )
    parser.add_argument(
        "--entries", type=Path, default=Path("experiments/papers"), help="their folder"
    )
    parser.add_argument(
        "--folder", type=Path, default=RUNS / "reproduce", help="of the runs (runs/reproduce)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="where to write pages, and records of finished runs (default: pages, there too)",
    )


def command(options: argparse.Namespace) -> int:
    """Runs entries, and writes their pages."""
    entries = read_entries(options.entries)
    papers = read_contents(options.entries, entries)
    if options.list:
        console().print(contents_table(papers, entries))
        return 0
    if unknown := [name for name in options.names if name not in entries]:
        raise ValueError(f"there is no entry {unknown[0]!r}; {suggest(unknown[0], entries)}")
    if options.queue and (options.names or options.seeds or options.budget != "full"):
        raise ValueError("--queue takes names, budgets and seeds from queue.toml: leave yours out")
    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds is {options.seeds}; give at least 1")
    if options.workers < 1:
        raise ValueError(f"--workers is {options.workers}; give at least 1")
    matplotlib_or()
    parts: list[tuple[list[Entry], BudgetName, int | None]]
    if options.queue:
        queue = read_queue(options.entries, entries)
        parts = [([entries[item.name]], item.budget, item.seeds) for item in queue]
        stand_aside()
    else:
        chosen = [entries[name] for name in options.names or entries]
        parts = [(chosen, options.budget, options.seeds)]
    output = options.output or options.folder
    ended: list[bool] = []
    try:
        for part, budget, seeds in parts:
            order = Order(budget, seeds, not options.done, options.folder, output, options.workers)
            ended += [well for _, well in reproduce(part, order, tell)]
    except KeyboardInterrupt:
        raise Stopped("interrupted; the same command goes on where it stopped") from None
    write_summaries(papers, entries, output)
    print(f"pages: {output}")
    # What was asked for by name, and could not even be begun, is a failure too.
    asked = sum(len(part) for part, *_ in parts)
    by_name = options.names or options.queue
    lacking = by_name and not options.done and len(ended) < asked
    return 1 if lacking or not all(ended) else 0


def tell(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def stand_aside() -> None:
    """This process leaves the machine to others: one core, and that only when nobody wants it."""
    stay_on(share_of_cores(0, usable_cores()))
    if hasattr(os, "nice"):
        os.nice(19)
