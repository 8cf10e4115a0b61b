"""LocalSGDA: simultaneous gradient descent ascent at the clients, both players averaged at the
server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Point, Problem


@dataclass(frozen=True)
class LocalSGDA(Algorithm[Point, Point, Point, Point]):
    """Local stochastic gradient descent ascent (Deng and Mahdavi, AISTATS 2021).

    Each client, `local_steps` times, with one batch for both players and both gradients at the old
    point:

        x <- P_X( x - primal_lr * grad_x f_k(x, y) )
        y <- P_Y( y + dual_lr   * grad_y f_k(x, y) )

    The server averages x and y. Up and down: dx + dy floats.

    *Differs from the paper*: the projections onto the problem's sets after every move are ours; the
    paper has no sets. Means over clients are weighted as the run says; the paper's are even.
    """

    primal_lr: Rate = 0.1
    dual_lr: Rate = 0.1
    local_steps: int = 8
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Deng and Mahdavi, Local Stochastic Gradient Descent Ascent, AISTATS 2021"
    )

    def local_step(
        self, problem: Problem, down: Point, client: Point, batch: Draw, clock: Clock
    ) -> Point:
        grad = gradients(problem, client, batch)
        x = problem.project_x(plus(client.x, -at(self.primal_lr, clock), grad.x))
        y = problem.project_y(plus(client.y, at(self.dual_lr, clock), grad.y))
        return Point(x, y)
