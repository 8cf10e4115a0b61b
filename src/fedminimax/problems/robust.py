"""Robust training: a network against the worst shift that is added to every input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from fedminimax.blocks.projections import ball
from fedminimax.problems.classifier import Classifier, one_hot
from fedminimax.problems.questions import counts
from fedminimax.types import AnswerCheck, Batch, Measures, Point, Query, Vectors

Loss = Literal["cross_entropy", "square"]


class Robust(Classifier):
    """Robust network: min over network weights, max over one shared perturbation in a ball.

        min over x, max over |y| <= radius of the mean loss of network(x; input + y)

    (Deng and Mahdavi, Local Stochastic Gradient Descent Ascent, AISTATS 2021; AdaFGDA paper, eq.
    14, which prints no projection.) y starts at 0, and methods project it onto the Euclidean ball
    after every step. Measures: accuracy on clean inputs (`accuracy`) and on inputs shifted by the
    server's y (`perturbed_accuracy`).

    Arguments:
        module: the network, as in `Classifier`.
        shape: the shape of one input, which is also that of y.
        radius: the largest |y|.
        loss: "cross_entropy", or "square" as the AdaFGDA paper prints it: the sum over outputs of
            their squared distances to the label, 1 at the label's class and 0 elsewhere; of a
            single output, to 0 or 1.
    """

    checks: ClassVar[Mapping[str, AnswerCheck]] = {
        **Classifier.checks,
        # Three counts of the same rows.
        "right": lambda reply, rows: counts(tuple(reply[0]), rows),
    }

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        radius: float = 1.0,
        loss: Loss = "cross_entropy",
    ):
        super().__init__(module)
        if loss not in get_args(Loss):
            raise ValueError(f'loss is {loss!r}; give "cross_entropy" or "square"')
        self.loss = loss
        self.shape, self.radius = tuple(shape), radius
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape is {shape}; give the shape of one input, such as (1, 28, 28)")
        if not 0 < radius < math.inf:
            raise ValueError(f"radius is {radius!r}; give a number above 0")
        self._project = ball(radius)

    def start(self) -> Point:
        weights = self.network.start()
        return Point(weights, weights.new_zeros(math.prod(self.shape)))

    def project_y(self, y: Tensor, /) -> Tensor:
        return self._project(y)

    def shift(self, y: Tensor, features: Tensor) -> Tensor:
        """The inputs, shifted by y."""
        if tuple(features.shape[1:]) != self.shape:
            raise ValueError(
                f"inputs have shape {tuple(features.shape[1:])}, but the perturbation has "
                f"{self.shape}: give the problem the shape of one input"
            )
        return features + y.reshape(self.shape)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return batch.mean(self.losses(value, self.shift(y, batch.features), batch))

    def losses(self, x: Tensor, features: Tensor, batch: Batch) -> Tensor:
        if self.loss == "cross_entropy":
            return super().losses(x, features, batch)
        outputs = self.network(x, features, batch).flatten(1)
        if outputs.shape[1] == 1:
            target = (batch.labels > 0).to(outputs.dtype).unsqueeze(1)
        else:
            target = one_hot(batch.labels.long(), outputs.shape[1], outputs.dtype)
        return (outputs - target).square().sum(1)

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question != "right":
            return super().answer(question, vectors, batch)
        x, y, moments = vectors[0], vectors[1], self.network_moments(vectors)
        inputs = (batch.features, self.shift(y, batch.features))
        right = [self.correct(x, moments, rows, batch.labels).sum() for rows in inputs]
        return (torch.stack([*right, right[0].new_tensor(len(batch.labels))]),)

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        (counts,) = ask.sum("right", *self.at(point, moments))
        clean, perturbed, rows = counts.tolist()
        return super().evaluate(point, ask, moments) | {
            "accuracy": clean / rows,
            "perturbed_accuracy": perturbed / rows,
            "perturbation": float(torch.linalg.vector_norm(point.y)),
        }
