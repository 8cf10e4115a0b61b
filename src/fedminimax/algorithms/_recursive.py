"""What Fed-DR-SCGD and its minimax form share: estimates of every level, each moved along with the
one that it is computed from, and the two ways to average them."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedminimax.algorithms._relay import POINT, Exchange, OfDepth, Part, relay, unknown
from fedminimax.algorithms._tracked import check_weight
from fedminimax.blocks.projections import ball
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.storm import storm
from fedminimax.problems.gradients import gradients, inner_pullback
from fedminimax.types import Clock, Draw, Phase, Point, Problem

Projection = Literal["none", "ball", "third"]
Sync = Literal["printed", "levelwise"]


class Levels(NamedTuple):
    """A point with the estimates of all levels: at the server, and on the way."""

    x: Tensor
    y: Tensor
    inner: tuple[Tensor, ...]  # h^(1) ... h^(K-1)
    momentum: tuple[Tensor, ...]  # v^(1) ... v^(K)
    momentum_y: Tensor  # w, of length 0 without a dual


class Client(NamedTuple):
    """The iteration that is being made, and what it starts from."""

    x: Tensor
    y: Tensor
    inner: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    momentum_y: Tensor
    old_x: Tensor
    old_y: Tensor
    old_inner: tuple[Tensor, ...]
    old_momentum: tuple[Tensor, ...]

    @property
    def now(self) -> Levels:
        return Levels(self.x, self.y, self.inner, self.momentum, self.momentum_y)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the levels are evaluated at: h^(0) = x, h^(1), ..."""
        return (self.x, *self.inner)

    @property
    def old_inputs(self) -> tuple[Tensor, ...]:
        return (self.old_x, *self.old_inner)


@dataclass(frozen=True, kw_only=True)
class DoublyRecursive(OfDepth):
    """An iteration is a move, a sweep up through the levels and a sweep down; of every
    `local_steps` one is synchronised.

    - printed: after the last of them all that was estimated is averaged at once.
    - levelwise: the last of them is made exchange by exchange, each mean before the next estimate
      is computed from it. It begins in one round, with its move, and ends in the next, so that a
      round's last exchange is that of x and y.
    """

    recursion_rate: Rate = 0.5  # a = alpha * eta^2
    local_steps: int = 4  # p
    first_batches: int = 1  # S, in batches
    projection: Projection = "none"  # Pi
    radius: float = 10.0  # C, for "ball"
    sync: Sync = "printed"
    keep: ClassVar[tuple[str, ...]] = Levels._fields
    carry: ClassVar[tuple[str, ...]] = ("old_x", "old_y", "old_inner", "old_momentum")
    levels: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        check_weight(owner, "recursion_rate", self.recursion_rate)
        for name, kind in (("projection", Projection), ("sync", Sync)):
            if getattr(self, name) not in get_args(kind):
                known = " or ".join(get_args(kind))
                raise ValueError(f"{owner}: {name} is {getattr(self, name)!r}; give {known}")
        radius = self.radius
        if not isinstance(radius, int | float) or not 0 < radius < math.inf:
            raise ValueError(f"{owner}: radius is {radius!r}; give a finite number above 0")

    @property
    def init_batches(self) -> int:  # type: ignore[override]
        return self.first_batches

    @abstractmethod
    def reached(self, client: Any, clock: Clock) -> Point:
        """Where an iteration moves to, before the projection onto the problem's sets."""

    def init_server(self, problem: Problem, start: Point) -> Levels:
        estimates = unknown(start, problem.depth - 1), unknown(start, problem.depth)
        return Levels(*start, *estimates, torch.zeros_like(start.y))

    def init_client(self, problem: Problem, down: Any, batch: Draw | None) -> Levels:
        assert batch is not None
        inputs = [down.x]
        for level in range(1, problem.depth):  # line 1
            inputs.append(problem.inner(level, inputs[-1], batch[level - 1]))
        outer = gradients(problem, Point(inputs[-1], down.y), batch[-1:])
        momentum = [outer.x]
        for level in range(problem.depth - 1, 0, -1):
            value, rows = inputs[level - 1], batch[level - 1]
            momentum.insert(0, inner_pullback(problem, level, value, momentum[0], rows)[1])
        return Levels(down.x, down.y, tuple(inputs[1:]), tuple(momentum), outer.y)

    def phases(self, round: int) -> tuple[Phase, ...]:
        if self.sync == "levelwise":
            return self.levelwise_phases(round)
        if round:
            return (self.phase(gradients=2),)
        first: dict[str, Any] = {"broadcast": self.broadcast_point, "receive": self.receive_first}
        return (self.phase(gradients=2, **first),)

    # All at once.

    def broadcast_point(self, server: Levels, clock: Clock) -> Point:
        """Before there are estimates that could travel down."""
        return Point(server.x, server.y)

    def broadcast(self, server: Levels, clock: Clock) -> Any:
        return server

    def receive_first(self, down: Point, client: Any, clock: Clock) -> Client:
        return opened(client)

    def receive(self, down: Levels, client: Any, clock: Clock) -> Client:
        return opened(down)

    def send(self, down: Any, client: Client, clock: Clock) -> tuple[Levels, Client]:
        return client.now, client

    def aggregate(self, problem: Problem, server: Levels, mean: Levels, clock: Clock) -> Levels:
        return mean  # lines 16-18

    # Level by level.

    def levelwise_phases(self, round: int) -> tuple[Phase, ...]:
        steps = self.local_steps - 1
        point = Exchange(POINT, self.local_step, steps, 2, "fresh", reached=self.reached)
        if round == 0:
            return relay(self, [point], opened, resumed)
        depth = self.known_depth
        inner, last = range(1, depth), (Part("momentum", depth), Part("momentum_y"))
        exchanges = (
            *(Exchange((Part("inner", k),), partial(self.track_inner, k)) for k in inner),
            Exchange(last, self.track_outer, gradients=2),
            *(
                Exchange((Part("momentum", k),), partial(self.track_momentum, k))
                for k in reversed(inner)
            ),
            point,
        )
        return relay(self, exchanges, opened, resumed)

    # One iteration.

    def local_step(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        x, y = self.reached(client, clock)
        x, y = problem.project_x(x), problem.project_y(y)
        client = opened(client)._replace(x=x, y=y)  # line 3
        for level in range(1, problem.depth):
            client = self.track_inner(level, problem, down, client, batch, clock)
        client = self.track_outer(problem, down, client, batch, clock)
        for level in range(problem.depth - 1, 0, -1):
            client = self.track_momentum(level, problem, down, client, batch, clock)
        return client

    def track_inner(
        self, level: int, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        part, rows = Part("inner", level), batch[level - 1]
        old = problem.inner(level, client.old_inputs[level - 1], rows)
        new = problem.inner(level, client.inputs[level - 1], rows)
        return part.put(client, self.tracked(part.of(client), new, old, clock))  # line 7

    def track_outer(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        part = Part("momentum", problem.depth)
        old = gradients(problem, Point(client.old_inputs[-1], client.old_y), batch[-1:])
        new = gradients(problem, Point(client.inputs[-1], client.y), batch[-1:])
        v = self.tracked(part.of(client), new.x, old.x, clock)
        w = self.tracked(client.momentum_y, new.y, old.y, clock)
        return part.put(client._replace(momentum_y=w), self.projected(v, 1))  # line 10

    def track_momentum(
        self, level: int, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        part, pull = Part("momentum", level), partial(inner_pullback, problem, level)
        rows, above = batch[level - 1], level  # v^(level + 1) stands at that place
        _, old = pull(client.old_inputs[level - 1], client.old_momentum[above], rows)
        _, new = pull(client.inputs[level - 1], client.momentum[above], rows)
        v = self.tracked(part.of(client), new, old, clock)
        return part.put(client, self.projected(v, problem.depth - level + 1))  # line 12

    def tracked(self, estimate: Tensor, new: Tensor, old: Tensor, clock: Clock) -> Tensor:
        return storm(estimate, new, old, at(self.recursion_rate, clock))

    def projected(self, vector: Tensor, power: int) -> Tensor:
        if self.projection == "ball":
            return ball(self.radius**power)(vector)  # Lemma C.1
        return vector / 3 if self.projection == "third" else vector  # Lemma C.21


def opened(now: Any) -> Client:
    """A client whose iteration starts from where it is; `now` has the fields of Levels."""
    point, estimates = (now.x, now.y), (now.inner, now.momentum)
    return Client(*point, *estimates, now.momentum_y, *point, *estimates)


def resumed(client: Any) -> Client:
    return Client(*client)
