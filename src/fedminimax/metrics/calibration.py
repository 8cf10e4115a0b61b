"""Probabilities and operating points from scores, without the scores leaving the clients.

The scores of a model that was trained to rank are no probabilities. Two maps turn them into
probabilities; both are increasing, so that the ranking stays:

    Platt       p = sigmoid( slope * score + offset ), the two numbers by maximum likelihood
    isotonic    p is the increasing step function of the score that fits the counts best

For the first, a client sends six numbers per exchange: the sums over its rows of the logistic loss,
its gradient (2) and its Hessian (3); the server takes Newton steps. For the second, and for an
operating point, clients send counts per class and score bin, as for `federated_auc`. The server
needs the sums over clients only. Use rows that the model was not trained on.

Sums are no privacy guarantee: those of a client with one row reveal that row's score.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedminimax.metrics.federated_auc import LARGEST, Ask, Histogram, histograms
from fedminimax.metrics.federated_auc import answer as histogram_answer
from fedminimax.metrics.ranking import Floats, scores_and_labels

# In units of the scores' size. A slope of 0 or less would make ties or reverse the ranking. If the
# validation rows ask for such a slope, all probabilities are nearly equal, in the same order.
LEAST_SLOPE = 1e-6
_STEPS, _HALVINGS = 100, 40
_CLOSE = 1e-10  # a decrease of the loss after which one more step is enough


class Platt(NamedTuple):
    """Platt scaling: p = sigmoid(slope * score + offset)."""

    slope: float
    offset: float
    exchanges: int = 0  # that fitting took

    def probabilities(self, scores: ArrayLike) -> Floats:
        return sigmoid(self.slope * np.asarray(scores, np.float64) + self.offset)

    def score_at(self, probability: float) -> float:
        """The score above which the probability is larger."""
        return (math.log(probability / (1 - probability)) - self.offset) / self.slope

    def to_json(self) -> dict[str, Any]:
        return {"kind": "platt", **self._asdict()}


class Isotonic(NamedTuple):
    """Isotonic regression: the probabilities at increasing scores, linear between two of them."""

    scores: Floats
    values: Floats

    def probabilities(self, scores: ArrayLike) -> Floats:
        return np.interp(np.asarray(scores, np.float64), self.scores, self.values)

    def score_at(self, probability: float) -> float:
        """The score above which the probability is larger."""
        below = int(np.searchsorted(self.values, probability, side="right"))
        if below == 0:
            return -LARGEST
        if below == len(self.values):
            return LARGEST
        (s0, s1), (v0, v1) = self.scores[below - 1 : below + 1], self.values[below - 1 : below + 1]
        if s0 == s1:
            return float(np.nextafter(s0, -np.inf))  # the score of a jump has the larger value
        return float(s0 + (probability - v0) / (v1 - v0) * (s1 - s0))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "isotonic", "scores": self.scores.tolist(), "values": self.values.tolist()}


def sigmoid(values: Floats) -> Floats:
    """1 / (1 + exp(-values)), without overflow or loss of digits far from 0."""
    return np.exp(-np.logaddexp(0.0, -values))


def from_json(value: dict[str, Any]) -> Platt | Isotonic:
    """The map that `to_json` wrote."""
    rest = {name: item for name, item in value.items() if name != "kind"}
    if value["kind"] == "platt":
        return Platt(**rest)
    return Isotonic(**{name: np.array(item, np.float64) for name, item in rest.items()})


# The client's side: a pure function of its own rows and of what the server sent.


def answer(
    question: str, scores: ArrayLike, labels: ArrayLike, *arrays: np.ndarray, least: int = 0
) -> Floats:
    """A client's answer to a question; the server needs the sum over clients only.

    Arguments:
        question: "size", "platt", or a question of `federated_auc.answer`.
        scores, labels: the client's rows.
        arrays: what the server sent: nothing for "size"; for "platt" (slope, offset), and the
            targets of negatives and of positives.
        least: the smallest count above 0 that a client reports in a histogram.

    Returns, for "size", the number of negatives, of positives, and the sum of squared scores; for
    "platt", the sums over rows of the loss, of its gradient, and of the entries (slope, slope),
    (slope, offset) and (offset, offset) of its Hessian.
    """
    if question not in ("size", "platt"):
        return histogram_answer(question, scores, labels, *arrays, least=least)
    values, positive = scores_and_labels(scores, labels)
    if question == "size":
        return np.array([np.sum(~positive), np.sum(positive), values @ values], np.float64)
    (slope, offset), targets = arrays
    target, margin = np.where(positive, targets[1], targets[0]), slope * values + offset
    loss = np.logaddexp(0, margin) - target * margin
    error, weight = sigmoid(margin) - target, sigmoid(margin) * sigmoid(-margin)
    sums = [loss, error * values, error, weight * values**2, weight * values, weight]
    return np.array([term.sum() for term in sums])


# The server's side.


def federated_platt(ask: Ask) -> Platt:
    """Platt scaling (Platt 1999), fitted by the Newton steps of Lin, Lin and Weng (2007).

    Targets are Platt's, which keep the slope finite if scores separate the classes: (N_+ + 1) /
    (N_+ + 2) for a positive and 1 / (N_- + 2) for a negative. The slope is kept positive, so that
    the ranking is not reversed.

    Argument:
        ask: `ask(question, *arrays)` returns the SUM of the clients' answers.

        >>> sites = [([-2.0, 1.0, 0.5], [0, 1, 0]), ([3.0, -1.0, 2.0], [1, 1, 0])]
        >>> ask = lambda question, *arrays: sum(answer(question, *site, *arrays) for site in sites)
        >>> round(float(federated_platt(ask).probabilities(0.5)), 3)
        0.496
    """
    negatives, positives, squares = ask("size").tolist()
    if not negatives or not positives:
        raise ValueError(
            f"the rows to calibrate on are {negatives:.0f} negatives and {positives:.0f} "
            "positives; both are needed: keep more rows for validation, or leave calibration out"
        )
    targets = np.array([1 / (negatives + 2), (positives + 1) / (positives + 2)])
    size = math.sqrt(squares / (negatives + positives)) or 1.0
    search = _Search(ask, targets, size)
    slope, offset = search.newton(0.0, math.log((positives + 1) / (negatives + 1)))
    if slope < LEAST_SLOPE:
        slope, offset = search.newton(LEAST_SLOPE, offset, slope_moves=False)
    return Platt(slope / size, offset, search.asked + 1)


class _Search:
    """Newton steps on slope and offset, with the slope in units of the scores' size."""

    def __init__(self, ask: Ask, targets: Floats, size: float):
        self.ask, self.targets, self.size, self.asked = ask, targets, size, 0

    def at(self, point: Floats) -> tuple[float, Floats, Floats]:
        self.asked += 1
        sums = self.ask("platt", point / [self.size, 1.0], self.targets)
        loss, *rest = (sums / [1, self.size, 1, self.size**2, self.size, 1]).tolist()
        first, second, corner, side, last = rest
        return loss, np.array([first, second]), np.array([[corner, side], [side, last]])

    def newton(self, slope: float, offset: float, slope_moves: bool = True) -> tuple[float, float]:
        point, free = np.array([slope, offset]), np.array([float(slope_moves), 1.0])
        loss, gradient, hessian = self.at(point)
        for _ in range(_STEPS):
            gradient, hessian = gradient * free, hessian * np.outer(free, free)
            # If all scores are equal, one direction has no curvature.
            damped = hessian + 1e-12 * np.trace(hessian) * np.eye(2) + np.diag(1 - free)
            step = -np.linalg.solve(damped, gradient)
            decrease = float(-gradient @ step)
            if decrease <= _CLOSE * (1 + loss):
                point = point + step
                break
            for halving in range(_HALVINGS):
                tried = point + step / 2**halving
                found = self.at(tried)
                if found[0] <= loss - 1e-4 * decrease / 2**halving:
                    break
            else:
                break  # rounding hides any further decrease
            point, (loss, gradient, hessian) = tried, found
        return float(point[0]), float(point[1])


def federated_counts(ask: Ask, least: int = 0) -> Histogram:
    """The clients' scores counted per class and bin, with fine bins where the classes overlap.

    Arguments:
        ask: `ask(question, *arrays)` returns the SUM of the clients' answers.
        least: the smallest count above 0 that a client reports.
    """
    *_, finest = histograms(ask, least=least)
    return finest


def isotonic_from(histogram: Histogram) -> Isotonic:
    """Isotonic regression of the counts: the increasing probabilities that fit them best.

    They are constant within a block of bins, and linear across bins without rows.

        >>> edges = np.array([0.0, 1.0, 2.0])
        >>> fit = isotonic_from(Histogram(edges, np.array([[3, 1, 2, 0], [1, 2, 1, 4]]), (0, 0)))
        >>> fit.probabilities([-1.0, 0.5, 1.5, 9.0]).tolist()
        [0.25, 0.5, 0.5, 1.0]
    """
    edges, counts, _ = histogram
    rows = counts.sum(axis=0)
    held = np.flatnonzero(rows)
    if not held.size:
        raise ValueError("no client reports a row to calibrate on: keep more rows for validation")
    shares = counts[1, held] / rows[held]
    from sklearn.isotonic import isotonic_regression  # slow to import, and seldom needed

    fitted = np.asarray(isotonic_regression(shares, sample_weight=rows[held]))
    firsts = np.flatnonzero(np.concatenate([[True], fitted[1:] > fitted[:-1]]))
    lasts = np.concatenate([firsts[1:] - 1, [held.size - 1]])
    ends = np.concatenate([[-LARGEST], edges, [LARGEST]])
    scores = np.stack([ends[held[firsts]], ends[held[lasts] + 1]], axis=1).ravel()
    # `np.interp` continues the first and the last value, so the outermost ends are not needed.
    inner = slice(1, -1) if len(firsts) > 1 else slice(1)
    return Isotonic(scores[inner], np.repeat(fitted[firsts], 2)[inner])


class OperatingPoint(NamedTuple):
    """Scores above `score` count as positive; with the rates on the counted rows."""

    score: float
    sensitivity: float
    specificity: float


def at_score(histogram: Histogram, score: float) -> OperatingPoint:
    """The rates at a score, to the resolution of the bins; exact just below an edge."""
    edges, counts, _ = histogram
    above = int(np.searchsorted(edges, score, side="right"))
    return _rates(counts, score, above + 1)


def operating_point(histogram: Histogram, wanted: str, value: float) -> OperatingPoint:
    """The operating point with one rate of at least a given value, and the largest other rate.

    Arguments:
        histogram: the counts.
        wanted: the rate to reach, "sensitivity" or "specificity".
        value: the least value of that rate on the counted rows.

    Only edges between bins are considered as thresholds.

        >>> edges = np.array([0.0, 1.0, 2.0])
        >>> counts = Histogram(edges, np.array([[3, 1, 2, 0], [1, 2, 1, 4]]), (0, 0))
        >>> operating_point(counts, "sensitivity", 0.8)[1:]
        (0.875, 0.5)
    """
    edges, counts, _ = histogram
    if not counts.sum(axis=1).all():
        raise ValueError(
            f"the rows to choose an operating point on are {counts[0].sum():.0f} negatives and "
            f"{counts[1].sum():.0f} positives; both are needed: keep more rows for validation"
        )
    # The bins from number `first` on count as positive.
    points = [_rates(counts, _just_below(edges, first), first) for first in range(edges.size + 2)]
    if wanted == "sensitivity":
        return [point for point in points if point.sensitivity >= value][-1]
    if wanted == "specificity":
        return next(point for point in points if point.specificity >= value)
    raise ValueError(f"{wanted!r} is no rate to choose by; give 'sensitivity' or 'specificity'")


def _just_below(edges: Floats, first: int) -> float:
    """The largest score below a bin, so that larger scores are in the bin or above it."""
    if first == 0:
        return -LARGEST
    return LARGEST if first > edges.size else float(np.nextafter(edges[first - 1], -np.inf))


def _rates(counts: Floats, score: float, first: int) -> OperatingPoint:
    negatives, positives = counts
    with np.errstate(invalid="ignore"):
        sensitivity = positives[first:].sum() / positives.sum()
        specificity = negatives[:first].sum() / negatives.sum()
    return OperatingPoint(score, float(sensitivity), float(specificity))
