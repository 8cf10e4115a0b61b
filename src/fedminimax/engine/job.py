"""One phase of one round, as an executor gets it, and the three things a client does in it."""

# torch gives `from_numpy` no types.
# pyright: reportUnknownMemberType=false

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
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.parted import join_parts as in_one_piece
from fedminimax.blocks.trees import leaves, tree_map
from fedminimax.data.batches import Draws
from fedminimax.engine.profile import no_timing
from fedminimax.messages.stage import Kept, Messages, MessageState, bytes_of
from fedminimax.problems.private import Oracle
from fedminimax.types import Clock, Draw, Phase, Problem, integer

MESSAGES = "messages"  # the field of what a client keeps for the stages of its messages


class ClientError(RuntimeError):
    """An error inside a method or a problem, with where it happened."""


@cache
def kept_type(fields: tuple[str, ...]) -> type:
    """The NamedTuple of the fields that a client keeps; it is what `receive` sees of the client."""
    # A tuple without entries leaves no trace in a checkpoint: it is what a field is without one.
    # Which fields depends on the method: no type can be written down.
    return namedtuple("Kept", fields, defaults=((),) * len(fields))  # pyright: ignore[reportUntypedNamedTuple]


@dataclass(frozen=True)
class PhaseJob:
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
    held: MessageState = field(
        default_factory=MessageState
    )  # what the server keeps for the phase's messages
    kind: str = ""  # of these messages
    oracle: Oracle | None = None  # how steps ask for rows; None: the problem itself

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

    def limit(self, steps: int) -> PhaseJob:
        return replace(self, steps=np.minimum(self.steps, steps))

    def client_clock(self, position: int) -> Clock:
        number, steps = int(self.cohort[position]), int(self.steps[position])
        return self.clock._replace(
            steps=torch.full_like(self.clock.steps, steps),
            client=torch.full_like(self.clock.client, number),
        )

    def to_device(self, numbers: np.ndarray) -> Tensor:
        """On the run's device."""
        return torch.from_numpy(numbers).to(self.clock.round.device)

    def client_kept(self, position: int) -> Any:
        return row_of(self.kept, position)


class ClientResult(NamedTuple):
    up: Any  # the method's Up, each field stacked
    kept: Any  # a NamedTuple of the fields to keep, likewise


class PhaseResult(NamedTuple):
    """What a phase leaves behind."""

    server: Any
    kept: Any  # of the cohort, stacked
    bytes_up: int
    bytes_down: int
    bad: str | None  # the name of a field that is not finite
    held: MessageState = MessageState()


class Executor(ABC):
    """What an executor supplies: a map over clients. `engine/executors/debug.py` is the plainest.

    >>> from fedminimax.engine.executors.choose import make
    >>> make("debug").name, make("vectorised").threads
    ('debug', 1)
    """

    name: str
    threads: int = 1
    repeatable: int = 0  # local steps in a round, at most, of those that `repeat` can play
    part: Callable[[str], AbstractContextManager[None]] = staticmethod(no_timing)

    @abstractmethod
    def run(self, job: PhaseJob) -> ClientResult:
        """The clients' part of a phase."""

    def exchange(self, job: PhaseJob) -> PhaseResult:
        """A whole phase whose clients are all in this process."""
        return run_phase(job, self.run, reduce_replies, self.part)

    def repeat(self, job: PhaseJob, clocks: Clock) -> PhaseResult | None:
        """The phase once for each of the stacked times, in rounds that differ in nothing else but
        their batches, of which `job` has those of all rounds; returned is what the last of them
        leaves behind. None: it cannot be done, or a number is not finite; the rounds are then to be
        played one by one."""
        return None

    @property
    def eager(self) -> Executor:
        """For a phase that is watched at work: its hooks are called, each time."""
        return self

    def close(self) -> None:  # noqa: B027
        """Gives back what the executor holds, if anything."""


class Reduced(NamedTuple):
    """The replies of a cohort, reduced to one."""

    up: Any
    held: MessageState  # what the server keeps for the messages of the phase
    flawed: bool = False  # does a client of another process keep what is not finite?


def reduce_replies(job: PhaseJob, found: ClientResult) -> Reduced:
    """Reduces the replies of a cohort that are all in this process."""
    up, held = job.messages.reduce(job.held, job.down, found.up, job.weights, job.clock)
    return Reduced(up=up, held=held)


def run_phase(
    job: PhaseJob,
    map: Callable[[PhaseJob], ClientResult],
    reduce: Callable[[PhaseJob, ClientResult], Reduced],
    part: Callable[[str], AbstractContextManager[None]],
) -> PhaseResult:
    """A whole phase: `map` is the clients' part, `reduce` makes one reply of theirs, and then the
    server takes its step. `part` times each of them."""
    with part("local steps"):
        found = map(job)
    with part("averaging"):
        arrived = reduce(job, found)
    with part("server step"):
        average, held = job.messages.at_server(arrived.held, job.down, arrived.up, job.clock)
        server = job.phase.aggregate(job.problem, job.server, average, job.clock)
    # What is kept and also sent has a part in the average, which tells of it, if it is one; and
    # what clients have kept as it was, has been looked at before.
    reducer = job.messages.reducer
    known = (found.up, job.kept) if reducer.linear and not reducer.masked else job.kept
    bad = bad_field(arrived.up, average, server, found.kept, found.up, known=known)
    replies = int(job.clock.replies)
    return PhaseResult(
        server=server,
        kept=found.kept,
        bytes_up=job.messages.bytes(arrived.up) * replies,
        bytes_down=bytes_of(job.down) * replies,
        bad=bad or ("state of a client" if arrived.flawed else None),
        held=held,
    )


def at(clocks: Clock, number: int) -> Clock:
    """One of stacked times."""
    return Clock(*(numbers[number] for numbers in clocks))


class RunningClient(NamedTuple):
    """A client in the middle of a phase."""

    client: Any  # the method's
    messages: Kept  # what it keeps for the stages of its messages


def begin(job: PhaseJob, kept: Any, clock: Clock) -> RunningClient:
    """The client at the start of a phase: what the server sent, beside what the client has kept."""
    messages: Kept = ()
    if MESSAGES in kept._fields:  # which are no business of the method's
        *own, messages = kept
        kept = kept_type(kept._fields[:-1])(*own)
    return RunningClient(job.phase.receive(job.down, kept, clock), messages)


def step(job: PhaseJob, running: RunningClient, draw: Draw, clock: Clock) -> RunningClient:
    """The client after one local step on its draw."""
    problem = job.problem if job.oracle is None else job.oracle.private(job.problem, clock)
    client = job.phase.local_step(problem, job.down, running.client, draw, clock)
    return RunningClient(client, running.messages)


def finish(job: PhaseJob, running: RunningClient, clock: Clock) -> ClientResult:
    """What the client sends and keeps at the end of its steps, after the message stages."""
    up, client = job.phase.send(job.down, running.client, clock)
    messages = running.messages
    if job.messages.stages:
        ended, up = tree_map(in_one_piece, (running.client, up))
        up, messages = job.messages.at_client(job.down, ended, up, messages, clock)
    return ClientResult(up, keeping(job.leave, client, messages))


class InitialState(NamedTuple):
    """What is kept at first for the messages of a phase."""

    kind: str  # equal for messages of one form, in one phase
    kept: Kept | None  # by a client; None: not known in this process
    held: MessageState  # by the server


def initial_state(job: PhaseJob) -> InitialState:
    """Of the form that follows from one step of the first client."""
    clock = job.client_clock(0)
    try:
        running = begin(job, job.client_kept(0), clock)
        if job.steps[0]:
            draw = job.draws.client(0, 0, job.problem.depth)
            running = step(job, running, draw, at_step(clock, 0))
        up, _ = job.phase.send(job.down, running.client, clock)
    except Exception as error:
        raise ClientError(f"{place(job, 0, 0)}: {error}") from error
    client, up = tree_map(in_one_piece, (running.client, up))
    form = [int(job.clock.phase), *((n, *v.shape, str(v.dtype)) for n, v in leaves(up))]
    kind = hashlib.blake2s(repr(form).encode(), digest_size=6).hexdigest()
    kept, held = job.messages.init(job.down, client, up, clock)
    return InitialState(kind=kind, kept=kept, held=held)


def at_the_server(clock: Clock) -> str:
    """Where a server's step is, in words."""
    return f"round {int(clock.round)}, phase {int(clock.phase)}, at the server"


def place(job: PhaseJob, position: int, number: int) -> str:
    """Where a step is, in words."""
    return (
        f"round {int(job.clock.round)}, client {int(job.cohort[position])}, "
        f"phase {int(job.clock.phase)}, step {number}"
    )


def phase_key(job: PhaseJob) -> Hashable:
    """Equal for phases in which clients do the same."""
    return kind_of_phase(int(job.clock.phase), job.phase)


def kind_of_phase(number: int, phase: Phase) -> Hashable:
    """The same for a phase with its number in the round."""
    return number, hook_key((phase.receive, phase.local_step, phase.send))


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
        parts = cast("tuple[Any, ...]", value)
        return type(parts), *map(hook_key, parts)
    return value if isinstance(value, str | int | float | NoneType) else id(value)


def keeping(kind: Any, client: Any, messages: Kept = ()) -> Any:
    """Of a client, the fields that are kept."""
    return kind(*(messages if f == MESSAGES else getattr(client, f) for f in kind._fields))


def at_step(clock: Clock, number: int | Tensor) -> Clock:
    """The clock of a local step, from that at the start of the phase."""
    step = number if isinstance(number, Tensor) else integer(number, clock.step.device)
    return clock._replace(step=step, iteration=clock.iteration + number)


def row_of(stacked: Any, place: int) -> Any:
    """The value of one client, from those of a cohort."""

    def row(field: Tensor) -> Tensor:
        return field[place]

    return tree_map(row, stacked)


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
