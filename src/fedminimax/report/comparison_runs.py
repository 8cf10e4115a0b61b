"""The runs of a comparison (report/comparison.py): begun, gone on with, or read.

Every run has a folder, so an interrupted comparison goes on where it stopped. Where records are
kept (report/records.py), a run that has one is not run again on another machine.
"""

from __future__ import annotations

import signal
import statistics
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from rich.progress import track

from fedminimax.config import ConfigError, Experiment, suggest
from fedminimax.engine.device import share_of_cores, stay_on
from fedminimax.engine.session import Run
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.trainer import succeeded
from fedminimax.experiment import experiment_of, load, resume, run_experiment, settled
from fedminimax.report import records
from fedminimax.report.comparison import Change, Comparison, Job, Line, Plan, measures, shown

FINAL = "final.safetensors"  # what a finished run has


def compare(
    path: Path, folder: Path, workers: int, at: str | None = None
) -> tuple[Comparison, list[Line]]:
    """All runs of a comparison; each has a folder below `folder`."""
    comparison = Comparison(path, at)
    return comparison, compared(comparison, folder, workers)


def compared(
    comparison: Comparison,
    folder: Path,
    workers: int = 1,
    begin: bool = True,
    kept: Path | None = None,
) -> list[Line]:
    """The lines of the table; without `begin`, of those runs that are finished. `kept` is the
    folder of the records."""
    pairs = [(v, label) for v in comparison.variations() for label in comparison.methods]
    plan = comparison.plan

    def done(job: Job) -> bool:
        return _finished(job, folder, kept)

    def played(of: Comparison, jobs: list[Job]) -> dict[Job, tuple]:
        if begin:
            with_starts(of, [job for job in jobs if not done(job)])
        else:
            jobs = [job for job in jobs if done(job)]
        return dict(zip(jobs, _run_all(of, jobs, folder, workers, kept), strict=True))

    def with_starts(of: Comparison, jobs: list[Job]) -> None:
        """Plays the runs that these begin with, for their vectors, which no record has."""
        found = (of.start(job) for job in jobs)
        starts = list(dict.fromkeys(start for start in found if start is not None))
        absent = [start for start in starts if not (folder / _name(start) / FINAL).exists()]
        if absent:
            with_starts(of, absent)
            _run_all(of, absent, folder, workers, None)

    # On seeds of their own: the best of several runs on a seed flatters the method there.
    tuning_seeds = range(plan.repeats, plan.repeats + plan.tuning_repeats)
    tuned = played(
        comparison.trials,
        [
            Job(varied, label, chosen, seed, plan.tuning_rounds)
            for varied, label in pairs
            for chosen in comparison.candidates(label)
            for seed in tuning_seeds
            if len(comparison.candidates(label)) > 1
        ],
    )
    judged, best = plan.for_tuning(), dict[tuple[Change, str], Change]()
    trials: dict[tuple[Change, str], list[tuple[Change, list[float | None]]]] = {}
    for varied, label in pairs:
        scored: dict[Change, list[float]] = {}
        for chosen in comparison.candidates(label):
            job = Job(varied, label, chosen, plan.repeats, plan.tuning_rounds)
            same = [job._replace(seed=seed) for seed in tuning_seeds]
            found = [tuned[trial] for trial in same if trial in tuned]
            scored[chosen] = _medians([judged.badness(*result) for result in found])
            if found:
                ends = [judged.value(h[-1]) if succeeded(outcome) else None for h, outcome in found]
                trials.setdefault((varied, label), []).append((chosen, ends))
        if len(scored) == 1 or all(scored.values()):
            best[varied, label] = min(scored, key=lambda chosen: scored[chosen])
    # Seed by seed: what an interruption leaves is a whole table of fewer seeds.
    repeats = [Job(*pair, best[pair], seed) for seed in range(plan.repeats) for pair in best]
    results = played(comparison, repeats)
    lines = []
    for varied, label in best:
        same = [job for job in results if (job.varied, job.label) == (varied, label)]
        histories, seeds = [results[job][0] for job in same], [job.seed for job in same]
        rounds = [plan.reached(history) for history in histories]
        outcomes = [results[job][1] for job in same]
        if same:
            of = (varied, label, best[varied, label])
            tried = trials.get((varied, label), ())
            lines.append(Line(*of, rounds, histories, outcomes, seeds, tried))
    return lines


def _medians(scores: list[tuple[float, float]]) -> list[float]:
    return [statistics.median_high(part) for part in zip(*scores, strict=True)]


def _run_all(
    comparison: Comparison, jobs: list[Job], folder: Path, workers: int, kept: Path | None
) -> list:
    """The history and outcome of every job, in order; what has been done is only read."""
    tasks = [
        (
            _located(comparison, job, folder),
            folder / _name(job),
            comparison.plan,
            None if kept is None else kept / (_name(job) + records.SUFFIX),
            _settings(comparison, job),
        )
        for job in jobs
    ]
    if not tasks:
        return []
    workers = min(workers, sum(not _finished(job, folder, kept) for job in jobs))
    if workers < 2:
        return [_run_one(*task) for task in track(tasks, "running")]
    # A fresh interpreter per worker, with cores of its own: torch's threads do not survive a fork.
    context = get_context("spawn")
    shares = context.SimpleQueue()
    for number in range(workers):
        shares.put(share_of_cores(number, workers))
    with ProcessPoolExecutor(workers, context, _begin_worker, (shares,)) as pool:
        futures = [pool.submit(_run_one, *task) for task in tasks]
        try:
            return [future.result() for future in track(futures, "running")]
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed, perhaps for want of memory: take fewer workers; the same "
                "command goes on where it stopped"
            ) from None
        except BaseException:  # else all the others would be run before anybody hears of it
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin_worker(shares: SimpleQueue) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # runs survive that, and are gone on with
    stay_on(shares.get())


def _finished(job: Job, folder: Path, kept: Path | None) -> bool:
    record = None if kept is None else kept / (_name(job) + records.SUFFIX)
    return (folder / _name(job) / FINAL).exists() or (record is not None and record.exists())


def _located(comparison: Comparison, job: Job, folder: Path) -> Experiment:
    """The experiment of a job, which may begin with the run of another in the same folder."""
    experiment, start = comparison.experiment(job), comparison.start(job)
    if start is None:
        return experiment
    place = str((folder / _name(start)).resolve())
    return replace(experiment, run=replace(experiment.run, start=place))


def _settings(comparison: Comparison, job: Job) -> dict[str, Any]:
    start = comparison.start(job)
    first = None if start is None else _settings(comparison, start)
    return records.settings_of(comparison.experiment(job), first)


def _run_one(
    experiment: Experiment, folder: Path, plan: Plan, record: Path | None, settings: dict[str, Any]
) -> tuple[list, str]:
    if record is not None and record.exists():
        *_, outcome, history = records.recall(record, settings)
    else:
        run = _run_in(experiment, folder)
        outcome, history = run.outcome, run.history
        if record is not None:
            records.keep(record, settings, outcome, RunFolder(folder))
    found = {name: None for record in history for name in measures(record[plan.split(record)])}
    for key, name in (("metric", plan.metric), ("tuning_metric", plan.for_tuning().metric)):
        if name not in found:
            raise ConfigError(
                f"[compare] {key} is {name!r}, which no record of {folder} has; "
                + suggest(str(name), found)
            )
    return history, outcome


def _run_in(experiment: Experiment, folder: Path) -> Run:
    """The run of a folder: begun, gone on with, or read."""
    if not (folder / "config.toml").exists():
        return run_experiment(experiment, folder)
    if experiment_of(folder).to_table() != Experiment.from_table(settled(experiment)).to_table():
        raise ValueError(f"{folder} holds a run with other settings: delete it, or name another")
    return load(folder) if (folder / FINAL).exists() else resume(folder)


def _name(job: Job) -> str:
    changes = (*job.varied, *job.chosen)
    parts = [f"{key.rpartition('.')[2]}={shown(value)}" for key, value in changes]
    length = [] if job.rounds is None else [f"rounds={job.rounds}"]
    return "_".join([job.label.replace(" ", "-"), *parts, f"seed={job.seed}", *length])
