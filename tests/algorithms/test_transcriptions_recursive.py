"""The doubly recursive methods against their box, in plain numpy with hand-written Jacobians.

The loops run over iterations t, levels k and machines n, as printed: no rounds, no phases. Only the
batches' rows come from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from rows import play
from rows_recursive import (
    BALLS,
    WIDTHS,
    composed,
    composed_by_size,
    composed_whole,
    composition,
    contested,
)

from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.fed_dr_scgda import FedDRSCGDA
from fedminimax.algorithms.levelwise_dr_scgd import LevelwiseDRSCGD
from fedminimax.algorithms.levelwise_dr_scgda import LevelwiseDRSCGDA
from fedminimax.blocks.schedules import InverseRoot, Schedule
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients

Vector = np.ndarray
Rows = tuple[np.ndarray, ...]
Number = Callable[[int], float]

SEED = 7


def value(k: int, u: Vector, rows: Rows) -> Vector:
    z = rows[k - 1] @ u
    return (np.tanh(z) if k % 2 else z + 0.2 * np.sin(z)).mean(axis=0)


def jacobian(k: int, u: Vector, rows: Rows) -> np.ndarray:
    z = rows[k - 1] @ u
    slope = 1 - np.tanh(z) ** 2 if k % 2 else 1 + 0.2 * np.cos(z)
    return (slope[:, :, None] * rows[k - 1]).mean(axis=0)


def targets(u: Vector, rows: Rows) -> np.ndarray:
    return rows[len(WIDTHS) - 1 + WIDTHS.index(len(u))]


def outer_slopes(u: Vector, y: Vector, rows: Rows) -> tuple[Vector, Vector]:
    t = targets(u, rows)
    d_u = u - t.mean(axis=0)
    if len(y):
        d_u[: len(y)] += y * np.cos(u - t).mean(axis=0)[: len(y)]
    return d_u, np.sin(u - t).mean(axis=0)[: len(y)] - y


@dataclass
class Box:
    """Algorithm 1 with the numbers that it needs; K = 1, 2, ... levels, N machines."""

    K: int
    weights: Vector
    sample: Callable[[int, int, int], Rows]  # machine, iteration, level
    first: Callable[[int, int], Rows]
    x0: Vector
    y0: Vector
    step: Number  # gamma eta
    dual_step: Number
    a: Number  # alpha eta^2
    p: int
    pi: Callable[[int, Vector], Vector]
    project_x: Callable[[Vector], Vector]
    project_y: Callable[[Vector], Vector]
    h: dict = field(default_factory=dict)  # (n, k) -> h_n^(k), with h_n^(0) = x_n
    v: dict = field(default_factory=dict)
    y: dict = field(default_factory=dict)
    w: dict = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)  # whose projections have moved something

    def mean(self, vectors: list[Vector]) -> Vector:
        return sum((c * u for c, u in zip(self.weights, vectors, strict=True)), np.zeros(()))

    def average(self, quantity: dict, k: int | None = None) -> None:
        machines = range(len(self.weights))
        common = self.mean([quantity[(n, k) if k is not None else n] for n in machines])
        for n in machines:
            quantity[(n, k) if k is not None else n] = common

    def start(self) -> None:
        K = self.K
        for n in range(len(self.weights)):
            self.h[n, 0], self.y[n] = self.x0, self.y0
            for k in range(1, K):
                self.h[n, k] = value(k, self.h[n, k - 1], self.first(n, k))
            slopes = outer_slopes(self.h[n, K - 1], self.y[n], self.first(n, K))
            self.v[n, K], self.w[n] = slopes
            for k in range(K - 1, 0, -1):
                J = jacobian(k, self.h[n, k - 1], self.first(n, k))
                self.v[n, k] = J.T @ self.v[n, k + 1]

    def iterate(self, t: int, levelwise: bool) -> None:
        """One t for all machines. `levelwise`: each quantity is averaged as soon as it is there."""
        K, N, a = self.K, range(len(self.weights)), self.a(t)
        sync = levelwise and (t + 1) % self.p == 0
        h, v, y = dict(self.h), dict(self.v), dict(self.y)  # those of t
        for n in N:
            self.h[n, 0] = h[n, 0] - self.step(t) * v[n, 1]
            self.y[n] = y[n] + self.dual_step(t) * self.w[n]
        if sync:
            self.average(self.h, 0)
            self.average(self.y)
        for n in N:
            x, y_n = self.project_x(self.h[n, 0]), self.project_y(self.y[n])
            self.cut |= {"x"} if (x != self.h[n, 0]).any() else set()
            self.cut |= {"y"} if (y_n != self.y[n]).any() else set()
            self.h[n, 0], self.y[n] = x, y_n
        for k in range(1, K):
            for n in N:
                xi = self.sample(n, t, k)
                kept = h[n, k] - value(k, h[n, k - 1], xi)
                self.h[n, k] = (1 - a) * kept + value(k, self.h[n, k - 1], xi)
            if sync:
                self.average(self.h, k)
        for n in N:
            xi = self.sample(n, t, K)
            old_u, old_y = outer_slopes(h[n, K - 1], y[n], xi)
            new_u, new_y = outer_slopes(self.h[n, K - 1], self.y[n], xi)
            self.v[n, K] = self.pi(K, (1 - a) * (v[n, K] - old_u) + new_u)
            self.w[n] = (1 - a) * (self.w[n] - old_y) + new_y
        if sync:
            self.average(self.v, K)
            self.average(self.w)
        for k in range(K - 1, 0, -1):
            for n in N:
                xi = self.sample(n, t, k)
                kept = v[n, k] - jacobian(k, h[n, k - 1], xi).T @ v[n, k + 1]
                new = jacobian(k, self.h[n, k - 1], xi).T @ self.v[n, k + 1]
                self.v[n, k] = self.pi(k, (1 - a) * kept + new)
            if sync:
                self.average(self.v, k)
        if not levelwise and (t + 1) % self.p == 0:
            for k in range(K):
                self.average(self.h, k)
                self.average(self.v, k + 1)
            self.average(self.y)
            self.average(self.w)

    def run(self, rounds: int, levelwise: bool) -> list[list[Vector]]:
        """After every synchronisation: x, y, h^(1) ..., v^(1) ..., w."""
        self.start()
        found = []
        for t in range(rounds * self.p):
            self.iterate(t, levelwise)
            if (t + 1) % self.p == 0:
                hs = [self.h[0, k] for k in range(1, self.K)]
                vs = [self.v[0, k] for k in range(1, self.K + 1)]
                found.append([self.h[0, 0], self.y[0], *hs, *vs, self.w[0]])
        return found


def number(rate: Any) -> Number:
    if isinstance(rate, Schedule):
        assert isinstance(rate, InverseRoot)
        return lambda t: rate.value / (rate.shift + t) ** rate.power
    return lambda t: rate


def numpy_ball(radius: float) -> Callable[[Vector], Vector]:
    return lambda u: u if np.linalg.norm(u) <= radius else u * radius / np.linalg.norm(u)


def box_of(problem: Any, clients: Clients, method: Any, radii: Any = None) -> Box:
    K, count = problem.depth, len(clients)
    clients = clients.to(torch.float64)
    everyone = np.arange(count)
    sampler = Sampler(clients, K, SEED)
    first = Sampler(clients, K, SEED, "first", method.first_batches).draw(everyone, 0, 1)

    def rows(draw: Any, n: int, k: int) -> Rows:
        return tuple(column.numpy() for column in draw.client(n, 0, K)[k - 1].rows)

    def pi(k: int, u: Vector) -> Vector:
        if method.projection == "ball":
            return numpy_ball(method.radius ** (K - k + 1))(u)
        return u / 3 if method.projection == "third" else u

    primal = getattr(method, "lr", None) or getattr(method, "primal_lr", None)
    radius_x, radius_y = radii or (np.inf, np.inf)
    return Box(
        K=K,
        weights=clients.weight_vector(clients.weights or "size").numpy(),
        sample=lambda n, t, k: rows(sampler.draw(everyone, t, 1), n, k),
        first=lambda n, k: rows(first, n, k),
        x0=problem.start().x.double().numpy(),
        y0=problem.start().y.double().numpy(),
        step=number(primal),
        dual_step=number(getattr(method, "dual_lr", 0.0)),
        a=number(method.recursion_rate),
        p=method.local_steps,
        pi=pi,
        project_x=numpy_ball(radius_x),
        project_y=numpy_ball(radius_y),
    )


def compare(problem: Any, clients: Clients, method: Any, radii: Any = None, rounds: int = 3) -> Box:
    levelwise = isinstance(method, LevelwiseDRSCGD | LevelwiseDRSCGDA)
    method, box = method.for_problem(problem), box_of(problem, clients, method, radii)
    expected = box.run(rounds, levelwise)
    servers = [state.server for state, _ in play(problem, method, clients, rounds, SEED)]
    for r, server in enumerate(servers):
        x, y, *_ = expected[r]
        close(server.x, x)
        close(server.y, y)
        # Level by level, the sweeps of an iteration end in the round after its move.
        behind = r - 1 if levelwise else r
        if behind >= 0:
            w = getattr(server, "momentum_y", server.y[:0])
            estimates = [*server.inner, *server.momentum, w]
            for mine, theirs in zip(estimates, expected[behind][2:], strict=True):
                close(mine, theirs)
    assert np.abs(expected[0][0] - expected[-1][0]).max() > 1e-3
    return box


def close(mine: torch.Tensor, theirs: Vector) -> None:
    np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-10, atol=1e-12)


RATES: dict[str, Any] = {"lr": 0.3, "recursion_rate": 0.4}
FALLING: dict[str, Any] = {
    "lr": InverseRoot(0.4, shift=3, power=1 / 3),
    "recursion_rate": InverseRoot(0.9, shift=2, power=2 / 3),
}
BOTH: dict[str, Any] = {"primal_lr": 0.2, "dual_lr": 0.3, "recursion_rate": 0.3}
MIN = pytest.mark.parametrize("kind", [FedDRSCGD, LevelwiseDRSCGD])
MINIMAX = pytest.mark.parametrize("kind", [FedDRSCGDA, LevelwiseDRSCGDA])
STEPS = pytest.mark.parametrize("steps", [1, 3])


@MIN
@STEPS
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("clients", [composed, composed_by_size, composed_whole])
def test_fed_dr_scgd(clients, depth, steps, kind):
    method = kind(**RATES, local_steps=steps)
    compare(composition(depth), clients(), method)


@MIN
@pytest.mark.parametrize("projection", ["ball", "third"])
def test_fed_dr_scgd_with_a_projection(projection, kind):
    options: dict[str, Any] = {"projection": projection, "radius": 0.6, "first_batches": 2}
    method = kind(**RATES, local_steps=3, **options).for_problem(composition(3))
    compare(composition(3), composed(), method)
    bare = replace(method, projection="none")
    one, other = (list(play(composition(3), m, composed(), 2, SEED))[-1] for m in (method, bare))
    assert not torch.allclose(one[0].server.x, other[0].server.x, rtol=1e-3)  # it binds


@MIN
@STEPS
def test_fed_dr_scgd_with_falling_rates_and_larger_first_batches(steps, kind):
    method = kind(**FALLING, local_steps=steps, first_batches=2)
    compare(composition(2), composed(), method)


@MINIMAX
@STEPS
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fed_dr_scgda(depth, steps, kind):
    method = kind(**BOTH, local_steps=steps)
    compare(contested(depth), composed(), method)


@MINIMAX
@STEPS
def test_fed_dr_scgda_with_sets(steps, kind):
    method = kind(**BOTH, local_steps=steps)
    problem = contested(2, BALLS)
    box = compare(problem, composed_by_size(), method, BALLS)
    assert box.cut == {"x", "y"}  # both players have wanted to leave
