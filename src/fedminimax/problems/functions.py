"""Problems given as plain functions of vectors and a batch: the quickest way to an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedminimax.types import Batch, Point, Problem

Projection = Callable[[Tensor], Tensor]


def _identity(v: Tensor) -> Tensor:
    return v


class Minimax(Problem):
    """min over x, max over y of the mean over clients of f(x, y, batch).

    Arguments:
        function: f, which returns a number; `batch.mean` averages over rows.
        x0: where x starts, a vector.
        y0: where y starts; without it the problem is a minimisation.
        project_x, project_y: the projections onto the sets of x and y, such as `fm.simplex`.

    >>> from fedminimax.blocks.projections import simplex
    >>> problem = Minimax(lambda x, y, batch: y @ batch.mean((batch.rows[0] - x) ** 2),
    ...                   x0=torch.zeros(2), y0=torch.full((2,), 0.5), project_y=simplex)
    >>> problem.start().y
    tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor, Batch], Tensor],
        x0: Tensor | ArrayLike,
        y0: Tensor | ArrayLike = (),
        project_x: Projection = _identity,
        project_y: Projection = _identity,
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
    """min over x of F_K( ... F_1(x)), each F_k a mean over clients.

    Arguments:
        levels: F_1 to F_K, functions of (vector, batch); all but the last return a vector.
        x0: where x starts, a vector.
        y0: where y starts. With it the last level is a function of (vector, y, batch), and is
            maximised over y.
        project_x, project_y: the projections onto the sets of x and y, such as `fm.simplex`.

    >>> scale = lambda x, batch: batch.mean(batch.rows[0]) * x
    >>> square = lambda v, batch: (v ** 2).sum()
    >>> Composition([scale, square], x0=torch.ones(3)).depth
    2
    """

    def __init__(
        self,
        levels: Sequence[Callable[..., Tensor]],
        x0: Tensor | ArrayLike,
        y0: Tensor | ArrayLike | None = None,
        project_x: Projection = _identity,
        project_y: Projection = _identity,
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
    """Refuses a projection that does not fit x0 or y0, before a step would fail in it."""
    for name, vector in problem.start()._asdict().items():
        if not vector.numel():
            continue
        reason = None
        try:
            if getattr(problem, f"project_{name}")(vector).shape == vector.shape:
                continue
        except RuntimeError as error:  # the lengths of two tensors differ
            reason = error
        raise ValueError(
            f"project_{name} returns no vector of the length of {name}0 ({vector.numel()}): give a "
            "projection onto a set of vectors of that length"
        ) from reason


def _vector(name: str, values: Tensor | ArrayLike) -> Tensor:
    vector = torch.as_tensor(values).detach().clone()
    if vector.numel() == 0:
        vector = vector.reshape(0)
    if vector.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; give a vector (use .flatten())")
    return vector if vector.is_floating_point() else vector.to(torch.get_default_dtype())
