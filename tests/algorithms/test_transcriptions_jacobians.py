"""NLASG, SCSC and SMVR against the algorithm sheet (3.11 to 3.13), written again in numpy.

Levels and their Jacobians are by hand; loops go over machines, iterations and levels. Every p-th
iteration averages x, the inner values and the Jacobians over machines. Only the batches' rows come
from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rows import federation_of
from rows_jacobians import (
    days,
    days_by_size,
    free_portfolio,
    maps,
    maps_by_size,
    portfolio,
    portfolio_rows,
    three_levels,
)

from fedminimax.algorithms.nlasg import NLASG
from fedminimax.algorithms.scsc import SCSC
from fedminimax.algorithms.smvr import SMVR
from fedminimax.blocks.schedules import InverseRoot
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.types import Problem

SEED, ROUNDS, P = 5, 2, 2
Matrix = np.ndarray
Rule = Callable[[int], float]  # iteration -> rate


# Levels by hand: rows -> value, rows -> Jacobian (of the last level, the gradient).


def curved_levels() -> list[tuple[Callable, Callable]]:
    def f1(x, rows):
        return np.mean([np.tanh(M @ x) for M in rows[0]], axis=0)

    def j1(x, rows):
        return np.mean([(1 - np.tanh(M @ x) ** 2)[:, None] * M for M in rows[0]], axis=0)

    def f2(h, rows):
        return np.mean([S @ h + 0.2 * np.sin(S @ h) for S in rows[1]], axis=0)

    def j2(h, rows):
        return np.mean([(1 + 0.2 * np.cos(S @ h))[:, None] * S for S in rows[1]], axis=0)

    def j3(z, rows):
        return np.mean([z - t for t in rows[2]], axis=0)

    return [(f1, j1), (f2, j2), (None, j3)]  # type: ignore[list-item]


def portfolio_levels(risk: float, fill: Matrix | None) -> list[tuple[Callable, Callable]]:
    """The risk-averse portfolio (Gao, ICML 2024); a missing return is the asset's mean."""

    def returns(rows) -> Any:
        if len(rows) == 1:
            return rows[0]
        return np.where(rows[1] > 0, rows[0], fill)

    def f1(x, rows):
        return np.concatenate([[np.mean([r @ x for r in returns(rows)])], x])

    def j1(x, rows):
        return np.vstack([returns(rows).mean(axis=0), np.eye(len(x))])

    def f2(u, rows):
        return np.array([u[0], np.mean([(r @ u[1:] - u[0]) ** 2 for r in returns(rows)])])

    def j2(u, rows):
        below = np.zeros(len(u))
        for r in returns(rows):
            away = r @ u[1:] - u[0]
            below += np.concatenate([[-2 * away], 2 * away * r]) / len(returns(rows))
        return np.vstack([np.eye(len(u))[0], below])

    def j3(z, rows):
        return np.array([-1.0, risk / (2 * np.sqrt(z[1])) if z[1] > 1e-8 else 0.0])

    return [(f1, j1), (f2, j2), (None, j3)]  # type: ignore[list-item]


class Machines:
    """What a box needs: levels, machines' samples and weights, and the set of x."""

    def __init__(self, clients: Clients, levels, project=lambda x: x):
        clients = clients.to(torch.float64)
        self.K, self.levels, self.project = len(levels), levels, project
        self.count = len(clients)
        self.weights = clients.train.sizes / clients.train.sizes.sum()
        if clients.weights == "uniform":
            self.weights = np.full(self.count, 1 / self.count)
        self._first = Sampler(clients, self.K, SEED, "first", 1)
        self._later = Sampler(clients, self.K, SEED)

    def rows(self, n: int, t: int | None) -> list[tuple[Matrix, ...]]:
        """xi_n^(1) .. xi_n^(K) of iteration t, or of the start."""
        sampler = self._first if t is None else self._later
        draw = sampler.draw(np.array([n]), t or 0, 1).client(0, 0, self.K)
        return [tuple(column.numpy() for column in batch.rows) for batch in draw]

    def value(self, k: int, v: Matrix, rows) -> Matrix:
        return self.levels[k - 1][0](v, rows[k - 1])

    def jacobian(self, k: int, v: Matrix, rows) -> Matrix:
        return self.levels[k - 1][1](v, rows[k - 1])

    def begin(self, x: Matrix, n: int) -> tuple[list[Matrix], list[Matrix]]:
        """h^(0) = x .. h^(K-1), and J^(1) .. J^(K)."""
        rows, h = self.rows(n, None), [x]
        for k in range(1, self.K):
            h.append(self.value(k, h[-1], rows))
        return h, [self.jacobian(k, h[k - 1], rows) for k in range(1, self.K + 1)]

    def average(self, machines: list[list[Matrix]]) -> None:
        for i in range(len(machines[0])):
            mean: Any = sum(w * m[i] for w, m in zip(self.weights, machines, strict=True))
            for m in machines:
                m[i] = mean


def chain(J: list[Matrix]) -> Matrix:
    total = J[-1]
    for matrix in J[-2::-1]:
        total = matrix.T @ total
    return total


def nlasg(m: Machines, x0: Matrix, step: Rule, tau: Rule, radius: None) -> tuple:
    w, J = map(list, zip(*(m.begin(x0, n) for n in range(m.count)), strict=True))
    z = [chain(own) for own in J]
    for t in range(ROUNDS * P):
        for n in range(m.count):
            rows, old = m.rows(n, t), list(w[n])
            w[n][0] = m.project(old[0] - step(t) * z[n])
            J[n] = [m.jacobian(k, old[k - 1], rows) for k in range(1, m.K + 1)]
            for k in range(1, m.K):
                moved = J[n][k - 1] @ (w[n][k - 1] - old[k - 1])
                w[n][k] = (1 - tau(t)) * old[k] + tau(t) * m.value(k, old[k - 1], rows) + moved
        if (t + 1) % P == 0:
            m.average(w)
            m.average(J)
        for n in range(m.count):
            z[n] = (1 - tau(t)) * z[n] + tau(t) * chain(J[n])
    return w[0], J[0]


def scsc(m: Machines, x0: Matrix, step: Rule, beta: Rule, radius: None) -> tuple:
    h, J = map(list, zip(*(m.begin(x0, n) for n in range(m.count)), strict=True))
    for t in range(ROUNDS * P):
        for n in range(m.count):
            rows, old = m.rows(n, t), list(h[n])
            h[n][0] = m.project(old[0] - step(t) * chain(J[n]))
            for k in range(1, m.K):
                h[n][k] = (1 - beta(t)) * (old[k] - m.value(k, old[k - 1], rows)) + m.value(
                    k, h[n][k - 1], rows
                )
            J[n] = [m.jacobian(k, h[n][k - 1], rows) for k in range(1, m.K + 1)]
        if (t + 1) % P == 0:
            m.average(h)
            m.average(J)
    return h[0], J[0]


def smvr(m: Machines, x0: Matrix, step: Rule, beta: Rule, radius: float | None) -> tuple:
    def projected(jacobian: Matrix) -> Matrix:
        size = np.sqrt((jacobian**2).sum())
        if radius is None or size <= radius:
            return jacobian
        projections.append(size)
        return jacobian * radius / size

    projections: list[float] = []
    h, V = map(list, zip(*(m.begin(x0, n) for n in range(m.count)), strict=True))
    V = [[projected(jacobian) for jacobian in own] for own in V]
    for t in range(ROUNDS * P):
        for n in range(m.count):
            rows, old = m.rows(n, t), list(h[n])
            h[n][0] = m.project(old[0] - step(t) * chain(V[n]))
            for k in range(1, m.K + 1):
                new = (1 - beta(t)) * (V[n][k - 1] - m.jacobian(k, old[k - 1], rows))
                new = new + m.jacobian(k, h[n][k - 1], rows)
                V[n][k - 1] = projected(new)
                if k < m.K:
                    h[n][k] = (1 - beta(t)) * (old[k] - m.value(k, old[k - 1], rows))
                    h[n][k] = h[n][k] + m.value(k, h[n][k - 1], rows)
        if (t + 1) % P == 0:
            m.average(h)
            m.average(V)
    assert radius is None or 0 < len(projections) < ROUNDS * P * m.count * m.K
    return h[0], V[0]


def asset_means(clients: Clients) -> Matrix:
    """Each asset's mean over its present returns, rows counting the same."""
    total = count = 0.0
    for returns, present in portfolio_rows():
        total = total + (returns * present).sum(axis=0)
        count = count + present.sum(axis=0)
    return total / count  # type: ignore[operator]


def onto_the_budget(x: Matrix) -> Matrix:
    return x + (1 - x.sum()) / len(x)


CASES: dict[str, tuple[Callable[[], Problem], Callable[[], Clients], Any, Any, float]] = {
    "curved": (three_levels, maps, curved_levels, lambda x: x, 0.2),
    "curved-by-size": (three_levels, maps_by_size, curved_levels, lambda x: x, 0.2),
    "portfolio": (
        portfolio, days, lambda: portfolio_levels(0.7, asset_means(days())), onto_the_budget, 0.05
    ),
    "portfolio-free": (
        free_portfolio, days_by_size, lambda: portfolio_levels(0.7, None), lambda x: x, 0.02
    ),
}  # fmt: skip


PLAIN = [(NLASG, nlasg, {}), (SCSC, scsc, {}), (SMVR, smvr, {})]
# The radius lies between the norms of the levels' Jacobians: some are scaled, some are not.
RUNS = [
    *((case, *method) for case in CASES for method in PLAIN),
    ("curved", SMVR, smvr, {"radius": 0.9}),
    ("portfolio", SMVR, smvr, {"radius": 1.9}),
    *(("portfolio", *method[:2], {"sent": "structured"}) for method in PLAIN),
    *(("curved", *method[:2], {"falling": True}) for method in PLAIN),
]


@pytest.mark.parametrize(
    ("case", "method", "box", "options"),
    RUNS,
    ids=lambda v: v if isinstance(v, str) else "+".join(v) if isinstance(v, dict) else v.__name__,
)
def test_a_run_is_the_sheet_s(case, method, box, options):
    make, clients, levels, project, step = CASES[case]
    rates: tuple[Any, Any] = step, 0.7
    rules: tuple[Rule, Rule] = (lambda t: step), (lambda t: 0.7)
    if options.get("falling"):
        rates = InverseRoot(step, shift=2.0, power=0.5), InverseRoot(0.9, shift=1.0, power=0.4)
        rules = (lambda t: step / (2 + t) ** 0.5), (lambda t: 0.9 / (1 + t) ** 0.4)
    options = {name: value for name, value in options.items() if name != "falling"}
    algorithm = method(*rates, local_steps=P, **options)
    federation, state, store = federation_of(make(), algorithm, clients(), seed=SEED)
    start = state.server.x.numpy()
    for _ in range(ROUNDS):
        state = play_round(federation, state, store, Debug())
    machines = Machines(clients(), levels(), project)
    h, jacobians = box(machines, start, *rules, options.get("radius"))
    server = state.server
    np.testing.assert_allclose(server.x.numpy(), h[0], rtol=1e-10, atol=1e-12)
    assert np.abs(h[0] - start).max() > 1e-3
    for ours, theirs in zip(server.inner, h[1:], strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-12)
    whole = algorithm.unpack(federation.problem, server.jacobians)
    for ours, theirs in zip(whole, jacobians, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-12)
