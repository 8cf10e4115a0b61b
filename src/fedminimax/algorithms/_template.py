"""NAME: one sentence that says what the method is. Copy this file: docs/adding_an_algorithm.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import average, plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Point, Problem


class Server(NamedTuple):
    x: Tensor
    y: Tensor


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    momentum: Tensor  # say what the paper calls it: u_t^k


@dataclass(frozen=True)
class Template(Algorithm[Server, Point, Client, Point]):
    """Descent ascent with momentum in x at the clients (authors, title, where, which algorithm).

    The update in plain maths, in the words of docs/words.md:

        momentum <- (1 - momentum_rate) * momentum + momentum_rate * grad_x f_k(x, y)
        x <- x - primal_lr * momentum,    y <- y + dual_lr * grad_y f_k(x, y)

    What travels: up and down dx + dy floats; a client keeps its momentum.

    *Differs from the paper*: every choice that the paper leaves open or that you made otherwise.
    """

    primal_lr: Rate = 0.1  # the paper's symbol
    dual_lr: Rate = 0.1
    momentum_rate: float = 0.5  # a rate is always the weight of the new value
    local_steps: int = 8
    keep: ClassVar[tuple[str, ...]] = ("momentum",)
    reference: ClassVar[str] = "authors, title, venue, year, algorithm number"

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(x=start.x, y=start.y)

    def init_client(self, problem: Problem, down: Point, batch: Draw | None) -> Client:
        return Client(x=down.x, y=down.y, momentum=torch.zeros_like(down.x))

    def receive(self, down: Point, client: Client, clock: Clock) -> Client:
        return Client(x=down.x, y=down.y, momentum=client.momentum)

    def local_step(
        self, problem: Problem, down: Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = gradients(problem, Point(client.x, client.y), batch)
        momentum = average(client.momentum, grad.x, self.momentum_rate)  # line or equation number
        x = problem.project_x(plus(client.x, -at(self.primal_lr, clock), momentum))
        y = problem.project_y(plus(client.y, at(self.dual_lr, clock), grad.y))
        return Client(x=x, y=y, momentum=momentum)
