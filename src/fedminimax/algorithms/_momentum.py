"""What LocalSGDAM and LocalSGDAM+ share: the move and the average, both scaled by one rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedminimax.algorithms._tracked import Momenta, MoveThenTrack, check_weight
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import average, plus
from fedminimax.types import Clock, Point, Problem


@dataclass(frozen=True)
class MomentumDescentAscent(MoveThenTrack):
    """Steps are lr * primal_lr and lr * dual_lr, weights lr * primal_rate and lr * dual_rate."""

    lr: Rate = 0.3  # alpha_t; eta in the LocalSCGDAM paper, whose values these are
    primal_lr: float = 0.33  # eta_x
    dual_lr: float = 0.33  # eta_y
    primal_rate: float = 3.3  # beta_x
    dual_rate: float = 3.3  # beta_y
    local_steps: int = 8  # tau

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("primal_rate", "dual_rate"):
            check_weight(type(self).__name__, f"lr * {name}", self.lr, getattr(self, name))

    def moved(self, problem: Problem, client: Any, clock: Clock) -> Point:
        lr = at(self.lr, clock)
        return Point(
            problem.project_x(plus(client.x, -lr * self.primal_lr, client.momentum_x)),
            problem.project_y(plus(client.y, lr * self.dual_lr, client.momentum_y)),
        )

    def averaged(self, client: Any, grad: Point, clock: Clock) -> Momenta:
        lr = at(self.lr, clock)
        primal, dual = lr * self.primal_rate, lr * self.dual_rate
        return Momenta(
            average(client.momentum_x, grad.x, primal),
            average(client.momentum_y, grad.y, dual),
        )
