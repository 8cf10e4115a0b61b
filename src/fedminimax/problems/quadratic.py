"""The quadratic saddle problem of the AdaFGDA paper, whose solution has a closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from fedminimax.types import Batch, Measures, Point, Problem, Query, Vectors


class Quadratic(Problem):
    """The heterogeneous quadratic saddle of the AdaFGDA paper (eq. 12), solved in closed form.

        f_k(x, y) = tau/2 |x|^2 - ( |y|^2/2 - b_k'y + t_k y'x )

    A client's rows are pairs (t, b), whose means are its t_k and b_k. The spread of the b_k is the
    heterogeneity. Measures: distances to the saddle.

    Arguments:
        dimension: the length of x, and of y.
        tau: the curvature in x.
        x0, y0: where every coordinate starts.
    """

    monitor = "distance"

    def __init__(self, dimension: int, tau: float = 10.0, x0: float = 1.0, y0: float = 1.0):
        if dimension < 1 or not tau > 0:
            raise ValueError(
                f"dimension is {dimension} and tau {tau}; give at least 1, and a number above 0"
            )
        self.dimension, self.tau, self.x0, self.y0 = dimension, tau, x0, y0

    def start(self) -> Point:
        return Point(torch.full((self.dimension,), self.x0), torch.full((self.dimension,), self.y0))

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        t, b = (batch.mean(column) for column in batch.rows)
        return self.tau / 2 * value @ value - (y @ y / 2 - b @ y + t * (y @ value))

    def dual_statistics(self, x: Tensor, batch: Batch) -> Tensor:
        t, b = (batch.mean(column) for column in batch.rows)
        return b - t * x

    def dual_from(self, mean: Tensor) -> Tensor:
        return mean

    def saddle(self, t: Tensor, b: Tensor) -> Point:
        """The solution when the weighted means over clients are t and b."""
        y = b / (1 + t * t / self.tau)
        return Point(t * y / self.tau, y)

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question == "means":
            return tuple(batch.mean(column) for column in batch.rows)
        return super().answer(question, vectors, batch)

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        """The loss, the distance to the exact saddle, and the squared distances of x and y."""
        best = self.saddle(*ask.mean("means"))
        x, y = ((p - q).square().sum() for p, q in zip(point, best, strict=True))
        measures = {"distance": (x + y).sqrt(), "distance_x2": x, "distance_y2": y}
        return super().evaluate(point, ask) | {
            name: float(value) for name, value in measures.items()
        }
