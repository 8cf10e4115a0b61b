"""Ways to do the same work, timed in turn: what slows the machine down slows all of them down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fedminimax.engine.device import threads

Call = Callable[[], Any]
LEAST = 5e-3  # seconds between two looks at the clock


class Effort(NamedTuple):
    """How long a row is measured."""

    seconds: float
    turns: int  # at least


FULL, QUICK = Effort(12.0, 9), Effort(2.0, 3)


class Times(NamedTuple):
    """Seconds of one call, turn after turn."""

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)


class Ratio(NamedTuple):
    """The median over turns, and the quartiles."""

    median: float
    low: float
    high: float


def in_turn(calls: dict[str, Call], effort: Effort) -> dict[str, Times]:
    """All calls in turn, over and over. One that is short is repeated within its turn, and one that
    takes turns with much longer ones as well, up to a tenth of their time."""
    once = {name: _warm(call) for name, call in calls.items()}
    long = max(once.values())
    repeats = {name: max(1, round(max(LEAST, long / 10) / s)) for name, s in once.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + effort.seconds
    turns = 0
    while turns < effort.turns or time.perf_counter() < end:
        for name, call in calls.items():
            found[name].append(seconds(call, repeats[name]))
        turns += 1
    return {name: Times(tuple(times)) for name, times in found.items()}


def seconds(call: Call, repeats: int = 1) -> float:
    """Of one call, among so many. One that returns a number has measured itself."""
    start = time.perf_counter()
    told = [call() for _ in range(repeats)]
    if isinstance(told[0], float):
        return sum(told) / repeats
    return (time.perf_counter() - start) / repeats


def _warm(call: Call) -> float:
    """The seconds that a call takes, whatever it returns; the first one may compile."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def times_faster(ours: Times, other: Times) -> Ratio:
    return spread([b / a for a, b in zip(ours.turns, other.turns, strict=True)])


def spread(values: list[float]) -> Ratio:
    """
    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    Ratio(median=3.0, low=2.0, high=4.0)
    """
    if len(values) == 1:
        return Ratio(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(middle, low, high)


def alone(call: Call, cores: int = 1) -> Call:
    """The call, with so many cores for each operation."""

    def limited() -> None:
        with threads(cores):
            call()

    return limited
