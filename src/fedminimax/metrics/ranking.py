"""Exact ranking measures of scores that are all in one place.

Scores are any real numbers; larger means "more likely positive", and a tie counts as half. Labels
are 0 or 1. A measure that needs both classes returns None if one is missing. For scores that must
not leave the clients see `federated_auc`.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedminimax.types import NonFiniteError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def scores_and_labels(scores: ArrayLike, labels: ArrayLike) -> tuple[Floats, Flags]:
    """Scores as float64 and labels as booleans, both 1-D. Others raise a ValueError."""
    values, classes = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    if values.ndim != 1 or values.shape != classes.shape:
        raise ValueError(
            f"scores have shape {values.shape} and labels {classes.shape}; expected two vectors of "
            "the same length: flatten them, one score and one label per row."
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise NonFiniteError(
            f"{bad.size} of {values.size} scores are not finite (the first is {values[bad[0]]} at "
            f"row {bad[0]}); a ranking needs real numbers: look for the round at which the model "
            "diverged and lower its lr."
        )
    strange = classes[(classes != 0) & (classes != 1)]
    if strange.size:
        raise ValueError(f"labels hold {strange[0]!s}; expected only 0 and 1: recode the classes.")
    return values, classes.astype(bool)


def auc(
    scores: ArrayLike, labels: ArrayLike, weights: NDArray[np.float64] | None = None
) -> float | None:
    """The share of pairs of opposite class in the right order; None if a class is missing.

    Arguments:
        scores, labels: of all rows.
        weights: of the rows, all above 0; a pair counts by the product of its two. None: alike.
    """
    values, positive = scores_and_labels(scores, labels)
    if positive.all() or not positive.any():
        return None
    upper, lower = _by_score(values, positive, weights)
    below = np.cumsum(lower) - lower / 2
    return float(upper @ below / (upper.sum() * lower.sum()))


def auprc(scores: ArrayLike, labels: ArrayLike) -> float | None:
    """Average precision (as scikit-learn's, no interpolation); None if a class is missing."""
    values, positive = scores_and_labels(scores, labels)
    if positive.all() or not positive.any():
        return None
    upper, lower = _by_score(values, positive, None)
    found = np.cumsum(upper[::-1])
    precision = found / (found + np.cumsum(lower[::-1]))
    return float(upper[::-1] @ precision / found[-1])


def auc_interval(
    scores: ArrayLike, labels: ArrayLike, level: float = 0.95
) -> tuple[float, float] | None:
    """A confidence interval of the AUC: DeLong's variance on the logit scale.

    DeLong, DeLong & Clarke-Pearson (1988), by the ranks of Sun & Xu (2014), which need one sort:

        var = var_i(V_i) / n+  +  var_j(W_j) / n-

    where V_i is the share of negatives below positive i and W_j the share of positives above
    negative j. The logit scale, logit(auc) -+ z sqrt(var) / (auc (1 - auc)), keeps the interval
    inside (0, 1) and allows it to be asymmetric near 1, where the plain interval must be clipped
    and covers too little.

    Under perfect separation (auc 0 or 1) the estimated variance is zero, also for a bootstrap. Then
    n = min(n+, n-) disjoint pairs are independent trials with the same outcome, so the exact
    binomial limit ((1 - level) / 2) ** (1 / n) is a valid, wide bound on that side.

    Arguments:
        scores, labels: of all rows.
        level: of confidence.

    Returns (low, high); None if a class has fewer than two rows, or if the variance is zero without
    perfect separation (constant scores).
    """
    if not 0 < level < 1:
        raise ValueError(
            f"level is {level}; expected a share strictly between 0 and 1, such as 0.95."
        )
    values, positive = scores_and_labels(scores, labels)
    smaller = min(int(positive.sum()), int((~positive).sum()))
    if smaller < 2:
        return None
    above, below = _placements(values[positive], values[~positive])
    centre, tail = float(above.mean()), (1 - level) / 2
    # Perfect separation is checked on the scores: rounding may keep a mean of placements from 1.
    if values[positive].min() > values[~positive].max():
        return tail ** (1 / smaller), 1.0
    if values[positive].max() < values[~positive].min():
        return 0.0, 1 - tail ** (1 / smaller)
    spread = math.sqrt(above.var(ddof=1) / above.size + below.var(ddof=1) / below.size)
    if spread < 1e-12:
        return None
    half = NormalDist().inv_cdf(1 - tail) * spread / (centre * (1 - centre))
    middle = math.log(centre / (1 - centre))
    return _logistic(middle - half), _logistic(middle + half)


def auc_error(value: float, positives: int, negatives: int) -> float | None:
    """The standard error of an AUC of which only the numbers of rows are known.

    Hanley and McNeil (Radiology 1982), for scores whose shape is not known:

        var = ( A (1-A) + (n+ - 1) (A/(2-A) - A^2) + (n- - 1) (2 A^2/(1+A) - A^2) ) / (n+ n-)

    None without rows of both classes.

    >>> round(auc_error(0.9, 20, 100), 3)
    0.047
    """
    if min(positives, negatives) < 1:
        return None
    square = value * value
    spread = (
        value * (1 - value)
        + (positives - 1) * (value / (2 - value) - square)
        + (negatives - 1) * (2 * square / (1 + value) - square)
    )
    return math.sqrt(max(spread, 0.0) / (positives * negatives))


class WorstSite(NamedTuple):
    """The site with the lowest AUC of those with enough rows, and the names of the others."""

    site: str | None
    auc: float | None
    left_out: tuple[str, ...]


def worst_site(
    aucs: Mapping[str, float | None], counts: Mapping[str, tuple[int, int]], least: int = 5
) -> WorstSite:
    """The site with the lowest AUC, of those with at least `least` rows of each class.

    The AUC of a few rows is noise, and the minimum over sites would select it; so small sites are
    left out, and named.

    Arguments:
        aucs: the AUC of each site.
        counts: (negatives, positives) of each site.
        least: the least rows of each class.
    """
    if least < 1:
        raise ValueError(
            f"least is {least}; expected at least 1, because one class alone has no AUC."
        )
    if set(aucs) != set(counts):
        odd = sorted(set(aucs) ^ set(counts))
        raise ValueError(
            f"site {odd[0]!r} has an AUC or counts but not both; give both for every site."
        )
    judged = {site: value for site, value in aucs.items() if min(counts[site]) >= least}
    left_out = tuple(site for site in aucs if site not in judged)
    known: dict[str, float] = {}
    for site, value in judged.items():
        if value is None or not 0 <= value <= 1:
            raise ValueError(
                f"site {site!r} has AUC {value} with {counts[site]} rows per class; expected a "
                "number in [0, 1]: compute its AUC from the rows that were counted."
            )
        known[site] = value
    if not known:
        return WorstSite(None, None, left_out)
    worst = min(known, key=known.__getitem__)
    return WorstSite(worst, known[worst], left_out)


def _by_score(values: Floats, positive: Flags, weights: Floats | None) -> tuple[Floats, Floats]:
    """The weight of positives and of negatives at each distinct score, the lowest first."""
    distinct, which = np.unique(values, return_inverse=True)
    weights = np.ones(values.size) if weights is None else weights
    upper = np.bincount(which, weights * positive, distinct.size)
    lower = np.bincount(which, weights * ~positive, distinct.size)
    return upper.astype(np.float64), lower.astype(np.float64)  # whole numbers to a type checker


def _placements(positives: Floats, negatives: Floats) -> tuple[Floats, Floats]:
    """The share of negatives below each positive, and of positives above each negative."""
    ranks = _midranks(np.concatenate([positives, negatives]))
    above = (ranks[: positives.size] - _midranks(positives)) / negatives.size
    below = 1 - (ranks[positives.size :] - _midranks(negatives)) / positives.size
    return above, below


def _midranks(values: Floats) -> Floats:
    _, which, times = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(times) - (times - 1) / 2)[which]


def _logistic(value: float) -> float:
    return (1 + math.tanh(value / 2)) / 2
