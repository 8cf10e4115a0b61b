"""What LocalSCGDM and LocalSCGDAM share: moving averages of inner values and of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedminimax.algorithms._relay import POINT, Exchange, OfDepth, Part, relay, unknown
from fedminimax.algorithms._tracked import check_weight
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import average, plus
from fedminimax.problems.gradients import gradients, inner_pullback, value_and_pull
from fedminimax.types import Clock, Draw, Phase, Point, Problem

Sync = Literal["printed", "levelwise"]
Output = Literal["x", "inner"]
Number = Tensor | float


class Composed(NamedTuple):
    """A point with its estimates: at the server, at a client, and on the way."""

    x: Tensor
    y: Tensor
    momentum_x: Tensor
    momentum_y: Tensor
    inner: tuple[Tensor, ...] = ()  # h: the value of each level but the last
    slopes: tuple[Tensor, ...] = ()  # the gradient in each of those values, for "levelwise"


@dataclass(frozen=True, kw_only=True)
class MovingAverages(OfDepth):
    """An iteration moves along the momenta and then averages anew at the point it has reached:
    inner values from the first level up, gradients from the last level down. Steps are
    lr * ..._lr, weights lr * ..._rate.

    - printed: clients go on from the averages of all that they track.
    - levelwise: the iteration after which clients synchronise is made exchange by exchange: first
      x and y are averaged, then each inner value before the next is computed from it, then each
      gradient before it is pulled through the level below. Such an iteration begins in one round,
      with its move, and ends in the next: a round's last exchange is that of x and y.
    """

    lr: Rate = 0.3  # eta
    primal_lr: Rate = 0.33  # gamma
    primal_rate: Rate = 3.3  # alpha in LocalSCGDM, beta_x in LocalSCGDAM
    inner_rate: Rate = 3.0  # beta in LocalSCGDM, alpha in LocalSCGDAM
    local_steps: int = 8  # p
    sync: Sync = "printed"
    output: Output = "x"
    keep: ClassVar[tuple[str, ...]] = ("momentum_x", "momentum_y", "inner")
    carry: ClassVar[tuple[str, ...]] = ("x", "y", "slopes")
    init_batches: ClassVar[int] = 1
    levels: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for rate in ("primal_rate", "inner_rate", "dual_rate"):
            check_weight(name, f"lr * {rate}", self.lr, getattr(self, rate, 0.0))
        for option, kind in (("sync", Sync), ("output", Output)):
            if getattr(self, option) not in get_args(kind):
                known = " or ".join(get_args(kind))
                raise ValueError(f"{name}: {option} is {getattr(self, option)!r}; give {known}")
        if self.output == "inner" and self.sync == "levelwise":
            raise ValueError(
                f"{name}: output is inner and sync levelwise, but there inner values are made a "
                "round after the x that they belong to: give output x, or sync printed"
            )

    def dual_rates(self, clock: Clock) -> tuple[Number, Number]:
        """What the step and the weight of y are lr times of."""
        return 0.0, 0.0

    def init_server(self, problem: Problem, start: Point) -> Composed:
        name, kind, count = type(self).__name__, type(problem).__name__, problem.depth - 1
        if self.output == "inner" and not count:
            raise ValueError(f"{name}: output is inner, but {kind} has no inner level: give x")
        if self.output == "inner" and getattr(problem, "evaluated", "x") == "stepped":
            raise ValueError(
                f"{name}: output is inner, the weights after the inner step, but {kind} has "
                'evaluated "stepped", which would take that step again: leave one of them out'
            )
        if self.sync == "levelwise" and problem.depth != self.known_depth:
            self.for_problem(problem)  # refuses it
        slopes = unknown(start, count) if self.sync == "levelwise" else ()
        momenta = torch.zeros_like(start.x), torch.zeros_like(start.y)
        return Composed(*start, *momenta, unknown(start, count), slopes)

    def init_client(self, problem: Problem, down: Any, batch: Draw | None) -> Composed:
        assert batch is not None
        point, inner = Point(down.x, down.y), unknown(down, problem.depth - 1)
        client = Composed(*point, *point, inner)
        client, grad = swept(problem, client, batch, Part.put)
        return client._replace(momentum_x=grad.x, momentum_y=grad.y)

    def phases(self, round: int) -> tuple[Phase, ...]:
        if self.sync == "levelwise":
            return self.levelwise_phases(round)
        if round:
            return (self.phase(),)
        return (self.phase(broadcast=self.broadcast_point, receive=self.receive_first),)

    def broadcast(self, server: Composed, clock: Clock) -> Any:
        return server

    def broadcast_point(self, server: Composed, clock: Clock) -> Point:
        """Before there are estimates that could travel down."""
        return Point(server.x, server.y)

    def receive(self, down: Any, client: Any, clock: Clock) -> Composed:
        return down

    def receive_first(self, down: Point, client: Any, clock: Clock) -> Composed:
        return Composed(*down, client.momentum_x, client.momentum_y, client.inner)

    def send(self, down: Any, client: Composed, clock: Clock) -> tuple[Any, Composed]:
        return client, client

    def aggregate(self, problem: Problem, server: Composed, mean: Any, clock: Clock) -> Composed:
        return mean  # 6

    def point(self, server: Composed) -> Point:
        if self.output == "x" or server.inner[-1].dim() == 0:  # no client has replied yet
            return Point(server.x, server.y)
        if len(server.inner[-1]) != len(server.x):
            raise ValueError(
                f"{type(self).__name__}: output is inner, but the last inner value has length "
                f"{len(server.inner[-1])} and x {len(server.x)}: give x"
            )
        return Point(server.inner[-1], server.y)

    # An iteration, with the line numbers of LocalSCGDAM.

    def local_step(
        self, problem: Problem, down: Any, client: Composed, batch: Draw, clock: Clock
    ) -> Composed:
        x, y = self.reached(client, clock)
        client = client._replace(x=problem.project_x(x), y=problem.project_y(y))  # 2
        client, grad = swept(problem, client, batch, partial(self.inner_averaged, clock))  # 3
        client = self.dual_averaged(client, grad.y, clock)  # 4
        return self.primal_averaged(client, grad.x, clock)

    def reached(self, client: Composed, clock: Clock) -> Point:
        lr, dual_lr = at(self.lr, clock), self.dual_rates(clock)[0]
        x = plus(client.x, -lr * at(self.primal_lr, clock), client.momentum_x)
        return Point(x, plus(client.y, lr * dual_lr, client.momentum_y))

    def inner_averaged(self, clock: Clock, part: Part, client: Composed, value: Tensor) -> Composed:
        weight = at(self.lr, clock) * at(self.inner_rate, clock)
        return part.put(client, average(part.of(client), value, weight))

    def primal_averaged(self, client: Composed, grad: Tensor, clock: Clock) -> Composed:
        weight = at(self.lr, clock) * at(self.primal_rate, clock)
        return client._replace(momentum_x=average(client.momentum_x, grad, weight))

    def dual_averaged(self, client: Composed, grad: Tensor, clock: Clock) -> Composed:
        weight = at(self.lr, clock) * self.dual_rates(clock)[1]
        return client._replace(momentum_y=average(client.momentum_y, grad, weight))

    # The same iteration, exchange by exchange.

    def levelwise_phases(self, round: int) -> tuple[Phase, ...]:
        steps = self.local_steps - 1
        point = Exchange(POINT, self.local_step, steps, 1, "fresh", reached=self.reached)
        if round == 0:
            return relay(self, [point], opened, resumed)
        inner, last = range(1, self.known_depth), _slope(self.known_depth - 1)
        exchanges = (
            *(Exchange((Part("inner", k),), partial(self.value, k)) for k in inner),
            Exchange((last, Part("momentum_y")), self.outer_slope, gradients=1),
            *(Exchange((_slope(k - 1),), partial(self.pulled, k)) for k in reversed(inner)),
            point,
        )
        return relay(self, exchanges, opened, resumed)

    def value(
        self, level: int, problem: Problem, down: Any, client: Composed, batch: Draw, clock: Clock
    ) -> Composed:
        new = problem.inner(level, below(client, level), batch[level - 1])
        return self.inner_averaged(clock, Part("inner", level), client, new)

    def outer_slope(
        self, problem: Problem, down: Any, client: Composed, batch: Draw, clock: Clock
    ) -> Composed:
        grad = last_gradients(problem, client, batch)
        client = self.dual_averaged(client, grad.y, clock)
        return self.with_slope(problem.depth - 1, client, grad.x, clock)

    def pulled(
        self, level: int, problem: Problem, down: Any, client: Composed, batch: Draw, clock: Clock
    ) -> Composed:
        vector, rows = _slope(level).of(client), batch[level - 1]
        grad = inner_pullback(problem, level, below(client, level), vector, rows)[1]
        return self.with_slope(level - 1, client, grad, clock)

    def with_slope(self, level: int, client: Composed, grad: Tensor, clock: Clock) -> Composed:
        if level == 0:
            return self.primal_averaged(client, grad, clock)
        return _slope(level).put(client, grad)


def opened(client: Any) -> Composed:
    """The client at the start of a round; its point comes with what it receives."""
    momenta = client.momentum_x, client.momentum_y
    return Composed(*momenta, *momenta, client.inner, unknown(Point(*momenta), len(client.inner)))


def resumed(client: Any) -> Composed:
    return Composed(**client._asdict())


def _slope(level: int) -> Part:
    """The gradient in a level's value; below the first level that is x, whose gradient is
    averaged."""
    return Part("slopes", level) if level else Part("momentum_x")


def below(client: Composed, level: int) -> Tensor:
    """What the level is a function of: the value of the one below, or x."""
    return client.inner[level - 2] if level > 1 else client.x


def last_gradients(problem: Problem, client: Composed, batch: Draw) -> Point:
    return gradients(problem, Point(below(client, problem.depth), client.y), batch[-1:])


def swept(
    problem: Problem,
    client: Composed,
    batch: Draw,
    update: Callable[[Part, Composed, Tensor], Composed],
) -> tuple[Composed, Point]:
    """The levels' values from the first up, each put in its place by `update` before the next is
    computed, and then the client's gradients from the last level down, at those values."""
    pulls = []
    for level in range(1, problem.depth):
        value, pull = value_and_pull(problem, level, below(client, level), batch[level - 1])
        client = update(Part("inner", level), client, value)
        pulls.append(pull)
    grad = last_gradients(problem, client, batch)
    vector = grad.x
    for pull in reversed(pulls):
        vector = pull(vector)
    return client, Point(vector, grad.y)
