"""Level-wise synchronisation: each quantity is averaged before the next one is computed from it.

An iteration that is synchronised begins at the end of one round, with its move, and ends in the
next, with the sweeps through the levels at the mean of the moves. So every round begins with the
server's point on its way down and ends with the clients' moves on their way up:

    round 0:        the local iterations, the move
    round 1 ...:    level 1, level 2, ..., the local iterations, the move
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, Self

from torch import Tensor

from fedminimax.types import Algorithm, Clock, Phase, Point, Problem


class Part(NamedTuple):
    """A vector of a state: a field, or one level's vector in a field with a vector per level."""

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


class Exchange(NamedTuple):
    """The vectors that are averaged together, and how a client computes them."""

    parts: tuple[Part, ...]
    local_step: Callable[..., Any]
    gradients: int = 0  # of the last level


def level_by_level(
    method: Any,
    round: int,
    exchanges: Callable[[int], Sequence[Exchange]],
    client: type,
    gradients: int = 1,
) -> tuple[Phase, ...]:
    """The phases of a round.

    Arguments:
        method: has `broadcast_point` and `receive_point` for the server's point on its way down,
            and `send_moved` and `aggregate_moved` for the clients' moves on their way up.
        round: in round 0 there are no sweeps.
        exchanges: from the depth to those of the sweeps. All see the same batches. Each sends down
            the means of the one before it, the first the server's point.
        client: the type of a client's state, of which all fields are kept or carried.
        gradients: of a local iteration.

    Returns the sweeps, and then the local iterations with the move.
    """
    down: dict[str, Any] = {"broadcast": method.broadcast_point, "receive": method.receive_point}
    phases: list[Phase] = []
    for number, (parts, local_step, level_gradients) in enumerate(
        exchanges(method.known_depth) if round else ()
    ):
        phases.append(
            method.phase(
                local_step=local_step,
                send=partial(_send, parts),
                aggregate=partial(_aggregate, parts),
                steps=1,
                gradients=level_gradients,
                draw="same" if number else "fresh",
                **down,
            )
        )
        down = {"broadcast": partial(_means, parts), "receive": partial(_receive, parts, client)}
    last = method.phase(
        steps=method.local_steps - 1,
        gradients=gradients,
        send=method.send_moved,
        aggregate=method.aggregate_moved,
        **down,
    )
    return *phases, last


def unknown(start: Point, count: int) -> tuple[Tensor, ...]:
    """Vectors whose lengths the clients' first replies will tell."""
    return tuple(start.x.new_zeros(()) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class OfDepth(Algorithm):
    """A method with as many exchanges as the problem has levels."""

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


def _means(parts: tuple[Part, ...], state: Any, clock: Clock) -> Any:
    return _type_of(parts)(*(part.of(state) for part in parts))


def _receive(parts: tuple[Part, ...], kind: type, down: Any, client: Any, clock: Clock) -> Any:
    return _put(parts, kind(**client._asdict()), down)


def _send(parts: tuple[Part, ...], down: Any, client: Any, clock: Clock) -> tuple[Any, Any]:
    return _means(parts, client, clock), client


def _aggregate(
    parts: tuple[Part, ...], problem: Problem, server: Any, mean: Any, clock: Clock
) -> Any:
    return _put(parts, server, mean)


def _put(parts: tuple[Part, ...], state: Any, vectors: Any) -> Any:
    for part, vector in zip(parts, vectors, strict=True):
        state = part.put(state, vector)
    return state


@cache
def _type_of(parts: tuple[Part, ...]) -> Any:
    """The NamedTuple of the vectors that travel together."""
    # Which vectors depends on the depth: no type can be written down.
    names = [part.name for part in parts]
    return namedtuple("Means", names)  # pyright: ignore[reportUntypedNamedTuple, reportUnknownArgumentType]
