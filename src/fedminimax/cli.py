"""The command line: fedminimax demo | run | tune | compare | report | reproduce | frontier | list |
data | predict | deploy | bench."""

from __future__ import annotations

import argparse
import csv
import inspect
import io
import json
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fedminimax import __version__
from fedminimax.algorithms import METHODS
from fedminimax.bench import bench
from fedminimax.config import CHOICES, ConfigError, Experiment, read_toml, suggest
from fedminimax.data import SOURCES
from fedminimax.data.download import fetch
from fedminimax.data.sources import Source, look, verify
from fedminimax.data.tables import read_table
from fedminimax.deploy import commands as deploy
from fedminimax.engine.checkpoint import CheckpointError
from fedminimax.engine.crew import Crew
from fedminimax.engine.distributed import (
    TIMEOUT,
    LostError,
    PeerError,
    joined,
    rank,
    started_by_torchrun,
)
from fedminimax.engine.profile import Profile
from fedminimax.engine.simulate import Run
from fedminimax.engine.trainer import Interrupted, succeeded
from fedminimax.engine.work import ClientError
from fedminimax.experiment import (
    build,
    experiment_of,
    load,
    preparation,
    resume,
    run_experiment,
    scores,
)
from fedminimax.metrics.ranking import auc
from fedminimax.report import html, portfolio, tracking
from fedminimax.report.comparison import Comparison, Spending
from fedminimax.report.comparison_runs import compare
from fedminimax.report.comparison_table import markdown, ranking_table
from fedminimax.report.datasets import sources_table
from fedminimax.report.demo import demo
from fedminimax.report.equal_cost import side_by_side
from fedminimax.report.figures import NO_FIGURE, draw, draw_charts, matplotlib_or
from fedminimax.report.papers import read_contents, read_entries
from fedminimax.report.progress import RunProgress
from fedminimax.report.reproduce import (
    BUDGETS,
    Order,
    contents_table,
    reproduce,
    write_summaries,
)
from fedminimax.report.runs import grouped, runs_in
from fedminimax.report.tables import (
    Compared,
    bytes_text,
    compare_table,
    console,
    list_table,
    number_text,
    options_table,
    profile_table,
    ranked,
)
from fedminimax.report.traits import traits_table
from fedminimax.report.tuning import counted, trial_line, trials_table, verdict
from fedminimax.tuning.search import Search

RUNS = Path("runs")


def main(arguments: Sequence[str] | None = None) -> int:
    options, rest = _parser().parse_known_args(arguments)
    if rest:
        # argparse stops at the first option; changes may also stand behind it.
        if not hasattr(options, "changes") or any("=" not in r or r[0] == "-" for r in rest):
            _parser().error(f"unrecognized arguments: {' '.join(rest)}")
        options.changes += rest
    try:
        with _warnings_as_notes():
            return options.command(options)
    except OSError as error:
        _say(f"{error.filename}: {error.strerror}" if error.filename else error)
        return 2
    except LostError as error:
        # Process 0 may be the one that is gone, so every other says it.
        print(f"fedminimax: {error}", file=sys.stderr)
        return 2
    except (ValueError, ClientError, PeerError) as error:
        _say(error)
        return 2
    except Stopped as stopped:
        _say(stopped)
        return 130
    except KeyboardInterrupt:
        resumes = hasattr(options, "resume")
        _say("interrupted; a run goes on with --resume" if resumes else "interrupted")
        return 130


def _say(sentence: object, who: str = "fedminimax") -> None:
    """Once, however many processes torchrun started."""
    if rank() == 0:
        print(f"{who}: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """A warning is a sentence for the user; the line of source that gave it would not help."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(message, "note")
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedminimax", description=sys.modules["fedminimax"].__doc__
    )
    parser.add_argument("--version", action="version", version=f"fedminimax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "demo", help="four hospitals train one classifier; a table at the end"
    )
    command.add_argument("--folder", type=Path, help="where to write (default: runs/demo-N)")
    command.add_argument("--splits", type=int, default=5, help="random splits to average over")
    command.set_defaults(command=_demo)

    command = commands.add_parser("run", help="run an experiment from a TOML file")
    command.add_argument("config", type=Path, help="a TOML file; with --resume also a run's folder")
    command.add_argument("changes", nargs="*", metavar="key=value", help="such as method.lr=0.05")
    command.add_argument("--folder", type=Path, help="where to write (default: runs/NAME-N)")
    command.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    command.add_argument("--quiet", action="store_true", help="print nothing but the result")
    command.add_argument("--sites", action="store_true", help="also show each site as it goes")
    command.add_argument("--json", action="store_true", help="print the result as one JSON line")
    command.add_argument("--profile", action="store_true", help="also print where the time went")
    command.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="that a process of torchrun waits for the others (default: %(default)g)",
    )
    command.set_defaults(command=_run)

    command = commands.add_parser("tune", help="search for better rates, on validation rows")
    command.add_argument("config", type=Path, help="a TOML file; with --resume also the folder")
    command.add_argument("changes", nargs="*", metavar="key=value", help="such as run.rounds=50")
    command.add_argument("--trials", type=int, help="settings to try, with those given (30)")
    command.add_argument("--repeats", type=int, help="of the best and of those given (5)")
    command.add_argument("--cuts", type=int, help="of validation rows per trial (1; few rows: 5)")
    command.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="RANGE",
        help='what to search, such as "method.lr=0.001..1 log" (default: all rates of the method)',
    )
    command.add_argument("--folder", type=Path, help="where to write (default: runs/NAME-tune-N)")
    command.add_argument("--resume", action="store_true", help="go on after the last trial")
    command.set_defaults(command=_tune)

    command = commands.add_parser(
        "compare", help="finished runs side by side, or the methods of a comparison file"
    )
    command.add_argument("folders", nargs="+", type=Path, metavar="RUN|FILE.toml")
    command.add_argument("--json", action="store_true", help="print one JSON line per run")
    command.add_argument("--folder", type=Path, help="of a file's runs (default: runs/NAME)")
    command.add_argument("--workers", type=int, default=1, help="runs of a file at the same time")
    command.add_argument(
        "--at", choices=get_args(Spending), help="rank the methods at equal cost, with differences"
    )
    command.add_argument(
        "-o", "--output", type=Path, help="also write a file's table, and figure, here"
    )
    command.set_defaults(command=_compare)

    command = commands.add_parser(
        "report", help="runs as one page: curves, ROC, sites, duals, costs; it opens offline"
    )
    command.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one that has some"
    )
    command.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the page (report.html)"
    )
    command.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="the charts also as SVG and PNG"
    )
    for name in ("tensorboard", "mlflow"):
        command.add_argument(
            f"--{name}", type=Path, metavar="FOLDER", help=f"the records also for {name}, as files"
        )
    command.set_defaults(command=_report)

    command = commands.add_parser(
        "reproduce", help="the papers' tables and figures: run them, and judge the papers' claims"
    )
    command.add_argument("names", nargs="*", metavar="NAME", help="entries (default: all)")
    command.add_argument("--list", action="store_true", help="every table and figure, and no more")
    command.add_argument("--budget", choices=BUDGETS, default="full", help="how long runs are")
    command.add_argument("--seeds", type=int, help="runs of each (default: what the entry says)")
    command.add_argument("--workers", type=int, default=1, help="runs of an entry at the same time")
    command.add_argument(
        "--done", action="store_true", help="begin nothing: write down what is finished"
    )
    command.add_argument(
        "--entries", type=Path, default=Path("experiments/papers"), help="their folder"
    )
    command.add_argument(
        "--folder", type=Path, default=RUNS / "reproduce", help="of the runs (runs/reproduce)"
    )
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        help="where to write pages, and records of finished runs (default: pages, there too)",
    )
    command.set_defaults(command=_reproduce)

    command = commands.add_parser(
        "frontier", help="finished portfolio runs against the efficient frontier of their data"
    )
    command.add_argument("folders", nargs="+", type=Path, metavar="RUN")
    command.add_argument(
        "-o", "--output", type=Path, help="also write the page, and a figure, here"
    )
    command.set_defaults(command=_frontier)

    command = commands.add_parser("list", help="what an experiment can name, one sentence each")
    command.add_argument(
        "what",
        nargs="?",
        help="methods (with what they cost), problems, data, models, or one name with its options",
    )
    command.set_defaults(command=_list)

    command = commands.add_parser("data", help="the files of data sets: list, fetch, verify")
    actions = command.add_subparsers(required=True, metavar="list|fetch|verify")
    for name, action, many, told in (
        ("list", _data_list, None, "the data sets that have files, and whether they are here"),
        ("fetch", _data_fetch, "+", "download what is missing of them, and check it"),
        ("verify", _data_verify, "*", "check the files that are here, or those of the named sets"),
    ):
        command = actions.add_parser(name, help=told)
        if many is not None:
            command.add_argument("names", nargs=many, metavar="NAME")
        command.add_argument(
            "--folder",
            default="",
            help="looked in first, and fetched to (default: FEDMINIMAX_DATA, or the cache)",
        )
        command.set_defaults(command=action)

    command = commands.add_parser("predict", help="score new rows with a finished run")
    command.add_argument("folder", type=Path, metavar="RUN")
    command.add_argument(
        "table", type=Path, help="a CSV file with the columns of the training data"
    )
    command.add_argument("-o", "--output", type=Path, help="where to write (default: the screen)")
    command.add_argument(
        "--best", action="store_true", help="the model of the best validation round, not the last"
    )
    command.set_defaults(command=_predict)

    deploy.add_commands(commands)

    command = commands.add_parser(
        "bench", help="how fast this is, beside loops by hand and other libraries"
    )
    command.add_argument("--quick", action="store_true", help="short measurements: a few minutes")
    command.add_argument(
        "--only", action="append", default=[], metavar="ROW", help="a row or a group of them"
    )
    command.add_argument(
        "--peers", action="store_true", help="also the same jobs in other libraries"
    )
    command.add_argument(
        "--peers-folder", type=Path, help="of their environments (default: in the cache)"
    )
    command.add_argument("--json", action="store_true", help="print the table as JSON")
    command.add_argument("-o", "--output", type=Path, help="also write it here, and beside as JSON")
    command.set_defaults(command=_bench)
    return parser


def _run(options: argparse.Namespace) -> int:
    with joined(options.timeout) as crew:
        return _run_by(crew, options)


def _run_by(crew: Crew, options: argparse.Namespace) -> int:
    quiet = options.quiet or options.json or not crew.leads
    profile = Profile() if options.profile else None
    if options.resume:
        if options.changes:
            raise ValueError(
                f"--resume goes on with the settings of the run, so {options.changes[0]!r} cannot "
                "be changed: leave it out, or start a new run"
            )
        folder = _to_resume(options)
        experiment = experiment_of(folder)
        built = build(experiment)
        show = RunProgress(quiet, built.clients if options.sites else None)
        with _stoppable(folder, crew) as asked, show.begun(experiment):
            calls = {**show.callbacks, "interrupted": asked, "profile": profile}
            run = resume(folder, built=built, crew=crew, **calls)
    else:
        if "methods" in read_toml(options.config):
            raise ConfigError(
                f"{options.config} has several methods: use fedminimax compare {options.config}"
            )
        experiment = Experiment.from_file(options.config, options.changes)
        _check_engine(experiment, crew)
        built = build(experiment)
        for note in [] if quiet else built.notes:
            print(f"note: {note}")
        folder = options.folder or numbered(RUNS, options.config.stem)
        show = RunProgress(quiet, built.clients if options.sites else None)
        with _stoppable(folder, crew) as asked, show.begun(experiment):
            calls = {**show.callbacks, "interrupted": asked, "profile": profile}
            run = run_experiment(experiment, folder, built=built, crew=crew, **calls)
    if crew.leads:
        _tell(run, folder, options)
    if profile is not None and crew.leads:
        # What --json promises is one line on the standard output.
        out = Console(stderr=True) if options.json else console()
        out.print(profile_table(profile, run.rounds))
    return 0 if succeeded(run.outcome) else 1


def _check_engine(experiment: Experiment, crew: Crew) -> None:
    """A new run says how it is to be carried; one that is resumed may be carried otherwise."""
    distributed = experiment.run.engine == "distributed"
    if distributed and not started_by_torchrun():
        raise ConfigError(
            'engine is "distributed", but torchrun has not started this process: use torchrun '
            "--nproc-per-node 2 -m fedminimax run ..., or leave engine out"
        )
    if crew.size > 1 and not distributed:
        raise ConfigError(
            f'torchrun has started {crew.size} processes, but engine is "simulator", which needs '
            "one: add engine=distributed"
        )


class Stopped(KeyboardInterrupt):
    """A run that Ctrl-C ended between two rounds: where it stands, and how it goes on."""


@contextmanager
def _stoppable(folder: Path, crew: Crew) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first time the round is finished, the second time not."""
    asked = False
    # torchrun passes a Ctrl-C on that its processes have heard themselves.
    second = signal.default_int_handler if crew.size == 1 else signal.SIG_IGN
    hint = "; Ctrl-C again stops at once" if crew.size == 1 else ""

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, second)
        if crew.leads:
            print(f"finishing the round{hint}", file=sys.stderr, flush=True)

    # Only a program's main thread is told of signals.
    heard = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, ask) if heard else None
    try:
        yield lambda: asked
    except Interrupted as error:
        raise Stopped(
            f"{error}, of which there is a checkpoint; go on with: fedminimax run "
            f"{shlex.quote(str(folder))} --resume"
        ) from None
    finally:
        if heard:
            signal.signal(signal.SIGINT, before)


def _to_resume(options: argparse.Namespace, suffix: str = "") -> Path:
    if options.folder is not None:
        return options.folder
    if options.config.is_dir():
        return options.config
    name = options.config.stem + suffix
    made = [p for p in RUNS.glob(f"{name}-*") if p.name.removeprefix(f"{name}-").isdigit()]
    if not made:
        raise ValueError(f"there is no run of {name} in {RUNS}/: give --folder")
    return max(made, key=lambda path: path.stat().st_mtime)


def _tell(run: Run, folder: Path, options: argparse.Namespace) -> None:
    last = run.history[-1]
    if options.json:
        result = {"folder": str(folder), "outcome": run.outcome, "rounds": run.rounds, **last}
        print(json.dumps(result))
        return
    metric = run.problem.monitor
    measured = [
        f"{split} {metric} {number_text(last[split].get(metric))}"
        for split in ("validation", "test", "train")
        if split in last
    ]
    print(f"{run.outcome}; " + ", ".join(measured))
    judged = last.get("test", last.get("validation", {}))
    if judged.get("auc_interval"):
        low, high = judged["auc_interval"]
        print(f"95 % interval of the AUC {low:.3f} to {high:.3f}", end="; ")
        print(f"worst site {judged['worst_site'] or '-'} {number_text(judged['worst_site_auc'])}")
    sent = f"{bytes_text(last['bytes_up'])} up, {bytes_text(last['bytes_down'])} down"
    print(f"{sent}, {last['exchanges']} exchanges, {last['gradients']} gradients")
    print(f"run folder: {folder}")


def _tune(options: argparse.Namespace) -> int:
    lengths = {"trials": options.trials, "repeats": options.repeats}
    if options.resume:
        cuts = [] if options.cuts is None else ["--cuts"]
        if given := [*options.changes, *options.search, *cuts]:
            raise ValueError(
                f"--resume goes on with the settings of the search, so {given[0]!r} cannot be "
                "changed: leave it out, or start a new search"
            )
        search = Search.resumed(_to_resume(options, "-tune"), **lengths)
    else:
        experiment = Experiment.from_file(options.config, options.changes)
        folder = options.folder or numbered(RUNS, f"{options.config.stem}-tune")
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


def _compare(options: argparse.Namespace) -> int:
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
    runs = ranked(runs)
    if options.json:
        for entry in runs:
            about = {"folder": entry.folder, "method": entry.method, "problem": entry.problem}
            print(json.dumps({**about, "outcome": entry.run.outcome, **entry.run.history[-1]}))
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


def _report(options: argparse.Namespace) -> int:
    def left_out(why: str) -> None:
        print(f"note: left out: {why}", file=sys.stderr)

    groups = grouped(runs_in(options.folders, left_out))
    asks = html.ask_all(groups)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(html.page(groups, asks), encoding="utf-8")
    print(f"report: {options.output}")
    if options.figures is not None:
        drawn = draw_charts(html.figures(groups, asks), options.figures)
        print(f"figures: {len(drawn)} files in {options.figures}")
    if options.tensorboard is not None:
        count = tracking.to_tensorboard(groups, options.tensorboard)
        print(f"tensorboard: {count} runs in {options.tensorboard}")
    if options.mlflow is not None:
        count = tracking.to_mlflow(groups, options.mlflow)
        print(f"mlflow: {count} runs in {options.mlflow}")
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    entries = read_entries(options.entries)
    papers = read_contents(options.entries, entries)
    if options.list:
        console().print(contents_table(papers, entries))
        return 0
    if unknown := [name for name in options.names if name not in entries]:
        raise ValueError(f"there is no entry {unknown[0]!r}; {suggest(unknown[0], entries)}")
    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds is {options.seeds}; give at least 1")
    if options.workers < 1:
        raise ValueError(f"--workers is {options.workers}; give at least 1")
    matplotlib_or()
    chosen = [entries[name] for name in options.names or entries]
    output = options.output or options.folder
    order = Order(
        options.budget, options.seeds, not options.done, options.folder, output, options.workers
    )
    try:
        ended = dict(reproduce(chosen, order, lambda text: print(text, flush=True)))
    except KeyboardInterrupt:
        raise Stopped("interrupted; the same command goes on where it stopped") from None
    write_summaries(papers, entries, output)
    print(f"pages: {output}")
    # What was asked for by name, and could not even be begun, is a failure too.
    lacking = options.names and not options.done and len(ended) < len(chosen)
    return 1 if lacking or not all(ended.values()) else 0


def _frontier(options: argparse.Namespace) -> int:
    samples = portfolio.placed(options.folders)
    if options.output is None:
        print(portfolio.page(samples), end="")
        return 0
    figure = options.output.with_suffix(".svg")
    if figure == options.output:
        raise ValueError(f"{figure} is where the figure goes: give the page another name")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    portfolio.draw(samples, figure)
    text = portfolio.page(samples, figure.name)
    print(text, end="")
    options.output.write_text(text, encoding="utf-8")
    return 0


def _list(options: argparse.Namespace) -> int:
    plural = {"methods": "method", "problems": "problem", "data": "data", "models": "model"}
    if options.what == "methods":
        console().print(traits_table(METHODS))
        return 0
    if options.what is None or options.what in plural:
        for section in CHOICES if options.what is None else [plural[options.what]]:
            console().print(list_table(section))
        return 0
    owners = [section for section in CHOICES if options.what in CHOICES[section]]
    if not owners:
        known = [*plural, *(name for names in CHOICES.values() for name in names)]
        raise ValueError(f"nothing is called {options.what!r}; {suggest(options.what, known)}")
    for section in owners:
        text = inspect.cleandoc(CHOICES[section][options.what].__doc__ or "")
        print(f'[{section}]\nname = "{options.what}"\n\n{text}\n')
        console().print(options_table(section, options.what))
    return 0


def _sources(names: Sequence[str]) -> list[Source]:
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"no data set with files is called {name!r}; {suggest(name, SOURCES)}")
    return [SOURCES[name] for name in names]


def _data_list(options: argparse.Namespace) -> int:
    console().print(sources_table(options.folder))
    return 0


def _data_fetch(options: argparse.Namespace) -> int:
    for source in _sources(options.names):
        with _Download() as show:
            found = fetch(source, options.folder, show.report)
        for path, fetched in found.items():
            print(f"{source.name}: {path} {'fetched' if fetched else 'is there'}")
    return 0


def _data_verify(options: argparse.Namespace) -> int:
    """Fails where a file is not what it should be, or a named data set is not whole."""
    failed, done = False, set()
    for source in _sources(options.names or list(SOURCES)):
        for file in source.files:
            # Of several forms, each that is here is checked: any of them may be the one read.
            paths = [look(source, [copy.name], options.folder) for copy in file.copies]
            if options.names and not any(paths):
                failed = True
                print(f"{source.name}: {file.copies[0].name} is missing: {source.advice()}")
            for copy, path in zip(file.copies, paths, strict=True):
                if path is not None and path not in done:
                    done.add(path)
                    good, text = verify(path, copy)
                    failed = failed or good is False
                    word = {True: "good", False: "WRONG", None: "unknown"}[good]
                    print(f"{source.name}: {path} {word}: {text}")
    if not done:
        print("there are no files to verify")
    return int(failed)


def _bench(options: argparse.Namespace) -> int:
    return bench(
        options.quick,
        options.only,
        options.peers,
        options.peers_folder,
        options.output,
        options.json,
    )


def _predict(options: argparse.Namespace) -> int:
    run = load(options.folder)
    schema, standardiser = preparation(options.folder)
    table = read_table(options.table, schema)
    features = torch.from_numpy(standardiser.transform(table.features))
    found = scores(run, features, options.best).tolist()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["line", "score"])
    writer.writerows(zip(table.lines, map(repr, found), strict=True))
    if options.output:
        options.output.write_text(text.getvalue(), encoding="utf-8")
    else:
        print(text.getvalue(), end="")
    if table.labels is not None:
        value = auc(found, table.labels)
        text = "not defined: the labels are of one class" if value is None else f"{value:.4f}"
        print(f"AUC on the {len(found)} labelled rows: {text}", file=sys.stderr)
    return 0


def _demo(options: argparse.Namespace) -> int:
    return demo(options.folder or numbered(RUNS, "demo"), options.splits)


def numbered(parent: Path, name: str) -> Path:
    """The first of name-1, name-2, ... that is not there yet."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


class _Download:
    """A bar for each file that is fetched; where there is no terminal, nothing."""

    def __init__(self) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self.bar = Progress(
            TextColumn("{task.description}"), *columns, disable=not sys.stdout.isatty()
        )
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Download:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def report(self, name: str, done: int, total: int | None) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=total)
        self.bar.update(self.tasks[name], completed=done, total=total)


if __name__ == "__main__":
    sys.exit(main())
