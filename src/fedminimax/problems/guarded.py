"""What a step is given in place of its problem, where rows may be asked in one way only."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

from torch import Tensor

from fedminimax.types import Batch, Point, Problem


class Guarded(Problem):
    """A problem whose rows are reached through the functions of problems/gradients.py alone.

    Sets, starts and structures, which no row changes, are those of the problem itself.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.depth, self.maximised = problem.depth, problem.maximised

    @property
    def sweep_gradients(self) -> int:
        return self.problem.sweep_gradients

    def start(self) -> Point:
        return self.problem.start()

    def project_x(self, x: Tensor, /) -> Tensor:
        return self.problem.project_x(x)

    def project_y(self, y: Tensor, /) -> Tensor:
        return self.problem.project_y(y)

    def jacobian_structure(self, level: int) -> tuple[Tensor, Tensor] | None:
        """None: with noise, no entry is known."""
        return None

    def inner(self, level: int, value: Tensor, batch: Batch) -> NoReturn:
        self._refuse("inner", "inner_value")

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> NoReturn:
        self._refuse("outer", "outer_value")

    def dual_statistics(self, x: Tensor, batch: Batch) -> NoReturn:
        self._refuse("dual_statistics", "dual_statistics")

    def answer(self, question: str, vectors: Any, batch: Batch) -> NoReturn:
        self._refuse(f"the question {question!r}", "gradients")

    def _refuse(self, what: str, function: str) -> NoReturn:
        raise ValueError(
            f"the method asks {type(self.problem).__name__} for {what} past the oracle, where a "
            f"row would be seen without noise: use {function} of fedminimax.extend"
        )

    @abstractmethod
    def gradients(self, point: Point, batch: Batch, dual_at: Tensor | None = None) -> Point:
        """As the function of this name."""

    @abstractmethod
    def outer_value(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """As the function of this name."""

    @abstractmethod
    def row_statistics(self, x: Tensor, batch: Batch) -> Tensor:
        """As the function `dual_statistics`."""

    @abstractmethod
    def class_slopes(self, copies: Tensor, batch: Batch) -> Tensor:
        """As the function of this name."""

    @abstractmethod
    def inner_value(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        """As the function of this name."""

    @abstractmethod
    def pullback(self, level: int, value: Tensor, vector: Tensor, batch: Batch) -> Tensor:
        """As the function of this name."""

    @abstractmethod
    def jacobian(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        """The Jacobian of F_level at `value`."""
