"""Questions to simulated clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedminimax.data.clients import Clients
from fedminimax.problems.questions import GRADIENTS
from fedminimax.types import Cost, Problem


class SimulatedAsk:
    """Asks every client about its rows of one split, and counts what would have travelled, and
    the gradients that were computed for the answers."""

    sees_rows = True

    def __init__(self, problem: Problem, clients: Clients, split: str, weights: Tensor):
        self.problem, self.shards, self.weights = problem, clients.splits[split], weights
        self.names = clients.names
        self.sampled_positive_share = clients.sampled_positive_share
        self.cost = Cost()

    def each(self, question: str, *vectors: Tensor) -> list[tuple[Tensor, ...]]:
        with torch.no_grad():
            replies = [
                self.problem.answer(question, vectors, self.shards.batch(k))
                for k in range(len(self.names))
            ]
        down = sum(v.numel() * v.element_size() for v in vectors) * len(replies)
        up = sum(v.numel() * v.element_size() for reply in replies for v in reply)
        asked = GRADIENTS.get(question, 0)
        rows = asked * int(self.shards.sizes[: len(replies)].sum())
        self.cost += Cost(asked * len(replies), rows, up, down, exchanges=1)
        return replies

    def mean(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        fields = zip(*self.each(question, *vectors), strict=True)
        return tuple(
            sum((w * v for w, v in zip(self.weights.tolist(), field, strict=True)), torch.zeros(()))
            for field in fields
        )

    def sum(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        fields = zip(*self.each(question, *vectors), strict=True)
        return tuple(torch.stack(field).sum(0) for field in fields)
