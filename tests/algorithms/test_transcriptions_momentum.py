"""The methods with momentum, STORM estimates or a snapshot against their boxes, in plain numpy.

The loops run over iterations t and machines k, as printed: no rounds, no phases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rows import labelled, linear_auc, margin_auc, noisy, noisy_by_size, play, quadratic
from rows import robust_least_squares as robust
from test_transcriptions import SEED, Paper, Vector, paper_of, same

from fedminimax.algorithms.ada_fgda import AdaFGDA
from fedminimax.algorithms.fedsgda_m import FedSGDAM
from fedminimax.algorithms.fedsgda_plus import FedSGDAPlus
from fedminimax.algorithms.fgda import FGDA
from fedminimax.algorithms.local_sgda_plus import LocalSGDAPlus
from fedminimax.algorithms.local_sgdam import LocalSGDAM
from fedminimax.algorithms.local_sgdam_plus import LocalSGDAMPlus
from fedminimax.blocks.schedules import InverseRoot
from fedminimax.data.batches import Sampler

Rate = Callable[[int], float]
FirstSample = Callable[[int], tuple]

MINIMAX = pytest.mark.parametrize(
    ("problem", "clients"),
    [
        (quadratic, noisy),
        (quadratic, noisy_by_size),
        (linear_auc, labelled),
        (margin_auc, labelled),
        (robust, labelled),
    ],
)


def first_sample(clients, batches: int) -> FirstSample:
    """The rows that a machine's first estimate is made from."""
    clients = clients.to(torch.float64)
    sampler = Sampler(clients, 1, SEED, "first", batches)
    drawn = sampler.draw(np.arange(len(clients)), 0, 1)
    return lambda k: tuple(column.numpy() for column in drawn.client(k, 0, 1)[0].rows)


# The boxes. Each returns what the server holds after every communication round.


def snapshot_sgda(
    paper: Paper, eta_x: float, eta_y: float, tau: int, S: int, rounds: int, glr: float = 1.0
) -> list:
    """Local SGDA+ (S in iterations); with glr, FedSGDA+ (Wu's code: reference + glr * change)."""
    xs, ys = [paper.v for _ in paper.machines], [paper.alpha for _ in paper.machines]
    reference, snapshot, points = (paper.v, paper.alpha), paper.v, []
    for t in range(rounds * tau):
        for k in paper.machines:
            xi = paper.sample(k, t)
            g_x = paper.gradient(xs[k], ys[k], xi)[0]
            g_y = paper.gradient(snapshot, ys[k], xi)[1]
            xs[k] = paper.project_v(xs[k] - eta_x * g_x)
            ys[k] = paper.project(ys[k] + eta_y * g_y)
        if (t + 1) % tau == 0:
            x = paper.project_v(reference[0] + glr * (paper.mean(xs) - reference[0]))
            y = paper.project(reference[1] + glr * (paper.mean(ys) - reference[1]))
            xs, ys, reference = [x] * len(xs), [y] * len(ys), (x, y)
            points.append(reference)
        if (t + 1) % S == 0:
            snapshot = xs[0]
    return points


def momentum_local_sgda(
    paper: Paper,
    first: FirstSample,
    a: Rate,
    eta: tuple[float, float],
    beta: tuple[float, float],
    tau: int,
    rounds: int,
    S: int | None = None,
) -> list:
    """Sharma et al.: x~ = x - eta_x d_x, x <- x + a_t (x~ - x), d <- (1 - beta a_t) d + beta a_t g;
    with S the dual's gradient is at the snapshot."""
    xs, ys = [paper.v for _ in paper.machines], [paper.alpha for _ in paper.machines]
    d = [paper.gradient(paper.v, paper.alpha, first(k)) for k in paper.machines]
    d_x, d_y = [g[0] for g in d], [g[1] for g in d]
    snapshot, points = paper.v, []
    for t in range(rounds * tau):
        for k in paper.machines:
            x_half, y_half = xs[k] - eta[0] * d_x[k], ys[k] + eta[1] * d_y[k]
            xs[k] = paper.project_v(xs[k] + a(t) * (x_half - xs[k]))
            ys[k] = paper.project(ys[k] + a(t) * (y_half - ys[k]))
            xi = paper.sample(k, t)
            g_x = paper.gradient(xs[k], ys[k], xi)[0]
            g_y = paper.gradient(xs[k] if S is None else snapshot, ys[k], xi)[1]
            d_x[k] = (1 - beta[0] * a(t)) * d_x[k] + beta[0] * a(t) * g_x
            d_y[k] = (1 - beta[1] * a(t)) * d_y[k] + beta[1] * a(t) * g_y
        if (t + 1) % tau == 0:
            xs, ys, d_x, d_y = ([paper.mean(v)] * len(v) for v in (xs, ys, d_x, d_y))
            points.append((xs[0], ys[0]))
        if S is not None and (t + 1) % S == 0:
            snapshot = xs[0]
    return points


def fedsgda_m(
    paper: Paper,
    first: FirstSample,
    steps: tuple[float, float],
    rates: tuple[float, float],
    Q: int,
    rounds: int,
) -> list:
    """Wu et al.: u, v from a first batch, averaged; local STORM; every Q the mean of all four."""
    g = [paper.gradient(paper.v, paper.alpha, first(k)) for k in paper.machines]
    u = [paper.mean([pair[0] for pair in g])] * len(g)
    v = [paper.mean([pair[1] for pair in g])] * len(g)
    xs, ys = [paper.v for _ in g], [paper.alpha for _ in g]
    points = []
    for t in range(rounds * Q):
        for k in paper.machines:
            x_old, y_old, xi = xs[k], ys[k], paper.sample(k, t)
            xs[k] = paper.project_v(x_old - steps[0] * u[k])
            ys[k] = paper.project(y_old + steps[1] * v[k])
            old, new = paper.gradient(x_old, y_old, xi), paper.gradient(xs[k], ys[k], xi)
            u[k] = new[0] + (1 - rates[0]) * (u[k] - old[0])
            v[k] = new[1] + (1 - rates[1]) * (v[k] - old[1])
        if (t + 1) % Q == 0:
            xs, ys, u, v = ([paper.mean(w)] * len(w) for w in (xs, ys, u, v))
            points.append((xs[0], ys[0]))
    return points


class Matrix:
    """The diagonal of A_t (or B_t), from all averages that the server has seen, oldest first."""

    def __init__(self, kind: str, varrho: float, rho: float):
        self.kind, self.varrho, self.rho, self.seen = kind, varrho, rho, []

    def see(self, average: Vector) -> None:
        self.seen.append(average)

    def diagonal(self) -> Vector | float:
        if self.kind == "identity" or not self.seen:
            return 1.0  # or A_1 = I
        if self.kind == "adagrad_norm":
            return np.sqrt(sum(float(w @ w) for w in self.seen)) + self.rho
        a, largest = np.zeros_like(self.seen[0]), np.zeros_like(self.seen[0])
        before = np.zeros_like(self.seen[0])
        for w in self.seen:
            square = (w - before) ** 2 if self.kind == "adabelief" else w**2
            a = self.varrho * a + (1 - self.varrho) * square
            largest, before = np.maximum(largest, a), w
        return np.sqrt(largest if self.kind == "amsgrad" else a) + self.rho


def algorithm_1(
    paper: Paper,
    first: FirstSample,
    eta: Rate,
    gamma: float,
    lam: float,
    alpha: Rate,
    beta: Rate,
    q: int,
    T: int,
    sync: str,
    matrix: Callable[[], Matrix],
    first_matrix: str = "rule",
) -> tuple[list, list]:
    """Algorithm 1 of the AdaFGDA paper, t = 1 .. T: the averages at each synchronisation, and the
    point that the server then moves to. Rates are functions of t."""
    xs, ys = [paper.v for _ in paper.machines], [paper.alpha for _ in paper.machines]
    g = [paper.gradient(paper.v, paper.alpha, first(k)) for k in paper.machines]  # 2
    w, v = [pair[0] for pair in g], [pair[1] for pair in g]
    A, B = matrix(), matrix()
    if first_matrix == "rule":
        A.see(paper.mean(w))
        B.see(paper.mean(v))
    averages, moved, draws = [], [], 0
    for t in range(1, T + 1):
        own = xs, ys, w, v
        if t % q == 0:
            xs, ys, w, v = ([paper.mean(z)] * len(z) for z in own)  # 5
            A.see(w[0])  # 6
            B.see(v[0])
            averages.append((xs[0], ys[0]))
        old = own if t % q == 0 and sync == "reaverage" else (xs, ys, w, v)
        y_hat = [y + lam * v_k / B.diagonal() for y, v_k in zip(ys, v, strict=True)]  # 7, 11
        x_hat = [x - gamma * w_k / A.diagonal() for x, w_k in zip(xs, w, strict=True)]
        ys = [paper.project(y + eta(t) * (h - y)) for y, h in zip(ys, y_hat, strict=True)]  # 8, 12
        xs = [paper.project_v(x + eta(t) * (h - x)) for x, h in zip(xs, x_hat, strict=True)]
        if t % q == 0:
            moved.append((xs[0], ys[0]))
        if t % q == 0 and sync == "literal":
            continue  # 9: else
        new_w, new_v = [], []
        for k in paper.machines:
            xi = paper.sample(k, draws)  # 14
            before = paper.gradient(old[0][k], old[1][k], xi)
            after = paper.gradient(xs[k], ys[k], xi)
            new_v.append(after[1] + (1 - alpha(t)) * (old[3][k] - before[1]))  # 15
            new_w.append(after[0] + (1 - beta(t)) * (old[2][k] - before[0]))  # 16
        w, v, draws = new_w, new_v, draws + 1
        if t % q == 0 and sync == "reaverage":
            w, v = [paper.mean(w)] * len(w), [paper.mean(v)] * len(v)
    return averages, moved


# Library against paper.


@MINIMAX
@pytest.mark.parametrize(("tau", "S"), [(2, None), (3, 3), (2, 6)])
def test_local_sgda_plus(problem, clients, tau, S):
    algorithm = LocalSGDAPlus(0.1, 0.3, local_steps=tau, snapshot_every=S)
    expected = snapshot_sgda(paper_of(problem(), clients()), 0.1, 0.3, tau, S or tau**2, 5)
    same(problem(), algorithm, clients(), expected)


@MINIMAX
@pytest.mark.parametrize("every", [1, 2])
def test_fedsgda_plus(problem, clients, every):
    algorithm = FedSGDAPlus(0.1, 0.3, local_steps=3, server_lr=1.7, snapshot_rounds=every)
    paper = paper_of(problem(), clients())
    same(problem(), algorithm, clients(), snapshot_sgda(paper, 0.1, 0.3, 3, 3 * every, 5, glr=1.7))


def test_fedsgda_plus_projects_what_the_server_reaches():
    paper = paper_of(robust(), labelled())
    expected = snapshot_sgda(paper, 0.1, 0.9, 3, 3, 4, glr=6.0)
    same(robust(), FedSGDAPlus(0.1, 0.9, 3, server_lr=6.0), labelled(), expected)
    loose = replace(paper, project=lambda vector: vector)
    assert np.abs(snapshot_sgda(loose, 0.1, 0.9, 3, 3, 4, glr=6.0)[-1][1]).max() > 1.5


@MINIMAX
@pytest.mark.parametrize(("plus", "S"), [(False, None), (True, None), (True, 6)])
def test_local_sgdam(problem, clients, plus, S):
    rates = {"primal_lr": 0.4, "dual_lr": 0.6, "primal_rate": 1.5, "dual_rate": 2.0}
    options = {"snapshot_every": S} if plus else {}
    kind = LocalSGDAMPlus if plus else LocalSGDAM
    algorithm = kind(lr=0.3, **rates, local_steps=2, **options)
    first = first_sample(clients(), 1)
    expected = momentum_local_sgda(
        paper_of(problem(), clients()),
        first,
        lambda t: 0.3,
        (0.4, 0.6),
        (1.5, 2.0),
        2,
        5,
        (S or 4) if plus else None,
    )
    same(problem(), algorithm, clients(), expected)


def test_local_sgdam_with_a_rate_per_iteration():
    """Steps and weights fall together."""
    expected = momentum_local_sgda(
        paper_of(quadratic(), noisy()),
        first_sample(noisy(), 1),
        lambda t: 0.3 / np.sqrt(2 + t),
        (0.4, 0.6),
        (1.5, 2.0),
        3,
        3,
    )
    algorithm = LocalSGDAM(InverseRoot(0.3, shift=2), 0.4, 0.6, 1.5, 2.0, local_steps=3)
    same(quadratic(), algorithm, noisy(), expected)


@MINIMAX
@pytest.mark.parametrize("batches", [1, 3])
def test_fedsgda_m(problem, clients, batches):
    algorithm = FedSGDAM(0.1, 0.2, 0.3, 0.6, local_steps=3, first_batches=batches)
    first = first_sample(clients(), batches)
    paper = paper_of(problem(), clients())
    same(problem(), algorithm, clients(), fedsgda_m(paper, first, (0.1, 0.2), (0.3, 0.6), 3, 4))


N, M, C1, C2, K = 0.8, 7.0, 0.5, 0.9, 5  # of the theory's rates


def eta_t(t: int) -> float:
    return N * K ** (1 / 3) / (M + t) ** (1 / 3)


THEORY: dict[str, Any] = {
    "lr": InverseRoot(N * K ** (1 / 3), shift=M + 1, power=1 / 3),
    "dual_rate": InverseRoot(C1 * N**2 * K ** (2 / 3), shift=M + 1, power=2 / 3),
    "primal_rate": InverseRoot(C2 * N**2 * K ** (2 / 3), shift=M + 1, power=2 / 3),
}


def expected_of(
    problem,
    clients,
    q: int,
    sync: str,
    kind: str = "identity",
    rounds: int = 4,
    first_matrix: str = "rule",
):
    averages, moved = algorithm_1(
        paper_of(problem(), clients()),
        first_sample(clients(), q),
        eta_t,
        0.1,
        0.2,
        lambda t: C1 * eta_t(t) ** 2,
        lambda t: C2 * eta_t(t) ** 2,
        q,
        q * rounds,
        sync,
        lambda: Matrix(kind, 0.7, 0.4),
        first_matrix,
    )
    # "track" leaves the common move to the clients.
    return averages if sync == "track" else moved


READINGS = ("track", "reaverage", "literal")
SYNC = pytest.mark.parametrize("sync", READINGS)


@MINIMAX
@SYNC
def test_fgda(problem, clients, sync):
    algorithm = FGDA(**THEORY, primal_lr=0.1, dual_lr=0.2, local_steps=3, sync=sync)
    same(problem(), algorithm, clients(), expected_of(problem, clients, 3, sync))


@pytest.mark.parametrize("kind", ["adam", "adabelief", "amsgrad", "adagrad_norm", "identity"])
@pytest.mark.parametrize(("problem", "clients"), [(quadratic, noisy_by_size), (robust, labelled)])
@pytest.mark.parametrize("first", ["rule", "identity"])
@SYNC
def test_ada_fgda(problem, clients, sync, first, kind):
    algorithm = AdaFGDA(
        **THEORY,
        primal_lr=0.1,
        dual_lr=0.2,
        local_steps=3,
        sync=sync,
        scale=kind,
        scale_rate=0.3,
        scale_floor=0.4,
        first_scale=first,
    )
    expected = expected_of(problem, clients, 3, sync, kind, first_matrix=first)
    same(problem(), algorithm, clients(), expected)


@SYNC
def test_the_readings_and_the_scales_are_not_the_same(sync):
    """Else the comparisons above would not tell them apart."""

    def last(sync: str, kind: str) -> Vector:
        return np.concatenate(expected_of(quadratic, noisy, 3, sync, kind)[-1])

    kinds = ("adam", "adabelief", "amsgrad", "adagrad_norm", "identity")
    ends = [last(sync, kind) for kind in kinds]
    for i, one in enumerate(ends):
        for other in ends[:i]:
            assert np.abs(one - other).max() > 1e-4
    # And A_1: not for the scale that is 1 anyway.
    for kind, end in zip(kinds[:-1], ends, strict=False):
        one = expected_of(quadratic, noisy, 3, sync, kind, first_matrix="identity")[-1]
        assert np.abs(np.concatenate(one) - end).max() > 1e-4
    # The three readings, at the same point of the iteration.
    q = 3
    rest = (eta_t, 0.1, 0.2, lambda t: 0.5, lambda t: 0.5, q, 3 * q)
    paper, first = paper_of(quadratic(), noisy()), first_sample(noisy(), q)
    track, again, literal = (
        algorithm_1(paper, first, *rest, s, lambda: Matrix("identity", 0, 0))[0][-1][1]
        for s in READINGS
    )
    for one, other in ((track, again), (track, literal), (again, literal)):
        assert np.abs(one - other).max() > 1e-4


def test_the_first_round_has_one_step_less():
    """The box averages at t = q, 2q, ...; with q = 1 it averages the first estimates at once."""
    assert [FGDA(local_steps=4).steps(r, 0) for r in range(3)] == [3, 4, 4]
    assert [FGDA(local_steps=4, sync="reaverage").steps(r, 0) for r in range(3)] == [3, 3, 3]
    assert [FGDA(local_steps=4, sync="literal").steps(r, 0) for r in range(3)] == [3, 3, 3]
    expected = expected_of(quadratic, noisy, 1, "track", rounds=5)
    algorithm = FGDA(**THEORY, primal_lr=0.1, dual_lr=0.2, local_steps=1)
    found = [state.server for state, _ in play(quadratic(), algorithm, noisy(), 5, SEED)]
    for server, (x, y) in zip(found, expected, strict=True):
        assert np.abs(server.x.numpy() - x).max() < 1e-10
        assert np.abs(server.y.numpy() - y).max() < 1e-10
    assert np.array_equal(found[0].x.numpy(), quadratic().start().x.numpy())
    assert not np.array_equal(found[1].x.numpy(), found[0].x.numpy())
