"""Differences between two series of measurements with the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95


class Difference(NamedTuple):
    """The mean of paired differences, and its 95 % interval, if there are at least two pairs."""

    mean: float
    low: float | None
    high: float | None
    pairs: int


def paired_difference(ours: Sequence[float], theirs: Sequence[float], among: int = 1) -> Difference:
    """The mean of `ours` minus `theirs`, pair by pair, with Student's 95 % interval.

    The effect that a seed has on both cancels in a difference, so the interval is narrower than
    those of the two means. With `among` intervals, all of them hold at once with 95 % (Bonferroni).

    >>> found = paired_difference([3.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    >>> found.mean, round(found.low, 2), round(found.high, 2)
    (2.0, -0.48, 4.48)
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, pairs = statistics.fmean(differences), len(differences)
    if pairs < 2:
        return Difference(mean, None, None, pairs)
    from scipy.special import stdtrit  # slow to import, and only comparisons need it

    quantile = float(stdtrit(pairs - 1, 1 - (1 - LEVEL) / 2 / among))
    half = quantile * statistics.stdev(differences) / math.sqrt(pairs)
    return Difference(mean, mean - half, mean + half, pairs)
