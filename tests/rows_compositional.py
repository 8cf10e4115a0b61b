"""Rows of the methods for compositions that keep moving averages, and small compositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rows import (
    EXACT,
    STALLS,
    Row,
    labelled,
    labelled_by_size,
    linear,
    mlp,
    noisy_by_size,
    robust_least_squares,
)
from torch import Tensor

from fedminimax.algorithms.levelwise_scgdam import LevelwiseSCGDAM
from fedminimax.algorithms.levelwise_scgdm import LevelwiseSCGDM
from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.algorithms.local_scgdm import LocalSCGDM
from fedminimax.blocks.projections import ball, simplex
from fedminimax.blocks.schedules import InverseRoot, StepDecay
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.functions import Composition
from fedminimax.types import Algorithm, Batch


def _moments(x: Tensor, batch: Batch) -> Tensor:
    """Two numbers of three; they grow no faster than the error of a linear score."""
    error = batch.features @ x - batch.labels
    return torch.stack([batch.mean(torch.tanh(error)), batch.mean((1 + error**2).sqrt())])


def _bent(h: Tensor, batch: Batch) -> Tensor:
    """Four numbers of two, with a slope that differs between rows."""
    shift = batch.mean(batch.features[:, :2])
    return torch.cat([torch.tanh(h + shift), h * (1 + 0.3 * shift)])


def _spread(z: Tensor, batch: Batch) -> Tensor:
    return batch.mean((z - batch.features[:, :1]).square().sum(-1)) / 2


def _contest(h: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """Strongly concave in y, coupled to the inner value with rows of its own."""
    return h @ h / 2 + y @ (h - batch.mean(batch.features[:, :2])) - y @ y / 2


def _worse(h: Tensor, y: Tensor, batch: Batch) -> Tensor:
    return y @ (h + batch.mean(batch.features[:, :2])) ** 2


def contest() -> Composition:
    """Two levels and a maximisation."""
    return Composition([_moments, _contest], torch.full((3,), 0.2), torch.zeros(2))


def three_levels() -> Composition:
    return Composition([_moments, _bent, _spread], torch.full((3,), 0.2))


def three_level_contest() -> Composition:
    def outer(z: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return _spread(z, batch) + y @ (z[:2] - batch.mean(batch.features[:, :2])) - y @ y / 2

    return Composition([_moments, _bent, outer], torch.full((3,), 0.2), torch.zeros(2))


def one_level() -> Composition:
    return Composition([lambda x, batch: _moments(x, batch)[1]], torch.full((3,), 0.2))


def contest_in_sets() -> Composition:
    """An x in a ball that it wants to leave, a y in the simplex: both projections bind."""
    start = torch.zeros(3), torch.full((2,), 0.5)
    return Composition([_moments, _worse], *start, ball(0.05), simplex)


def compositional_auc() -> CompositionalAUC:
    return CompositionalAUC(mlp(), inner_lr=0.5)


def linear_compositional_auc() -> CompositionalAUC:
    return CompositionalAUC(linear(), inner_lr=0.8, evaluated="stepped")


def margin_compositional_auc() -> CompositionalAUC:
    return CompositionalAUC(linear(), form="margin", margin=0.5, inner_lr=0.5, hessian="none")


MIN: dict[str, Any] = {"lr": 0.3, "primal_lr": 0.3, "primal_rate": 1.5, "inner_rate": 2.0}
MAX: dict[str, Any] = {**MIN, "dual_lr": 0.6, "dual_rate": 2.5}
# Only the steps fall, or the weights with them.
STEPS_FALL: dict[str, Any] = {**MAX, "primal_lr": StepDecay(0.3, at=(1, 3)), "dual_lr": 0.3}
ALL_FALL: dict[str, Any] = {**MAX, "lr": InverseRoot(0.3)}
HEAVY: dict[str, Any] = {
    "lr": 0.4,
    "primal_lr": 0.1,
    "dual_lr": 0.125,
    "primal_rate": 2.0,
    "dual_rate": 2.0,
    "inner_rate": 1.0,
}

# fmt: off
ROWS = (
    Row("scgdam", LocalSCGDAM(**MAX, local_steps=3), contest, labelled),
    Row("scgdam-auc", LocalSCGDAM(**STEPS_FALL, local_steps=2), compositional_auc, labelled),
    Row("scgdam-stepped", LocalSCGDAM(**ALL_FALL, local_steps=2), linear_compositional_auc,
        labelled_by_size),
    Row("scgdam-inner", LocalSCGDAM(**ALL_FALL, local_steps=2, output="inner"), compositional_auc,
        labelled_by_size),
    Row("scgdam-margin", LocalSCGDAM(**MAX, local_steps=2), margin_compositional_auc, labelled),
    Row("scgdam-sets", LocalSCGDAM(**MAX, local_steps=3), contest_in_sets, labelled),
    Row("scgdam-1", LocalSCGDAM(**MAX, local_steps=3), clients=noisy_by_size),
    Row("scgdam-3", LocalSCGDAM(**MAX, local_steps=2), three_level_contest, labelled),
    Row("scgdam-levels", LevelwiseSCGDAM(**MAX, depth=2, local_steps=3), contest, labelled),
    Row("scgdam-levels-auc", LevelwiseSCGDAM(**ALL_FALL, depth=2, local_steps=2), compositional_auc,
        labelled),
    Row("scgdam-levels-sets", LevelwiseSCGDAM(**MAX, depth=2, local_steps=1), contest_in_sets,
        labelled),
    Row("scgdam-levels-1", LevelwiseSCGDAM(**MAX, depth=1, local_steps=2),
        robust_least_squares, labelled),
    Row("scgdam-levels-3", LevelwiseSCGDAM(**MAX, depth=3, local_steps=2),
        three_level_contest, labelled_by_size),
    Row("scgdam-far", LocalSCGDAM(**HEAVY, local_steps=8), **{**STALLS, "rounds": 55}),
    Row("scgdam-far-1", LocalSCGDAM(**{**HEAVY, "dual_lr": 0.6}, local_steps=1),
        **{**EXACT, "rounds": 150}),
    Row("scgdam-far-levels", LevelwiseSCGDAM(**{**HEAVY, "dual_lr": 0.6}, depth=1,
        local_steps=1), **{**EXACT, "rounds": 150}),
    Row("scgdm", LocalSCGDM(**MIN, local_steps=3), three_levels, labelled),
    Row("scgdm-1", LocalSCGDM(**MIN, local_steps=2), one_level, labelled),
    Row("scgdm-size", LocalSCGDM(**{**MIN, "lr": InverseRoot(0.3)}, local_steps=2), three_levels,
        labelled_by_size),
    Row("scgdm-levels", LevelwiseSCGDM(**MIN, depth=3, local_steps=3), three_levels,
        labelled),
    Row("scgdm-levels-p1", LevelwiseSCGDM(**MIN, depth=3, local_steps=1), three_levels,
        labelled),
)
# fmt: on

# Floats per client and round, up and down, but for the inner values: see `extra_floats`.
FLOATS: dict[type[Algorithm], Callable[[int, int], tuple[int, int]]] = {
    LocalSCGDAM: lambda x, y: (2 * (x + y), 2 * (x + y)),
    LocalSCGDM: lambda x, y: (2 * x, 2 * x),
    LevelwiseSCGDAM: lambda x, y: (2 * (x + y), 2 * (x + y)),
    LevelwiseSCGDM: lambda x, y: (2 * x, 2 * x),
}


def inner_lengths(row: Row) -> list[int]:
    """How many numbers each level but the last returns."""
    problem, batch = row.problem(), row.clients().to(torch.float64).train.batch(0)
    values = [problem.start().x.double()]
    for level in range(1, problem.depth):
        values.append(problem.inner(level, values[-1], batch))
    return [len(value) for value in values[1:]]


def extra_floats(row: Row, round: int) -> tuple[int, int]:
    """What a round sends beside FLOATS: inner values, and, level by level, gradients in them."""
    method = row.algorithm
    if not isinstance(method, LocalSCGDAM | LocalSCGDM):
        return 0, 0
    both, inner = sum(v.numel() for v in row.problem().start()), sum(inner_lengths(row))
    if isinstance(method, LevelwiseSCGDAM | LevelwiseSCGDM):
        return (2 * inner, 2 * inner) if round else (-both, -both)  # at first only the point
    return inner, inner if round else -both  # there are no estimates yet
