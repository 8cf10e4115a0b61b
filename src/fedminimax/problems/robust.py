"""Robust training: a network against one perturbation that is added to every input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedminimax.blocks.projections import ball
from fedminimax.problems._classifier import Classifier
from fedminimax.problems.questions import counts
from fedminimax.types import AnswerCheck, Ask, Batch, Point


class Robust(Classifier):
    """Robust network: min over network weights, max over one shared perturbation in a ball.

        min over x, max over |y| <= radius of the mean cross-entropy of network(x; input + y)

    (Deng and Mahdavi 2021; papers/adafgda.txt, eq. 14, which prints a square and no projection.)
    y has the length of one input, whose shape is `shape`; it starts at 0 and methods project it
    onto the Euclidean ball after every move. Measures: accuracy on clean inputs (`accuracy`) and
    on inputs moved by the server's y (`perturbed_accuracy`).
    """

    checks: ClassVar[Mapping[str, AnswerCheck]] = {
        **Classifier.checks,
        # Three counts of the same rows.
        "right": lambda reply, rows: counts(tuple(reply[0]), rows),
    }

    def __init__(self, module: nn.Module, shape: tuple[int, ...], radius: float = 1.0):
        super().__init__(module)
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

    def moved(self, y: Tensor, features: Tensor) -> Tensor:
        if tuple(features.shape[1:]) != self.shape:
            raise ValueError(
                f"inputs have shape {tuple(features.shape[1:])}, but the perturbation has "
                f"{self.shape}: give the problem the shape of one input"
            )
        return features + y.reshape(self.shape)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return batch.mean(self.losses(value, self.moved(y, batch.features), batch))

    def answer(
        self, question: str, vectors: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, ...]:
        if question != "right":
            return super().answer(question, vectors, batch)
        x, y, moments = vectors[0], vectors[1], self.network_moments(vectors)
        inputs = (batch.features, self.moved(y, batch.features))
        right = [self.correct(x, moments, rows, batch.labels).sum() for rows in inputs]
        return (torch.stack([*right, right[0].new_tensor(len(batch.labels))]),)

    def evaluate(self, point: Point, ask: Ask, moments: Tensor | None = None) -> dict[str, Any]:
        (counts,) = ask.sum("right", *self.at(point, moments))
        clean, perturbed, rows = counts.tolist()
        return super().evaluate(point, ask, moments) | {
            "accuracy": clean / rows,
            "perturbed_accuracy": perturbed / rows,
            "perturbation": float(torch.linalg.vector_norm(point.y)),
        }
