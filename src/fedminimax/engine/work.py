"""One phase of one round, as an executor gets it, and the three things a client does in it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.batches import Draws
from fedminimax.engine.profile import untimed
from fedminimax.engine.trees import leaves, tree_map
from fedminimax.types import Clock, Draw, Phase, Problem, whole


class ClientError(RuntimeError):
    """An error inside a method or a problem, with where it happened."""


@cache
def kept_type(fields: tuple[str, ...]) -> type:
    """The NamedTuple of the fields that a client keeps; it is what `receive` sees of the client."""
    # A tuple without entries leaves no trace in a checkpoint: it is what a field is without one.
    return namedtuple("Kept", fields, defaults=((),) * len(fields))


@dataclass(frozen=True)
class Work:
    """A phase for a cohort. Tensors of all clients are stacked along a first dimension."""

    problem: Problem
    phase: Phase
    server: Any
    kept: Any  # a NamedTuple of the fields that clients have from before
    leave: type  # the NamedTuple of the fields that clients are to keep after it
    draws: Draws
    clock: Clock  # `step`, `steps` and `client` are filled in per client and step
    cohort: np.ndarray
    steps: np.ndarray
    weights: Tensor  # of the clients in the mean; those of a whole cohort sum to one

    @cached_property
    def down(self) -> Any:
        return self.phase.broadcast(self.server, self.clock)

    @cached_property
    def most_steps(self) -> int:
        return int(self.steps.max())

    @cached_property
    def unequal(self) -> bool:
        """Do some clients take fewer steps than others?"""
        return int(self.steps.min()) < self.most_steps

    def limited(self, steps: int) -> Work:
        return replace(self, steps=np.minimum(self.steps, steps))

    def client_clock(self, position: int) -> Clock:
        number, steps = int(self.cohort[position]), int(self.steps[position])
        return self.clock._replace(
            steps=torch.full_like(self.clock.steps, steps),
            client=torch.full_like(self.clock.client, number),
        )

    def placed(self, numbers: np.ndarray) -> Tensor:
        """On the run's device."""
        return torch.from_numpy(numbers).to(self.clock.round.device)

    def client_kept(self, position: int) -> Any:
        return tree_map(lambda field: field[position], self.kept)


class Result(NamedTuple):
    up: Any  # the method's Up, each field stacked
    kept: Any  # a NamedTuple of the fields to keep, likewise


class Exchanged(NamedTuple):
    """What a phase leaves behind."""

    server: Any
    kept: Any  # of the cohort, stacked
    bytes_up: int
    bytes_down: int
    bad: str | None  # the name of a field that is not finite


class Executor(ABC):
    """What an executor supplies: a map over clients. `engine/debug.py` is the plainest.

    >>> from fedminimax.engine.executors import make
    >>> make("debug").name, make("vectorised").threads
    ('debug', 1)
    """

    name: str
    threads: int = 1
    repeatable: int = 0  # local steps in a round, at most, of those that `repeat` can play
    part: Callable[[str], AbstractContextManager[None]] = staticmethod(untimed)

    @abstractmethod
    def run(self, work: Work) -> Result:
        """The clients' part of a phase."""

    def exchange(self, work: Work) -> Exchanged:
        """A whole phase: the clients' part, the mean, and what the server makes of it."""
        with self.part("local steps"):
            up, kept = self.run(work)
        with self.part("averaging"):
            average = mean(up, work.weights)
        with self.part("server step"):
            new = work.phase.aggregate(work.problem, work.server, average, work.clock)
        down = bytes_of(work.down) * len(work.cohort)
        # What is kept and also sent has a part in the average, which tells of it; and what clients
        # have kept as it was, has been looked at before.
        bad = bad_field(average, new, kept, known=(up, work.kept))
        return Exchanged(new, kept, bytes_of(up), down, bad)

    def repeat(self, work: Work, clocks: Clock) -> Exchanged | None:
        """The phase once for each of the stacked times, in rounds that differ in nothing else but
        their batches, of which `work` has those of all rounds; returned is what the last of them
        leaves behind. None: it cannot be done, or a number is not finite; the rounds are then to be
        played one by one."""
        return None

    @property
    def eager(self) -> Executor:
        """For a phase that is watched at work: its hooks are called, each time."""
        return self

    def close(self) -> None:  # noqa: B027
        """Gives back what the executor holds, if anything."""


def at(clocks: Clock, number: int) -> Clock:
    """One of stacked times."""
    return Clock(*(numbers[number] for numbers in clocks))


def begin(work: Work, kept: Any, clock: Clock) -> Any:
    return work.phase.receive(work.down, kept, clock)


def step(work: Work, client: Any, draw: Draw, clock: Clock) -> Any:
    return work.phase.local_step(work.problem, work.down, client, draw, clock)


def finish(work: Work, client: Any, clock: Clock) -> Result:
    up, client = work.phase.send(work.down, client, clock)
    return Result(up, keeping(work.leave, client))


def keeping(kind: Any, client: Any) -> Any:
    return kind(*(getattr(client, field) for field in kind._fields))


def at_step(clock: Clock, number: int | Tensor) -> Clock:
    step = number if isinstance(number, Tensor) else whole(number, clock.step.device)
    return clock._replace(step=step, iteration=clock.iteration + number)


def stack(values: Sequence[Any]) -> Any:
    """The values of single clients as one, in client order."""
    return tree_map(lambda *tensors: torch.stack(tensors), *values)


def mean(up: Any, weights: Tensor) -> Any:
    """The weighted mean over clients of each field."""
    return tree_map(lambda field: weighted(field, weights), up)


def weighted(field: Tensor, weights: Tensor) -> Tensor:
    # One pass over the rows, which may be long.
    rows = field if field.dim() == 1 else field.flatten(1)
    return (weights.to(field) @ rows).reshape(field.shape[1:])


def bad_field(*values: Any, known: Any = ()) -> str | None:
    """The name of the first field that holds a NaN or an infinity; no tensor that is in `known` is
    looked at."""
    seen = {id(tensor) for _, tensor in leaves(known)}
    for value in values:  # of which some are the same: the server often keeps what the mean is
        for name, tensor in leaves(value):
            if id(tensor) not in seen and not _finite(tensor):
                return name
            seen.add(id(tensor))
    return None


def _finite(tensor: Tensor) -> bool:
    # The sum takes half the time, and tells of all that is wrong; it may be too large itself.
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())


def bytes_of(values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in leaves(values))
