"""The papers' imbalance: thin the positives of a balanced data set to a given share."""

from __future__ import annotations

import numpy as np

from fedminimax.data.sites import DataError, listed
from fedminimax.random import generator


def keep_positives(labels: np.ndarray, share: float, seed: int, number: int = 0) -> np.ndarray:
    """Ascending indices of all negatives and of so many positives that they make up `share`.

    The count is int(share / (1 - share) * negatives), as in the papers' code; at least one positive
    stays if there was one, and all stay if there are fewer. `number` keeps apart the draws of
    several clients.

    >>> int(len(keep_positives(np.array([0] * 25_000 + [1] * 25_000), 0.1, seed=0))) - 25_000
    2777
    """
    check_share(share)
    labels = np.asarray(labels)
    if labels.ndim > 1:
        raise DataError(
            f"positive_share thins the positives of one label, but there are {labels.shape[1]}; "
            "leave it out."
        )
    odd = np.setdiff1d(labels, [0, 1])
    if len(odd):
        raise DataError(f"The labels hold {listed(odd.tolist())}; recode them as 0 and 1.")
    negatives, positives = np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)
    count = max(1, int(share / (1 - share) * len(negatives)))
    kept = generator(seed, "imbalance", number).permutation(positives)[:count]
    return np.sort(np.concatenate([negatives, kept]))


def check_share(share: float) -> None:
    if not 0 < share < 1:
        raise DataError(
            f"The share of positives is {share}; give a number between 0 and 1, such as 0.1."
        )
