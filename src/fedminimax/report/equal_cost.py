"""Methods at equal cost: ranked, with the difference to the best and its uncertainty."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedminimax.engine.trainer import FINISHED, succeeded
from fedminimax.experiment import settled
from fedminimax.metrics.paired import Difference, paired_difference
from fedminimax.report.comparison import Line, Plan, Spending
from fedminimax.report.tables import Compared, common_metric

Record = dict[str, Any]


class Place(NamedTuple):
    """A method in the ranking, by the records of its seeds at the same cost."""

    rank: int
    line: Line
    budget: float
    records: list[Record]
    values: list[float | None]  # None: that run did not come to its end
    behind: Difference | None  # its metric less that of the best, seed by seed; None for the best

    @property
    def told_apart(self) -> bool | None:
        """Is it behind the best by more than chance? None if that cannot be said."""
        if self.behind is None or self.behind.low is None or self.behind.high is None:
            return None
        return not self.behind.low <= 0 <= self.behind.high


def side_by_side(runs: Sequence[Compared], at: Spending) -> tuple[Plan, list[Line]]:
    """Runs of several methods as lines to rank: what differs only in its seeds is one line."""
    groups: dict[str, dict[str, Compared]] = {}
    for entry in runs:
        table = settled(entry.experiment)
        seeds = {part: table[part].pop("seed", None) for part in ("run", "split", "data")}
        settings = json.dumps(table, sort_keys=True, default=repr)
        groups.setdefault(settings, {})[json.dumps(seeds)] = entry
    ordered = [dict(sorted(group.items())) for group in groups.values()]
    _check_alike(ordered)
    firsts = [next(iter(group.values())) for group in ordered]
    methods = [entry.method for entry in firsts]
    lines = []
    for entry, group in zip(firsts, ordered, strict=True):
        alone = methods.count(entry.method) == 1
        label = entry.method if alone else f"{entry.method}, {entry.folder}"
        same = [other.run for other in group.values()]
        outcomes = [run.outcome for run in same]
        lines.append(Line((), label, (), [], [run.history for run in same], outcomes))
    return Plan(*common_metric(runs), repeats=len(lines[0].histories), at=at), lines


def _check_alike(groups: list[dict[str, Compared]]) -> None:
    """A difference is one of methods only on the same rows, with the same seeds."""
    first, *others = (next(iter(group.values())) for group in groups)
    for group, other in zip(groups[1:], others, strict=True):
        tables = [settled(entry.experiment) for entry in (first, other)]
        unlike = [
            f"[{part}] of {first.folder} and of {other.folder}"
            for part in ("data", "split")
            if {**tables[0][part], "seed": 0} != {**tables[1][part], "seed": 0}
        ]
        if list(group) != list(groups[0]):
            unlike.append(
                f"the seeds of the runs like {first.folder} ({len(groups[0])}) and of those like "
                f"{other.folder} ({len(group)})"
            )
        if unlike:
            raise ValueError(
                f"{unlike[0]} differ, so their difference would not be one of methods: compare "
                "runs on the same data, each method with the same seeds"
            )


def spent(record: Record, at: Spending) -> int:
    """What a run had spent at a record; bytes are counted in both directions."""
    if at == "bytes":
        return record["bytes_up"] + record["bytes_down"]
    return record["round" if at == "rounds" else "gradients"]


def rank(plan: Plan, lines: Sequence[Line]) -> list[Place]:
    """Lines with the same seeds, the best mean first; runs that broke down come last.

    The budget is what every run that went all its rounds has spent. A run counts by its last
    evaluation within it, also where it had stopped before, at its target.
    """
    assert plan.at is not None
    budget = _budget(plan.at, lines)
    read = {}
    for number, line in enumerate(lines):
        records = [_within(history, plan.at, budget) for history in line.histories]
        ended = [succeeded(outcome) for outcome in line.outcomes]
        values = [plan.value(r) if e else None for r, e in zip(records, ended, strict=True)]
        read[number] = (line, records, values)
    order = sorted(read, key=lambda number: _badness(plan, read[number][2]))
    best = read[order[0]][2]
    places = []
    for place, number in enumerate(order, 1):
        line, records, values = read[number]
        behind = None
        if place > 1 and None not in values:
            behind = paired_difference(values, best)  # type: ignore[arg-type]  none is None here
        places.append(Place(place, line, budget, records, values, behind))
    return places


def _budget(at: Spending, lines: Sequence[Line]) -> float:
    runs = [run for line in lines for run in zip(line.histories, line.outcomes, strict=True)]
    whole = [history for history, outcome in runs if outcome == FINISHED]
    ended = whole or [history for history, outcome in runs if succeeded(outcome)]
    return min((spent(history[-1], at) for history in ended), default=math.inf)


def _within(history: list[Record], at: Spending, budget: float) -> Record:
    return next((r for r in reversed(history) if spent(r, at) <= budget), history[0])


def _badness(plan: Plan, values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return math.inf
    return -statistics.fmean(known) if plan.larger else statistics.fmean(known)
