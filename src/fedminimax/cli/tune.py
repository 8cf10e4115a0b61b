"""fedminimax tune: a search for better rates."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fedminimax.cli.common import RUNS, Stopped, next_free, tell_note, to_resume
from fedminimax.config import Experiment
from fedminimax.report.tables import console
from fedminimax.report.tuning import counted, trial_line, trials_table, verdict
from fedminimax.tuning.search import Search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("config", type=Path, help="a TOML file; with --resume also the folder")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="such as run.rounds=50")
    parser.add_argument("--trials", type=int, help="settings to try, with those given (30)")
    parser.add_argument("--repeats", type=int, help="of the best and of those given (5)")
    parser.add_argument("--cuts", type=int, help="of validation rows per trial (1; few rows: 5)")
    parser.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="RANGE",
        help='what to search, such as "method.lr=0.001..1 log" (default: all rates of the method)',
    )
    parser.add_argument("--folder", type=Path, help="where to write (default: runs/NAME-tune-N)")
    parser.add_argument("--resume", action="store_true", help="go on after the last trial")


def command(options: argparse.Namespace) -> int:
    """Searches, and says what was found."""
    lengths = {"trials": options.trials, "repeats": options.repeats}
    if options.resume:
        cuts = [] if options.cuts is None else ["--cuts"]
        if given := [*options.changes, *options.search, *cuts]:
            raise ValueError(
                f"--resume goes on with the settings of the search, so {given[0]!r} cannot be "
                "changed: leave it out, or start a new search"
            )
        search = Search.resumed(to_resume(options, "-tune"), **lengths)
    else:
        experiment = Experiment.from_file(options.config, options.changes, tell_note)
        folder = options.folder or next_free(RUNS, f"{options.config.stem}-tune")
        lengths["cuts"] = options.cuts
        lengths = {name: number for name, number in lengths.items() if number is not None}
        search = Search(folder, experiment, options.search, **lengths)
        search.create()
    for note in search.found.notes:
        print(f"note: {note}")
    print("searching " + ", ".join(map(str, search.space)), flush=True)
    try:
        found = search.run(lambda trial: print(trial_line(search, trial), flush=True))
    except KeyboardInterrupt:
        again = f"fedminimax tune {shlex.quote(str(search.folder))} --resume"
        raise Stopped(f"interrupted; no finished trial is lost, go on with: {again}") from None
    console().print(trials_table(search, found))
    print(said := f"{counted(found)}\n{verdict(found)}")
    if found.chosen is None:
        return 1
    for edge in search.at_the_edge(found.chosen):
        print(f"note: trial {found.chosen.number} is at an end of {edge}: search further")
    path = search.write_best(found.chosen, f"Trial {found.chosen.number}. {said}")
    print(f"settings of trial {found.chosen.number}: fedminimax run {shlex.quote(str(path))}")
    return 0
