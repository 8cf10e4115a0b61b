"""What classifiers share: a network with one logit, or one per class, losses and accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedminimax.problems._network_problem import NetworkProblem
from fedminimax.problems.questions import counts
from fedminimax.types import AnswerCheck, Ask, Batch, Point, Weights


class Classifier(NetworkProblem):
    """A problem whose network tells classes apart; a single logit means two, of which a label
    above 0 is the second."""

    monitor = "accuracy"
    larger_is_better = True
    client_weights: Weights = "size"
    checks: ClassVar[Mapping[str, AnswerCheck]] = {"labels_outside": counts}

    @classmethod
    def outputs_for(cls, classes: int) -> int:
        return 1 if classes == 2 else classes

    def prepare(self, ask: Ask) -> Classifier:
        """Labels that the network has no output for end the run before it begins."""
        if outside := int(ask.sum("labels_outside")[0]):
            raise ValueError(
                f"{outside} training rows have a label that the network has no output for: number "
                "the classes 0, 1, ..., one for each output; a single output knows 0 and 1 (or -1 "
                "and 1)"
            )
        return self

    def answer(
        self, question: str, vectors: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, ...]:
        if question != "labels_outside":
            return super().answer(question, vectors, batch)
        first = batch.features[:1]
        outputs = self.network(self.network.start().to(first), first).numel()
        two = [-1, 1] if bool((batch.labels < 0).any()) else [0, 1]
        known = torch.tensor(two if outputs == 1 else range(outputs)).to(batch.labels)
        return ((~torch.isin(batch.labels, known)).sum().reshape(1),)

    def losses(self, x: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy of each row, with the batch's own normalisation."""
        logits = self.network(x, features, batch).flatten(1)
        if logits.shape[1] == 1:
            target = (batch.labels > 0).to(logits.dtype)
            return F.binary_cross_entropy_with_logits(logits[:, 0], target, reduction="none")
        return F.cross_entropy(logits, batch.labels.long(), reduction="none")

    def correct(
        self, x: Tensor, moments: Tensor | None, features: Tensor, labels: Tensor
    ) -> Tensor:
        """1 for each row that new rows' treatment gets right: evaluation mode, with estimated
        batch-norm moments."""
        logits = self.network.outputs(x, features, moments).flatten(1)
        if logits.shape[1] == 1:
            right = (logits[:, 0] > 0) == (labels > 0)
        else:
            right = logits.argmax(1) == labels.long()
        return right.to(logits.dtype)

    def at(self, point: Point, moments: Tensor | None) -> tuple[Tensor, ...]:
        """What a question about accuracy sends along."""
        return tuple(point) if moments is None else (*point, moments)

    def network_moments(self, vectors: tuple[Tensor, ...]) -> Tensor | None:
        """The batch-norm moments, if they were sent along."""
        return vectors[2] if self.network.has_norms else None


def one_hot(numbers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(rows, count): 1 at each row's number; a row whose number is none of them has only zeros."""
    places = torch.arange(count, device=numbers.device)
    return (numbers.unsqueeze(-1) == places).to(dtype)


def worst(names: list[Any], values: list[float]) -> tuple[Any, float]:
    """The least of the values and whose it is."""
    return min(zip(names, values, strict=True), key=lambda pair: pair[1])
