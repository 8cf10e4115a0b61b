"""FESS-GDA: FSGDA whose server smooths x with an anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedminimax.algorithms._smoothing import Server, at_first, check_pull, check_smoothing
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Point, Problem


@dataclass(frozen=True)
class FESSGDA(Algorithm[Server, Point, Point, Point]):
    """Stochastic smoothed gradient descent ascent (Shen et al., AISTATS 2024, Algorithm 1).

    A client of the cohort, `local_steps` times, with one batch and both gradients at the old point:

        x <- x - primal_lr * grad_x f_k(x, y)
        y <- P_Y( y + dual_lr * ( grad_y f_k(x, y) - dual_proximal * (y - y_0) ) )

    The server, with K = local_steps:

        x <- x + primal_server_lr * ( mean_k x^k - x )
               - primal_server_lr * primal_lr * K * smoothing * ( x - anchor )
        y <- P_Y( y + dual_server_lr * ( mean_k y^k - y ) )
        anchor <- anchor + anchor_rate * ( x - anchor )

    `smoothing` is 0 when f satisfies the PL condition in x (PL-PL). For a general concave dual
    (Theorem 3.3) `dual_proximal` is epsilon / (2 D), D the diameter of Y: the method then runs on
    f - epsilon / (4 D) |y - y_0|^2. Clients keep nothing. Up and down: dx + dy floats; the anchor
    never travels.

    *Differs from the paper*: the anchor starts at the first x, which the paper leaves open. y_0 is
    the point of Y nearest to 0, which every client can compute (the paper: any point of Y). A
    primal_lr that changes from step to step enters the pull with its value at the first step of
    the round. A set of x, if the problem has one, is projected onto after each move and after the
    server's.
    """

    primal_lr: Rate = 0.1  # eta_{x,l}
    dual_lr: Rate = 0.1  # eta_{y,l}
    local_steps: int = 8  # K
    primal_server_lr: Rate = 1.0  # eta_{x,g}
    dual_server_lr: Rate = 1.0  # eta_{y,g}
    smoothing: float = 1.0  # p; the theory's is twice the smoothness of f
    anchor_rate: Rate = 0.1  # beta
    dual_proximal: Rate = 0.0  # epsilon / (2 D)
    partial: ClassVar[bool] = True
    solves: ClassVar[str] = "minimax: nonconvex-PL, nonconvex-concave, PL-PL"
    reference: ClassVar[str] = (
        "Shen, Huang, Zhang and Shen, Stochastic Smoothed Gradient Descent Ascent for Federated "
        "Minimax Optimization, AISTATS 2024, Alg. 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing("FESSGDA", self.smoothing, self.anchor_rate)

    def init_server(self, problem: Problem, start: Point) -> Server:
        step = at_first(self.primal_lr) * at_first(self.primal_server_lr) * self.local_steps
        check_pull("FESSGDA", step * self.smoothing)
        return Server(x=start.x, y=start.y, anchor=start.x)

    def local_step(
        self, problem: Problem, down: Point, client: Point, batch: Draw, clock: Clock
    ) -> Point:
        grad = gradients(problem, client, batch)
        if self.dual_proximal != 0:  # Theorem 3.3
            center = problem.project_y(torch.zeros_like(client.y))
            pull = at(self.dual_proximal, clock) * (client.y - center)
            grad = Point(grad.x, grad.y - pull)
        x = problem.project_x(plus(client.x, -at(self.primal_lr, clock), grad.x))  # line 7
        y = problem.project_y(plus(client.y, at(self.dual_lr, clock), grad.y))  # line 8
        return Point(x, y)

    def aggregate(self, problem: Problem, server: Server, mean: Point, clock: Clock) -> Server:
        lr, server_lr = at(self.primal_lr, clock), at(self.primal_server_lr, clock)
        pull = lr * clock.steps * self.smoothing * (server.x - server.anchor)
        x = problem.project_x(server.x + server_lr * (mean.x - server.x - pull))  # line 13
        dual_server_lr = at(self.dual_server_lr, clock)
        y = problem.project_y(server.y + dual_server_lr * (mean.y - server.y))  # line 14
        anchor = server.anchor + at(self.anchor_rate, clock) * (x - server.anchor)  # line 15
        return Server(x=x, y=y, anchor=anchor)
