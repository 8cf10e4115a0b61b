"""Average precision (AUPRC) from counts of scores in bins, and how far off it can be.

Above a threshold are t positives and f negatives; the precision there is t / (t + f). Average
precision is the mean, over positives, of the precision at the threshold that lets them in. Of a bin
with p positives and n negatives, below which T positives and F negatives are left out, counts say

    lowest    negatives first, one positive at a time: (T + i) / (T + i + F + n),  i = 1 .. p
    highest   all p positives at one score, then the negatives:  (T + p) / (T + p + F)

No order of the bin's scores, and no ties among them, gives less or more. A bin that contains a
single number is one tie, whose precision is known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from fedminimax.metrics.ranking import Floats


class Bins(NamedTuple):
    """The bins with positives, from the highest scores down."""

    positives: Floats
    negatives: Floats
    positives_above: Floats
    negatives_above: Floats
    single: Floats  # 1 where the bin contains a single number

    @staticmethod
    def of(counts: np.ndarray, edges: ArrayLike) -> Bins:
        edges, counts = np.asarray(edges, np.float64), np.asarray(counts, np.float64)[:, ::-1]
        single = np.zeros(edges.size + 1)
        single[1:-1] = (edges[1:] <= np.nextafter(edges[:-1], np.inf))[::-1]
        above = np.cumsum(counts, axis=1) - counts
        held = counts[1] > 0
        return Bins(counts[1, held], counts[0, held], above[1, held], above[0, held], single[held])


def auprc_from_counts(counts: np.ndarray, edges: ArrayLike) -> tuple[float, float] | None:
    """(AUPRC, bound) of counts of shape (2, bins), negatives first; None if a class is missing.

    The exact one of the counted rows is within the bound.

        >>> value, bound = auprc_from_counts(np.array([[2, 1, 0], [0, 1, 1]]), [0.3, 0.6])
        >>> round(value, 6), round(bound, 6)
        (0.916667, 0.083333)
    """
    if not np.asarray(counts).sum(axis=1).all():
        return None
    p, n, t, f, single = Bins.of(counts, edges)
    tied = p * (t + p) / (t + p + f + n)
    # The sum over i of (t + i) / (t + i + c) in closed form.
    c = f + n
    lowest = np.where(single, tied, p - c * (_digamma(t + p + c + 1) - _digamma(t + c + 1)))
    highest = np.where(single, tied, p * (t + p) / (t + p + f))
    low, high = lowest.sum() / p.sum(), highest.sum() / p.sum()
    return float((low + high) / 2), float((high - low) / 2)


class PrecisionRecall(NamedTuple):
    """Points (recall, precision): `middle` at the edges of bins, where both are known, and curves
    between which the precision at any other recall is."""

    middle: Floats  # (points, 2)
    lower: Floats
    upper: Floats


def precision_recall_from_counts(counts: np.ndarray, edges: ArrayLike) -> PrecisionRecall | None:
    """The curve of counts of shape (2, bins), negatives first; None if a class is missing."""
    if not np.asarray(counts).sum(axis=1).all():
        return None
    p, n, t, f, single = Bins.of(counts, edges)
    total = p.sum()
    before, after, known = t / total, (t + p) / total, (t + p) / (t + p + f + n)
    highest = np.where(single, known, (t + p) / (t + p + f))
    # With all its negatives first; from here to what is known the curve is concave.
    below = t + f + n
    lowest = np.where((single > 0) | (below == 0), known, t / np.maximum(below, 1))

    def steps(left: Floats, right: Floats) -> Floats:
        recalls = np.stack([before, after], axis=1).ravel()
        return np.stack([recalls, np.stack([left, right], axis=1).ravel()], axis=1)

    middle = np.stack([after, known], axis=1)
    first = np.array([[0.0, known[0]]])
    return PrecisionRecall(
        np.concatenate([first, middle]), steps(lowest, known), steps(highest, highest)
    )


def _digamma(numbers: Floats) -> Floats:
    return torch.digamma(torch.from_numpy(numbers)).numpy()
