"""What releases with Gaussian noise spend of a budget (epsilon, delta).

Neighbours differ by one row that is replaced by an empty one, while the counts of rows are public.
A release whose value a row moves by at most C, with noise of standard deviation sigma * C, tells
neighbours apart as well as N(0, 1) and N(mu, 1) with mu = 1 / sigma (Dong, Roth and Su, Gaussian
Differential Privacy, 2022). Releases compose exactly: their mu^2 add up, also if each is chosen
after a look at those before. The unit of all accounts here is mu^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

MOST_EPSILON = 1e6  # beyond it nothing is promised


def delta_of(mu: float, epsilon: float) -> float:
    """The least delta with which N(0, 1) and N(mu, 1) are (epsilon, delta)-indistinguishable.

    >>> round(delta_of(1.0, 1.0), 4)
    0.1269
    """
    if mu <= 0:
        return 0.0
    near = _log_normal(mu / 2 - epsilon / mu)
    far = epsilon + _log_normal(-mu / 2 - epsilon / mu)
    # The difference of two exponentials, without overflow and without cancellation at the start.
    return float(-math.exp(near) * math.expm1(min(far - near, 0.0)))


def _log_normal(value: float) -> float:
    """The logarithm of the normal distribution function."""
    return float(torch.special.log_ndtr(torch.tensor(value, dtype=torch.float64)))


def epsilon_of(mu2: float, delta: float) -> float:
    """The epsilon that releases have spent, for this delta.

    Arguments:
        mu2: the sum of 1 / sigma^2 over the releases.
        delta: the delta of the promise.

    >>> round(epsilon_of(1.0, 1e-5), 3), epsilon_of(0.0, 1e-5)
    (4.377, 0.0)
    """
    check_delta(delta)
    if not mu2 >= 0:
        raise ValueError(f"mu^2 is {mu2!r}; give a sum of squares, of at least 0")
    mu = math.sqrt(mu2)
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(mu, high) > delta:
        high *= 2
        if high > MOST_EPSILON:
            return math.inf
    return last_true(lambda epsilon: delta_of(mu, epsilon) > delta, 0.0, high)


def mu2_of(epsilon: float, delta: float) -> float:
    """The largest mu^2 that stays within (epsilon, delta).

    >>> round(mu2_of(epsilon_of(1.0, 1e-5), 1e-5), 6)
    1.0
    """
    check_epsilon(epsilon)
    check_delta(delta)
    high = 1.0
    while delta_of(high, epsilon) <= delta:
        high *= 2
    low = high
    while delta_of(low, epsilon) > delta:
        low /= 2
    return last_true(lambda mu: delta_of(mu, epsilon) <= delta, low, high) ** 2


def noise_for(epsilon: float, delta: float, releases: int) -> float:
    """The noise multiplier sigma with which so many equal releases spend (epsilon, delta).

    >>> sigma = noise_for(3.0, 1e-5, releases=240)
    >>> round(epsilon_of(240 / sigma**2, 1e-5), 6)
    3.0
    """
    if releases < 1:
        raise ValueError(f"releases is {releases!r}; give how many there are, at least 1")
    return math.sqrt(releases / mu2_of(epsilon, delta))


def sampled_epsilon(share: float, noise: float, times: int, delta: float) -> float:
    """The epsilon of releases on secret samples, by the privacy loss distributions of
    dp-accounting (the extra `privacy`).

    Arguments:
        share: with which each client or row is in a sample, independently of the others; who is
            must stay unknown to whoever reads the releases.
        noise: the multiplier sigma of each release.
        times: how many releases there are.
        delta: the delta of the promise.
    """
    check_delta(delta)
    if share == 1:
        return epsilon_of(times / noise**2, delta)
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        raise ValueError(
            "releases on samples are counted by dp-accounting, which is not installed: "
            "pip install 'fedminimax[privacy]'"
        ) from error
    release = dp_accounting.PoissonSampledDpEvent(share, dp_accounting.GaussianDpEvent(noise))
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.SelfComposedDpEvent(release, times))
    return float(accountant.get_epsilon(delta))


def sampled_noise(epsilon: float, delta: float, share: float, times: int) -> float:
    """The multiplier with which so many releases on secret samples spend (epsilon, delta)."""
    check_epsilon(epsilon)
    most = noise_for(epsilon, delta, times)  # samples never need more than all
    if share == 1:
        return most
    least = most
    while sampled_epsilon(share, least, times, delta) < epsilon:
        least /= 2

    def too_little(noise: float) -> bool:
        return sampled_epsilon(share, noise, times, delta) > epsilon

    # On the safe side of what is left to the search.
    return last_true(too_little, least, 2 * most, 1e-3) * (1 + 2e-3)


def last_true(
    holds: Callable[[float], bool], low: float, high: float, width: float = 1e-13
) -> float:
    """Where a condition that holds at `low`, and not at `high`, ceases to hold, up to a relative
    width."""
    while high - low > width * max(high, 1e-9):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def check_epsilon(epsilon: float) -> None:
    """Refuses an epsilon that promises nothing, or that is no number above 0."""
    if not (isinstance(epsilon, int | float) and 0 < epsilon <= MOST_EPSILON):
        raise ValueError(
            f"epsilon is {epsilon!r}; give a number above 0 and of at most {MOST_EPSILON:g}"
        )


def check_delta(delta: float) -> None:
    """Refuses a delta that is not between 0 and 0.5."""
    if not (isinstance(delta, int | float) and 0 < delta < 0.5):
        raise ValueError(f"delta is {delta!r}; give a number between 0 and 0.5, such as 1e-5")
