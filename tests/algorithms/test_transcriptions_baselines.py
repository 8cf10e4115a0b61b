"""The baselines against their boxes, written again in numpy; only rows and draws are the library's.

Cohorts of three of five clients, so that absent clients and client weights are in play.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from rows import cross_entropy, federation_of, labelled, labelled_by_size, least_squares
from rows_baselines import (
    class_weighted,
    class_weighted_linear,
    classes,
    least_squares_in_a_ball,
)
from test_transcriptions import SEED, Paper, Rows, Vector, onto_ball, paper_of, same

from fedminimax.algorithms.afl import AFL
from fedminimax.algorithms.drfa import DRFA
from fedminimax.algorithms.fedprox import FedProx
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.local_sgdm import LocalSGDM
from fedminimax.algorithms.local_sgdm_rl import Copies, LocalSGDMRL, ratios
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.engine.simulate import simulate
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.weighted_cross_entropy import WeightedCrossEntropy
from fedminimax.random import distinct, key, words
from fedminimax.types import Algorithm, Clock, Problem

MINIMISATIONS = [
    (cross_entropy, labelled),
    (cross_entropy, labelled_by_size),
    (least_squares, labelled),
    (least_squares_in_a_ball, labelled),
]
on_each = pytest.mark.parametrize(("problem", "clients"), MINIMISATIONS)
COHORT = 3


def paper_for(problem: Callable[[], Problem], clients: Clients) -> Paper:
    paper = paper_of(problem(), clients)
    if problem is least_squares_in_a_ball:
        paper = replace(paper, project_v=onto_ball(0.05))
    return paper


def servers(
    problem: Problem, algorithm: Algorithm, clients: Clients, rounds: int
) -> Iterator[tuple]:
    """Round, server and client store after each round of a partial run."""
    federation, state, store = federation_of(problem, algorithm, clients, SEED, cohort=COHORT)
    for number in range(rounds):
        state = play_round(federation, state, store, Debug())
        yield number, state.server, store


def evenly(round: int, phase: int) -> list[int]:
    return distinct(key(SEED, "cohort", round, phase), COHORT, 5).tolist()


def close(found: torch.Tensor, expected: Vector) -> bool:
    return bool(np.abs(found.numpy() - expected).max() <= 1e-10 * max(1, np.abs(expected).max()))


# LocalSGDM and FedProx.


@on_each
@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_local_sgdm(problem, clients, beta):
    paper = paper_for(problem, clients())
    w = [paper.v for _ in paper.machines]
    u = [np.zeros_like(paper.v) for _ in paper.machines]
    points, eta, period = [], 0.05, 3
    for t in range(9):
        for k in paper.machines:
            g = paper.gradient(w[k], paper.alpha, paper.sample(k, t))[0]
            u[k] = beta * u[k] + g
            w[k] = paper.project_v(w[k] - eta * u[k])
        if (t + 1) % period == 0:
            w, u = [paper.mean(w)] * len(w), [paper.mean(u)] * len(u)
            points.append((w[0], paper.alpha))
    same(problem(), LocalSGDM(eta, beta, period), clients(), points)


def ratio(change: np.ndarray, c: int, unique: float) -> float:
    """R_c of the authors' code: entry by entry of the last layer."""
    own = rest = 0.0
    others = [o for o in range(len(change)) if o != c]
    for entry in range(change.shape[1]):
        here = change[c, entry]
        if here > 0 and all(abs(change[o, entry]) < unique * here for o in others):
            own += here
            rest += sum(change[o, entry] for o in others) / len(others)
    return min(abs(own) / abs(rest), 5000) if rest else 10


@pytest.mark.parametrize("slope", [0.1, 2.0])
def test_local_sgdm_rl(slope):
    problem, clients = class_weighted_linear(), classes()
    width, count, eta, beta, period = 3, 3, 0.3, 0.5, 2
    paper = paper_of(problem, clients)
    w, u = paper.v.reshape(count, width), np.zeros((count, width))
    alpha, points = np.ones(count), []

    def softmax_gradient(w: Vector, rows: Rows, weights: Vector) -> Vector:
        features, labels = rows[0], rows[1].astype(int)
        scores = np.exp(features @ w.T)
        off = scores / scores.sum(1, keepdims=True) - np.eye(count)[labels]
        return (off * weights[labels][:, None]).T @ features / len(labels)

    weights = np.array([7, 5, 12, 4, 6]) / 34  # by size; the server's own rows have none
    own = tuple(column.numpy() for column in clients.train.rows(5))
    for round in range(3):
        ws, us = [w] * 5, [u] * 5
        for t in range(round * period, (round + 1) * period):
            for k in range(5):
                us[k] = beta * us[k] + softmax_gradient(ws[k], paper.sample(k, t), alpha)
                ws[k] = ws[k] - eta * us[k]
        w, u = np.tensordot(weights, ws, 1), np.tensordot(weights, us, 1)
        change = []
        for c in range(count):
            copy, momentum = w, np.zeros_like(w)
            rows = tuple(column[own[1] == c] for column in own)
            for _ in range(2):
                momentum = beta * momentum + softmax_gradient(copy, rows, np.ones(count))
                copy = copy - eta * momentum
            change.append((copy - w).ravel())
        found = [ratio(np.array(change), c, 0.8) for c in range(count)]
        alpha = 1 + slope * np.array(found)
        points.append((w.ravel(), alpha))
    assert len(set(alpha)) > 1
    same(problem, LocalSGDMRL(eta, beta, period, slope=slope), clients, points)


def test_the_ratio_is_ten_where_no_entry_is_unique_and_capped():
    level = torch.ones(2, 3)
    assert ratios(level, 0.8).tolist() == [10, 10]
    far = torch.tensor([[1.0, -1e-9], [1e-6, 1.0]])
    assert float(ratios(far, 0.8).min()) > 5000
    up, _ = LocalSGDMRL(slope=0.5).send_weights(None, Copies(far, far, far), Clock.at())  # type: ignore[arg-type]
    assert up.weights.tolist() == [2501, 2501]


def test_the_ratio_loss_needs_its_problem_and_rows():
    with pytest.raises(ValueError, match="one logit per class, which CrossEntropy has not"):
        LocalSGDMRL().init_server(cross_entropy(), cross_entropy().start())
    bare = Clients([classes().train.rows(k) for k in range(5)])
    with pytest.raises(ValueError, match="LocalSGDMRL needs rows at the server"):
        simulate(class_weighted(), LocalSGDMRL(), bare, 1)
    with pytest.raises(ValueError, match="the y of WeightedCrossEntropy is no player"):
        simulate(class_weighted(), LocalSGDA(), classes(), 1)
    even = simulate(class_weighted(), LocalSGDM(), classes(), 1)  # all classes weigh the same
    assert even.point.y.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="last layer must be Linear"):
        WeightedCrossEntropy(torch.nn.Linear(3, 2), 3)


@on_each
def test_fedprox(problem, clients):
    paper = paper_for(problem, clients())
    server, points, t, mu = paper.v, [], 0, 0.7
    for _ in range(3):
        ends = []
        for k in paper.machines:
            w = server
            for step in range(4):
                g = paper.gradient(w, paper.alpha, paper.sample(k, t + step))[0]
                w = paper.project_v(w - 0.1 * (g + mu * (w - server)))
            ends.append(w)
        t += 4
        server = paper.mean(ends)
        points.append((server, paper.alpha))
    same(problem(), FedProx(0.1, 4, proximal=mu), clients(), points)


# SCAFFOLD.


@on_each
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_with_absent_clients(problem, clients, option):
    """The printed rules: displacements for option II (but with a set, where they no longer tell
    the gradients), the gradient of all rows at the server's point for option I."""
    eta_l, eta_g, steps = 0.05, 1.3, 3
    algorithm = Scaffold(eta_l, eta_g, steps, option)
    paper, data = paper_for(problem, clients()), clients().to(torch.float64)
    N = len(data)
    whole = [tuple(column.numpy() for column in data.train.rows(k)) for k in range(N)]
    x, c, own, t = paper.v, np.zeros_like(paper.v), [np.zeros_like(paper.v)] * N, 0
    met: set[int] = set()
    for number, server, store in servers(problem(), algorithm, clients(), 4):
        S = evenly(number, 0)
        ends, changes = [], []
        for i in S:
            y, used = x, np.zeros_like(x)
            for k in range(steps):
                g = paper.gradient(y, paper.alpha, paper.sample(i, t + k))[0]
                used = used + g / steps
                y = paper.project_v(y - eta_l * (g - own[i] + c))
            if option == "I":
                new = paper.gradient(x, paper.alpha, whole[i])[0]
            elif problem is least_squares_in_a_ball:
                new = used
            else:
                new = own[i] - c + (x - y) / (steps * eta_l)
            ends.append(y)
            changes.append(new - own[i])
            own = [new if j == i else own[j] for j in range(N)]
        t += steps
        w = paper.weights[S] / paper.weights[S].sum()
        x = paper.project_v(x + eta_g * (np.tensordot(w, np.array(ends), 1) - x))
        c = c + paper.weights[S].sum() * np.tensordot(w, np.array(changes), 1)
        assert close(server.x, x)
        assert close(server.control, c)
        met |= set(S)
        assert set(store.states) == met
        for i in met:
            assert close(store.states[i].control, own[i])
        # The server's control is the mean over all clients, met or not.
        assert np.allclose(c, np.tensordot(paper.weights, np.array(own), 1), atol=1e-12)
    assert len(met) > COHORT


# DRFA and AFL.


def loss_of(problem: Problem, w: Vector, rows: Rows) -> float:
    features, labels = rows
    if isinstance(problem, CrossEntropy):
        q = 1 / (1 + np.exp(-(features @ w[:-1] + w[-1])))
        return float(-np.mean(labels * np.log(q) + (1 - labels) * np.log(1 - q)))
    return float(np.mean((features @ w - labels) ** 2))


def onto_simplex(v: Vector) -> Vector:
    """The threshold by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


@on_each
def test_drfa(problem, clients):
    eta, gamma, tau, m, N = 0.05, 0.1, 4, COHORT, 5
    algorithm = DRFA(eta, gamma, tau, clients=N)
    paper = paper_for(problem, clients())
    w, weights, t = paper.v, np.full(N, 1 / N), 0
    seen, chosen, zeros = set(), set(), 0
    for number, server, _ in servers(problem(), algorithm, clients(), 6):
        # Sampled according to lambda: the client whose stretch of [0, 1) holds the number.
        uniform = words(key(SEED, "cohort", number, 0), np.arange(m)) / 2**32
        D = [int(np.argmax(np.cumsum(weights) > u)) for u in uniform]
        later = int(words(key(0, "DRFA snapshot"), number)) % tau + 1
        ends, shots = [], []
        for i in D:
            local = [w]
            for step in range(tau):
                g = paper.gradient(local[-1], paper.alpha, paper.sample(i, t + step))[0]
                local.append(paper.project_v(local[-1] - eta * g))
            ends.append(local[tau])
            shots.append(local[later])
        w, snapshot = np.sum(ends, 0) / m, np.sum(shots, 0) / m
        U = evenly(number, 1)
        v = np.zeros(N)
        for i in U:
            v[i] = N / m * loss_of(problem(), snapshot, paper.sample(i, t + tau))
        t += tau + 1
        weights = onto_simplex(weights + tau * gamma * v)
        assert close(server.x, w)
        assert close(server.snapshot, snapshot)
        assert close(server.weights, weights)
        seen.add(tuple(sorted(D)))
        chosen.add(later)
        zeros += int((weights == 0).any())
    assert len(seen) > 1
    assert len(chosen) > 1
    assert zeros  # the projection was needed


@pytest.mark.parametrize(
    ("lr", "weights_lr", "outcome"),
    [(0.1, 1e8, "finished"), (10.0, 1e30, "non-finite weights at round 0, phase 1, at the server")],
)
def test_huge_rates_of_drfa_end_in_a_sentence(lr, weights_lr, outcome):
    method = DRFA(lr, weights_lr, 3)
    run = simulate(least_squares(), method, labelled(), 8, cohort=COHORT, dtype=torch.float32)
    assert run.outcome.startswith(outcome)


@on_each
@pytest.mark.parametrize("output", ["average", "last"])
def test_afl(problem, clients, output):
    gamma_w, gamma_l, N, m = 0.05, 0.5, 5, COHORT
    algorithm = AFL(gamma_w, gamma_l, output, clients=N)
    paper = paper_for(problem, clients())
    w, weights, visited, zeros = paper.v, np.full(N, 1 / N), [], 0
    for t, server, _ in servers(problem(), algorithm, clients(), 8):
        direction, losses = np.zeros_like(w), np.zeros(N)
        for k in evenly(t, 0):
            rows = paper.sample(k, t)
            direction += N / m * weights[k] * paper.gradient(w, paper.alpha, rows)[0]
            losses[k] = N / m * loss_of(problem(), w, rows)
        w = paper.project_v(w - gamma_w * direction)
        weights = onto_simplex(weights + gamma_l * losses)
        visited.append(w)
        zeros += int((weights == 0).any())
        assert close(server.weights, weights)
        expected = np.mean(visited, 0) if output == "average" else w
        assert close(algorithm.point(server).x, expected)
    assert zeros
