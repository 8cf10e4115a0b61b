"""What the methods for compositions share: the levels of a problem on one batch, and the first
estimates that a client makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fedminimax.problems.gradients import (
    gradients,
    inner_jacobian,
    inner_value,
    pullback,
    value_and_pull,
)
from fedminimax.types import Draw, Point, Problem

Pull = Callable[[Tensor], Tensor]  # a vector -> the transposed Jacobian times it


class SampledLevels(NamedTuple):
    """F_1 ... F_K, each on its own rows of a batch."""

    problem: Problem
    batch: Draw

    def value(self, level: int, at: Tensor) -> Tensor:
        return inner_value(self.problem, level, at, self.batch[level - 1])

    def value_and_pull(self, level: int, at: Tensor) -> tuple[Tensor, Pull]:
        return value_and_pull(self.problem, level, at, self.batch[level - 1])

    def pull(self, level: int, at: Tensor, vector: Tensor) -> Tensor:
        """The transposed Jacobian of F_level, times a vector."""
        return pullback(self.problem, level, at, vector, self.batch[level - 1])

    def value_and_jacobian(self, level: int, at: Tensor) -> tuple[Tensor, Tensor]:
        return inner_jacobian(self.problem, level, at, self.batch[level - 1])

    def slopes(self, at: Tensor, y: Tensor) -> Point:
        """The gradients of F_K in its input and in y."""
        return gradients(self.problem, Point(at, y), self.batch[-1:])

    def slope(self, at: Tensor) -> Tensor:
        """The gradient of F_K, where it has no y."""
        return self.slopes(at, at[:0]).x


def first_estimates(
    problem: Problem, point: Point, batch: Draw
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """A client's own estimates, on one batch: the value of each level but the last; the gradient in
    what each level is given, the first of which is x; the gradient in y."""
    F, inputs = SampledLevels(problem, batch), [point.x]
    pulls: list[Pull] = []
    for k in range(1, problem.depth):
        value, pull = F.value_and_pull(k, inputs[-1])
        inputs.append(value)
        pulls.append(pull)
    slope = F.slopes(inputs[-1], point.y)
    momentum = [slope.x]
    for pull in reversed(pulls):
        momentum.insert(0, pull(momentum[0]))
    return tuple(inputs[1:]), tuple(momentum), slope.y


def pull_back(pulls: Sequence[Pull], vector: Tensor) -> Tensor:
    """J_1^T ... J_(K-1)^T vector"""
    for pull in reversed(pulls):
        vector = pull(vector)
    return vector
