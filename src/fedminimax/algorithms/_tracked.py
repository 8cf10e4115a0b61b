"""Methods that move along an estimate of the gradients and update it at the point they reach: what
travels, and what they check."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypeVar

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


Server = TypeVar("Server", default=Tracked)
Down = TypeVar("Down", default=Tracked)


@dataclass(frozen=True)
class FourVectors(Algorithm[Server, Down, Tracked, Tracked], Generic[Server, Down]):
    """What travels: the point and both estimates, up and down. In the first round only the point
    goes down, and a client starts from its own estimates."""

    keep: ClassVar[tuple[str, ...]] = ("momentum_x", "momentum_y")  # for the first round
    init_batches: ClassVar[int] = 1

    def init_server(self, problem: Problem, start: Point) -> Server:
        none_x, none_y = torch.zeros_like(start.x), torch.zeros_like(start.y)
        server: Any = Tracked(x=start.x, y=start.y, momentum_x=none_x, momentum_y=none_y)
        return server

    def init_client(self, problem: Problem, down: Any, batch: Draw | None) -> Tracked:
        assert batch is not None
        grad = gradients(problem, Point(down.x, down.y), batch)
        return Tracked(x=down.x, y=down.y, momentum_x=grad.x, momentum_y=grad.y)

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase() if round else self.first_phase(),)

    def first_phase(self, **changes: Any) -> Phase:
        """The usual exchange, before there are averages that could travel down."""
        first = self.phase(broadcast=self.broadcast_point, receive=self.receive_point)
        return first._replace(**changes)

    def broadcast_point(self, server: Server, clock: Clock) -> Point:
        state: Any = server
        return Point(state.x, state.y)

    def receive_point(self, down: Point, client: Tracked, clock: Clock) -> Tracked:
        """The server's point, and the client's own estimates."""
        return state_at(down, client)

    def broadcast(self, server: Server, clock: Clock) -> Down:
        state: Any = server
        return state

    def receive(self, down: Down, client: Tracked, clock: Clock) -> Tracked:
        sent: Any = down
        return state_at(Point(sent.x, sent.y), sent)

    def send(self, down: Down, client: Tracked, clock: Clock) -> tuple[Tracked, Tracked]:
        return client, client

    def send_momenta(self, down: Any, client: Tracked, clock: Clock) -> tuple[Momenta, Tracked]:
        sent = Momenta(momentum_x=client.momentum_x, momentum_y=client.momentum_y)
        return sent, client

    def aggregate(self, problem: Problem, server: Server, mean: Tracked, clock: Clock) -> Server:
        """The server with the averages in the place of what it had."""
        state: Any = server
        return state._replace(**mean._asdict())

    def set_momenta(self, problem: Problem, server: Server, mean: Momenta, clock: Clock) -> Server:
        state: Any = server
        return state._replace(momentum_x=mean.momentum_x, momentum_y=mean.momentum_y)


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
