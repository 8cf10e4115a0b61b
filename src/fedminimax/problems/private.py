"""The oracle with privacy for rows: what each row adds is clipped, and the mean gets noise.

Every answer is a release: a mean over n rows, of which each adds a vector of at most a given
length, with Gaussian noise of `noise` times that length over n. With n public, a row that is
replaced by an empty one moves the mean by at most length / n. What the method makes of releases
costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedminimax.privacy.noise import Noise, Normal, Seeded
from fedminimax.problems import gradients as exact
from fedminimax.problems.guarded import Guarded
from fedminimax.types import Batch, Clock, Point, Problem

_NUMBERS = 1 << 24  # that the rows of a batch have at once; larger batches go in parts
_FEW = 32  # rows that go together, whatever they take
Released = tuple[Tensor, ...]


@dataclass(frozen=True)
class Oracle:
    """How rows are asked in a run.

    row_clip: the length that a row's gradient is cut to. dual_scale: by which its part in y is
    multiplied before. noise: the multiplier of each client, or one for all. source: where noise
    comes from. limit: how many releases of each level a step may make; None: they are only counted.
    """

    row_clip: float
    dual_scale: float = 1.0
    noise: float | tuple[float, ...] = 0.0
    source: Noise = Seeded(0)
    limit: tuple[int, ...] | None = None

    def with_limit(self, limit: tuple[int, ...]) -> Oracle:
        return replace(self, limit=limit)

    def private(self, problem: Problem, clock: Clock, begins: bool = False) -> Private:
        """What a step at that time is given in place of its problem."""
        noise = self.noise
        if isinstance(noise, tuple):
            noise = torch.tensor(noise, device=clock.client.device)[clock.client.long()]
        return Private(problem, self, noise, self.source.at(clock, begins))


class Private(Guarded):
    """A problem as one step of one client sees it, or of all clients under vmap."""

    def __init__(self, problem: Problem, oracle: Oracle, noise: Any, normal: Normal):
        super().__init__(problem)
        self.oracle, self.noise, self.normal = oracle, noise, normal
        self.releases = [0] * problem.depth  # of each level, in this step

    def gradients(self, point: Point, batch: Batch, dual_at: Tensor | None = None) -> Point:
        def of_row(row: Batch) -> Released:
            return tuple(exact.gradients(self.problem, point, (row,), dual_at))

        clip, scales = self.oracle.row_clip, (1.0, self.oracle.dual_scale)
        return Point(*self._release(self.depth, of_row, batch, clip, scales))

    def outer_value(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        def of_row(row: Batch) -> Released:
            return (self.problem.outer(value, y, row).reshape(1),)

        return self._release(self.depth, of_row, batch)[0].reshape(())

    def row_statistics(self, x: Tensor, batch: Batch) -> Tensor:
        def of_row(row: Batch) -> Released:
            return (self.problem.dual_statistics(x, row),)

        return self._release(self.depth, of_row, batch)[0]

    def class_slopes(self, copies: Tensor, batch: Batch) -> Tensor:
        self._refuse("class_slopes", "gradients")

    def inner_value(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        def of_row(row: Batch) -> Released:
            return (self._own(level, value, row),)

        found = self._release(level, of_row, batch, self._clip(level))[0]
        known = self.problem.reference(level, value)
        return found if known is None else known + found

    def pullback(self, level: int, value: Tensor, vector: Tensor, batch: Batch) -> Tensor:
        def of_row(row: Batch) -> Released:
            return torch.func.vjp(lambda v: self._own(level, v, row), value)[1](vector)

        # The vector is no secret: it was released, or is made of what was.
        clip = self._clip(level) * vector.norm()
        found = self._release(level, of_row, batch, clip)[0]
        if self.problem.reference(level, value) is None:
            return found
        known = torch.func.vjp(lambda v: self._know(level, v), value)[1](vector)[0]
        return known + found

    def jacobian(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        def of_row(row: Batch) -> Released:
            return (torch.func.jacrev(lambda v: self._own(level, v, row))(value),)

        found = self._release(level, of_row, batch, self._clip(level))[0]
        if self.problem.reference(level, value) is None:
            return found
        return torch.func.jacrev(lambda v: self._know(level, v))(value) + found

    def _clip(self, level: int) -> float:
        return self.oracle.row_clip * self.problem.row_scale(level)

    def _know(self, level: int, value: Tensor) -> Tensor:
        known = self.problem.reference(level, value)
        assert known is not None
        return known

    def _own(self, level: int, value: Tensor, row: Batch) -> Tensor:
        """What a row makes of the level, less what is known without it."""
        found, known = self.problem.inner(level, value, row), self.problem.reference(level, value)
        return found if known is None else found - known

    def _release(
        self,
        level: int,
        of_row: Callable[[Batch], Released],
        batch: Batch,
        clip: float | Tensor | None = None,
        scales: Sequence[float] | None = None,
    ) -> Released:
        """The mean over rows of clipped vectors, in parts that each have a scale, with noise."""
        call = self._count(level)
        clip = self.oracle.row_clip if clip is None else clip
        total = clipped_sum(of_row, batch, clip, scales)
        spread = self.noise * clip * batch.weight.amax()
        sizes = [part.numel() for part in total]
        noise = self.normal(call, torch.cat([part.reshape(-1) for part in total])).split(sizes)
        return tuple(
            part + (spread * own / scale).reshape(part.shape).to(part)
            for part, own, scale in zip(total, noise, scales or (1.0,) * len(total), strict=True)
        )

    def _count(self, level: int) -> int:
        self.releases[level - 1] += 1
        limit = self.oracle.limit
        if limit is not None and self.releases[level - 1] > limit[level - 1]:
            raise ValueError(
                f"a step asks level {level} of {type(self.problem).__name__} more than "
                f"{limit[level - 1]} times, as often as was counted for the budget: a method must "
                "not ask more often for some values than for others"
            )
        return sum(self.releases)


def clipped_sum(
    of_row: Callable[[Batch], Released],
    batch: Batch,
    clip: float | Tensor,
    scales: Sequence[float] | None = None,
) -> Released:
    """The weighted sum over rows of what `of_row` makes of each, cut to the length `clip`.

    A row whose vector is not finite adds nothing: it is as good as an empty one.
    """

    def contribution(columns: tuple[Tensor, ...], weight: Tensor) -> Released:
        row = Batch(tuple(c.unsqueeze(0) for c in columns), weight.new_ones(1), weight.new_ones(0))
        parts = of_row(row)
        own = scales or (1.0,) * len(parts)
        squares = [(part * s).square().sum() for part, s in zip(parts, own, strict=True)]
        length = torch.stack(squares).sum().sqrt()
        factor = weight * torch.where(length > clip, clip / length, torch.ones_like(length))
        finite = torch.isfinite(length)
        return tuple(torch.where(finite, factor.to(part) * part, 0.0) for part in parts)

    form = torch.func.vmap(contribution)
    total: Released | None = None
    for columns, weight in _parts(batch, of_row):
        part = tuple(v.sum(0) for v in form(columns, weight))
        total = part if total is None else tuple(a + b for a, b in zip(total, part, strict=True))
    assert total is not None
    return total


def _parts(batch: Batch, of_row: Callable[[Batch], Released]) -> Any:
    """The rows and their weights, as many at a time as memory is good for."""
    count = len(batch.weight)
    row = Batch(tuple(c[:1] for c in batch.rows), batch.weight[:1], batch.weight[:0])
    size = count
    if count > _FEW and not exact.is_transformed():
        numbers = sum(part.numel() for part in of_row(row))
        size = max(_FEW, min(count, _NUMBERS // max(1, numbers)))
    for first in range(0, count, size):
        columns = tuple(column[first : first + size] for column in batch.rows)
        yield columns, batch.weight[first : first + size]
