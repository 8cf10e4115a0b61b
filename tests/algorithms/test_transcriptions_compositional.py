"""LocalSCGDAM and LocalSCGDM against their boxes, in plain numpy, with Jacobians written by hand.

The loops run over iterations t and devices k, as printed: no rounds, no phases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from rows import labelled, labelled_by_size, linear
from rows_compositional import (
    contest,
    contest_in_sets,
    one_level,
    three_level_contest,
    three_levels,
)
from test_transcriptions import (
    SEED,
    Rows,
    Vector,
    auc_paper,
    onto_ball,
    onto_simplex,
    same,
    sigmoid,
    weights_of,
)

from fedminimax.algorithms.levelwise_scgdam import LevelwiseSCGDAM
from fedminimax.algorithms.levelwise_scgdm import LevelwiseSCGDM
from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.algorithms.local_scgdm import LocalSCGDM
from fedminimax.blocks.schedules import InverseRoot, StepDecay
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.types import Algorithm, Problem

Rate = Callable[[int], float]
# The value of a level, and its Jacobian, transposed, times a vector.
Level = tuple[Callable[[Vector, Rows], Vector], Callable[[Vector, Vector, Rows], Vector]]


def shift(rows: Rows) -> Vector:
    return rows[0][:, :2].mean(axis=0)


def moments(x: Vector, rows: Rows) -> Vector:
    error = rows[0] @ x - rows[1]
    return np.array([np.tanh(error).mean(), np.sqrt(1 + error**2).mean()])


def moments_pulled(x: Vector, v: Vector, rows: Rows) -> Vector:
    total = np.zeros_like(x)
    for feature, label in zip(*rows, strict=True):
        e = feature @ x - label
        total += (v[0] * (1 - np.tanh(e) ** 2) + v[1] * e / np.sqrt(1 + e**2)) * feature
    return total / len(rows[1])


def bent(h: Vector, rows: Rows) -> Vector:
    return np.concatenate([np.tanh(h + shift(rows)), h * (1 + 0.3 * shift(rows))])


def bent_pulled(h: Vector, v: Vector, rows: Rows) -> Vector:
    jacobian = np.zeros((4, 2))
    for i in range(2):
        jacobian[i, i] = 1 - np.tanh(h[i] + shift(rows)[i]) ** 2
        jacobian[2 + i, i] = 1 + 0.3 * shift(rows)[i]
    return jacobian.T @ v


def spread_gradient(z: Vector, y: Vector, rows: Rows) -> tuple[Vector, Vector]:
    return z - rows[0][:, 0].mean(), np.zeros(0)


def contest_gradient(h: Vector, y: Vector, rows: Rows) -> tuple[Vector, Vector]:
    return h + y, h - shift(rows) - y


def contest_3_gradient(z: Vector, y: Vector, rows: Rows) -> tuple[Vector, Vector]:
    slope = z - rows[0][:, 0].mean()
    slope[:2] += y
    return slope, z[:2] - shift(rows) - y


def worse_gradient(h: Vector, y: Vector, rows: Rows) -> tuple[Vector, Vector]:
    return 2 * y * (h + shift(rows)), (h + shift(rows)) ** 2


def error_gradient(x: Vector, y: Vector, rows: Rows) -> tuple[Vector, Vector]:
    return moments_pulled(x, np.array([0.0, 1.0]), rows), np.zeros(0)


def inner_step(rho: float, hessian: str) -> Level:
    """Compositional AUC (Zhang et al., NeurIPS 2023, equations 2 and 3) for a linear network with a
    bias: v = (w, w0, a, b), rows a = (feature, 1), H v = mean of sig (1 - sig) a (a.v)."""

    def value(v: Vector, rows: Rows) -> Vector:
        features, labels = rows
        a = np.column_stack([features, np.ones(len(labels))])
        slope = a.T @ (sigmoid(a @ v[:-2]) - labels) / len(labels)
        return np.concatenate([v[:-2] - rho * slope, v[-2:]])

    def pulled(v: Vector, vector: Vector, rows: Rows) -> Vector:
        if hessian == "none":
            return vector
        features, labels = rows
        product = np.zeros_like(v[:-2])
        for feature in features:
            a = np.append(feature, 1.0)
            s = sigmoid(a @ v[:-2])
            product += s * (1 - s) * a * (a @ vector[:-2]) / len(labels)
        return np.concatenate([vector[:-2] - rho * product, vector[-2:]])

    return value, pulled


@dataclass(frozen=True)
class Paper:
    levels: tuple[Level, ...]  # all but the last
    gradient: Callable[[Vector, Vector, Rows], tuple[Vector, Vector]]  # of the last, in z and y
    sample: Callable[[int, int], list[Rows]]  # of each level
    first: Callable[[int], list[Rows]]
    weights: Vector
    x: Vector
    y: Vector
    onto_x: Callable[[Vector], Vector] = lambda v: v
    onto_y: Callable[[Vector], Vector] = lambda v: v

    @property
    def devices(self) -> range:
        return range(len(self.weights))

    def mean(self, vectors: list[Vector]) -> list[Vector]:
        """The average, at every device."""
        total = sum(w * v for w, v in zip(self.weights, vectors, strict=True))
        return [total] * len(vectors)  # type: ignore[list-item]


MOMENTS, BENT = (moments, moments_pulled), (bent, bent_pulled)


def paper_of(problem: Problem, clients: Clients, name: str) -> Paper:
    clients = clients.to(torch.float64)
    everyone, depth = np.arange(len(clients)), problem.depth

    @cache
    def drawn(t: int) -> Any:
        return sampler.draw(everyone, t, 1)

    def numpy_rows(draw: Any) -> list[Rows]:
        return [tuple(column.numpy() for column in batch.rows) for batch in draw]

    sampler, first = Sampler(clients, depth, SEED), Sampler(clients, depth, SEED, "first")
    weights = weights_of(clients, clients.weights or "size")
    sets: dict[str, Any] = {}
    if isinstance(problem, CompositionalAUC):
        shares = [np.mean(clients.train.rows(k)[1].numpy() > 0) for k in range(len(clients))]
        p = float(sum(w * share for w, share in zip(weights, shares, strict=True)))
        levels = (inner_step(problem.inner_lr, problem.hessian),)
        gradient = auc_paper(p, problem.form, problem.margin)[0]
        if problem.form == "margin":
            sets = {"onto_y": lambda v: np.maximum(v, 0)}
    else:
        levels, gradient = {
            "contest": ((MOMENTS,), contest_gradient),
            "contest_in_sets": ((MOMENTS,), worse_gradient),
            "three_levels": ((MOMENTS, BENT), spread_gradient),
            "three_level_contest": ((MOMENTS, BENT), contest_3_gradient),
            "one_level": ((), error_gradient),
        }[name]
        if name == "contest_in_sets":
            sets = {"onto_x": onto_ball(0.05), "onto_y": onto_simplex}
    x, y = (v.double().numpy() for v in problem.start())
    return Paper(
        levels,
        gradient,
        lambda k, t: numpy_rows(drawn(t).client(k, 0, depth)),
        lambda k: numpy_rows(first.draw(everyone, 0, 1).client(k, 0, depth)),
        weights,
        x,
        y,
        **sets,
    )


@dataclass(frozen=True)
class Rates:
    eta: Rate
    gamma_x: Rate
    gamma_y: Rate
    beta_x: float
    beta_y: float
    alpha: float


class Device:
    """One device's x, y, h^(1) .. h^(K-1), u, v."""

    def __init__(self, paper: Paper, k: int):
        self.paper, self.x, self.y, self.h = paper, paper.x, paper.y, []
        xi = paper.first(k)
        for level, (value, _) in enumerate(paper.levels):
            self.h.append(value(self.at(level), xi[level]))
        self.u, self.v = self.gradient(xi)

    def at(self, level: int) -> Vector:
        """What the level (counted from 0) is evaluated at."""
        return self.h[level - 1] if level else self.x

    def gradient(self, xi: list[Rows]) -> tuple[Vector, Vector]:
        q, g_y = self.paper.gradient(self.at(len(self.h)), self.y, xi[-1])
        for level in range(len(self.h) - 1, -1, -1):
            q = self.paper.levels[level][1](self.at(level), q, xi[level])
        return q, g_y

    def move(self, r: Rates, t: int) -> tuple[Vector, Vector]:
        return (
            self.x - r.gamma_x(t) * r.eta(t) * self.u,
            self.y + r.gamma_y(t) * r.eta(t) * self.v,
        )

    def iterate(self, r: Rates, t: int, xi: list[Rows]) -> None:
        """Steps 2 to 4 of the box."""
        x, y = self.move(r, t)
        self.x, self.y = self.paper.onto_x(x), self.paper.onto_y(y)
        for level, (value, _) in enumerate(self.paper.levels):
            w = r.alpha * r.eta(t)
            self.h[level] = (1 - w) * self.h[level] + w * value(self.at(level), xi[level])
        g_x, g_y = self.gradient(xi)
        self.u = (1 - r.beta_x * r.eta(t)) * self.u + r.beta_x * r.eta(t) * g_x
        self.v = (1 - r.beta_y * r.eta(t)) * self.v + r.beta_y * r.eta(t) * g_y


def local_scgdam(paper: Paper, r: Rates, p: int, rounds: int) -> list:
    """Algorithm 1 of the LocalSCGDAM paper; without y, Algorithm 2 of the Fed-DR-SCGD paper."""
    devices, points = [Device(paper, k) for k in paper.devices], []
    for t in range(rounds * p):
        for k, device in enumerate(devices):
            device.iterate(r, t, paper.sample(k, t))
        if (t + 1) % p == 0:
            for name in ("x", "y", "u", "v"):
                means = paper.mean([getattr(d, name) for d in devices])
                for device, mean in zip(devices, means, strict=True):
                    setattr(device, name, mean)
            for level in range(len(paper.levels)):
                for device, mean in zip(
                    devices, paper.mean([d.h[level] for d in devices]), strict=True
                ):
                    device.h[level] = mean
            points.append((devices[0].x, devices[0].y))
    return points


def level_by_level(paper: Paper, r: Rates, p: int, rounds: int) -> list:
    """In a communication iteration x and y are averaged, then each h, then the gradient before each
    Jacobian product, then the momenta."""
    devices, points = [Device(paper, k) for k in paper.devices], []
    for t in range(rounds * p):
        xi = [paper.sample(k, t) for k in paper.devices]
        if (t + 1) % p:
            for device, rows in zip(devices, xi, strict=True):
                device.iterate(r, t, rows)
            continue
        moved = [device.move(r, t) for device in devices]
        for device in devices:
            device.x = paper.onto_x(paper.mean([m[0] for m in moved])[0])
            device.y = paper.onto_y(paper.mean([m[1] for m in moved])[0])
        points.append((devices[0].x, devices[0].y))
        w = r.alpha * r.eta(t)
        for level, (value, _) in enumerate(paper.levels):
            new = [
                (1 - w) * d.h[level] + w * value(d.at(level), rows[level])
                for d, rows in zip(devices, xi, strict=True)
            ]
            for device, mean in zip(devices, paper.mean(new), strict=True):
                device.h[level] = mean
        found = [
            paper.gradient(d.at(len(d.h)), d.y, rows[-1])
            for d, rows in zip(devices, xi, strict=True)
        ]
        q = [pair[0] for pair in found]
        for level in range(len(paper.levels) - 1, -1, -1):
            q = paper.mean(q)
            pulled = paper.levels[level][1]
            q = [
                pulled(d.at(level), own, rows[level])
                for d, own, rows in zip(devices, q, xi, strict=True)
            ]
        b_x, b_y = r.beta_x * r.eta(t), r.beta_y * r.eta(t)
        u = paper.mean([(1 - b_x) * d.u + b_x * g for d, g in zip(devices, q, strict=True)])
        v = paper.mean([(1 - b_y) * d.v + b_y * g[1] for d, g in zip(devices, found, strict=True)])
        for device, mean_u, mean_v in zip(devices, u, v, strict=True):
            device.u, device.v = mean_u, mean_v
    return points


BOXES: dict[type[Algorithm], Callable[..., list]] = {
    LocalSCGDAM: local_scgdam,
    LocalSCGDM: local_scgdam,
    LevelwiseSCGDAM: level_by_level,
    LevelwiseSCGDM: level_by_level,
}
RATES: dict[str, Any] = {
    "lr": 0.3,
    "primal_lr": 0.4,
    "dual_lr": 0.6,
    "primal_rate": 1.5,
    "dual_rate": 2.0,
    "inner_rate": 2.5,
}
USUAL = Rates(lambda t: 0.3, lambda t: 0.4, lambda t: 0.6, 1.5, 2.0, 2.5)


def auc_square() -> CompositionalAUC:
    return CompositionalAUC(linear(), inner_lr=0.8)


def auc_first_order() -> CompositionalAUC:
    return CompositionalAUC(linear(), inner_lr=0.8, hessian="none")


def auc_margin() -> CompositionalAUC:
    return CompositionalAUC(linear(), form="margin", margin=0.5, inner_lr=0.5)


def check(problem: Callable[[], Any], clients: Callable[[], Clients], method: Any, r: Rates):
    paper = paper_of(problem(), clients(), problem.__name__)
    expected = BOXES[type(method)](paper, r, method.local_steps, 3)
    same(problem(), method.for_problem(problem()), clients(), expected)


MINIMAX = pytest.mark.parametrize("kind", [LocalSCGDAM, LevelwiseSCGDAM])


@MINIMAX
@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize(
    ("problem", "clients"),
    [
        (contest, labelled),
        (contest, labelled_by_size),
        (contest_in_sets, labelled),
        (three_level_contest, labelled),
        (auc_square, labelled),
        (auc_first_order, labelled),
        (auc_margin, labelled),
    ],
)
def test_local_scgdam(problem, clients, p, kind):
    check(problem, clients, kind(**RATES, local_steps=p), USUAL)


@pytest.mark.parametrize("kind", [LocalSCGDM, LevelwiseSCGDM])
@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize(
    ("problem", "clients"),
    [(three_levels, labelled), (three_levels, labelled_by_size), (one_level, labelled)],
)
def test_local_scgdm(problem, clients, p, kind):
    primal = {name: rate for name, rate in RATES.items() if not name.startswith("dual")}
    check(problem, clients, kind(**primal, local_steps=p), USUAL)


@MINIMAX
def test_a_schedule_for_lr_moves_steps_and_weights(kind):
    r = Rates(lambda t: 0.3 / np.sqrt(2 + t), USUAL.gamma_x, USUAL.gamma_y, 1.5, 2.0, 2.5)
    rates: dict[str, Any] = {**RATES, "lr": InverseRoot(0.3, shift=2)}
    check(contest, labelled, kind(**rates, local_steps=3), r)


@MINIMAX
def test_schedules_for_the_players_leave_the_weights_alone(kind):
    def halved(value: float) -> StepDecay:
        return StepDecay(value, factor=2, at=(4, 8), unit="iteration")

    def decayed(value: float) -> Rate:
        return lambda t: value / 2 ** ((t >= 4) + (t >= 8))

    r = Rates(USUAL.eta, decayed(0.4), decayed(0.6), 1.5, 2.0, 2.5)
    rates: dict[str, Any] = {**RATES, "primal_lr": halved(0.4), "dual_lr": halved(0.6)}
    check(contest, labelled, kind(**rates, local_steps=3), r)


def test_the_two_boxes_are_not_the_same():
    """Else the comparisons above would not tell them apart."""
    for problem in (contest, auc_square, three_level_contest):
        paper = paper_of(problem(), labelled(), problem.__name__)
        ends = [
            np.concatenate(box(paper, USUAL, 1, 4)[-1]) for box in (local_scgdam, level_by_level)
        ]
        assert np.abs(ends[0] - ends[1]).max() > 1e-5
    exact, first = (
        np.concatenate(local_scgdam(paper_of(f(), labelled(), ""), USUAL, 1, 4)[-1])
        for f in (auc_square, auc_first_order)
    )
    assert np.abs(exact - first).max() > 1e-4
