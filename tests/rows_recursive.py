"""Rows of the doubly recursive methods, and the compositions that they run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rows import SIZES, Row
from torch import Tensor

from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.fed_dr_scgda import FedDRSCGDA
from fedminimax.algorithms.levelwise_dr_scgd import LevelwiseDRSCGD
from fedminimax.algorithms.levelwise_dr_scgda import LevelwiseDRSCGDA
from fedminimax.blocks.projections import ball
from fedminimax.blocks.schedules import InverseRoot, StepDecay
from fedminimax.data.clients import Clients
from fedminimax.problems.functions import Composition
from fedminimax.random import generator
from fedminimax.types import Algorithm, Batch

WIDTHS = (4, 3, 2, 3, 2)  # of x and of the values of the levels before the last, up to depth 5


def composed_rows(
    sizes: tuple[int, ...] = SIZES, spread: float = 0.3, noise: float = 0.3, seed: int = 1
) -> list[tuple]:
    """Rows (a matrix for each level, a target of each width), whose means differ from client to
    client by `spread` and whose rows differ by `noise`."""
    random = generator(seed, "composed")
    matrices = [np.eye(b, a) + 0.3 * random.standard_normal((b, a)) for a, b in pairwise(WIDTHS)]
    centres = [*matrices, *(0.4 * random.standard_normal(width) for width in WIDTHS)]

    def column(centre: np.ndarray, size: int) -> np.ndarray:
        own = centre + spread * random.standard_normal(centre.shape)
        return own + noise * random.standard_normal((size, *centre.shape))

    return [tuple(column(centre, size) for centre in centres) for size in sizes]


def composed() -> Clients:
    return Clients(composed_rows(), batch_size=4)


def composed_by_size() -> Clients:
    return Clients(composed_rows(), batch_size=4, weights="size")


def composed_whole() -> Clients:
    return Clients(composed_rows(), batch_size=None)


def exact_clients(spread: float = 0.3, count: int = 5) -> Clients:
    """One row each: every level is its exact function."""
    return Clients(composed_rows((1,) * count, spread), batch_size=None)


def _level(level: int, value: Tensor, batch: Batch) -> Tensor:
    reached = torch.einsum("nij,j->ni", batch.rows[level - 1], value)
    bent = torch.tanh(reached) if level % 2 else reached + 0.2 * torch.sin(reached)
    return batch.mean(bent)


def _target(value: Tensor, batch: Batch) -> Tensor:
    target = batch.rows[len(WIDTHS) - 1 + WIDTHS.index(len(value))]
    return batch.mean((value - target).square().sum(-1)) / 2


def _contested(value: Tensor, y: Tensor, batch: Batch) -> Tensor:
    target = batch.rows[len(WIDTHS) - 1 + WIDTHS.index(len(value))]
    pull = batch.mean(torch.sin(value - target))[: len(y)]
    return _target(value, batch) + y @ pull - 0.5 * y @ y


def composition(depth: int) -> Composition:
    levels = [partial(_level, level) for level in range(1, depth)]
    return Composition([*levels, _target], torch.full((WIDTHS[0],), 0.3))


def contested(depth: int, radii: tuple[float, float] | None = None) -> Composition:
    """The same with a y of length 2; both players perhaps in balls."""
    levels = [partial(_level, level) for level in range(1, depth)]
    start = torch.full((WIDTHS[0],), 0.3), torch.tensor([0.2, -0.1])
    if radii is None:
        return Composition([*levels, _contested], *start)
    project_x, project_y = map(ball, radii)
    inside = project_x(start[0]), project_y(start[1])
    return Composition([*levels, _contested], *inside, project_x, project_y)


def deep(depth: int) -> Callable[[], Composition]:
    return partial(composition, depth)


def deep_contest(depth: int, radii: tuple[float, float] | None = None) -> Callable[[], Composition]:
    return partial(contested, depth, radii)


BALLS = (0.1, 0.02)  # both players want to leave them
RATES: dict[str, Any] = {"lr": 0.2, "recursion_rate": 0.3, "local_steps": 3}
BOTH: dict[str, Any] = {"primal_lr": 0.2, "dual_lr": 0.4, "recursion_rate": 0.3, "local_steps": 2}
FALLING: dict[str, Any] = {
    "lr": InverseRoot(0.3, shift=2, power=1 / 3),
    "recursion_rate": InverseRoot(0.9, shift=2, power=2 / 3),
    "local_steps": 2,
}

# fmt: off
ROWS = (
    Row("dr-scgd", FedDRSCGD(**RATES), deep(3), composed),
    Row("dr-scgd-levels", LevelwiseDRSCGD(**RATES, depth=3), deep(3), composed),
    Row("dr-scgd-levels-1", LevelwiseDRSCGD(**{**RATES, "local_steps": 1}, depth=3), deep(3),
        composed),
    Row("dr-scgd-one", FedDRSCGD(**RATES, first_batches=3), deep(1), composed_by_size),
    Row("dr-scgd-one-levels", LevelwiseDRSCGD(**RATES, depth=1), deep(1), composed),
    Row("dr-scgd-two", FedDRSCGD(**FALLING, projection="ball", radius=0.5), deep(2), composed),
    Row("dr-scgd-two-levels", LevelwiseDRSCGD(**FALLING, depth=2), deep(2),
        composed_by_size),
    Row("dr-scgd-third", FedDRSCGD(**RATES, projection="third"), deep(3), composed),
    Row("dr-scgd-whole", FedDRSCGD(**RATES), deep(2), composed_whole),
    Row("dr-scgda", LevelwiseDRSCGDA(**BOTH, depth=3), deep_contest(3), composed),
    Row("dr-scgda-printed", FedDRSCGDA(**BOTH), deep_contest(3), composed),
    Row("dr-scgda-one", LevelwiseDRSCGDA(StepDecay(0.3, at=(1, 3)), 0.3, depth=1), deep_contest(1),
        composed_by_size),
    Row("dr-scgda-sets", LevelwiseDRSCGDA(**BOTH, depth=2), deep_contest(2, BALLS), composed),
    Row("dr-scgda-sets-printed", FedDRSCGDA(**BOTH), deep_contest(2, BALLS),
        composed),
)
# fmt: on

# Floats per client and round, up and down, of the point and its own estimates; those of the values
# between the levels, and of the gradients in them, depend on the problem.
FLOATS: dict[type[Algorithm], Callable[[int, int], tuple[int, int]]] = {
    FedDRSCGD: lambda x, y: (2 * x, 2 * x),
    FedDRSCGDA: lambda x, y: (2 * (x + y), 2 * (x + y)),
    LevelwiseDRSCGD: lambda x, y: (2 * x, 2 * x),
    LevelwiseDRSCGDA: lambda x, y: (2 * (x + y), 2 * (x + y)),
}


def extra_floats(row: Row, round: int) -> tuple[int, int]:
    """What a round sends beside FLOATS: the estimates of the levels; the first has none to send
    down, nor, level-wise, up."""
    method = row.algorithm
    if not isinstance(method, FedDRSCGD | FedDRSCGDA):
        return 0, 0
    problem = row.problem()
    both = sum(v.numel() for v in problem.start())
    between = 2 * sum(WIDTHS[1 : problem.depth])
    if round:
        return between, between
    level_wise = isinstance(method, LevelwiseDRSCGD | LevelwiseDRSCGDA)
    return -both if level_wise else between, -both
