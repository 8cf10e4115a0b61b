"""A nonconvex-nonconcave test function with a single saddle."""

from __future__ import annotations

import torch
from torch import Tensor

from fedminimax.types import Batch, Measures, Point, Problem, Query


class PLPL(Problem):
    """A nonconvex-nonconcave function that satisfies the Polyak-Lojasiewicz condition in x and y.

        f_k(x, y) = x^2 + 3 sin^2 x sin^2 y - 4 y^2 - 10 sin^2 y + s_k x - t_k y

    summed over coordinates (Yang, Kiyavash and He, NeurIPS 2020, without s and t). A client's rows
    are pairs (s, t) of vectors, which make it differ from the others. If they average to 0 over
    clients, the federation's only saddle is (0, 0).

    Arguments:
        dimension: the length of x, and of y.
        x0, y0: where every coordinate starts.
    """

    monitor = "distance"

    def __init__(self, dimension: int = 1, x0: float = 2.0, y0: float = 2.0):
        if dimension < 1:
            raise ValueError(f"dimension is {dimension}; give at least 1")
        self.dimension, self.x0, self.y0 = dimension, x0, y0

    def start(self) -> Point:
        return Point(torch.full((self.dimension,), self.x0), torch.full((self.dimension,), self.y0))

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        s, t = (batch.mean(column) for column in batch.rows)
        sin2_x, sin2_y = torch.sin(value) ** 2, torch.sin(y) ** 2
        common = value**2 + 3 * sin2_x * sin2_y - 4 * y**2 - 10 * sin2_y
        return common.sum() + s @ value - t @ y

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        """The loss, and the distance to (0, 0)."""
        away = torch.linalg.vector_norm(torch.cat(tuple(point)))
        return super().evaluate(point, ask) | {"distance": float(away)}
