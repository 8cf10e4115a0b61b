"""AFL: gradient descent for the worst mixture of the clients, one step a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._client_weights import ClientWeights
from fedminimax.blocks.schedules import Rate, at
from fedminimax.problems.gradients import gradients, outer_value
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    weights: Tensor  # lambda
    average: Tensor  # of x over the rounds


class Down(NamedTuple):
    x: Tensor
    y: Tensor
    weights: Tensor


class Up(NamedTuple):
    gradient: Tensor  # times the client's own weight
    losses: Tensor


@dataclass(frozen=True)
class AFL(ClientWeights[Server, Down, Up, Up]):
    """Agnostic federated learning (Mohri, Sivek and Suresh, ICML 2019, Stochastic-AFL).

    The server holds weights on the simplex over the N clients. In each round every client that
    takes part (all N, or m drawn evenly) computes the loss and the gradient of one batch, and

        x <- P_X( x - lr * (N/m) sum_k weights_k grad f_k(x) )
        weights <- P( weights + weights_lr * (N/m) * losses f_k(x) of those asked, else 0 )

    both at the old point. It returns the average of x over the rounds, or the last x. Up and down:
    d + N floats.

    *Differs from the paper*: its text was not at hand. A client multiplies its gradient by its own
    weight, which it reads in the weights that travel down, since the server sees means only. With
    m < N clients the factor N/m keeps both directions unbiased. The weights begin even.
    """

    lr: Rate = 0.1  # gamma_w
    weights_lr: Rate = 0.01  # gamma_lambda
    output: Literal["average", "last"] = "average"
    reference: ClassVar[str] = "Mohri, Sivek and Suresh, Agnostic Federated Learning, ICML 2019"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output not in ("average", "last"):
            raise ValueError(f'AFL: output is {self.output!r}; give "average" or "last"')

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(x=start.x, y=start.y, weights=self.even(start.x), average=start.x)

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(weights="uniform"),)

    def broadcast(self, server: Server, clock: Clock) -> Down:
        return Down(x=server.x, y=server.y, weights=server.weights)

    def receive(self, down: Down, client: Up, clock: Clock) -> Up:
        return Up(gradient=torch.zeros_like(down.x), losses=torch.zeros_like(down.weights))

    def local_step(self, problem: Problem, down: Down, client: Up, batch: Draw, clock: Clock) -> Up:
        grad = gradients(problem, Point(down.x, down.y), batch)
        loss = outer_value(problem, down.x, down.y, batch[-1])
        own = self.own_entry(torch.ones_like(loss), clock) @ down.weights
        return Up(gradient=own * grad.x, losses=self.own_entry(loss, clock))

    def send(self, down: Down, client: Up, clock: Clock) -> tuple[Up, Up]:
        return client, client

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        x = problem.project_x(server.x - at(self.lr, clock) * self.count * mean.gradient)
        lr, losses = at(self.weights_lr, clock), self.count * mean.losses
        return Server(
            x=x,
            y=server.y,
            weights=self.ascend(server.weights, lr, losses),
            average=server.average + (x - server.average) / (clock.round + 1),
        )

    def point(self, server: Server) -> Point:
        return Point(server.average if self.output == "average" else server.x, server.y)
