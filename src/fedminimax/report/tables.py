"""Tables for the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedminimax.config import CHOICES, Experiment, described
from fedminimax.engine.profile import Profile
from fedminimax.engine.session import Run
from fedminimax.report.operating import calibration_of


class Compared(NamedTuple):
    """A run as `compare` shows it."""

    folder: str
    method: str
    problem: str
    run: Run
    experiment: Experiment


class Span(NamedTuple):
    """A number over seeds; what is not finite was never reached."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Span:
        return Span(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        middle, low, high = (number_text(v) if math.isfinite(v) else "never" for v in self)
        return middle if self.low == self.high else f"{middle} ({low} to {high})"


def console() -> Console:
    """The screen; a file or a pipe has no edge that a table must fit into."""
    found = Console()
    return found if found.is_terminal else Console(width=1000)


def bytes_text(number: float) -> str:
    """1234567 -> '1.2 MB'"""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError


def privacy_text(spent: Mapping[str, float]) -> str:
    """{"epsilon": 2.5, "delta": 1e-05} -> 'epsilon 2.5 spent, at delta 1e-05'"""
    return f"epsilon {spent['epsilon']:.4g} spent, at delta {spent['delta']:g}"


def list_table(section: str) -> Table:
    """The classes that a section of an experiment may name, with one sentence each."""
    return names_table(section, CHOICES[section])


def names_table(title: str, kinds: Mapping[str, Any]) -> Table:
    """Classes with one sentence each."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, kind in kinds.items():
        table.add_row(name, described(kind))
    return table


def profile_table(profile: Profile, rounds: int) -> Table:
    """Where the time of a run went, the longest part first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("where the time went")
    for heading in ("seconds", "share", "times", "ms each", "ms per round"):
        table.add_column(heading, justify="right")
    parts = profile.parts()
    whole = sum(seconds for _, seconds in parts.values())
    for name, (times, seconds) in sorted(parts.items(), key=lambda item: -item[1][1]):
        each = "" if name == "other" else f"{1e3 * seconds / times:.3g}"
        share, per = f"{seconds / whole:.1%}", f"{1e3 * seconds / max(rounds, 1):.3g}"
        counted = "" if name == "other" else str(times)
        table.add_row(name, f"{seconds:.2f}", share, counted, each, per)
    return table


def ranked(runs: Sequence[Compared]) -> list[Compared]:
    """The best first, judged on validation rows where there are any."""
    metric, larger = common_metric(runs)
    return sorted(runs, key=lambda r: _ranking(r.run, metric, larger))


def compare_table(runs: Sequence[Compared]) -> Table:
    """Runs side by side, in the order given, by the records of the models that they return."""
    metric, larger = common_metric(runs)
    held = runs[0].run.kept
    split = next(s for s in ("validation", "test", "train") if s in held)
    title = f"{metric} ({'higher' if larger else 'lower'} is better)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    splits = [split] if split == "test" or "test" not in held else [split, "test"]
    # A ranking of few positives may have a high AUC, and yet few of its first rows are positive.
    precise = [f"auprc, {splits[-1]}"] if metric == "auc" else []
    shares = {entry.folder: positive_share(entry) for entry in runs}
    positive = ["positive"] if any(share is not None for share in shares.values()) else []
    for heading in ("run", "method", "problem", "model"):
        table.add_column(heading, overflow="fold")
    for heading in ("rounds", *splits, *precise, *positive, "gradients", "up", "down"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in runs:
        kept, last, share = entry.run.kept, entry.run.history[-1], shares[entry.folder]
        model = entry.experiment.model
        table.add_row(
            *(entry.folder, entry.method, entry.problem, model.name if model else "-"),
            str(last["round"]),
            *(number_text(kept.get(s, {}).get(metric)) for s in splits),
            *(number_text(kept.get(splits[-1], {}).get("auprc")) for _ in precise),
            *(["-" if share is None else f"{share:.1%}"] if positive else []),
            str(last["gradients"]),
            bytes_text(last["bytes_up"]),
            bytes_text(last["bytes_down"]),
        )
    return table


def positive_share(entry: Compared) -> float | None:
    """Of the validation rows, as the run's calibration counts them; None where it has none."""
    found = calibration_of(entry.folder, best=entry.run.best is not None)
    if found is None or any(found.counts.withheld):
        return None
    negatives, positives = found.counts.counts.sum(axis=1)
    return float(positives / (negatives + positives))


# Settings that decide what a model sees of a row, not which rows judge it.
VIEWS = {
    "data": {"drop", "categorical", "codes", "most_codes", "missing"},
    "split": {"standardise", "bins", "rare", "auxiliary"},
}


def different_rows(runs: Sequence[Compared]) -> str | None:
    """The first difference in the rows that judge these runs; None if they are the same."""
    first, *others = runs
    own = _rows_of(first)
    for entry in others:
        rows = _rows_of(entry)
        for key in own | rows:
            if own.get(key) != rows.get(key):
                one, other = (f"{found.get(key)!r}" for found in (own, rows))
                return f"{key} is {one} in {first.folder} and {other} in {entry.folder}"
    return None


def _rows_of(entry: Compared) -> dict[str, Any]:
    table = entry.experiment.to_table()
    return {
        f"{section}.{key}": value
        for section, views in VIEWS.items()
        for key, value in table[section].items()
        if key not in views
    }


def number_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def common_metric(runs: Sequence[Compared]) -> tuple[str, bool]:
    """By what all of these runs are judged, and whether larger is better."""
    kinds = {(r.run.problem.monitor, r.run.problem.larger_is_better) for r in runs}
    if len(kinds) > 1:
        names = ", ".join(sorted(metric for metric, _ in kinds))
        raise ValueError(
            f"these runs are judged by different metrics ({names}): compare like with like"
        )
    return kinds.pop()


def _ranking(run: Run, metric: str, larger: bool) -> float:
    kept = run.kept
    value = kept.get("validation", kept.get("train", {})).get(metric)
    if value is None:
        return float("inf")
    return -value if larger else value
