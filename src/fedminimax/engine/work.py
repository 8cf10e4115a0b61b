"""One phase of one round, as an executor gets it, and the three things a client does in it."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.batches import Draws
from fedminimax.types import Clock, Draw, Phase, Problem


class ClientError(RuntimeError):
    """An error inside a method or a problem, with where it happened."""


@cache
def kept_type(fields: tuple[str, ...]) -> type:
    """The NamedTuple of the fields that a client keeps; it is what `receive` sees of the client."""
    return namedtuple("Kept", fields)


@dataclass(frozen=True)
class Work:
    """A phase for a cohort. Tensors of all clients are stacked along a first dimension."""

    problem: Problem
    phase: Phase
    keep: tuple[str, ...]
    down: Any
    kept: tuple[Tensor, ...]
    draws: Draws
    clock: Clock  # `step`, `steps` and `client` are filled in per client and step
    cohort: np.ndarray
    steps: np.ndarray

    @property
    def most_steps(self) -> int:
        return int(self.steps.max())

    def limited(self, steps: int) -> Work:
        return replace(self, steps=np.minimum(self.steps, steps))

    def client_clock(self, position: int) -> Clock:
        number, steps = int(self.cohort[position]), int(self.steps[position])
        return self.clock._replace(steps=torch.tensor(steps), client=torch.tensor(number))

    def client_kept(self, position: int) -> tuple[Tensor, ...]:
        return tuple(field[position] for field in self.kept)


class Result(NamedTuple):
    up: Any  # the method's Up, each field stacked
    kept: tuple[Tensor, ...]


class Executor(Protocol):
    """What an executor supplies: a map over clients."""

    name: str
    threads: int

    def run(self, work: Work) -> Result: ...

    def close(self) -> None: ...


def begin(work: Work, kept: tuple[Tensor, ...], clock: Clock) -> Any:
    return work.phase.receive(work.down, kept_type(work.keep)(*kept), clock)


def step(work: Work, client: Any, draw: Draw, clock: Clock) -> Any:
    return work.phase.local_step(work.problem, work.down, client, draw, clock)


def finish(work: Work, client: Any, clock: Clock) -> tuple[Any, tuple[Tensor, ...]]:
    up, client = work.phase.send(work.down, client, clock)
    return up, tuple(getattr(client, field) for field in work.keep)


def at_step(clock: Clock, number: int) -> Clock:
    return clock._replace(step=torch.tensor(number), iteration=clock.iteration + number)


def stack(results: Sequence[tuple[Any, tuple[Tensor, ...]]]) -> Result:
    """The results of single clients, in client order."""
    ups, kept = [r[0] for r in results], [r[1] for r in results]
    up = type(ups[0])(*(torch.stack(field) for field in zip(*ups, strict=True)))
    return Result(up, tuple(torch.stack(field) for field in zip(*kept, strict=True)))


def mean(up: Any, weights: Tensor) -> Any:
    """The weighted mean over clients of each field, added in client order."""

    def average(field: Tensor) -> Tensor:
        w = (weights / weights.sum()).to(field.dtype).reshape(-1, *([1] * (field.dim() - 1)))
        return (w * field).sum(0)

    return type(up)(*(average(field) for field in up))


def bad_field(values: Any) -> str | None:
    """The name of the first field that holds a NaN or an infinity."""
    for name in values._fields:
        value = getattr(values, name)
        if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
            return name
    return None


def bytes_of(values: Any) -> int:
    return sum(v.numel() * v.element_size() for v in values)
