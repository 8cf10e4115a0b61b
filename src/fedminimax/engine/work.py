"""One phase of one round, as an executor gets it, and the three things a client does in it."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from types import FunctionType, MethodType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.parted import whole as in_one_piece
from fedminimax.blocks.trees import leaves, tree_map
from fedminimax.data.batches import Draws
from fedminimax.engine.profile import untimed
from fedminimax.messages.stage import Held, Messages, bytes_of
from fedminimax.types import Clock, Draw, Phase, Problem, whole

MESSAGES = "messages"  # the field of what a client keeps for the stages of its messages


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
    messages: Messages = field(default_factory=Messages)
    held: Held = field(default_factory=Held)  # what the server keeps for the phase's messages
    kind: str = ""  # of these messages

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
    held: Held = Held()


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
            arrived, held = work.messages.reduce(work.held, work.down, up, work.weights, work.clock)
        with self.part("server step"):
            average, held = work.messages.at_server(held, arrived, work.clock)
            new = work.phase.aggregate(work.problem, work.server, average, work.clock)
        count = len(work.cohort)
        down, sent = bytes_of(work.down) * count, work.messages.bytes(arrived) * count
        # What is kept and also sent has a part in the average, which tells of it, if it is one; and
        # what clients have kept as it was, has been looked at before.
        known = (up, work.kept) if work.messages.reducer.linear else work.kept
        bad = bad_field(arrived, average, new, kept, up, known=known)
        return Exchanged(new, kept, sent, down, bad, held)

    def first(self, work: Work) -> First:
        """What is kept at first for the messages of a phase."""
        return first_states(work)

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


class Running(NamedTuple):
    """A client in the middle of a phase."""

    client: Any  # the method's
    messages: tuple  # what it keeps for the stages of its messages


def begin(work: Work, kept: Any, clock: Clock) -> Running:
    messages = ()
    if MESSAGES in kept._fields:  # which are no business of the method's
        *own, messages = kept
        kept = kept_type(kept._fields[:-1])(*own)
    return Running(work.phase.receive(work.down, kept, clock), messages)


def step(work: Work, running: Running, draw: Draw, clock: Clock) -> Running:
    client = work.phase.local_step(work.problem, work.down, running.client, draw, clock)
    return Running(client, running.messages)


def finish(work: Work, running: Running, clock: Clock) -> Result:
    up, client = work.phase.send(work.down, running.client, clock)
    messages = running.messages
    if work.messages.stages:
        ended, up = tree_map(in_one_piece, (running.client, up))
        up, messages = work.messages.at_client(work.down, ended, up, messages, clock)
    return Result(up, keeping(work.leave, client, messages))


class First(NamedTuple):
    """What is kept at first for the messages of a phase."""

    kind: str  # equal for messages of one form, in one phase
    kept: tuple | None  # by a client; None: not known in this process
    held: Held  # by the server


def first_states(work: Work) -> First:
    """Of the form that follows from one step of the first client."""
    clock = work.client_clock(0)
    try:
        running = begin(work, work.client_kept(0), clock)
        if work.steps[0]:
            draw = work.draws.client(0, 0, work.problem.depth)
            running = step(work, running, draw, at_step(clock, 0))
        up, _ = work.phase.send(work.down, running.client, clock)
    except Exception as error:
        raise ClientError(f"{place(work, 0, 0)}: {error}") from error
    client, up = tree_map(in_one_piece, (running.client, up))
    form = [int(work.clock.phase), *((n, *v.shape, str(v.dtype)) for n, v in leaves(up))]
    kind = hashlib.blake2s(repr(form).encode(), digest_size=6).hexdigest()
    return First(kind, *work.messages.init(work.down, client, up, clock))


def place(work: Work, position: int, number: int) -> str:
    """Where a step is, in words."""
    return (
        f"round {int(work.clock.round)}, client {int(work.cohort[position])}, "
        f"phase {int(work.clock.phase)}, step {number}"
    )


def phase_key(work: Work) -> Hashable:
    """Equal for phases in which clients do the same."""
    hooks = work.phase.receive, work.phase.local_step, work.phase.send
    return int(work.clock.phase), hook_key(hooks)


def hook_key(value: Any) -> Hashable:
    """Equal for hooks that do the same. Functions are made anew for each round; their instructions
    and what they hold are not."""
    if isinstance(value, MethodType):
        return value.__func__, hook_key(value.__self__)
    if isinstance(value, partial):
        named = tuple(sorted(value.keywords.items()))
        return hook_key(value.func), hook_key(value.args), hook_key(named)
    if isinstance(value, FunctionType):
        held = tuple(cell.cell_contents for cell in value.__closure__ or ())
        named = tuple(sorted((value.__kwdefaults__ or {}).items()))
        return value.__code__, hook_key(held), hook_key(value.__defaults__), hook_key(named)
    if isinstance(value, tuple):
        return type(value), *map(hook_key, value)
    return value if isinstance(value, str | int | float | NoneType) else id(value)


def keeping(kind: Any, client: Any, messages: tuple = ()) -> Any:
    """Of a client, the fields that are kept."""
    return kind(*(messages if f == MESSAGES else getattr(client, f) for f in kind._fields))


def at_step(clock: Clock, number: int | Tensor) -> Clock:
    step = number if isinstance(number, Tensor) else whole(number, clock.step.device)
    return clock._replace(step=step, iteration=clock.iteration + number)


def stack(values: Sequence[Any]) -> Any:
    """The values of single clients as one, in client order."""
    return tree_map(lambda *tensors: torch.stack(tensors), *values)


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
