"""The rows of the methods that estimate whole Jacobians, and the compositions they run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rows import SIZES, Row
from torch import Tensor

from fedminimax.algorithms.nlasg import NLASG
from fedminimax.algorithms.scsc import SCSC
from fedminimax.algorithms.smvr import SMVR
from fedminimax.blocks.schedules import InverseRoot
from fedminimax.data.clients import Clients
from fedminimax.data.returns import Returns
from fedminimax.problems.functions import Composition
from fedminimax.problems.portfolio import Portfolio
from fedminimax.random import generator
from fedminimax.types import Algorithm, Batch, Point, Problem, Query


def _first(x: Tensor, batch: Batch) -> Tensor:
    return batch.mean(torch.tanh(batch.rows[0] @ x))


def _second(h: Tensor, batch: Batch) -> Tensor:
    z = batch.rows[1] @ h
    return batch.mean(z + 0.2 * torch.sin(z))


def _last(z: Tensor, batch: Batch) -> Tensor:
    return batch.mean((z - batch.rows[2]).square().sum(-1)) / 2


def three_levels() -> Composition:
    """Lengths 4, 3 and 2, all levels curved."""
    return Composition([_first, _second, _last], torch.full((4,), 0.3))


def _to_targets(h: Tensor, batch: Batch) -> Tensor:
    return batch.mean((h[:2] * h[1:] - batch.rows[2]).square().sum(-1)) / 2


def two_levels() -> Composition:
    return Composition([_first, _to_targets], torch.full((4,), 0.3))


def map_rows(sizes: tuple[int, ...] = SIZES, spread: float = 0.3, noise: float = 0.3) -> list:
    """Rows (M, S, t) of three_levels, whose centres differ from client to client."""
    random = generator(0, "maps")
    columns = []
    for shape in ((3, 4), (2, 3), (2,)):
        centre = np.eye(*shape) if len(shape) == 2 else np.full(shape, 0.4)
        centre = centre + 0.3 * random.standard_normal(shape)
        own = [centre + spread * random.standard_normal(shape) for _ in sizes]
        columns.append(
            [
                c + noise * random.standard_normal((n, *shape))
                for c, n in zip(own, sizes, strict=True)
            ]
        )
    return list(zip(*columns, strict=True))


def maps() -> Clients:
    return Clients(map_rows(), batch_size=4)


def maps_by_size() -> Clients:
    return Clients(map_rows(), batch_size=4, weights="size")


class Affine(Problem):
    """Two affine maps A x + a and B h + b, and the distance to t: rows (A, a, B, b, t), all of
    length 3, and the minimum in closed form."""

    depth = 3
    monitor = "distance"

    def start(self) -> Point:
        return Point(torch.ones(3), torch.zeros(0))

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        linear, offset = batch.rows[2 * level - 2 : 2 * level]
        return batch.mean(linear @ value + offset)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return batch.mean((value - batch.rows[4]).square().sum(-1)) / 2

    def answer(self, question: str, vectors: Any, batch: Batch) -> tuple[Tensor, ...]:
        if question == "means":
            return tuple(batch.mean(column) for column in batch.rows)
        return super().answer(question, vectors, batch)

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> dict[str, Any]:
        A, a, B, b, t = ask.mean("means")
        best = torch.linalg.solve(A, torch.linalg.solve(B, t - b) - a)
        far = float(torch.linalg.vector_norm(point.x - best))
        return super().evaluate(point, ask) | {"distance": far}


def affine_rows(clients: int = 6, maps_differ: float = 0.0, noise: float = 0.0, rows: int = 1):
    """Clients whose offsets and targets are far apart, and whose maps are if they are to be."""
    random = generator(1, "affine")
    columns = []
    for shape in ((3, 3), (3,), (3, 3), (3,), (3,)):
        square = len(shape) == 2
        centre = np.eye(3) + 0.1 * random.standard_normal(shape) if square else np.zeros(shape)
        own = random.standard_normal((clients, 1, *shape))
        own = centre + (maps_differ if square else 3.0) * (own - own.mean(0))
        columns.append(own + noise * random.standard_normal((clients, rows, *shape)))
    return list(zip(*columns, strict=True))


def same_maps() -> Clients:
    return Clients(affine_rows(), batch_size=None)


def own_maps() -> Clients:
    return Clients(affine_rows(maps_differ=0.1), batch_size=None)


def portfolio() -> Portfolio:
    return Portfolio(4, risk=0.7, budget="sum")


def free_portfolio() -> Portfolio:
    return Portfolio(4, risk=0.7)


def long_portfolio() -> Portfolio:
    return Portfolio(4, budget="long_only")


def portfolio_rows(missing: float = 0.2) -> list[tuple[np.ndarray, ...]]:
    whole = Returns(len(SIZES), 4, max(SIZES), factors=2, spread=0.5, missing=missing).client_rows()
    return [tuple(column[:n] for column in rows) for rows, n in zip(whole, SIZES, strict=True)]


def days() -> Clients:
    return Clients(portfolio_rows(), batch_size=4)


def days_by_size() -> Clients:
    return Clients(portfolio_rows(missing=0.0), batch_size=4, weights="size")


SOME: dict[str, Any] = {"lr": 0.1, "averaging_rate": 0.6, "local_steps": 3}
SMALL: dict[str, Any] = {"lr": 0.02, "averaging_rate": 0.8, "local_steps": 2}
FALLING = {"lr": InverseRoot(0.1), "averaging_rate": InverseRoot(0.9, power=0.3), "local_steps": 2}
DRIFT: dict[str, Any] = {"lr": 0.4, "averaging_rate": 0.5, "local_steps": 4}
FAR: dict[str, Any] = {"problem": Affine, "rounds": 40}
EXACT = {**FAR, "clients": same_maps, "distance": (0.0, 1e-10)}
STALLS = {**FAR, "clients": own_maps, "distance": (1e-2, 1.0)}

# fmt: off
ROWS = (
    Row("smvr", SMVR(**SOME), three_levels, maps),
    Row("smvr-structured", SMVR(**SMALL, sent="structured"), portfolio, days),
    Row("smvr-far", SMVR(**DRIFT), **EXACT),
    Row("smvr-maps", SMVR(**DRIFT), **STALLS),
    Row("scsc", SCSC(**FALLING), two_levels, maps_by_size),
    Row("scsc-portfolio", SCSC(**SMALL), long_portfolio, days),
    Row("scsc-far", SCSC(**DRIFT), **EXACT),
    Row("scsc-maps", SCSC(**DRIFT), **STALLS),
    Row("nlasg", NLASG(**SOME), three_levels, maps),
    Row("nlasg-structured", NLASG(**SMALL, sent="structured"), portfolio, days_by_size),
    Row("nlasg-far", NLASG(**DRIFT), **EXACT),
    Row("nlasg-maps", NLASG(**DRIFT), **STALLS),
)
# fmt: on

# Floats per client and round, up and down: x, and what `extra_floats` adds for the row's levels.
FLOATS: dict[type[Algorithm], Callable[[int, int], tuple[int, int]]] = {
    SMVR: lambda x, y: (x, x),
    SCSC: lambda x, y: (x, x),
    NLASG: lambda x, y: (x, x),
}


def level_lengths(problem: Problem, clients: Clients) -> list[int]:
    """Those of x and of what the levels before the last return."""
    batch, values = clients.train.batch(0), [problem.start().x.double()]
    for level in range(1, problem.depth):
        values.append(problem.inner(level, values[-1], batch))
    return [value.numel() for value in values]


def extra_floats(row: Row, round: int) -> tuple[int, int]:
    """The inner values and the Jacobians, which the first round does not send down."""
    if type(row.algorithm) not in FLOATS:
        return 0, 0
    problem = row.problem()
    if isinstance(problem, Portfolio):
        d = problem.dimension
        first, second = (d + 1) * d, 2 * (d + 1)
        if row.algorithm.sent == "structured":  # type: ignore[attr-defined]
            first, second = first if problem.budget == "long_only" else d, d + 1
        estimates = (d + 1) + 2 + first + second + 2
    else:
        lengths = level_lengths(problem, row.clients())
        matrices = sum(a * b for a, b in zip(lengths[1:], lengths[:-1], strict=True))
        estimates = sum(lengths[1:]) + matrices + lengths[-1]
    return estimates, estimates if round else 0
