"""LocalSGDAM: local descent ascent along momenta that are averaged with the point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._tracked import FourVectors, Tracked, check_weight
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import average, plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Clock, Draw, Point, Problem


@dataclass(frozen=True)
class LocalSGDAM(FourVectors):
    """Momentum Local SGDA (Sharma et al., ICML 2022), also called LocalSGDAM.

    Each client, `local_steps` times, moves along its momenta and then tracks them on a fresh batch
    at the point that it has reached:

        x <- P_X( x - lr * primal_lr * momentum_x )
        y <- P_Y( y + lr * dual_lr   * momentum_y )
        momentum_x <- (1 - lr * primal_rate) * momentum_x + lr * primal_rate * grad_x f_k(x, y)
        momentum_y <- (1 - lr * dual_rate)   * momentum_y + lr * dual_rate   * grad_y f_k(x, y)

    The momenta begin as gradients on one batch. The server averages all four. Up and down:
    2 (dx + dy) floats; the first round has no momenta to send down.

    *Differs from the paper*: its text was not at hand; the update is written from memory of it, and
    the rates given here are those of the LocalSCGDAM paper. The first momenta are not averaged
    before the first step. The projections onto the problem's sets after every move are ours.
    """

    lr: Rate = 0.3  # alpha_t; eta in the LocalSCGDAM paper, whose values these are
    primal_lr: float = 0.33  # eta_x
    dual_lr: float = 0.33  # eta_y
    primal_rate: float = 3.3  # beta_x
    dual_rate: float = 3.3  # beta_y
    local_steps: int = 8  # tau
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Sharma et al., Federated Minimax Optimization: Improved Convergence Analyses and "
        "Algorithms, ICML 2022, Momentum Local SGDA"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("primal_rate", "dual_rate"):
            check_weight(type(self).__name__, f"lr * {name}", self.lr, getattr(self, name))

    def local_step(
        self, problem: Problem, down: Tracked, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        lr = at(self.lr, clock)
        x = problem.project_x(plus(client.x, -lr * self.primal_lr, client.momentum_x))
        y = problem.project_y(plus(client.y, lr * self.dual_lr, client.momentum_y))
        grad = gradients(problem, Point(x, y), batch)
        return Tracked(
            x=x,
            y=y,
            momentum_x=average(client.momentum_x, grad.x, lr * self.primal_rate),
            momentum_y=average(client.momentum_y, grad.y, lr * self.dual_rate),
        )
