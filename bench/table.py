"""The rows of the bench: what is asked of each, what was found, and how both are written down."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bench.measure import Effort, Ratio, Times, times_faster
from fedminimax import __version__
from fedminimax.engine.device import usable_cores

PASS, SHORT, UNKNOWN, FAILED = "pass", "falls short", "not measured", "failed"


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
    why: Callable[[], str]  # where the time or memory goes: asked of a row that falls short
    other: str = "-"
    limit: str = "-"  # the least that is possible, measured in the same run


def faster(
    ours: Times, other: Times, why: Callable[[], str], limit: Times | None = None, about: str = ""
) -> Found:
    """A figure of the kind "so many times faster than the other", about which more can be said."""
    told = milliseconds(other.median) + (f" ({about})" if about else "")
    least = "-" if limit is None else milliseconds(limit.median)
    return Found(times_faster(ours, other), milliseconds(ours.median), why, told, least)


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
    verdict: str
    reason: str = ""  # why it falls short, or has no figure


def measured(row: Row, effort: Effort) -> Result:
    """One row that fails does not end the others."""
    try:
        found = row.measure(effort)
        short = not row.asked.met(found.figure.median)
        return Result(row, found, SHORT, found.why()) if short else Result(row, found, PASS)
    except CannotMeasureError as error:
        return Result(row, None, UNKNOWN, str(error))
    except Exception as error:
        return Result(row, None, FAILED, sentence(error))


def sentence(error: BaseException) -> str:
    """What an error says, without what follows its first line.

    >>> sentence(KeyError("seconds")), sentence(OSError())
    ("KeyError: 'seconds'", 'OSError')
    """
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def machine() -> dict[str, Any]:
    return {
        "cores": usable_cores(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedminimax": __version__,
    }


HEADINGS = (
    *("row", "what", "ours", "limit", "against", "the other"),
    *("ratio or figure", "asked", "verdict"),
)


def cells(result: Result) -> tuple[str, ...]:
    row, found = result.row, result.found
    ours = limit = other = figure = "-"
    if found is not None:
        middle, low, high = found.figure
        ours, limit, other = found.ours, found.limit, found.other
        figure = f"{middle:.3g} {row.asked.unit} ({low:.3g} to {high:.3g})"
    verdict = result.verdict + (f": {result.reason}" if result.reason else "")
    told = ours, limit, row.against, other, figure, str(row.asked), verdict
    return row.name, row.what, *told


def markdown(results: list[Result], command: str, to_come: int = 0) -> str:
    about = machine()
    lines = [
        "# Speed, side by side",
        "",
        f"Written by `{command}`: {about['cores']} cores ({about['processor']}), "
        f"Python {about['python']}, torch {about['torch']}, fedminimax {about['fedminimax']}.",
        "",
        "Each row times both sides in turn within one run. The figure is the median over turns,",
        "with the quartiles; a ratio above 1 means that ours takes less time. The limit is the",
        "same work by hand, or the part of it that nobody can leave out.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(_escaped(c) for c in cells(result)) + " |" for result in results]
    counted = [sum(r.verdict == kind for r in results) for kind in (PASS, SHORT, UNKNOWN, FAILED)]
    told = "{} pass, {} fall short, {} not measured, {} failed".format(*counted)
    lines += ["", f"{told}; {to_come} rows to come." if to_come else f"{told}.", ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def as_json(results: list[Result]) -> dict[str, Any]:
    rows = []
    for result in results:
        row, found = result.row, result.found
        entry: dict[str, Any] = {"row": row.name, "what": row.what, "against": row.against}
        entry |= {"asked": row.asked._asdict(), "verdict": result.verdict}
        entry |= {"reason": result.reason}
        if found is not None:
            entry |= {"figure": found.figure._asdict(), "ours": found.ours}
            entry |= {"limit": found.limit, "other": found.other}
        rows.append(entry)
    return {"machine": machine(), "rows": rows}
