"""Probabilities and operating points from scores, without the scores leaving the clients.

A model that was trained to rank has scores that are no probabilities. Two maps make them so, both
increasing, so that the ranking stays:

    Platt       p = sigmoid( slope * score + offset ), the two numbers by maximum likelihood
    isotonic    p is the increasing step function of the score that fits the counts best

For the first, a client sends six numbers per exchange: the sum of the logistic loss of its rows, of
its gradient (2) and of its Hessian (3); the server takes Newton's steps. For the second, and for an
operating point, clients send the counts per class and score bin of `federated_auc`. The server
needs sums only. Use rows that the model was not trained on.

These are sums, not a privacy guarantee: those of a client with one row tell that row's score.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.isotonic import isotonic_regression

from fedminimax.metrics.federated_auc import LARGEST, Ask, Histogram, histograms
from fedminimax.metrics.federated_auc import answer as histogram_answer
from fedminimax.metrics.ranking import Floats, scores_and_labels

# In units of the scores' size. A slope of 0 or less would tie or reverse the ranking: where the
# validation rows ask for that, probabilities are all but the same, and the order stays.
LEAST_SLOPE = 1e-6
_STEPS, _HALVINGS = 100, 40
_CLOSE = 1e-10  # a decrease that Newton's next step makes vanish


class Platt(NamedTuple):
    """p = sigmoid(slope * score + offset)."""

    slope: float
    offset: float
    exchanges: int = 0  # that it took

    def probabilities(self, scores: ArrayLike) -> Floats:
        return sigmoid(self.slope * np.asarray(scores, np.float64) + self.offset)

    def score_at(self, probability: float) -> float:
        """The score above which the probability is larger."""
        return (math.log(probability / (1 - probability)) - self.offset) / self.slope

    def to_json(self) -> dict[str, Any]:
        return {"kind": "platt", **self._asdict()}


class Isotonic(NamedTuple):
    """The probabilities at increasing scores; between two of these they lie on a line."""

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
            return float(np.nextafter(s0, -np.inf))  # a jump, which belongs to what is above it
        return float(s0 + (probability - v0) / (v1 - v0) * (s1 - s0))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "isotonic", "scores": self.scores.tolist(), "values": self.values.tolist()}


def sigmoid(values: Floats) -> Floats:
    """Also far from 0, where 1 + exp would overflow or round the rest away."""
    return np.exp(-np.logaddexp(0.0, -values))


def from_json(value: dict[str, Any]) -> Platt | Isotonic:
    """What `to_json` wrote."""
    rest = {name: item for name, item in value.items() if name != "kind"}
    if value["kind"] == "platt":
        return Platt(**rest)
    return Isotonic(**{name: np.array(item, np.float64) for name, item in rest.items()})


# The client's side: a pure function of its own rows and of what the server sent.


def answer(
    question: str, scores: ArrayLike, labels: ArrayLike, *arrays: np.ndarray, least: int = 0
) -> Floats:
    """A client's answer; the server needs only the sum of them.

    "size" (): its negatives, its positives, and the sum of its squared scores. "platt" (at,
    targets), with at = (slope, offset) and the targets of negatives and of positives: the sums over
    rows of the loss, of its gradient, and of the Hessian's entries (slope, slope), (slope, offset)
    and (offset, offset). Others: as `federated_auc.answer`.
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
    """Platt's map (Platt 1999, by the safeguarded Newton steps of Lin, Lin and Weng 2007).

    `ask(question, *arrays)` returns the SUM of the clients' answers. Targets are Platt's, which
    keep the slope finite where scores separate the classes: (N_+ + 1) / (N_+ + 2) for a positive
    and 1 / (N_- + 2) for a negative. The slope is positive: a map that reverses the ranking is not
    looked for.

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
    """Newton's steps on the two numbers, with the slope in units of the scores' size."""

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
            # Scores that are all alike leave one direction without curvature.
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
                break  # no better point can be told from this one
            point, (loss, gradient, hessian) = tried, found
        return float(point[0]), float(point[1])


def federated_counts(ask: Ask, least: int = 0) -> Histogram:
    """The clients' scores counted per class and bin, finely where the classes meet."""
    *_, finest = histograms(ask, least=least)
    return finest


def isotonic_from(histogram: Histogram) -> Isotonic:
    """The increasing probabilities that fit the counts best (pool adjacent violators).

    They are constant over the bins of a block, and on a line across bins without rows.

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
    fitted = np.asarray(isotonic_regression(shares, sample_weight=rows[held]))
    firsts = np.flatnonzero(np.concatenate([[True], fitted[1:] > fitted[:-1]]))
    lasts = np.concatenate([firsts[1:] - 1, [held.size - 1]])
    ends = np.concatenate([[-LARGEST], edges, [LARGEST]])
    scores = np.stack([ends[held[firsts]], ends[held[lasts] + 1]], axis=1).ravel()
    # Beyond its first and last inner edge a constant goes on for ever.
    inner = slice(1, -1) if len(firsts) > 1 else slice(1)
    return Isotonic(scores[inner], np.repeat(fitted[firsts], 2)[inner])


class OperatingPoint(NamedTuple):
    """Scores above `score` count as positive; what that gives on the rows counted."""

    score: float
    sensitivity: float
    specificity: float


def at_score(histogram: Histogram, score: float) -> OperatingPoint:
    """The rates at a score, to the resolution of the bins: exact where it is just below an edge."""
    edges, counts, _ = histogram
    above = int(np.searchsorted(edges, score, side="right"))
    return _rates(counts, score, above + 1)


def operating_point(histogram: Histogram, wanted: str, value: float) -> OperatingPoint:
    """The operating point with a sensitivity, or a specificity, of at least `value` on the rows
    counted, and the highest other rate that an edge between bins gives.

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
    # The bins from number `first` on count as positive; 0: all of them.
    points = [_rates(counts, _just_below(edges, first), first) for first in range(edges.size + 2)]
    if wanted == "sensitivity":
        return [point for point in points if point.sensitivity >= value][-1]
    if wanted == "specificity":
        return next(point for point in points if point.specificity >= value)
    raise ValueError(f"{wanted!r} is no rate to choose by; give 'sensitivity' or 'specificity'")


def _just_below(edges: Floats, first: int) -> float:
    """The score below which the bin begins, so that larger means: in it or above."""
    if first == 0:
        return -LARGEST
    return LARGEST if first > edges.size else float(np.nextafter(edges[first - 1], -np.inf))


def _rates(counts: Floats, score: float, first: int) -> OperatingPoint:
    negatives, positives = counts
    with np.errstate(invalid="ignore"):
        sensitivity = positives[first:].sum() / positives.sum()
        specificity = negatives[:first].sum() / negatives.sum()
    return OperatingPoint(score, float(sensitivity), float(specificity))
