"""Smoothed-GDA and Smoothed-AGDA: smoothing on one machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._smoothing import Server, at_first, check_pull, check_smoothing
from fedminimax.blocks.schedules import Rate, at
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    grad_x: Tensor
    grad_y: Tensor


class Gradients(NamedTuple):
    grad_x: Tensor
    grad_y: Tensor


class PrimalGradient(NamedTuple):
    grad_x: Tensor


class DualGradient(NamedTuple):
    grad_y: Tensor


class Primal(NamedTuple):
    x: Tensor


@dataclass(frozen=True)
class OneStep(Algorithm[Server, Point, Client, Gradients]):
    """One gradient per client and exchange; the server makes the moves. The line numbers are those
    of Algorithm 2 of the FESS-GDA paper."""

    smoothing: float = 1.0  # p; the theory's is twice the smoothness of f
    anchor_rate: Rate = 0.1  # beta
    primal_lr: Rate = 0.1  # eta_x
    dual_lr: Rate = 0.1  # eta_y

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing(type(self).__name__, self.smoothing, self.anchor_rate)

    def init_server(self, problem: Problem, start: Point) -> Server:
        check_pull(type(self).__name__, at_first(self.primal_lr) * self.smoothing)
        return Server(x=start.x, y=start.y, anchor=start.x)

    def receive(self, down: Point, client: Client, clock: Clock) -> Client:
        none_x, none_y = torch.zeros_like(down.x), torch.zeros_like(down.y)
        return Client(x=down.x, y=down.y, grad_x=none_x, grad_y=none_y)

    def local_step(
        self, problem: Problem, down: Point | Primal, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = gradients(problem, Point(client.x, client.y), batch)
        return client._replace(grad_x=grad.x, grad_y=grad.y)

    def new_anchor(self, server: Server, x: Tensor, clock: Clock) -> Tensor:
        rate = at(self.anchor_rate, clock)
        return server.anchor + rate * (x - server.anchor)  # line 5

    def new_x(self, problem: Problem, server: Server, grad_x: Tensor, clock: Clock) -> Tensor:
        smoothed = grad_x + self.smoothing * (server.x - server.anchor)
        return problem.project_x(server.x - at(self.primal_lr, clock) * smoothed)  # line 3

    def new_y(self, problem: Problem, server: Server, grad_y: Tensor, clock: Clock) -> Tensor:
        return problem.project_y(server.y + at(self.dual_lr, clock) * grad_y)  # line 4


@dataclass(frozen=True)
class SmoothedGDA(OneStep):
    """Smoothed gradient descent ascent (Zhang et al., 2020; Shen et al., 2024, Algorithm 2).

        x <- x - primal_lr * ( grad_x f(x, y) + smoothing * ( x - anchor ) )
        y <- P_Y( y + dual_lr * grad_y f(x, y) )                      at the old x
        anchor <- anchor + anchor_rate * ( x - anchor )

    Up and down: dx + dy floats per step.

    *Differs from the paper*: the paper has one machine. With several clients, f is their mean and
    each step averages their gradients, which is the paper's method on f; with one client it is the
    paper's to the letter. The anchor starts at the first x. A gradient may be that of a batch. A
    set of x is projected onto after each move.
    """

    solves: ClassVar[str] = "minimax: nonconvex-concave"
    reference: ClassVar[str] = (
        "Zhang, Xiao, Sun and Luo, A Single-Loop Smoothed Gradient Descent-Ascent Algorithm for "
        "Nonconvex-Concave Min-Max Problems, NeurIPS 2020"
    )

    def send(self, down: Point, client: Client, clock: Clock) -> tuple[Gradients, Client]:
        return Gradients(grad_x=client.grad_x, grad_y=client.grad_y), client

    def aggregate(self, problem: Problem, server: Server, mean: Gradients, clock: Clock) -> Server:
        x = self.new_x(problem, server, mean.grad_x, clock)
        y = self.new_y(problem, server, mean.grad_y, clock)
        return Server(x=x, y=y, anchor=self.new_anchor(server, x, clock))


@dataclass(frozen=True)
class SmoothedAGDA(OneStep):
    """Smoothed-GDA whose dual moves after the primal (Zhang et al., 2020; Yang et al., 2022).

        x <- x - primal_lr * ( grad_x f(x, y) + smoothing * ( x - anchor ) )
        y <- P_Y( y + dual_lr * grad_y f(x, y) )                      at the new x
        anchor <- anchor + anchor_rate * ( x - anchor )

    The dual's gradient is that of a second batch (`second_batch`), as in the stochastic method, or
    of the first one again. Two exchanges per step, two gradients per client. Up: dx + dy floats;
    down: 2 dx + dy, as the new x travels too.

    *Differs from the paper*: as Smoothed-GDA. The text of both papers was not at hand; the order of
    the moves and the second batch follow from their names and from the FESS-GDA paper's account.
    """

    second_batch: bool = True
    carry: ClassVar[tuple[str, ...]] = ("y",)
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Yang, Orvieto, Lucchi and He, Faster Single-loop Algorithms for Minimax Optimization "
        "without Strong Concavity, AISTATS 2022"
    )

    def phases(self, round: int) -> tuple[Phase, ...]:
        primal = self.phase(send=self.send_primal, aggregate=self.move_primal)
        dual = self.phase(
            broadcast=self.broadcast_primal,
            receive=self.receive_primal,
            send=self.send_dual,
            aggregate=self.move_dual,
            draw="fresh" if self.second_batch else "same",
        )
        return primal, dual

    def send_primal(
        self, down: Point, client: Client, clock: Clock
    ) -> tuple[PrimalGradient, Client]:
        return PrimalGradient(client.grad_x), client

    def move_primal(
        self, problem: Problem, server: Server, mean: PrimalGradient, clock: Clock
    ) -> Server:
        x = self.new_x(problem, server, mean.grad_x, clock)
        return Server(x=x, y=server.y, anchor=self.new_anchor(server, x, clock))

    def broadcast_primal(self, server: Server, clock: Clock) -> Primal:
        return Primal(server.x)

    def receive_primal(self, down: Primal, client: Client, clock: Clock) -> Client:
        return self.receive(Point(down.x, client.y), client, clock)

    def send_dual(self, down: Primal, client: Client, clock: Clock) -> tuple[DualGradient, Client]:
        return DualGradient(client.grad_y), client

    def move_dual(
        self, problem: Problem, server: Server, mean: DualGradient, clock: Clock
    ) -> Server:
        return server._replace(y=self.new_y(problem, server, mean.grad_y, clock))
