"""Chance in a method: draws that server and clients make alike, as pure functions of the clock."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedminimax.random import key, words


def stream_of(purpose: str) -> int:
    """The key of a method's own stream; made once, since a graph cannot make it."""
    return key(0, purpose)


def common_number(stream: int, round: Tensor, count: int) -> Tensor:
    """A whole number in [0, count) that everyone finds for a round, so that it need not travel.

    >>> import torch
    >>> [int(common_number(7, torch.tensor(r), 4)) for r in range(6)]
    [3, 3, 2, 1, 2, 2]
    """
    return words(stream, round) % count


def by_weight(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Positions drawn in proportion to their weights, one per uniform number, in ascending order.

    >>> by_weight(np.array([0.5, 0.0, 0.5]), np.array([0.9, 0.1, 0.6]))
    array([0, 2, 2])
    """
    bounds = np.cumsum(weights, dtype=np.float64)
    # Scaled by the last bound: rounding must not leave a gap below 1, nor give a position of
    # weight 0.
    return np.sort(np.searchsorted(bounds, uniform * bounds[-1], side="right"))
