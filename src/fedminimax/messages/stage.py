"""What happens to a message between a client's `send` and the server's `aggregate`.

A `Stage` changes what a client sends, and undoes at the server what must be undone after the
reduction. A `Reducer` makes one value of the replies. `Messages` composes them: it is a value, set
up once for a run, so that every executor and every site applies the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.trees import leaves, tree_map
from fedminimax.types import Clock

# A NamedTuple whose fields are tensors, or tuples of tensors: a method's Down, Client or Up, and
# what a stage keeps. Which one it is depends on the method.
Message = Any
Kept = tuple[Any, ...]  # what a client keeps, for each stage


def bytes_of(values: Message) -> int:
    """The bytes of all tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in leaves(values))


def update(down: Message, up: Message) -> Message:
    """Each field of a reply, less what the server sent down under the same name and shape.

    A field that the server did not send down is an update as it is.
    """
    return up._make(_less(getattr(down, name, None), getattr(up, name)) for name in up._fields)


def _less(sent: Any, field: Any) -> Any:
    alike = isinstance(sent, Tensor) and isinstance(field, Tensor) and sent.shape == field.shape
    return field - sent if alike else field


def add_update(down: Message, change: Message) -> Message:
    """The reply that such an update belongs to: the inverse of `update`."""
    return change._make(
        _plus(getattr(down, name, None), getattr(change, name)) for name in change._fields
    )


def _plus(sent: Any, field: Any) -> Any:
    alike = isinstance(sent, Tensor) and isinstance(field, Tensor) and sent.shape == field.shape
    return sent + field if alike else field


def norm(value: Message) -> Tensor:
    """The Euclidean norm of all numbers of a value together."""
    squares = [tensor.square().sum() for _, tensor in leaves(value) if tensor.is_floating_point()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def shrink(value: Message, bound: float) -> Message:
    """The value, scaled down to this norm if it is longer."""
    length = norm(value)
    factor = torch.where(length > bound, bound / length, torch.ones_like(length))

    def scaled(field: Tensor) -> Tensor:
        return field * factor.to(field) if field.is_floating_point() else field

    return tree_map(scaled, value)


class Stage:
    """One step of a message's way. Stages are frozen dataclasses of settings with pure functions.

    Rounding what travels, in full:

    >>> @dataclass(frozen=True)
    ... class Round(Stage):
    ...     digits: int = 2
    ...     def at_client(self, down, client, up, kept, clock):
    ...         return tree_map(lambda field: field.round(decimals=self.digits), up), kept
    >>> up, _ = Round().at_client(None, None, (torch.tensor([0.123]),), (), Clock.at())
    >>> up
    (tensor([0.1200]),)
    """

    everyone: ClassVar[bool] = False  # must all clients take part in every phase?
    last: ClassVar[bool] = False  # must it be the last stage at a client?
    adds: ClassVar[bool] = False  # if it encodes: is a sum of encoded messages that of their sum?

    def init_client(self, up: Message) -> Any:
        """What a client keeps for this stage between its rounds. `up` has the form of a reply."""
        return ()

    def init_server(self, up: Message) -> Any:
        """What the server keeps for this stage; it is part of every checkpoint."""
        return ()

    def at_client(
        self, down: Message, client: Message, up: Message, kept: Any, clock: Clock
    ) -> tuple[Message, Any]:
        """What travels in place of `up`, and what the client keeps.

        down: what the server sent. client: the method's client state after its local steps.
        """
        return up, kept

    def at_server(
        self, state: Any, down: Message, mean: Message, clock: Clock
    ) -> tuple[Message, Any]:
        """The reduced reply in the form that `up` had before this stage, and the new state.

        down: what the server sent.
        """
        return mean, state

    def encode(self, sent: Message, clock: Clock) -> Message:
        """The tensors that a site sends for what `at_client` returned: a smaller form of it, if
        there is one. `decode` must give back `sent`, bit by bit."""
        return sent

    def decode(self, encoded: Message, like: Message, clock: Clock) -> Message:
        """What was encoded. `like` has its form."""
        return encoded

    def check(self, encoded: Message, like: Message) -> str | None:
        """What is wrong with a message from a site, beside its shapes and types; None: nothing."""
        return None

    def bytes(self, up: Message) -> int:
        """How many bytes one client's message takes, as this stage sends it."""
        return bytes_of(up)

    def inside(self, up: Message) -> Message:
        """Of a message, what the stages before this one sent."""
        return up


class Reducer:
    """Makes one value of the replies of a cohort.

    A linear one is a weighted sum: groups of clients and processes each add up their own `part`,
    and `finish` makes the mean of the sum of these. One that is not linear gets all replies in one
    place.
    """

    linear: ClassVar[bool] = False
    masked: ClassVar[bool] = False  # is its sum one of whole numbers, which sites can mask?

    def init_server(self, up: Message) -> Any:
        """What the server keeps for the reducer; it is part of every checkpoint."""
        return ()

    def part(self, ups: Message, weights: Tensor) -> Message:
        """Of a linear reducer, what these clients have in the sum."""
        return mean(ups, weights)

    def finish(self, total: Message, like: Message) -> Message:
        """Of a linear reducer, the reply that the sum over all parts stands for. `like` is one
        client's reply, or has its form."""
        return total

    def reduce(
        self, state: Any, down: Message, ups: Message, weights: Tensor, clock: Clock
    ) -> tuple[Message, Any]:
        """The reduced reply, and the new state. Each field of `ups` has a first dimension of
        clients, and `weights`, one per client, sum to one."""
        raise TypeError(f"{type(self).__name__} does not say how it reduces: add reduce")


@dataclass(frozen=True)
class Mean(Reducer):
    """The weighted mean, which the methods are written for."""

    linear: ClassVar[bool] = True

    def reduce(
        self, state: Any, down: Message, ups: Message, weights: Tensor, clock: Clock
    ) -> tuple[Message, Any]:
        return mean(ups, weights), state


def mean(ups: Message, weights: Tensor) -> Message:
    """The weighted mean over clients of each field."""
    return tree_map(partial(weighted_mean, weights=weights), ups)


def weighted_mean(field: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over the first dimension, that of clients."""
    # One pass over the rows, which may be long.
    rows = field if field.dim() == 1 else field.flatten(1)
    return (weights.to(field) @ rows).reshape(field.shape[1:])


class MessageState(NamedTuple):
    """What the server keeps for the messages of one phase."""

    stages: tuple[Any, ...] = ()
    reducer: Any = ()


@dataclass(frozen=True)
class Messages:
    """The stages of a run's messages, in the order in which a client applies them, and the reducer.

    >>> from fedminimax.messages import Clip, Median
    >>> Messages.of([Clip(1.0), Median()])
    Messages(stages=(Clip(norm=1.0, dual_norm=None),), reducer=Median())
    """

    stages: tuple[Stage, ...] = ()
    reducer: Reducer = Mean()

    @staticmethod
    def of(given: Messages | Sequence[Stage | Reducer] | None) -> Messages:
        """From a list of stages; a reducer, if there is one, stands last."""
        if isinstance(given, Messages):
            return given
        parts = list(given or ())
        last = parts[-1] if parts else None
        reducer = last if isinstance(last, Reducer) else Mean()
        others = parts[:-1] if reducer is last else parts
        stages = tuple(part for part in others if isinstance(part, Stage))
        early = next((stage for stage in stages[:-1] if stage.last), None)
        if early is not None:
            raise ValueError(
                f"messages has {stages[-1]!r} after {early!r}, which decides what travels: put "
                f"{type(early).__name__} last"
            )
        if len(stages) < len(others):
            wrong = next(part for part in others if not isinstance(part, Stage))
            raise ValueError(
                f"messages has {wrong!r}; give stages such as Clip(1.0), and last at most one "
                "reducer such as Median()"
            )
        return Messages(stages, reducer)

    def then(self, stage: Stage) -> Messages:
        """The same messages with one more stage at the end."""
        return replace(self, stages=(*self.stages, stage))

    @property
    def everyone(self) -> bool:
        """Must all clients take part in every phase?"""
        return any(stage.everyone for stage in self.stages)

    @property
    def masked(self) -> bool:
        """Are replies and answers added up as whole numbers, which sites mask?"""
        return self.reducer.masked

    @property
    def keeps(self) -> bool:
        """Do clients keep anything for a stage?"""
        return self._keeping > 0

    @property
    def _keeping(self) -> int:
        """How many stages there are up to the last one for which clients keep something."""
        own = [type(stage).init_client is not Stage.init_client for stage in self.stages]
        return max((number for number, keeps in enumerate(own, 1) if keeps), default=0)

    def init(
        self, down: Message, client: Message, up: Message, clock: Clock
    ) -> tuple[Kept, MessageState]:
        """What a client and the server keep at first, for replies like this one."""
        kept: list[Any] = []
        states: list[Any] = []
        for stage in self.stages:
            form = tree_map(torch.zeros_like, up)
            kept.append(stage.init_client(form))
            states.append(stage.init_server(form))
            up, _ = stage.at_client(down, client, up, kept[-1], clock)
        return tuple(kept[: self._keeping]), MessageState(
            tuple(states), self.reducer.init_server(tree_map(torch.zeros_like, up))
        )

    def at_client(
        self, down: Message, client: Message, up: Message, kept: Kept, clock: Clock
    ) -> tuple[Message, Kept]:
        """What travels, and what the client keeps."""
        new: list[Any] = []
        nothing = ((),) * (len(self.stages) - len(kept))
        for stage, own in zip(self.stages, (*kept, *nothing), strict=True):
            up, own = stage.at_client(down, client, up, own, clock)
            new.append(own)
        return up, tuple(new[: len(kept)])

    def reduce(
        self, held: MessageState, down: Message, ups: Message, weights: Tensor, clock: Clock
    ) -> tuple[Message, MessageState]:
        """The reduced message of a whole cohort, as it arrived."""
        found, state = self.reducer.reduce(held.reducer, down, ups, weights, clock)
        return found, held._replace(reducer=state)

    def at_server(
        self, held: MessageState, down: Message, arrived: Message, clock: Clock
    ) -> tuple[Message, MessageState]:
        """What the method's `aggregate` gets, of a reduced message."""
        new: list[Any] = []
        stages = zip(reversed(self.stages), reversed(held.stages), strict=True)
        for stage, state in stages:
            arrived, state = stage.at_server(state, down, arrived, clock)
            new.append(state)
        return arrived, held._replace(stages=tuple(reversed(new)))

    def encode(self, sent: Message, clock: Clock) -> Message:
        """The tensors that a site sends."""
        for stage in self.stages:
            sent = stage.encode(sent, clock)
        return sent

    def decode(self, encoded: Message, like: Message, clock: Clock) -> Message:
        """What was encoded. `like` has its form."""
        for stage in reversed(self.stages):
            encoded = stage.decode(encoded, like, clock)
        return encoded

    def check(self, encoded: Message, like: Message) -> str | None:
        """What is wrong with a message from a site; None: nothing."""
        return next(filter(None, (stage.check(encoded, like) for stage in self.stages)), None)

    def bytes(self, up: Message) -> int:
        """What one client's message takes on its way."""
        for stage in reversed(self.stages):
            if type(stage).bytes is not Stage.bytes:
                return stage.bytes(up)
            up = stage.inside(up)
        return bytes_of(up)
