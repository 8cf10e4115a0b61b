"""What the smoothing methods share: an anchor that follows x slowly, and pulls it back."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedminimax.blocks.schedules import Rate, at
from fedminimax.types import Algorithm, Clock, Point, Problem


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    anchor: Tensor  # z


@dataclass(frozen=True)
class Smoothing(Algorithm):
    """Descent on f + smoothing/2 |x - anchor|^2, whose anchor moves to x by `anchor_rate`."""

    smoothing: float = 1.0  # p; the theory's is twice the smoothness of f
    anchor_rate: Rate = 0.1  # beta

    def __post_init__(self) -> None:
        super().__post_init__()
        name, rate = type(self).__name__, self.anchor_rate
        if not (math.isfinite(self.smoothing) and self.smoothing >= 0):
            raise ValueError(
                f"{name}: smoothing is {self.smoothing!r}; give a finite number of at least 0"
            )
        if at_first(rate) > 1:
            raise ValueError(
                f"{name}: anchor_rate is {rate!r}; give a number from 0 to 1 (1: no smoothing)"
            )

    @abstractmethod
    def pull(self) -> float:
        """How far the anchor pulls x back in the first round, as a share of their distance."""

    def init_server(self, problem: Problem, start: Point) -> Server:
        pull = self.pull()
        if pull >= 2:
            warnings.warn(
                f"{type(self).__name__}: in a round the anchor pulls x back by {pull:g} times "
                "their distance (step size of the round times smoothing); from 2 on it overshoots "
                "by more than it corrects: lower the step sizes or smoothing",
                stacklevel=2,
            )
        # a copy: one tensor in two places would be another graph than that of later rounds
        return Server(*start, start.x)

    def followed(self, server: Server, clock: Clock) -> Server:
        """The server after its anchor has moved."""
        lag = server.x - server.anchor
        return server._replace(anchor=server.anchor + at(self.anchor_rate, clock) * lag)


def at_first(rate: Rate) -> float:
    """The rate with which a run begins."""
    return float(at(rate, Clock.at()))
