"""What classifiers share: a network with one logit, or one per class, losses and accuracies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedminimax.problems.network import Network, weights_of
from fedminimax.types import Ask, Batch, Point, Problem, Weights


class Classifier(Problem):
    """A problem whose x is the weights of a network; a single logit means two classes, of which a
    label above 0 is the second."""

    monitor = "accuracy"
    larger_is_better = True
    client_weights: Weights = "size"

    def __init__(self, module: nn.Module):
        self.network = Network(module)

    def start_from(self, module: nn.Module) -> Tensor:
        weights = weights_of(module)
        if weights.numel() != self.network.length:
            raise ValueError(
                f"the module to start from has {weights.numel()} weights, the problem's network "
                f"{self.network.length}: give a module of the same architecture"
            )
        return weights

    def module(self, point: Point, moments: Tensor | None = None) -> nn.Module:
        return self.network.module(point.x, moments)

    def moments(self, point: Point, ask: Ask) -> Tensor | None:
        return ask.mean("moments", point.x)[0] if self.network.has_norms else None

    def answer(
        self, question: str, vectors: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, ...]:
        if question == "moments":
            return (self.network.moments(vectors[0], batch.features),)
        return super().answer(question, vectors, batch)

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
