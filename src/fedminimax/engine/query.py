"""Questions to clients: what all who ask share, and asking simulated clients."""

# torch gives `from_numpy` and `tolist` no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.clients import Clients
from fedminimax.messages.secure import fixed_point
from fedminimax.problems.questions import GRADIENTS
from fedminimax.types import Cost, Problem

_TOGETHER = 1024  # replies that are added up at once


class CountedQuery(ABC):
    """Asks every client, or those of the given numbers, about its rows of one split, and counts
    what travels, and the gradients that are computed for the answers."""

    sees_rows: bool
    tells_each = True
    masked = False  # are answers added up as whole numbers, which sites can mask?

    def __init__(
        self,
        clients: Clients,
        split: str,
        weights: Tensor,
        numbers: np.ndarray | None = None,
    ):
        self.shards = clients.splits[split]
        self.names: Sequence[str] = clients.names
        self.weights = weights
        self.numbers: Sequence[int] = range(len(clients))
        if numbers is not None:
            self.numbers = numbers.tolist()
            self.names = tuple(clients.names[k] for k in self.numbers)
            chosen = weights[torch.from_numpy(numbers)]
            self.weights = chosen / chosen.sum()
        self.device = clients.device
        self.sampled_positive_share = clients.sampled_positive_share
        self.cost = Cost()

    def each(self, question: str, *vectors: Tensor) -> list[tuple[Tensor, ...]]:
        return list(self._replies(question, vectors))

    def mean(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        if self.masked:
            return self.summed_words(question, vectors, weighted=True)
        total: list[Tensor] = []
        replies = self._replies(question, vectors)
        for weight, reply in zip(self.weights.tolist(), replies, strict=True):
            total = total or [torch.zeros(())] * len(reply)
            total = [t + weight * v for t, v in zip(total, reply, strict=True)]
        return tuple(total)

    def sum(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        if self.masked:
            return self.summed_words(question, vectors, weighted=False)
        total: list[Tensor] = []
        replies = self._replies(question, vectors)
        while some := list(islice(replies, _TOGETHER)):
            part = [torch.stack(field).sum(0) for field in zip(*some, strict=True)]
            total = [a + b for a, b in zip(total, part, strict=True)] if total else part
        return tuple(total)

    def summed_words(
        self, question: str, vectors: tuple[Tensor, ...], weighted: bool
    ) -> tuple[Tensor, ...]:
        """The sum of the answers in fixed point, each times the client's weight if `weighted`.
        What is not finite has no words; a sum of it is a NaN."""
        total: list[Tensor] = []
        like: tuple[Tensor, ...] = ()
        known: list[Tensor] = []  # where all answers are finite
        replies = self._replies(question, vectors, fixed_point.answer_bytes)
        for weight, like in zip(self.weights.tolist(), replies, strict=True):
            there, weight = [v.isfinite() for v in like], weight if weighted else 1.0
            finite = [v.where(t, torch.zeros_like(v)) for v, t in zip(like, there, strict=True)]
            own = [fixed_point.answer_words(question, v, weight) for v in finite]
            total = [*map(fixed_point.added_answers, total, own)] if total else own
            known = [*map(torch.logical_and, known, there)] if known else there
        found = zip(total, like, known, strict=True)
        sums = ((fixed_point.answer_of(words, v, weighted), there) for words, v, there in found)
        return tuple(v if bool(there.all()) else v.where(there, torch.nan) for v, there in sums)

    @abstractmethod
    def answers(self, question: str, vectors: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, ...]]:
        """One reply per client, in the order of `names`."""

    def _replies(
        self,
        question: str,
        vectors: tuple[Tensor, ...],
        size: Callable[[Tensor], int] = lambda v: v.numel() * v.element_size(),
        answers: Callable[..., Iterable[tuple[Tensor, ...]]] | None = None,
    ) -> Iterator[tuple[Tensor, ...]]:
        """The answers, counted; `size` says how many bytes a vector takes, and `answers` asks."""
        asked, count = GRADIENTS.get(question, 0), len(self.numbers)
        down = sum(v.numel() * v.element_size() for v in vectors) * count
        rows = asked * int(self.shards.sizes[self.numbers].sum()) if asked else 0
        self.cost += Cost(asked * count, rows, 0, down, exchanges=1)
        up = 0
        for reply in (answers or self.answers)(question, vectors):
            up += sum(map(size, reply))
            yield reply
        self.cost += Cost(bytes_up=up)


class LocalQuery(CountedQuery):
    """All clients are here, and so are their rows."""

    sees_rows = True

    def __init__(
        self,
        problem: Problem,
        clients: Clients,
        split: str,
        weights: Tensor,
        numbers: np.ndarray | None = None,
    ):
        super().__init__(clients, split, weights, numbers)
        self.problem = problem

    def answers(self, question: str, vectors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """One after the other: those of a million clients are never in memory together."""
        for client in self.numbers:
            yield self.answer(question, vectors, client)

    def answer(self, question: str, vectors: tuple[Tensor, ...], client: int) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.problem.answer(question, vectors, self.shards.batch(client))
