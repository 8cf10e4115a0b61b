"""What scores and labels say of a classifier: intervals, probabilities held against what came, and
rates at operating points. Pure functions."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedminimax.metrics.ranking import Floats
from fedminimax.report.operating import Calibration

Z = 1.959963984540054  # of a 95 % interval
BINS = 10
# The operating points that a report shows: the rate to reach on validation rows.
SHOWN = (
    ("probability", 0.5),
    ("sensitivity", 0.95),
    ("sensitivity", 0.9),
    ("sensitivity", 0.8),
    ("specificity", 0.9),
    ("specificity", 0.95),
)


class Bin(NamedTuple):
    """Rows whose probabilities are alike: their mean, and the share that is positive."""

    probability: float
    share: float
    low: float
    high: float
    rows: int


class Rule(NamedTuple):
    """An operating point by validation rows, and what it comes to on other rows."""

    wanted: str
    value: float
    probability: float  # above which a row counts as positive
    found: int  # positives above it
    positives: int
    alarms: int  # negatives above it
    negatives: int


def wilson(count: float, of: float) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson (1927).

    >>> tuple(round(end, 3) for end in wilson(9, 10))
    (0.596, 0.982)
    """
    share, size = count / of, Z * Z / of
    middle = (share + size / 2) / (1 + size)
    half = Z / (1 + size) * math.sqrt(share * (1 - share) / of + size / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def auprc_interval(value: float, positives: int) -> tuple[float, float] | None:
    """The 95 % logit interval of an average precision, by Boyd, Eng and Page (2013); None at the
    ends, where it has no width.

    >>> tuple(round(end, 3) for end in auprc_interval(0.8, 100))
    (0.71, 0.867)
    """
    if not 0 < value < 1:
        return None
    logit, half = math.log(value / (1 - value)), Z / math.sqrt(positives * value * (1 - value))
    return 1 / (1 + math.exp(half - logit)), 1 / (1 + math.exp(-half - logit))


def reliability(probabilities: Floats, labels: np.ndarray) -> tuple[Bin, ...]:
    """Ten bins of equal width; those without rows are left out."""
    which = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    found = []
    for number in np.unique(which):
        inside = which == number
        rows, positive = int(inside.sum()), int(labels[inside].sum())
        mean = float(probabilities[inside].mean())
        found.append(Bin(mean, positive / rows, *wilson(positive, rows), rows))
    return tuple(found)


def rules(known: Calibration, scores: Floats, labels: np.ndarray) -> tuple[Rule, ...]:
    """The operating points that are shown, on these rows."""
    found = []
    for wanted, value in SHOWN:
        least = known.score_at(wanted, value)
        above = scores > least
        probability = float(known.platt.probabilities(np.array(least)))
        hits, alarms = int((above & labels).sum()), int((above & ~labels).sum())
        totals = int(labels.sum()), int((~labels).sum())
        found.append(Rule(wanted, value, probability, hits, totals[0], alarms, totals[1]))
    return tuple(found)
