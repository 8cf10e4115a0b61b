"""Level-wise synchronisation: each quantity is averaged before the next one is computed from it.

How to use it: `phases(round)` returns `relay(self, exchanges, opened, resumed)`, where `exchanges`
go round in a circle: each sends down the means that the one before it has sent up, the first those
of the last. A round ends with the local iterations, whose means are the point, so every round, the
first too, begins by sending the point down:

    round 0:     point                              from the client's own first estimates
    round 1 ...: level 1, level 2, ..., point       estimates at the server's point, then the steps

An `Exchange` names its quantities as `Part`s, fields of the client that the server has by the same
name, and the local step that computes them; that of the point says with `reached` where its clients
move next. `opened` makes a client of what it has kept, `resumed` one of what it has kept and
carries. Quantities whose lengths are not known before the first reply begin at the server as
`unknown(start, count)`. A method that derives from `OfDepth` knows how many levels there are.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor

from fedminimax.types import Algorithm, Clock, Phase, Point, Problem


class Part(NamedTuple):
    """A vector of a state: a field, or the one of that level in a field with one for each level."""

    field: str
    level: int | None = None

    @property
    def name(self) -> str:
        return self.field if self.level is None else f"{self.field}_{self.level}"

    def of(self, state: Any) -> Tensor:
        value = getattr(state, self.field)
        return value if self.level is None else value[self.level - 1]

    def put(self, state: Any, vector: Tensor) -> Any:
        """The state with this vector in its place.

        >>> import torch
        >>> class State(NamedTuple):
        ...     inner: tuple
        >>> Part("inner", 2).put(State((torch.zeros(1), torch.zeros(1))), torch.ones(1))
        State(inner=(tensor([0.]), tensor([1.])))
        """
        if self.level is None:
            return state._replace(**{self.field: vector})
        values = getattr(state, self.field)
        levels = (*values[: self.level - 1], vector, *values[self.level :])
        return state._replace(**{self.field: levels})


POINT = (Part("x"), Part("y"))


@dataclass(frozen=True)
class Exchange:
    """What is averaged at once, and how a client computes it from what was averaged before."""

    parts: tuple[Part, ...]
    local_step: Callable[..., Any]
    steps: int = 1
    gradients: int = 0  # of the last level, per step
    draw: Literal["fresh", "same"] = "same"  # the levels of one iteration share their batches
    # client, clock -> Point: sent in the place of the client's own; the server projects the mean
    reached: Callable[[Any, Clock], Point] | None = None


def relay(
    method: Algorithm,
    exchanges: Sequence[Exchange],
    opened: Callable[[Any], Any],
    resumed: Callable[[Any], Any],
) -> tuple[Phase, ...]:
    """The phases of a round: one for each exchange."""
    return tuple(
        method.phase(
            local_step=exchange.local_step,
            steps=exchange.steps,
            gradients=exchange.gradients,
            draw="fresh" if number == 0 else exchange.draw,
            **_hooks(exchanges[number - 1].parts, exchange, resumed if number else opened),
        )
        for number, exchange in enumerate(exchanges)
    )


def unknown(start: Point, count: int) -> tuple[Tensor, ...]:
    """Vectors whose lengths the clients' first replies will tell."""
    return tuple(start.x.new_zeros(()) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class OfDepth(Algorithm):
    """A method whose exchanges are as many as the levels of the problem."""

    depth: int | None = None  # K; None: that of the run's problem

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.depth
        if given is not None and (type(given) is not int or given < 1):
            raise ValueError(
                f"{type(self).__name__}: depth is {given!r}; give a whole number of at least 1, or "
                "leave it out"
            )

    def for_problem(self, problem: Problem) -> Self:
        """The method for a run on that problem."""
        if self.depth not in (None, problem.depth):
            raise ValueError(
                f"{type(self).__name__}: depth is {self.depth}, but {type(problem).__name__} has "
                f"depth {problem.depth}: leave it out, or give {problem.depth}"
            )
        return replace(self, depth=problem.depth)

    @property
    def known_depth(self) -> int:
        if self.depth is None:
            raise ValueError(
                f"{type(self).__name__} has to know how many levels there are: give depth=..."
            )
        return self.depth


def _hooks(
    down_parts: tuple[Part, ...], exchange: Exchange, made: Callable[[Any], Any]
) -> dict[str, Callable[..., Any]]:
    up_parts, reached = exchange.parts, exchange.reached
    down_type, up_type = _means(down_parts), _means(up_parts)

    def broadcast(server: Any, clock: Clock) -> Any:
        return down_type(*(part.of(server) for part in down_parts))

    def receive(down: Any, client: Any, clock: Clock) -> Any:
        return _put_all(down_parts, made(client), down)

    def send(down: Any, client: Any, clock: Clock) -> tuple[Any, Any]:
        source = client if reached is None else reached(client, clock)
        return up_type(*(part.of(source) for part in up_parts)), client

    def aggregate(problem: Problem, server: Any, mean: Any, clock: Clock) -> Any:
        server = _put_all(up_parts, server, mean)
        if reached is None:
            return server
        # Clients have no sets to project onto when they send.
        return server._replace(x=problem.project_x(server.x), y=problem.project_y(server.y))

    return {
        "broadcast": broadcast,
        "receive": receive,
        "send": send,
        "aggregate": aggregate,
    }


def _put_all(parts: tuple[Part, ...], state: Any, vectors: Any) -> Any:
    for part, vector in zip(parts, vectors, strict=True):
        state = part.put(state, vector)
    return state


@cache
def _means(parts: tuple[Part, ...]) -> Any:
    """The NamedTuple of the quantities that travel together."""
    return namedtuple("Means", [part.name for part in parts])
