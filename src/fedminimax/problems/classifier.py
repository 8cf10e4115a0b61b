"""Base class of classification problems: cross-entropy and accuracy of a network with logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedminimax.problems.network_problem import NetworkProblem
from fedminimax.problems.questions import counts
from fedminimax.types import AnswerCheck, Batch, Point, Query, Vectors


class Classifier(NetworkProblem):
    """A problem whose network classifies rows.

    The network has one logit per class, or a single logit for two classes; then a label above 0 is
    the second class.
    """

    monitor = "accuracy"
    larger_is_better = True
    checks: ClassVar[Mapping[str, AnswerCheck]] = {"labels_outside": counts}

    @classmethod
    def outputs_for(cls, classes: int) -> int:
        return 1 if classes == 2 else classes

    def prepare(self, ask: Query) -> Classifier:
        """Refuses labels that the network has no output for, before the run begins."""
        if outside := int(ask.sum("labels_outside")[0]):
            raise ValueError(
                f"{outside} training rows have a label that the network has no output for: number "
                "the classes 0, 1, ..., one for each output; a single output knows 0 and 1 (or -1 "
                "and 1)"
            )
        return self

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question != "labels_outside":
            return super().answer(question, vectors, batch)
        first = batch.features[:1]
        outputs = self.network(self.network.start().to(first), first).numel()
        two = [-1, 1] if bool((batch.labels < 0).any()) else [0, 1]
        known = torch.tensor(two if outputs == 1 else range(outputs)).to(batch.labels)
        return ((~torch.isin(batch.labels, known)).sum().reshape(1),)

    def losses(self, x: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy of each row, with batch normalisation by this batch."""
        logits = self.network(x, features, batch).flatten(1)
        if logits.shape[1] == 1:
            target = (batch.labels > 0).to(logits.dtype)
            return F.binary_cross_entropy_with_logits(logits[:, 0], target, reduction="none")
        return F.cross_entropy(logits, batch.labels.long(), reduction="none")

    def correct(
        self, x: Tensor, moments: Tensor | None, features: Tensor, labels: Tensor
    ) -> Tensor:
        """1 for each row that is classified correctly, else 0: in evaluation mode, with the given
        batch-norm moments."""
        logits = self.network.outputs(x, features, moments).flatten(1)
        if logits.shape[1] == 1:
            right = (logits[:, 0] > 0) == (labels > 0)
        else:
            right = logits.argmax(1) == labels.long()
        return right.to(logits.dtype)

    def at(self, point: Point, moments: Tensor | None) -> Vectors:
        """The vectors that a question about accuracy is sent with."""
        return tuple(point) if moments is None else (*point, moments)

    def network_moments(self, vectors: Vectors) -> Tensor | None:
        """The batch-norm moments among the vectors that `at` returned."""
        return vectors[2] if self.network.has_norms else None


def one_hot(numbers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """A matrix (rows, count) with a 1 at each row's number; a row with a number outside
    0 .. count - 1 has zeros only."""
    places = torch.arange(count, device=numbers.device)
    return (numbers.unsqueeze(-1) == places).to(dtype)


def worst(names: list[str], values: list[float]) -> tuple[str, float]:
    """The smallest value, after its name."""
    return min(zip(names, values, strict=True), key=lambda pair: pair[1])
