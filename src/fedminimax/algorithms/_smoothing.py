"""The smoothing methods: the server's state, and what is checked before a run.

They descend on f + smoothing/2 |x - anchor|^2, whose anchor follows x by `anchor_rate`.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

from torch import Tensor

from fedminimax.blocks.schedules import Rate, at
from fedminimax.types import Clock


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    anchor: Tensor  # z


def check_smoothing(owner: str, smoothing: float, anchor_rate: Rate) -> None:
    """Refuses a pull or a rate of the anchor with which no run can begin."""
    if not (math.isfinite(smoothing) and smoothing >= 0):
        raise ValueError(f"{owner}: smoothing is {smoothing!r}; give a finite number of at least 0")
    if at_first(anchor_rate) > 1:
        raise ValueError(
            f"{owner}: anchor_rate is {anchor_rate!r}; give a number from 0 to 1 (1: no smoothing)"
        )


def check_pull(owner: str, pull: float) -> None:
    """`pull`: how far the anchor pulls x back in the first round, as a share of their distance."""
    if pull >= 2:
        warnings.warn(
            f"{owner}: in a round the anchor pulls x back by {pull:g} times their distance (step "
            "size of the round times smoothing); from 2 on it overshoots by more than it "
            "corrects: lower the step sizes or smoothing",
            stacklevel=3,
        )


def at_first(rate: Rate) -> float:
    """The rate with which a run begins."""
    return float(at(rate, Clock.at()))
