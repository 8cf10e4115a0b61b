"""FESS-GDA: FSGDA whose server smooths x with an anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedminimax.algorithms._descent_ascent import TwoSided
from fedminimax.algorithms._smoothing import Server, Smoothing, at_first
from fedminimax.blocks.schedules import Rate, at
from fedminimax.problems.gradients import gradients
from fedminimax.types import Clock, Draw, Point, Problem


@dataclass(frozen=True)
class FESSGDA(Smoothing, TwoSided):
    """Federated stochastic smoothed gradient descent ascent (FESS-GDA paper, Algorithm 1).

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

    dual_proximal: Rate = 0.0  # epsilon / (2 D)
    partial: ClassVar[bool] = True
    solves: ClassVar[str] = "minimax: nonconvex-PL, nonconvex-concave, PL-PL"
    reference: ClassVar[str] = (
        "Shen, Huang, Zhang and Shen, Stochastic Smoothed Gradient Descent Ascent for Federated "
        "Minimax Optimization, AISTATS 2024, Alg. 1"
    )

    def pull(self) -> float:
        rate = at_first(self.primal_lr) * at_first(self.primal_server_lr)
        return rate * self.local_steps * self.smoothing

    def local_step(
        self, problem: Problem, down: Point, client: Point, batch: Draw, clock: Clock
    ) -> Point:
        grad = gradients(problem, client, batch)
        if self.dual_proximal != 0:
            center = problem.project_y(torch.zeros_like(client.y))
            pull = at(self.dual_proximal, clock) * (client.y - center)
            grad = grad._replace(y=grad.y - pull)  # Theorem 3.3
        return self.moved(problem, client, grad, clock)  # lines 7-8

    def aggregate(self, problem: Problem, server: Server, mean: Point, clock: Clock) -> Server:
        pull = at(self.primal_lr, clock) * clock.steps * self.smoothing
        mean = mean._replace(x=mean.x - pull * (server.x - server.anchor))
        server = super().aggregate(problem, server, mean, clock)  # lines 13-14
        return self.followed(server, clock)  # line 15
