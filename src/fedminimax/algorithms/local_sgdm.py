"""LocalSGDM: local SGD with heavy-ball momentum, which is averaged with the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Point, Problem


class State(NamedTuple):
    """What the server holds, what a client holds, and what travels both ways."""

    x: Tensor
    y: Tensor
    momentum: Tensor  # u


@dataclass(frozen=True)
class LocalSGDM(Algorithm[State, State, State, State]):
    """Local SGD with momentum (Yu, Jin and Yang, ICML 2019, Alg. 1); for minimisation.

    Each client, `local_steps` times, from the momentum that all share:

        momentum <- heavy_ball * momentum + grad f_k(x)
        x <- P_X( x - lr * momentum )

    The server averages x and momentum. The momentum is not damped: in the long run a step is
    lr / (1 - heavy_ball) long. Up and down: 2d floats.

    *Differs from the paper*: its text was not at hand; the update is that of every account of it.
    The projection onto the problem's set, if it has one, is ours. The default rates are those of
    the LocalSCGDAM paper, which does not say whether it damps.
    """

    lr: Rate = 0.1  # eta
    heavy_ball: float = 0.1  # beta
    local_steps: int = 8  # I
    maximises: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "Yu, Jin and Yang, On the Linear Speedup Analysis of Communication Efficient Momentum SGD "
        "for Distributed Non-Convex Optimization, ICML 2019, Alg. 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.heavy_ball < 1:
            raise ValueError(
                f"LocalSGDM: heavy_ball is {self.heavy_ball!r}; give a number of at least 0 and "
                "below 1 (0: no momentum)"
            )

    def init_server(self, problem: Problem, start: Point) -> State:
        return State(x=start.x, y=start.y, momentum=torch.zeros_like(start.x))

    def broadcast(self, server: State, clock: Clock) -> State:
        return server

    def receive(self, down: State, client: State, clock: Clock) -> State:
        return down

    def local_step(
        self, problem: Problem, down: State, client: State, batch: Draw, clock: Clock
    ) -> State:
        grad = gradients(problem, Point(client.x, client.y), batch)
        momentum = plus(grad.x, self.heavy_ball, client.momentum)  # u_i^(t)
        x = problem.project_x(plus(client.x, -at(self.lr, clock), momentum))  # x_i^(t)
        return client._replace(x=x, momentum=momentum)

    def send(self, down: State, client: State, clock: Clock) -> tuple[State, State]:
        return client, client

    def aggregate(self, problem: Problem, server: State, mean: State, clock: Clock) -> State:
        return mean
