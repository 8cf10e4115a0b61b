"""The rows of the bench: what is asked of each, what was found, and how both are written down."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fedminimax import __version__
from fedminimax.bench.measure import Effort, Ratio, Times, times_faster

PASS, SHORT, UNKNOWN = "pass", "falls short", "not measured"


class CannotMeasureError(Exception):
    """The sentence that says why a row has no figure on this machine."""


class Asked(NamedTuple):
    """A bound on a row's figure."""

    bound: float
    least: bool  # or else most
    unit: str = "x"

    def met(self, value: float) -> bool:
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"{'at least' if self.least else 'at most'} {self.bound:g} {self.unit}".strip()


def at_least(bound: float) -> Asked:
    return Asked(bound, True)


def at_most(bound: float, unit: str) -> Asked:
    return Asked(bound, False, unit)


class Found(NamedTuple):
    """What a row's measurement says."""

    figure: Ratio  # in the unit that is asked for
    ours: str
    other: str = "-"
    why: str = ""  # what limits it, measured in the same run


def faster(ours: Times, other: Times, why: str = "") -> Found:
    """A figure of the kind "so many times faster than the other"."""
    figure = times_faster(ours, other)
    return Found(figure, milliseconds(ours.median), milliseconds(other.median), why)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True)
class Row:
    """One line of the table: a claim, and how it is measured."""

    name: str  # for --only: its group and, after a dot, the row
    what: str
    against: str
    asked: Asked
    measure: Callable[[Effort], Found]

    def matches(self, wanted: str) -> bool:
        return self.name == wanted or self.name.startswith(f"{wanted}.")


class Result(NamedTuple):
    row: Row
    found: Found | None
    reason: str  # why it was not measured

    @property
    def verdict(self) -> str:
        if self.found is None:
            return UNKNOWN
        return PASS if self.row.asked.met(self.found.figure.median) else SHORT


def measured(row: Row, effort: Effort) -> Result:
    try:
        return Result(row, row.measure(effort), "")
    except CannotMeasureError as error:
        return Result(row, None, str(error))


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedminimax": __version__,
    }


HEADINGS = ("row", "what", "ours", "against", "the other", "ratio or figure", "asked", "verdict")


def cells(result: Result) -> tuple[str, ...]:
    row, found = result.row, result.found
    if found is None:
        told = "-", row.against, "-", "-", str(row.asked), f"{UNKNOWN}: {result.reason}"
        return row.name, row.what, *told
    middle, low, high = found.figure
    unit = row.asked.unit
    figure = f"{middle:.3g} {unit} ({low:.3g} to {high:.3g})"
    verdict = result.verdict
    if verdict == SHORT and found.why:
        verdict = f"{SHORT}: {found.why}"
    return row.name, row.what, found.ours, row.against, found.other, figure, str(row.asked), verdict


def markdown(results: list[Result], command: str) -> str:
    about = machine()
    lines = [
        "# Speed, side by side",
        "",
        f"Written by `{command}`: {about['cores']} cores ({about['processor']}), "
        f"Python {about['python']}, torch {about['torch']}, fedminimax {about['fedminimax']}.",
        "",
        "Each row times both sides in turn within one run. The figure is the median over turns,",
        "with the quartiles; a ratio above 1 means that ours takes less time.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(_escaped(c) for c in cells(result)) + " |" for result in results]
    counted = [sum(r.verdict == kind for r in results) for kind in (PASS, SHORT, UNKNOWN)]
    lines += ["", f"{counted[0]} pass, {counted[1]} fall short, {counted[2]} not measured.", ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def as_json(results: list[Result]) -> dict[str, Any]:
    rows = []
    for result in results:
        row, found = result.row, result.found
        entry: dict[str, Any] = {"row": row.name, "what": row.what, "against": row.against}
        entry |= {"asked": row.asked._asdict(), "verdict": result.verdict}
        if found is None:
            entry["reason"] = result.reason
        else:
            entry |= {"figure": found.figure._asdict(), "ours": found.ours, "other": found.other}
            entry["why"] = found.why
        rows.append(entry)
    return {"machine": machine(), "rows": rows}
