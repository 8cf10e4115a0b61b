"""The charts of a report, made from the records of its runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fedminimax.metrics.federated_auc import ROC
from fedminimax.metrics.precision_recall import PrecisionRecall
from fedminimax.report.charts import (
    Chart,
    Mark,
    Series,
    falls_over_decades,
    series,
    starts_far_off,
)
from fedminimax.report.roc import Asked, thinned
from fedminimax.report.runs import SPLITS, Group, Record, by_round, metric, numbers, spread

Asks = Mapping[int, Asked | str]  # of each group, by its number
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
ABBREVIATED = ("auc", "auprc")
SHARES = ("auc", "auprc", "accuracy")  # between 0 and 1
LEAST_SPAN = 0.1  # of their axis: what differs by less does not fill a chart
# Other views of the same number, which the tables have.
DOUBLED = ("auc_federated", "auc_weighted", "auc_bound", "auprc_federated", "auprc_bound")

ROWS = {"train": "training rows", "validation": "validation rows", "test": "test rows"}
MEASURES = {
    "grad_x": "Gradient in x (grad_x)",
    "grad_y": "Projected gradient in y (grad_y)",
    "grad_phi": "Gradient of max over y (grad_phi)",
    "moreau": "Gradient of the Moreau envelope (moreau)",
    "gap": "Duality gap (gap)",
    "dissimilarity_x": "Spread of the clients' gradients in x (dissimilarity_x)",
    "dissimilarity_y": "Spread of the clients' gradients in y (dissimilarity_y)",
    "drift_x": "Spread of the clients' x after a round (drift_x)",
    "drift_y": "Spread of the clients' y after a round (drift_y)",
}


class Against(NamedTuple):
    """What curves are drawn against."""

    name: str
    label: str  # of the axis
    value: Callable[[Record], float | None]


class Learning(NamedTuple):
    """One measure on one split, against each of the axes."""

    title: str
    charts: dict[str, Chart]


def sent(record: Record) -> float:
    return record["bytes_up"] + record["bytes_down"]


def against(groups: Sequence[Group]) -> list[Against]:
    """Rounds, gradients, bytes and seconds; bytes in the unit that suits them all."""
    most = max(sent(run.last) for group in groups for run in group.runs)
    size, unit = next(pair for pair in UNITS if most >= pair[0] or pair[0] == 1)
    return [
        Against("round", "round", lambda record: record["round"]),
        Against("gradients", "gradients, over all clients", lambda record: record["gradients"]),
        Against("bytes", f"{unit} sent, up and down", lambda record: sent(record) / size),
        Against("seconds", "seconds, evaluations included", lambda record: record["seconds"]),
    ]


def learning(groups: Sequence[Group]) -> list[Learning]:
    """The metrics that the runs are judged by."""
    found = []
    for name in dict.fromkeys(group.first.monitor for group in groups):
        for split in SPLITS:
            charts, title = {}, f"{words(name)} on {ROWS[split]}"
            for axis in against(groups):
                lines = _lines(groups, axis.value, metric(split, name))
                lines = tuple(_with_interval(groups, line, split, name) for line in lines)
                if lines:
                    slug = f"{name}-{split}-by-{axis.name}"
                    charts[axis.name] = _chart(slug, title, axis.label, lines, name)
            if charts:
                found.append(Learning(title, charts))
    return found


def _with_interval(groups: Sequence[Group], line: Series, split: str, name: str) -> Series:
    """A single run's AUC with the interval that its records have."""
    group = next(group for group in groups if group.number == line.number)
    if name != "auc" or len(group.runs) > 1:
        return line
    value = metric(split, name)
    records = [record for record in group.first.history if value(record) is not None]
    if len(records) != len(line.marks):
        return line
    marks = []
    for mark, record in zip(line.marks, records, strict=True):
        low, high = record[split].get("auc_interval") or (mark.y, mark.y)
        marks.append(mark._replace(low=low, high=high))
    return replace(line, marks=tuple(marks))


def measures(groups: Sequence[Group]) -> list[Chart]:
    """The other numbers of the records, by round: on test rows, or those that there are."""
    monitors = {group.first.monitor for group in groups}
    found = []
    for split in ("test", "validation", "train"):
        names = dict.fromkeys(name for group in groups for name in numbers(group, split))
        wanted = [name for name in names if name not in monitors and name not in DOUBLED]
        for name in wanted:
            found += _by_round(groups, split, name, f"{words(name)} on {ROWS[split]}")
        if found:
            break
    return found


def optimality(groups: Sequence[Group]) -> list[Chart]:
    names = dict.fromkeys(name for group in groups for name in numbers(group, "optimality"))
    return [
        chart
        for name in names
        for chart in _by_round(groups, "optimality", name, MEASURES.get(name, words(name)))
    ]


def variables(group: Group) -> Chart | None:
    """The dual, and what else of the point was recorded, by round."""
    names = numbers(group, "variables")
    lines = tuple(
        series(name, number, by_round(group, _round, metric("variables", name)), len(group.runs))
        for number, name in enumerate(names)
    )
    if not lines:
        return None
    return Chart(_slug(f"variables {group.number + 1} {group.label}"), group.label, "round", lines)


def pace(groups: Sequence[Group]) -> Chart | None:
    """Seconds per round between two records."""
    lines = []
    for group in groups:
        rows: dict[int, list[float]] = {}
        for run in group.runs:
            for before, after in zip(run.history, run.history[1:], strict=False):
                if after["round"] > before["round"]:
                    taken = after["seconds"] - before["seconds"]
                    each = 1000 * taken / (after["round"] - before["round"])
                    rows.setdefault(after["round"], []).append(each)
        points = [(round, over) for round in sorted(rows) if (over := spread(rows[round]))]
        if points:
            lines.append(series(group.label, group.number, points, len(group.runs)))
    if not lines:
        return None
    log, title = falls_over_decades(lines), "Milliseconds per round, evaluations included"
    return Chart("milliseconds-per-round", title, "round", tuple(lines), log=log)


def roc(groups: Sequence[Group], asks: Asks) -> Chart | None:
    found = _asked(groups, asks)
    lines = [_curve(group, told.curve, told.bound) for group, told in found]
    if not lines:
        return None
    title = f"True positive rate on {_rows_of(found)}"
    return Chart("roc", title, "false positive rate", tuple(lines), "roc")


def precision_recall(groups: Sequence[Group], asks: Asks) -> Chart | None:
    """Precision against recall, and the share of positives, which is what chance gives."""
    found = _asked(groups, asks)
    lines = [_curve(group, told.precision, told.auprc_bound) for group, told in found]
    if not lines:
        return None
    title = f"Precision on {_rows_of(found)}"
    chance = min(told.positives / told.total for _, told in found)
    return Chart("precision-recall", title, "recall", tuple(lines), "precision", level=chance)


def calibration(groups: Sequence[Group], asks: Asks) -> Chart | None:
    """The share of positives against the probability that was told, in tenths."""
    lines = []
    for group in groups:
        found = asks.get(group.number)
        if isinstance(found, Asked) and found.seen is not None and found.seen.bins:
            marks = tuple(Mark(b.probability, b.share, b.low, b.high) for b in found.seen.bins)
            lines.append(Series(group.label, group.number, marks))
    if not lines:
        return None
    title = "Share that is positive, with its 95 % interval"
    return Chart("calibration", title, "probability", tuple(lines), "calibration")


def _asked(groups: Sequence[Group], asks: Asks) -> list[tuple[Group, Asked]]:
    told = [(group, asks.get(group.number)) for group in groups]
    return [(group, found) for group, found in told if isinstance(found, Asked)]


def _rows_of(found: Sequence[tuple[Group, Asked]]) -> str:
    return " or ".join(ROWS[split] for split in sorted({told.split for _, told in found}))


def _curve(group: Group, curve: ROC | PrecisionRecall, bound: float) -> Series:
    middle, lower, upper = (_pairs(thinned(part)) for part in curve)
    marks = tuple(Mark(x, y, y, y) for x, y in middle)
    band = (lower, upper) if bound > 0 else ((), ())
    return Series(group.label, group.number, marks, 1, *band)


def words(name: str) -> str:
    """worst_site_auc -> Worst site AUC"""
    parts = [part.upper() if part in ABBREVIATED else part for part in name.split("_")]
    return parts[0][:1].upper() + " ".join(parts)[1:]


def _by_round(groups: Sequence[Group], part: str, name: str, title: str) -> list[Chart]:
    lines = _lines(groups, _round, metric(part, name))
    if not lines:
        return []
    return [_chart(title, title, "round", lines, name)]


def _chart(name: str, title: str, x: str, lines: tuple[Series, ...], of: str = "") -> Chart:
    log = falls_over_decades(lines)
    cut = not log and starts_far_off(lines)
    least = LEAST_SPAN if any(word in of for word in SHARES) else 0.0
    return Chart(_slug(name), title, x, lines, log=log, cut=cut, least=least)


def _lines(groups: Sequence[Group], x: Callable, y: Callable) -> tuple[Series, ...]:
    """A line for each group that has any such number."""
    return tuple(
        series(group.label, group.number, points, len(group.runs))
        for group in groups
        if (points := by_round(group, x, y))
    )


def _round(record: Record) -> float:
    return record["round"]


def _pairs(corners) -> tuple[tuple[float, float], ...]:
    return tuple((round(float(x), 6), round(float(y), 6)) for x, y in corners)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80]
