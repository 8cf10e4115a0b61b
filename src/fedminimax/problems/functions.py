"""Problems written as plain functions of vectors and a batch: a newcomer's objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedminimax.types import Batch, Point, Problem


def _identity(v: Tensor) -> Tensor:
    return v


class Minimax(Problem):
    """min over x, max over y of the mean over clients of f(x, y, batch); without `y0` a
    minimisation.

    >>> from fedminimax.blocks.projections import simplex
    >>> problem = Minimax(lambda x, y, batch: y @ batch.mean((batch.rows[0] - x) ** 2),
    ...                   x0=torch.zeros(2), y0=torch.full((2,), 0.5), project_y=simplex)
    >>> problem.start().y
    tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor, Batch], Tensor],
        x0: Any,
        y0: Any = (),
        project_x: Callable[[Tensor], Tensor] = _identity,
        project_y: Callable[[Tensor], Tensor] = _identity,
    ):
        self.function = function
        self._start = Point(_vector("x0", x0), _vector("y0", y0))
        self.project_x, self.project_y = project_x, project_y
        if self._start.y.numel() and project_y(self._start.y).shape != self._start.y.shape:
            raise ValueError(
                f"project_y returns a vector of another length than y0 ({self._start.y.numel()}): "
                "give a projection onto a set of vectors of that length"
            )

    def start(self) -> Point:
        return self._start

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return self.function(value, y, batch)


class Composition(Problem):
    """min over x of F_K( ... F_1(x)), each F_k a mean over clients; with `y0`, the last level also
    takes y and is maximised.

    >>> scale = lambda x, batch: batch.mean(batch.rows[0]) * x
    >>> square = lambda v, batch: (v ** 2).sum()
    >>> Composition([scale, square], x0=torch.ones(3)).depth
    2
    """

    def __init__(
        self,
        levels: Sequence[Callable[..., Tensor]],
        x0: Any,
        y0: Any = None,
        project_x: Callable[[Tensor], Tensor] = _identity,
        project_y: Callable[[Tensor], Tensor] = _identity,
    ):
        if not levels:
            raise ValueError("a composition of no levels: give at least one function")
        self.levels = tuple(levels)
        self.depth = len(self.levels)
        self._dual = y0 is not None
        self._start = Point(_vector("x0", x0), _vector("y0", () if y0 is None else y0))
        self.project_x, self.project_y = project_x, project_y

    def start(self) -> Point:
        return self._start

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        return self.levels[level - 1](value, batch)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return self.levels[-1](value, y, batch) if self._dual else self.levels[-1](value, batch)


def _vector(name: str, values: Any) -> Tensor:
    vector = torch.as_tensor(values).detach().clone()
    if vector.numel() == 0:
        vector = vector.reshape(0)
    if vector.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; give a vector (use .flatten())")
    return vector if vector.is_floating_point() else vector.to(torch.get_default_dtype())
