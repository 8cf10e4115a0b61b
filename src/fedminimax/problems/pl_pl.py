"""A test function that is neither convex nor concave, and still has one saddle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedminimax.types import Ask, Batch, Point, Problem


class PLPL(Problem):
    """A nonconvex-nonconcave function that satisfies the PL condition in both players.

        f_k(x, y) = x^2 + 3 sin^2 x sin^2 y - 4 y^2 - 10 sin^2 y + s_k x - t_k y

    summed over coordinates (Yang, Kiyavash and He, NeurIPS 2020, without s and t). A client's rows
    are pairs (s, t) of vectors, the tilt that makes it differ from the others; when the tilts of
    all clients average to 0, the federation's only saddle is (0, 0).
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

    def evaluate(self, point: Point, ask: Ask, moments: Tensor | None = None) -> dict[str, Any]:
        """The loss, and the distance to (0, 0)."""
        away = torch.linalg.vector_norm(torch.cat(tuple(point)))
        return super().evaluate(point, ask) | {"distance": float(away)}
