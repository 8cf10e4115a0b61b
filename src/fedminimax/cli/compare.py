"""fedminimax compare: finished runs side by side, or the methods of a comparison file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from fedminimax.cli.common import RUNS
from fedminimax.engine.state.checkpoint import CheckpointError
from fedminimax.experiment import experiment_of, load
from fedminimax.report.comparison import Comparison, Spending
from fedminimax.report.comparison_runs import compare
from fedminimax.report.comparison_table import markdown, ranking_table
from fedminimax.report.equal_cost import side_by_side
from fedminimax.report.figures import NO_FIGURE, draw, matplotlib_or
from fedminimax.report.tables import (
    Compared,
    common_metric,
    compare_table,
    console,
    different_rows,
    ranked,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN|FILE.toml")
    parser.add_argument("--json", action="store_true", help="print one JSON line per run")
    parser.add_argument(
        "--anyway", action="store_true", help="rank runs on different data or splits too"
    )
    parser.add_argument("--folder", type=Path, help="of a file's runs (default: runs/NAME)")
    parser.add_argument("--workers", type=int, default=1, help="runs of a file at the same time")
    parser.add_argument(
        "--at", choices=get_args(Spending), help="rank the methods at equal cost, with differences"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="also write a file's table, and figure, here"
    )


def command(options: argparse.Namespace) -> int:
    """Prints the table of runs, or of a comparison."""
    if options.folders[0].suffix == ".toml":
        return _compare_file(options)
    runs = []
    for folder in options.folders:
        try:
            experiment, run = experiment_of(folder), load(folder)
            if not run.history:
                raise CheckpointError(f"there is no record in {folder}/history.jsonl")
        except CheckpointError as error:
            # runs/* also holds what is unfinished, and the demonstration.
            print(f"note: left out: {error}", file=sys.stderr)
            continue
        names = (experiment.method.name, experiment.problem.name)
        runs.append(Compared(str(folder), *names, run, experiment))
    if not runs:
        raise ValueError("none of these is the folder of a finished run")
    if options.at is not None:
        if options.json:
            raise ValueError("--at ranks methods, --json lists runs: leave one of them out")
        console().print(ranking_table(*side_by_side(runs, options.at)))
        return 0
    common_metric(runs)
    if not options.anyway and (difference := different_rows(runs)):
        raise ValueError(
            f"these runs are judged on different rows: {difference}. Leave one out, or give "
            "--anyway to rank them nevertheless"
        )
    runs = ranked(runs)
    if options.json:
        for entry in runs:
            about = {"folder": entry.folder, "method": entry.method, "problem": entry.problem}
            print(json.dumps({**about, "outcome": entry.run.outcome, **entry.run.kept}))
    else:
        console().print(compare_table(runs))
    return 0


def _compare_file(options: argparse.Namespace) -> int:
    path, *others = options.folders
    if others or options.workers < 1:
        raise ValueError("give one comparison file at a time, and at least one worker")
    if options.output is not None and Comparison(path).plan.figure:
        matplotlib_or(NO_FIGURE)
    folder = options.folder or RUNS / path.stem
    found = compare(path, folder, options.workers, options.at)
    if options.output is None:
        print(markdown(path, *found), end="")
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure = options.output.with_suffix(".svg") if found[0].plan.figure else None
    if figure is not None:
        draw(*found, figure)
    text = markdown(path, *found, figure=None if figure is None else figure.name)
    print(text, end="")
    options.output.write_text(text, encoding="utf-8")
    return 0
