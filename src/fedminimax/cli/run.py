"""fedminimax run: an experiment from a TOML file, or the rest of one."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from fedminimax.cli.common import RUNS, Stopped, next_free, tell_note, to_resume
from fedminimax.cli.web import serve
from fedminimax.config import ConfigError, Experiment, read_toml
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.backends.local import Local
from fedminimax.engine.backends.torchrun import TIMEOUT, join_processes, started_by_torchrun
from fedminimax.engine.profile import Profile
from fedminimax.engine.session import Run
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.trainer import Interrupted, succeeded
from fedminimax.experiment import build, experiment_of, resume, run_experiment
from fedminimax.report.live import Going
from fedminimax.report.operating import save_calibration
from fedminimax.report.progress import RunProgress
from fedminimax.report.tables import bytes_text, console, number_text, privacy_text, profile_table
from fedminimax.tuning.auto import ASKED, is_auto, run_auto, verdict

LOCAL = Local()  # this process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("config", type=Path, help="a TOML file; with --resume also a run's folder")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="such as method.lr=0.05")
    parser.add_argument("--folder", type=Path, help="where to write (default: runs/NAME-N)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the result")
    parser.add_argument("--sites", action="store_true", help="also show each site as it goes")
    parser.add_argument(
        "--web", action="store_true", help="also serve a page that shows the run, on this machine"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    parser.add_argument("--profile", action="store_true", help="also print where the time went")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="that a process of torchrun waits for the others (default: %(default)g)",
    )


def command(options: argparse.Namespace) -> int:
    """Runs an experiment, or goes on with it."""
    with join_processes(options.timeout) as backend:
        return _run_by(backend, options)


def _run_by(backend: Backend, options: argparse.Namespace) -> int:
    quiet = options.quiet or options.json or not backend.leads
    profile = Profile() if options.profile else None
    if options.resume:
        if options.changes:
            raise ValueError(
                f"--resume goes on with the settings of the run, so {options.changes[0]!r} cannot "
                "be changed: leave it out, or start a new run"
            )
        folder = to_resume(options)
        if (folder / ASKED).exists():
            asked = tomllib.loads(RunFolder(folder).read_toml_text(ASKED))
            return _search(Experiment.from_table(asked), folder, options)
        experiment = experiment_of(folder)
        built = build(experiment)
        show = RunProgress(quiet, built.clients if options.sites else None)
        with (
            _shown(folder, backend, options),
            _stoppable(folder, backend) as asked,
            show.begun(experiment),
        ):
            calls = {**show.callbacks, "interrupted": asked, "profile": profile}
            run = resume(folder, built=built, backend=backend, **calls)
    else:
        if "methods" in read_toml(options.config):
            raise ConfigError(
                f"{options.config} has several methods: use fedminimax compare {options.config}"
            )
        note = None if quiet else tell_note
        experiment = Experiment.from_file(options.config, options.changes, note)
        _check_engine(experiment, backend)
        folder = options.folder or next_free(RUNS, options.config.stem)
        if is_auto(experiment):
            return _search(experiment, folder, options)
        built = build(experiment)
        for text in [] if quiet else built.notes:
            tell_note(text)
        show = RunProgress(quiet, built.clients if options.sites else None)
        with (
            _shown(folder, backend, options),
            _stoppable(folder, backend) as asked,
            show.begun(experiment),
        ):
            calls = {**show.callbacks, "interrupted": asked, "profile": profile}
            run = run_experiment(experiment, folder, built=built, backend=backend, **calls)
    if backend.leads:
        save_calibration(run, built, folder)
        _tell(run, folder, options)
    if profile is not None and backend.leads:
        # What --json promises is one line on the standard output.
        out = Console(stderr=True) if options.json else console()
        out.print(profile_table(profile, run.rounds))
    return 0 if succeeded(run.outcome) else 1


@contextmanager
def _shown(folder: Path, backend: Backend, options: argparse.Namespace) -> Iterator[None]:
    """Serves a page of the run while it goes, if that is asked for."""
    if not options.web or not backend.leads:
        yield
        return
    with serve(folder.name, lambda: [Going(folder.name, folder, "running")]) as address:
        print(f"watch it at {address}", file=sys.stderr, flush=True)
        yield


def _search(asked: Experiment, folder: Path, options: argparse.Namespace) -> int:
    """Tries recipes, and ends as the run of the best of them does."""
    if options.profile or options.sites or options.web:
        raise ValueError(
            "--profile, --sites and --web show one run, and auto tries several: leave them out"
        )
    say = (lambda text: None) if options.quiet or options.json else _say
    with _stoppable(folder) as interrupted:
        calls = {"say": say, "interrupted": interrupted}
        run, _, built, record = run_auto(asked, folder, options.resume, **calls)
    save_calibration(run, built, folder)
    if not options.json:
        print(verdict(record))
    _tell(run, folder, options)
    return 0 if succeeded(run.outcome) else 1


def _say(text: str) -> None:
    print(text, flush=True)


def _check_engine(experiment: Experiment, backend: Backend) -> None:
    """A new run says how it is to be carried; one that is resumed may be carried otherwise."""
    distributed = experiment.run.engine == "distributed"
    if distributed and not started_by_torchrun():
        raise ConfigError(
            'engine is "distributed", but torchrun has not started this process: use torchrun '
            "--nproc-per-node 2 -m fedminimax run ..., or leave engine out"
        )
    if distributed and is_auto(experiment):
        raise ConfigError(
            'problem "auto" tries its recipes in one process: leave engine out, or name a problem'
        )
    if backend.size > 1 and not distributed:
        raise ConfigError(
            f'torchrun has started {backend.size} processes, but engine is "simulator", which '
            "needs one: add engine=distributed"
        )


@contextmanager
def _stoppable(folder: Path, backend: Backend = LOCAL) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first time the round is finished, the second time not."""
    asked = False
    # torchrun passes a Ctrl-C on that its processes have heard themselves.
    second = signal.default_int_handler if backend.size == 1 else signal.SIG_IGN
    hint = "; Ctrl-C again stops at once" if backend.size == 1 else ""

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, second)
        if backend.leads:
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


def _tell(run: Run, folder: Path, options: argparse.Namespace) -> None:
    last, kept = run.history[-1], run.kept
    if options.json:
        result = {"folder": str(folder), "outcome": run.outcome, "rounds": run.rounds, **last}
        print(json.dumps({**result, "kept_round": kept["round"], "kept": _measures(kept)}))
        return
    metric = run.problem.monitor
    measured = [f"{n} {metric} {number_text(m.get(metric))}" for n, m in _measures(kept).items()]
    print(f"{run.outcome}; " + ", ".join(measured))
    if kept["round"] < run.rounds:
        print(f"of round {kept['round']}, the best by validation; predict --last takes the last")
    judged = kept.get("test", kept.get("validation", {}))
    if judged.get("auprc") is not None:
        print(f"AUPRC {number_text(judged['auprc'])}, on the same rows")
    if judged.get("auc_interval"):
        low, high = judged["auc_interval"]
        print(f"95 % interval of the AUC {low:.3f} to {high:.3f}", end="; ")
        print(f"worst site {judged['worst_site'] or '-'} {number_text(judged['worst_site_auc'])}")
    sent = f"{bytes_text(last['bytes_up'])} up, {bytes_text(last['bytes_down'])} down"
    print(f"{sent}, {last['exchanges']} exchanges, {last['gradients']} gradients")
    if spent := last.get("privacy"):
        print(f"{privacy_text(spent)}; its noise follows from the seed, as in every simulation")
    print(f"run folder: {folder}")


def _measures(record: dict[str, Any]) -> dict[str, Any]:
    """What a record has measured, by the rows that it is of."""
    return {split: record[split] for split in ("validation", "test", "train") if split in record}
