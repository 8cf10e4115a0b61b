"""What methods share that move along an average of gradients and track it at the point they reach.

The average begins with a first batch at every client; afterwards points and averages travel
together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.schedules import Rate, Schedule, at
from fedminimax.blocks.storm import storm
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Tracked(NamedTuple):
    """A point with its averages of gradients: at the server, at a client, and on the way."""

    x: Tensor
    y: Tensor
    momentum_x: Tensor
    momentum_y: Tensor


class Momenta(NamedTuple):
    momentum_x: Tensor
    momentum_y: Tensor


@dataclass(frozen=True)
class MoveThenTrack(Algorithm):
    """All four vectors are averaged in every round; the first begins with each client's own
    gradients, on `init_batches` batches of its own."""

    keep: ClassVar[tuple[str, ...]] = ("momentum_x", "momentum_y")  # for the first round
    init_batches: ClassVar[int] = 1

    def init_server(self, problem: Problem, start: Point) -> Any:
        return Tracked(*start, torch.zeros_like(start.x), torch.zeros_like(start.y))

    def init_client(self, problem: Problem, down: Any, batch: Draw | None) -> Any:
        assert batch is not None
        grad = gradients(problem, Point(down.x, down.y), batch)
        return Tracked(down.x, down.y, *grad)

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.first_phase() if round == 0 else self.phase(),)

    def first_phase(self, **changes: Any) -> Phase:
        """The usual exchange, before there are averages that could travel down."""
        hooks = {"broadcast": self.broadcast_point, "receive": self.receive_first}
        return self.phase(**{**hooks, **changes})

    def broadcast_point(self, server: Any, clock: Clock) -> Point:
        return Point(server.x, server.y)

    def broadcast(self, server: Any, clock: Clock) -> Any:
        return server

    def receive_first(self, down: Any, client: Any, clock: Clock) -> Any:
        return Tracked(down.x, down.y, client.momentum_x, client.momentum_y)

    def receive(self, down: Any, client: Any, clock: Clock) -> Any:
        return Tracked(down.x, down.y, down.momentum_x, down.momentum_y)

    def send(self, down: Any, client: Any, clock: Clock) -> tuple[Tracked, Any]:
        return Tracked(client.x, client.y, client.momentum_x, client.momentum_y), client

    def send_momenta(self, down: Any, client: Any, clock: Clock) -> tuple[Momenta, Any]:
        return Momenta(client.momentum_x, client.momentum_y), client

    def aggregate(self, problem: Problem, server: Any, mean: Any, clock: Clock) -> Any:
        return server._replace(**mean._asdict())


def storm_tracked(
    problem: Problem,
    client: Any,
    new: Point,
    batch: Draw,
    primal_rate: Tensor | float,
    dual_rate: Tensor | float,
) -> Tracked:
    """The client at a new point, with STORM estimates there: both gradients on the same rows."""
    before = gradients(problem, Point(client.x, client.y), batch)
    after = gradients(problem, new, batch)
    return Tracked(
        *new,
        storm(client.momentum_x, after.x, before.x, primal_rate),
        storm(client.momentum_y, after.y, before.y, dual_rate),
    )


def check_weight(owner: str, name: str, *rates: Rate) -> None:
    """The weight of a new value, a product of rates, is at most 1 when a run begins: beyond it the
    average would overshoot."""
    value = math.prod(float(at(rate, Clock.at())) for rate in rates)
    if value > 1:
        begins = "begins at" if any(isinstance(rate, Schedule) for rate in rates) else "is"
        raise ValueError(f"{owner}: {name} {begins} {value!r}; give a weight of at most 1")
