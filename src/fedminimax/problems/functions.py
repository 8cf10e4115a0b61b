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
        _check_sets(self)

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
        if callable(levels):
            raise ValueError(
                "levels is one function; give a list of them, level 1 first: Composition([f], x0) "
                "has one level"
            )
        if not levels:
            raise ValueError("a composition of no levels: give at least one function")
        self.levels = tuple(levels)
        self.depth = len(self.levels)
        self._dual = y0 is not None
        self._start = Point(_vector("x0", x0), _vector("y0", () if y0 is None else y0))
        self.project_x, self.project_y = project_x, project_y
        _check_sets(self)

    def start(self) -> Point:
        return self._start

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        return self.levels[level - 1](value, batch)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return self.levels[-1](value, y, batch) if self._dual else self.levels[-1](value, batch)


def _check_sets(problem: Problem) -> None:
    """A set of vectors of another length would be found out in the middle of a step."""
    for name, vector in problem.start()._asdict().items():
        if not vector.numel():
            continue
        reason = None
        try:
            if getattr(problem, f"project_{name}")(vector).shape == vector.shape:
                continue
        except RuntimeError as error:  # tensors of two lengths met
            reason = error
        raise ValueError(
            f"project_{name} returns no vector of the length of {name}0 ({vector.numel()}): give a "
            "projection onto a set of vectors of that length"
        ) from reason


def _vector(name: str, values: Any) -> Tensor:
    vector = torch.as_tensor(values).detach().clone()
    if vector.numel() == 0:
        vector = vector.reshape(0)
    if vector.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; give a vector (use .flatten())")
    return vector if vector.is_floating_point() else vector.to(torch.get_default_dtype())
