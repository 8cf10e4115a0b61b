"""Methods that move along an estimate of the gradients and update it at the point they reach: what
travels, and what they check."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.schedules import Rate, Schedule, at
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Tracked(NamedTuple):
    """A point and the estimates of the gradients there: at the server, at a client, and on the
    way."""

    x: Tensor
    y: Tensor
    momentum_x: Tensor
    momentum_y: Tensor


class Momenta(NamedTuple):
    momentum_x: Tensor
    momentum_y: Tensor


@dataclass(frozen=True)
class FourVectors(Algorithm[Tracked, Tracked, Tracked, Tracked]):
    """What travels: the point and both estimates, up and down. In the first round only the point
    goes down, and a client starts from its own estimates."""

    keep: ClassVar[tuple[str, ...]] = ("momentum_x", "momentum_y")  # for the first round
    init_batches: ClassVar[int] = 1

    def init_server(self, problem: Problem, start: Point) -> Tracked:
        none_x, none_y = torch.zeros_like(start.x), torch.zeros_like(start.y)
        return Tracked(x=start.x, y=start.y, momentum_x=none_x, momentum_y=none_y)

    def init_client(self, problem: Problem, down: Tracked | Point, batch: Draw | None) -> Tracked:
        assert batch is not None
        grad = gradients(problem, Point(down.x, down.y), batch)
        return Tracked(x=down.x, y=down.y, momentum_x=grad.x, momentum_y=grad.y)

    def phases(self, round: int) -> tuple[Phase, ...]:
        first = self.phase(broadcast=self.broadcast_point, receive=self.receive_point)
        return (self.phase() if round else first,)

    def broadcast_point(self, server: Tracked, clock: Clock) -> Point:
        """In the first round there are no averages to send down."""
        return Point(server.x, server.y)

    def receive_point(self, down: Point, client: Tracked, clock: Clock) -> Tracked:
        """The server's point, and the client's own estimates."""
        return state_at(down, client)

    def broadcast(self, server: Tracked, clock: Clock) -> Tracked:
        return server

    def receive(self, down: Tracked, client: Tracked, clock: Clock) -> Tracked:
        return down

    def send(self, down: Tracked, client: Tracked, clock: Clock) -> tuple[Tracked, Tracked]:
        return client, client

    def aggregate(self, problem: Problem, server: Tracked, mean: Tracked, clock: Clock) -> Tracked:
        return mean


def state_at(point: Point, estimates: Tracked) -> Tracked:
    """A point with estimates, which may come from another state."""
    return Tracked(
        x=point.x,
        y=point.y,
        momentum_x=estimates.momentum_x,
        momentum_y=estimates.momentum_y,
    )


def check_weight(owner: str, name: str, *rates: Rate) -> None:
    """The weight of a new value, a product of rates, must be at most 1 when a run begins: beyond it
    the average would overshoot."""
    value = math.prod(float(at(rate, Clock.at())) for rate in rates)
    if value > 1:
        begins = "begins at" if any(isinstance(rate, Schedule) for rate in rates) else "is"
        raise ValueError(f"{owner}: {name} {begins} {value!r}; give a weight of at most 1")
