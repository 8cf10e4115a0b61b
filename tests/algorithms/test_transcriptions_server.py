"""The methods with a step or an exchange of their own at the server, against their boxes in numpy.

Written from the papers and the algorithm sheet, with loops over clients and steps, gradients by
hand, and cohorts: `who(round, exchange)` lists the clients that take part. Only the batches' rows
and the cohorts come from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rows import federation_of, labelled, noisy, noisy_by_size, quadratic, robust_least_squares
from test_transcriptions import SEED, Paper, Vector, margin_auc, paper_of

from fedminimax.algorithms.cdma import CDMAADA, CDMANC, CDMAONE
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDA, FedNormSGDAPlus
from fedminimax.algorithms.fednest import FedNest
from fedminimax.algorithms.fess_gda import FESSGDA
from fedminimax.algorithms.fsgda import FSGDA
from fedminimax.algorithms.sagda import SAGDA
from fedminimax.algorithms.smoothed_gda import SmoothedAGDA, SmoothedGDA
from fedminimax.blocks.schedules import InverseRoot
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.types import Algorithm, Problem

Who = Callable[[int, int], list[int]]
ROUNDS = 3


def mean(paper: Paper, machines: list[int], vectors: list[Vector]) -> Vector:
    weights = paper.weights[machines]
    return sum(w * v for w, v in zip(weights / weights.sum(), vectors, strict=True))  # type: ignore


class Box:
    """What every box needs; rounds are played by `round`, which moves x, y and `now`."""

    def __init__(self, paper: Paper, clients: Clients, who: Who, **numbers: Any):
        self.paper, self.who, self.n = paper, who, numbers
        self.x, self.y, self.now = paper.v, paper.alpha, 0
        clients = clients.to(torch.float64)
        self.rows = [
            tuple(c.numpy() for c in clients.train.rows(k)) for k in range(len(paper.weights))
        ]
        self.begin()

    def begin(self) -> None:
        pass

    def round(self, t: int) -> None:
        raise NotImplementedError

    def batch_gradient(self, k: int, iteration: int, x: Vector, y: Vector):
        return self.paper.gradient(x, y, self.paper.sample(k, iteration))

    def full_gradient(self, k: int, x: Vector, y: Vector):
        return self.paper.gradient(x, y, self.rows[k])

    def averaged(self, machines: list[int], pairs: list[tuple[Vector, Vector]]):
        return tuple(mean(self.paper, machines, [p[i] for p in pairs]) for i in (0, 1))

    def local(self, k: int, K: int, eta_x: float, eta_y: float, correct=None, snapshot=None):
        """K steps of machine k from the server's point; all gradients used are returned too."""
        x, y, used = self.x, self.y, []
        for j in range(K):
            g_x, g_y = self.batch_gradient(k, self.now + j, x, y)
            if snapshot is not None:
                g_y = self.batch_gradient(k, self.now + j, snapshot, y)[1]
            if correct is not None:
                g_x, g_y = correct(k, self.now + j, x, y, g_x, g_y)
            used.append((g_x, g_y))
            x, y = self.paper.project_v(x - eta_x * g_x), self.paper.project(y + eta_y * g_y)
        return x, y, used


class Fess(Box):
    """FESS-GDA, Algorithm 1, on f - reg/2 |y - y_0|^2."""

    def begin(self):
        self.z = self.x

    def round(self, t):
        n, S = self.n, self.who(t, 0)
        K, eta_xl, eta_xg, p = n["K"], n["eta_xl"], n["eta_xg"], n["p"]
        y_0 = self.paper.project(np.zeros_like(self.y))

        def regularised(k, iteration, x, y, g_x, g_y):
            return g_x, g_y - n["reg"] * (y - y_0)

        ends = [self.local(k, K, eta_xl, n["eta_yl"], regularised)[:2] for k in S]
        m_x, m_y = self.averaged(S, ends)
        x = self.x + eta_xg * (m_x - self.x) - eta_xl * eta_xg * K * p * (self.x - self.z)
        self.x = self.paper.project_v(x)
        self.y = self.paper.project(self.y + n["eta_yg"] * (m_y - self.y))
        self.z = self.z + n["beta"] * (self.x - self.z)
        self.now += K


class Smoothed(Box):
    """FESS-GDA paper, Algorithm 2; `alternating`: y moves at the new x."""

    def begin(self):
        self.z = self.x

    def round(self, t):
        n, S, x, y = self.n, self.who(t, 0), self.x, self.y
        g_x, g_y = self.averaged(S, [self.batch_gradient(k, self.now, x, y) for k in S])
        self.x = self.paper.project_v(x - n["eta_x"] * (g_x + n["p"] * (x - self.z)))
        if n["alternating"]:
            self.now += n["second"]
            pairs = [self.batch_gradient(k, self.now, self.x, y) for k in S]
            g_y = self.averaged(S, pairs)[1]
        self.y = self.paper.project(y + n["eta_y"] * g_y)
        self.z = self.z + n["beta"] * (self.x - self.z)
        self.now += 1


class Fsgda(Box):
    """Sheet 3.16."""

    def round(self, t):
        n, S = self.n, self.who(t, 0)
        ends = [self.local(k, n["K"], n["eta_xl"], n["eta_yl"])[:2] for k in S]
        d_x = mean(self.paper, S, [e[0] - self.x for e in ends])
        d_y = mean(self.paper, S, [e[1] - self.y for e in ends])
        self.x = self.paper.project_v(self.x + n["eta_xg"] * d_x)
        self.y = self.paper.project(self.y + n["eta_yg"] * d_y)
        self.now += n["K"]


class Sagda(Box):
    """Sheet 3.16: the controls have a batch of their own, before the local steps."""

    def round(self, t):
        n, S = self.n, self.who(t, 0)
        v = {k: self.batch_gradient(k, self.now, self.x, self.y) for k in S}
        V = self.averaged(S, list(v.values()))
        self.now += 1

        def correct(k, iteration, x, y, g_x, g_y):
            return g_x - v[k][0] + V[0], g_y - v[k][1] + V[1]

        ends = [self.local(k, n["K"], n["eta_xl"], n["eta_yl"], correct)[:2] for k in S]
        m_x, m_y = self.averaged(S, ends)
        self.x = self.paper.project_v(self.x + n["eta_xg"] * (m_x - self.x))
        self.y = self.paper.project(self.y + n["eta_yg"] * (m_y - self.y))
        self.now += n["K"]


class FedNorm(Box):
    """Sheet 3.17, a_k = 1, tau_eff the mean; S: the dual's gradient at a snapshot."""

    def round(self, t):
        n, machines = self.n, self.who(t, 0)
        if n["S"] and t % n["S"] == 0:
            self.snapshot = self.x
        snapshot = self.snapshot if n["S"] else None
        tau = {k: n["tau"](t, k) for k in machines}
        g = {}
        for k in machines:
            used = self.local(k, tau[k], n["eta_x"], n["eta_y"], snapshot=snapshot)[2]
            g[k] = tuple(sum(u[i] for u in used) / tau[k] for i in (0, 1))
        tau_eff = mean(self.paper, machines, [np.array(float(tau[k])) for k in machines])
        g_x, g_y = self.averaged(machines, [g[k] for k in machines])
        self.x = self.paper.project_v(self.x - tau_eff * n["gamma_x"] * g_x)
        self.y = self.paper.project(self.y + tau_eff * n["gamma_y"] * g_y)
        self.now += max(tau.values())


class Cdma(Box):
    """Sheet 3.15: NC has no control, ONE the mean of full gradients, ADA a STORM estimate of it."""

    def round(self, t):
        n, kind, first = self.n, self.n["variant"], self.who(t, 0)
        x_t, y_t = self.x, self.y
        correct: Callable | None = None
        machines = first
        if kind != "nc":
            full = [self.full_gradient(k, x_t, y_t) for k in first]
            u = self.averaged(first, full)
            if kind == "ada" and t > 0:
                a = min(n["a"](t), 1.0)
                old = self.averaged(first, [self.full_gradient(k, *self.previous) for k in first])
                u = tuple(u[i] - (1 - a) * old[i] + (1 - a) * self.u[i] for i in (0, 1))
            self.u, self.previous = u, (x_t, y_t)

            def corrected(k, iteration, x, y, g_x, g_y):
                o_x, o_y = self.batch_gradient(k, iteration, x_t, y_t)
                return g_x - o_x + u[0], g_y - o_y + u[1]

            correct, machines = corrected, self.who(t, 1) if n["redraw"] else first
        rate = n["rate"](t)
        ends = [
            self.local(k, n["K"], rate * n["eta_x"], rate * n["eta_y"], correct) for k in machines
        ]
        self.x, self.y = self.averaged(machines, [e[:2] for e in ends])
        self.now += n["K"]


class Nest(Box):
    """Sheet 3.14: T inner rounds on y (FedInn), then one on x (FedOut)."""

    def anchor(self, S, x, y):
        if self.n["whole"]:
            return self.averaged(S, [self.full_gradient(k, x, y) for k in S])
        found = self.averaged(S, [self.batch_gradient(k, self.now, x, y) for k in S])
        self.now += 1
        return found

    def round(self, t):
        n, S = self.n, self.who(t, 0)
        for _ in range(n["T"]):
            q, x, y = self.anchor(S, self.x, self.y)[1], self.x, self.y
            ends = []
            for k in S:
                y_k = y
                for j in range(n["tau_y"]):
                    new = self.batch_gradient(k, self.now + j, x, y_k)[1]
                    old = self.batch_gradient(k, self.now + j, x, y)[1]
                    y_k = self.paper.project(y_k + n["beta"] / n["tau_y"] * (new - old + q))
                ends.append(y_k)
            self.now += n["tau_y"]
            self.y = mean(self.paper, S, ends)
        h, x, y = self.anchor(S, self.x, self.y)[0], self.x, self.y
        ends = []
        for k in S:
            x_k = x
            for j in range(n["tau_x"]):
                new = self.batch_gradient(k, self.now + j, x_k, y)[0]
                old = self.batch_gradient(k, self.now + j, x, y)[0]
                x_k = self.paper.project_v(x_k - n["alpha"] / n["tau_x"] * (new - old + h))
            ends.append(x_k)
        self.now += n["tau_x"]
        self.x = mean(self.paper, S, ends)


# Library against box.

PROBLEMS = pytest.mark.parametrize(
    ("problem", "clients"),
    [(quadratic, noisy_by_size), (margin_auc, labelled), (robust_least_squares, labelled)],
)
COHORTS = pytest.mark.parametrize("cohort", [5, 3])


def same(
    problem: Problem,
    algorithm: Algorithm,
    clients: Clients,
    cohort: int,
    kind: type[Box],
    **numbers: Any,
) -> None:
    federation, state, store = federation_of(problem, algorithm, clients, SEED, cohort=cohort)

    def who(round: int, exchange: int) -> list[int]:
        return federation.draw_cohort(None, round, exchange).tolist()

    box = kind(paper_of(problem, clients), clients, who, **numbers)
    for t in range(ROUNDS):
        before = box.x, box.y
        box.round(t)
        state = play_round(federation, state, store, Debug())
        for ours, theirs in zip(algorithm.point(state.server), (box.x, box.y), strict=True):
            assert np.abs(ours.numpy() - theirs).max() <= 1e-10, f"after round {t}"
        # A method that stood still would agree with nothing.
        moves = zip((box.x, box.y), before, strict=True)
        assert max(np.abs(new - old).max(initial=0) for new, old in moves) > 1e-6


LOCAL = {"primal_lr": 0.1, "dual_lr": 0.15, "local_steps": 3}
SERVER = {**LOCAL, "primal_server_lr": 1.3, "dual_server_lr": 1.7}
BOX = {"eta_xl": 0.1, "eta_yl": 0.15, "K": 3, "eta_xg": 1.3, "eta_yg": 1.7}


@COHORTS
@PROBLEMS
@pytest.mark.parametrize("reg", [0.0, 0.3])
def test_fess_gda(problem, clients, cohort, reg):
    method = FESSGDA(**SERVER, smoothing=0.6, anchor_rate=0.4, dual_proximal=reg)
    same(problem(), method, clients(), cohort, Fess, **BOX, p=0.6, beta=0.4, reg=reg)


@PROBLEMS
def test_smoothed_gda(problem, clients):
    method = SmoothedGDA(0.6, 0.4, primal_lr=0.2, dual_lr=0.1)
    numbers = {"eta_x": 0.2, "eta_y": 0.1, "p": 0.6, "beta": 0.4, "alternating": False}
    same(problem(), method, clients(), 5, Smoothed, **numbers)


@PROBLEMS
@pytest.mark.parametrize("second", [True, False])
def test_smoothed_agda(problem, clients, second):
    method = SmoothedAGDA(0.6, 0.4, primal_lr=0.2, dual_lr=0.1, second_batch=second)
    numbers = {"eta_x": 0.2, "eta_y": 0.1, "p": 0.6, "beta": 0.4, "alternating": True}
    same(problem(), method, clients(), 5, Smoothed, **numbers, second=int(second))


@COHORTS
@PROBLEMS
def test_fsgda(problem, clients, cohort):
    same(problem(), FSGDA(**SERVER), clients(), cohort, Fsgda, **BOX)


@COHORTS
@PROBLEMS
def test_sagda(problem, clients, cohort):
    same(problem(), SAGDA(**SERVER), clients(), cohort, Sagda, **BOX)


NORM = {**LOCAL, "primal_server_lr": 0.12, "dual_server_lr": 0.2}
NORM_BOX = {"eta_x": 0.1, "eta_y": 0.15, "gamma_x": 0.12, "gamma_y": 0.2}


@COHORTS
@PROBLEMS
@pytest.mark.parametrize("snapshot", [0, 2])
def test_fed_norm_sgda_with_steps_given(problem, clients, cohort, snapshot):
    given = (1, 4, 2, 3, 1)
    plain = FedNormSGDA(**NORM, client_steps=given)
    plus = FedNormSGDAPlus(**NORM, client_steps=given, snapshot_rounds=max(snapshot, 1))
    numbers = {**NORM_BOX, "tau": lambda t, k: given[k], "S": snapshot}
    same(problem(), plus if snapshot else plain, clients(), cohort, FedNorm, **numbers)


@COHORTS
def test_fed_norm_sgda_with_steps_in_turns(cohort):
    method = FedNormSGDA(**NORM, least_steps=2)
    numbers = {**NORM_BOX, "tau": lambda t, k: 2 + (t + k) % 2, "S": 0}
    same(quadratic(), method, noisy(), cohort, FedNorm, **numbers)


CDMA_BOX = {"eta_x": 0.1, "eta_y": 0.15, "K": 3, "rate": lambda t: 1.0}


@COHORTS
@PROBLEMS
def test_cdma_nc(problem, clients, cohort):
    same(problem(), CDMANC(**LOCAL), clients(), cohort, Cdma, **CDMA_BOX, variant="nc")


@COHORTS
@PROBLEMS
@pytest.mark.parametrize("redraw", [False, True])
def test_cdma_one(problem, clients, cohort, redraw):
    method = CDMAONE(**LOCAL, redraw=redraw)
    same(problem(), method, clients(), cohort, Cdma, **CDMA_BOX, variant="one", redraw=redraw)


@COHORTS
@PROBLEMS
@pytest.mark.parametrize("redraw", [False, True])
def test_cdma_ada(problem, clients, cohort, redraw):
    """eta_t = eta_0 / (t + 1)^0.2, a_t = min(1.4 / (t + 1)^0.4, 1): above 1 at first."""
    method = CDMAADA(
        InverseRoot(0.1, power=0.2, unit="round"),
        InverseRoot(0.15, power=0.2, unit="round"),
        3,
        redraw,
        InverseRoot(1.4, power=0.4, unit="round"),
    )
    numbers = {**CDMA_BOX, "rate": lambda t: (t + 1) ** -0.2, "a": lambda t: 1.4 * (t + 1) ** -0.4}
    same(problem(), method, clients(), cohort, Cdma, **numbers, variant="ada", redraw=redraw)


@COHORTS
@PROBLEMS
@pytest.mark.parametrize("data", ["whole", "minibatch"])
def test_fednest(problem, clients, cohort, data):
    method = FedNest(0.3, 0.4, 3, inner_rounds=2, inner_steps=2, control_data=data)
    numbers = {"alpha": 0.3, "beta": 0.4, "tau_x": 3, "tau_y": 2, "T": 2, "whole": data == "whole"}
    same(problem(), method, clients(), cohort, Nest, **numbers)
