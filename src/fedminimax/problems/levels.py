"""A composition of K levels whose minimum is known for any difference between clients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedminimax.metrics.optimality import Full
from fedminimax.types import Batch, Measures, Point, Problem, Query


class Levels(Problem):
    """A composition of any depth with heterogeneous levels, solved exactly by x = (1, ..., 1).

    With e = u - (1, ..., 1, 0), the distance of a level's input from the solution, and every
    function of e taken coordinate by coordinate, client n has

        F_n^(k)(u) = (1, ..., 1, 0) + g(e) + A_n^(k) phi(e) + b_n^(k)          k = 1 .. K - 1
        F_n^(K)(u) = |w|^2 / 2  -  b_n^(K)'e  +  pull * s                      e = (w, s)

        phi(e) = sin e + 1 - cos e,      g(e) = ( e + bend * phi(e) ) / ( 1 + bend )

    x has `dimension` coordinates and enters level 1 with a last coordinate of 0; inner values have
    one more. A row holds (A, b), and a client's A and b are the means of its rows: since they enter
    linearly and average to 0 over clients (`LevelsData`, all clients weighing the same), every mean
    level is that with A = b = 0. Its g is increasing, so x = (1, ..., 1) is the only stationary
    point, and the minimum there is 0: the loss is the excess over it. At the solution the mean
    Jacobians are the identity, and so is the Hessian, at every depth.

    A_n^(k) makes the Jacobians of clients differ, and b_n^(k) their values. Unless the data draw
    them as `independent`, a single number per client determines the matrices and offsets of all its
    levels, which gives the largest bias. The last coordinate s of the inner values is 0 in the
    mean. The gradient of the last level at the solution is (0, ..., 0, pull).

    A method that evaluates a level at a client's own value, and averages afterwards, has a bias
    that does not vanish: the covariances over clients of the Jacobian of a level with the value of
    the level before it, and with the gradient that is multiplied by it. If the Jacobians do not
    differ, both are 0, and what remains is the curvature of the mean levels times the spread of the
    values, which shrinks with the recursion rate and is 0 with `bend` 0. If the values do not
    differ, both are 0 at the solution, unless `pull` is not 0.

    Arguments:
        dimension: the length of x.
        depth: K.
        bend: how far the mean levels are from linear, from 0 to 0.7.
        pull: the last coordinate of the gradient of the last level at the solution.
        x0: where every coordinate of x starts.
    """

    monitor = "slope"

    def __init__(
        self,
        dimension: int,
        depth: int = 3,
        bend: float = 0.3,
        pull: float = 0.0,
        x0: float = 0.0,
    ):
        for name, given in (("dimension", dimension), ("depth", depth)):
            if type(given) is not int or given < 1:
                raise ValueError(f"{name} is {given!r}; give a whole number of at least 1")
        for name, number in (("pull", pull), ("x0", x0)):
            if not (isinstance(number, int | float) and math.isfinite(number)):
                raise ValueError(f"{name} is {number!r}; give a finite number")
        if not (isinstance(bend, int | float) and 0 <= bend <= 0.7):
            raise ValueError(
                f"bend is {bend!r}; give a number between 0 and 0.7: beyond, the mean levels are "
                "not increasing and the minimum is not the only stationary point"
            )
        self.dimension, self.depth = dimension, depth
        self.bend, self.pull, self.x0 = bend, pull, x0

    def start(self) -> Point:
        return Point(torch.full((self.dimension,), self.x0), torch.zeros(0))

    def solution(self, like: Tensor) -> Tensor:
        """(1, ..., 1), in the type and on the device of `like`."""
        return torch.ones_like(like[: self.dimension])

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        if not 0 < level < self.depth:
            return super().inner(level, value, batch)
        matrices, offsets = self._means(level, batch)
        around = torch.cat([self.solution(value), value.new_zeros(1)])
        if level == 1:
            value = torch.cat([value, value.new_zeros(1)])
        away = value - around
        bent = torch.sin(away) + 1 - torch.cos(away)
        mean = (away + self.bend * bent) / (1 + self.bend)
        return around + mean + matrices @ bent + offsets

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        _, tilt = self._means(self.depth, batch)
        away, last = value[: self.dimension] - 1, value[self.dimension :]
        tilted = tilt[: self.dimension] @ away + tilt[self.dimension : len(value)] @ last
        return away @ away / 2 - tilted + self.pull * last.sum()

    def _means(self, level: int, batch: Batch) -> tuple[Tensor, Tensor]:
        matrices, offsets = batch.rows
        if offsets.shape[1:] != (self.depth, self.dimension + 1):
            levels, size = offsets.shape[1:]
            raise ValueError(
                f"the rows are for {levels} levels and dimension {size - 1}, the problem has depth "
                f"{self.depth} and dimension {self.dimension}: give both the same"
            )
        # The last level has an offset and no matrix.
        return batch.mean(matrices[:, level - 1 : level]).sum(0), batch.mean(offsets[:, level - 1])

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        """The federation's loss, the length of its gradient, and the distance to the solution."""
        full = Full(self, ask)
        slope = torch.linalg.vector_norm(full.gradients(point).x)
        distance = torch.linalg.vector_norm(point.x - self.solution(point.x))
        return {"loss": full.value(point), "slope": float(slope), "distance": float(distance)}
