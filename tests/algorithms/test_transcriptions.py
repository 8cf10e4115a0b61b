"""Every method against its paper's box, written again here in numpy, with hand-written gradients.

The loops are over machines and steps, as printed. Only the batches' rows come from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from rows import (
    SIZES,
    auc,
    cross_entropy,
    labelled,
    labelled_by_size,
    labelled_rows,
    least_squares,
    linear,
    linear_auc,
    margin_auc,
    noisy,
    noisy_by_size,
    play,
    quadratic,
    robust_least_squares,
)

from fedminimax.algorithms.coda import Coda
from fedminimax.algorithms.coda_plus import CodaPlus
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.npa import NPA
from fedminimax.blocks.schedules import InverseRoot, Stagewise
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.query import LocalQuery
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.gradients import gradients
from fedminimax.problems.quadratic import Quadratic
from fedminimax.types import Batch, Point, Problem, batch_of

Vector = np.ndarray
Rows = tuple[np.ndarray, ...]

SEED = 5


def sigmoid(z: Vector) -> Vector:
    return 1 / (1 + np.exp(-z))


@dataclass(frozen=True)
class Paper:
    """What a box needs: gradients of F_k, samples z_t^k, the machines' weights, the sets."""

    gradient: Callable[[Vector, Vector, Rows], tuple[Vector, Vector]]
    best_dual: Callable[[Vector, list[tuple[float, Rows]]], Vector]
    sample: Callable[[int, int], Rows]
    weights: Vector
    v: Vector
    alpha: Vector
    project: Callable[[Vector], Vector]  # onto the set of alpha
    project_v: Callable[[Vector], Vector]

    @property
    def machines(self) -> range:
        return range(len(self.weights))

    def mean(self, vectors: list[Vector]) -> Vector:
        total = np.zeros_like(vectors[0])
        for weight, vector in zip(self.weights, vectors, strict=True):
            total = total + weight * vector
        return total


def quadratic_paper(tau: float):
    def gradient(x: Vector, y: Vector, rows: Rows) -> tuple[Vector, Vector]:
        t, b = rows[0].mean(), rows[1].mean(axis=0)
        return tau * x - t * y, -y + b - t * x

    def best_dual(x: Vector, weighted: list[tuple[float, Rows]]) -> Vector:
        total = np.zeros_like(x)
        for weight, (t, b) in weighted:
            total = total + weight * (b.mean(axis=0) - t.mean() * x)
        return total

    return gradient, best_dual


def auc_paper(p: float, form: str, margin: float):
    """AUC (Ying et al., NeurIPS 2016; Yuan et al., ICCV 2021), with s = sigmoid(w'features + w0)
    and v = (w, w0, a, b)."""

    def score(v: Vector, features: np.ndarray) -> Vector:
        return sigmoid(features @ v[:-3] + v[-3])

    def gradient(v: Vector, alpha: Vector, rows: Rows) -> tuple[Vector, Vector]:
        features, labels = rows
        n = len(labels)
        d_v, d_alpha = np.zeros_like(v), np.zeros(1)
        for s, feature, label in zip(score(v, features), features, labels, strict=True):
            a, b, al = v[-2], v[-1], alpha[0]
            factor = 2 * (1 + al) if form == "square" else 2 * al
            if label > 0:
                d_s = 2 * (1 - p) * (s - a) - factor * (1 - p)
                d_v[-2] += -2 * (1 - p) * (s - a) / n
                d_alpha[0] += -2 * (1 - p) * s / n
            else:
                d_s = 2 * p * (s - b) + factor * p
                d_v[-1] += -2 * p * (s - b) / n
                d_alpha[0] += 2 * p * s / n
            d_v[:-3] += d_s * s * (1 - s) * feature / n
            d_v[-3] += d_s * s * (1 - s) / n
        d_alpha[0] += -2 * p * (1 - p) * alpha[0]
        if form == "margin":
            d_alpha[0] += 2 * p * (1 - p) * margin
        return d_v, d_alpha

    def best_dual(v: Vector, weighted: list[tuple[float, Rows]]) -> Vector:
        s_pos = n_pos = s_neg = n_neg = 0.0
        for weight, (features, labels) in weighted:
            for s, label in zip(score(v, features), labels, strict=True):
                share = weight / len(labels)
                if label > 0:
                    s_pos, n_pos = s_pos + share * s, n_pos + share
                else:
                    s_neg, n_neg = s_neg + share * s, n_neg + share
        gap = s_neg / n_neg - s_pos / n_pos
        return np.array([gap if form == "square" else margin + gap])

    return gradient, best_dual


def cross_entropy_paper():
    def gradient(v: Vector, alpha: Vector, rows: Rows) -> tuple[Vector, Vector]:
        features, labels = rows
        error = sigmoid(features @ v[:-1] + v[-1]) - labels
        return np.append(features.T @ error, error.sum()) / len(labels), np.zeros(0)

    return gradient, None


def least_squares_paper():
    def gradient(v: Vector, alpha: Vector, rows: Rows) -> tuple[Vector, Vector]:
        features, labels = rows
        return 2 * features.T @ (features @ v - labels) / len(labels), np.zeros(0)

    return gradient, None


def robust_paper():
    """The larger of two squared errors: y in the simplex weighs them, x stays in a ball."""

    def gradient(v: Vector, alpha: Vector, rows: Rows) -> tuple[Vector, Vector]:
        features, labels = rows
        error, n = features @ v - labels, len(labels)
        slope = 2 * features.T @ (alpha[0] * error + alpha[1] * (error + 1)) / n
        return slope, np.array([np.mean(error**2), np.mean((error + 1) ** 2)])

    return gradient, None


def onto_simplex(vector: Vector) -> Vector:
    """Of two entries: the segment from (1, 0) to (0, 1)."""
    first = np.clip((1 + vector[0] - vector[1]) / 2, 0, 1)
    return np.array([first, 1 - first])


def onto_ball(radius: float) -> Callable[[Vector], Vector]:
    return lambda v: v if np.sqrt(v @ v) <= radius else v * radius / np.sqrt(v @ v)


def weights_of(clients: Clients, kind: str) -> Vector:
    sizes = np.array(clients.train.sizes, dtype=float)
    return sizes / sizes.sum() if kind == "size" else np.full(len(sizes), 1 / len(sizes))


def paper_of(problem: Problem, clients: Clients) -> Paper:
    clients = clients.to(torch.float64)
    sampler = Sampler(clients, 1, SEED)
    everyone = np.arange(len(clients))

    def sample(machine: int, iteration: int) -> Rows:
        batch = sampler.draw(everyone, iteration, 1).client(machine, 0, 1)[0]
        return tuple(column.numpy() for column in batch.rows)

    weights = weights_of(clients, clients.weights or "size")

    def keep(vector: Vector) -> Vector:
        return vector

    project = project_v = keep
    if isinstance(problem, AUC):
        shares = [np.mean(clients.train.rows(k)[1].numpy() > 0) for k in range(len(clients))]
        p = float(sum(w * share for w, share in zip(weights, shares, strict=True)))
        gradient, best_dual = auc_paper(p, problem.form, problem.margin)
        if problem.form == "margin":

            def project(vector: Vector) -> Vector:
                return np.maximum(vector, 0)

    elif isinstance(problem, Quadratic):
        gradient, best_dual = quadratic_paper(problem.tau)
    elif isinstance(problem, CrossEntropy):
        gradient, best_dual = cross_entropy_paper()
    elif len(problem.start().y):
        gradient, best_dual = robust_paper()
        project, project_v = onto_simplex, onto_ball(0.05)
    else:
        gradient, best_dual = least_squares_paper()
    v, alpha = (value.double().numpy() for value in problem.start())
    return Paper(gradient, best_dual, sample, weights, v, alpha, project, project_v)  # type: ignore[arg-type]


# The boxes. Each returns what the server holds after every communication round.


def fedavg(paper: Paper, rate: Callable[[int], float], I: int, rounds: int) -> list:  # noqa: E741
    """FedAvg: local SGD, then the mean."""
    v, points, now = paper.v, [], 0
    for _ in range(rounds):
        local = []
        for k in paper.machines:
            w = v
            for t in range(I):
                w = w - rate(now + t) * paper.gradient(w, paper.alpha, paper.sample(k, now + t))[0]
            local.append(w)
        now += I
        v = paper.mean(local)
        points.append((v, paper.alpha))
    return points


def local_sgda(paper: Paper, eta_x: float, eta_y: float, tau: int, rounds: int) -> list:
    """Local SGDA (Deng and Mahdavi 2021): both move at once, on one sample; average every tau."""
    xs = [paper.v for _ in paper.machines]
    ys = [paper.alpha for _ in paper.machines]
    points = []
    for t in range(rounds * tau):
        for k in paper.machines:
            g_x, g_y = paper.gradient(xs[k], ys[k], paper.sample(k, t))
            xs[k] = paper.project_v(xs[k] - eta_x * g_x)
            ys[k] = paper.project(ys[k] + eta_y * g_y)
        if (t + 1) % tau == 0:
            xs = [paper.mean(xs)] * len(xs)
            ys = [paper.mean(ys)] * len(ys)
            points.append((xs[0], ys[0]))
    return points


def dsg_plus(
    paper: Paper,
    v0: Vector,
    alpha0: Vector,
    eta: float,
    T: int,
    I: int,  # noqa: E741
    gamma: float,
    begin: int,
) -> tuple[Vector, Vector, list]:
    """Algorithm 2 of the CODASCA paper."""
    v = [v0 for _ in paper.machines]
    alpha = [alpha0 for _ in paper.machines]
    sum_v, sum_alpha, points = np.zeros_like(v0), np.zeros_like(alpha0), []
    for t in range(T):
        for k in paper.machines:
            g_v, g_alpha = paper.gradient(v[k], alpha[k], paper.sample(k, begin + t))
            v[k], alpha[k] = (
                paper.project_v(v[k] - eta * (g_v + gamma * (v[k] - v0))),
                paper.project(alpha[k] + eta * g_alpha),
            )
        # The return line averages v_t^k for t = 1..T over k too, so it makes no difference that
        # in a communication step v_t^k is already the average.
        sum_v, sum_alpha = sum_v + paper.mean(v), sum_alpha + paper.mean(alpha)
        if (t + 1) % I == 0:
            v = [paper.mean(v)] * len(v)
            alpha = [paper.mean(alpha)] * len(alpha)
            points.append((v[0], alpha[0]))
    return sum_v / T, sum_alpha / T, points


@dataclass(frozen=True)
class StagePlan:
    eta: float
    gamma: float
    I: int  # noqa: E741
    rounds: int


def coda_plus(
    paper: Paper, stages: list[StagePlan], output: str = "average", dual_batches: int | None = None
) -> list:
    """Algorithm 1; with `dual_batches` CODA, whose stages end with a dual from a sample."""
    v, alpha, begin, points = paper.v, paper.alpha, 0, []
    for stage in stages:
        T = stage.rounds * stage.I
        mean_v, mean_alpha, reached = dsg_plus(
            paper, v, alpha, stage.eta, T, stage.I, stage.gamma, begin
        )
        begin += T
        v, alpha = (mean_v, mean_alpha) if output == "average" else reached[-1]
        if dual_batches is not None:
            drawn = [
                (paper.weights[k] / dual_batches, paper.sample(k, begin + j))
                for k in paper.machines
                for j in range(dual_batches)
            ]
            alpha = paper.project(paper.best_dual(v, drawn))
            begin += dual_batches
        points += [*reached[:-1], (v, alpha)]
    return points


def codasca(paper: Paper, stages: list[StagePlan], eta_g: float = 1.0, equation: int = 6) -> list:
    """Algorithms 3 and 4, each round begun at v_{r-1}, each stage returning its last round."""
    v_s, alpha_s, begin, points = paper.v, paper.alpha, 0, []
    for stage in stages:
        eta, I = stage.eta, stage.I  # noqa: E741
        v0, v_r, alpha_r = v_s, v_s, alpha_s
        c_v = [np.zeros_like(v0) for _ in paper.machines]
        c_alpha = [np.zeros_like(alpha_s) for _ in paper.machines]
        mean_c_v, mean_c_alpha = np.zeros_like(v0), np.zeros_like(alpha_s)
        for _ in range(stage.rounds):
            local_v, local_alpha = [], []
            for k in paper.machines:
                v, alpha = v_r, alpha_r
                used_v, used_alpha = np.zeros_like(v), np.zeros_like(alpha)
                for t in range(I):
                    g_v, g_alpha = paper.gradient(v, alpha, paper.sample(k, begin + t))
                    g_v = g_v + stage.gamma * (v - v0)
                    used_v, used_alpha = used_v + g_v / I, used_alpha + g_alpha / I
                    v = paper.project_v(v - eta * (g_v - c_v[k] + mean_c_v))
                    alpha = paper.project(alpha + eta * (g_alpha - c_alpha[k] + mean_c_alpha))
                local_v.append(v)
                local_alpha.append(alpha)
                if equation == 6:
                    c_v[k] = c_v[k] - mean_c_v + (v_r - v) / (I * eta)
                    c_alpha[k] = c_alpha[k] - mean_c_alpha + (alpha - alpha_r) / (I * eta)
                else:
                    c_v[k], c_alpha[k] = used_v, used_alpha
            begin += I
            mean_c_v, mean_c_alpha = paper.mean(c_v), paper.mean(c_alpha)
            v_r, alpha_r = (
                paper.project_v(v_r + eta_g * (paper.mean(local_v) - v_r)),
                paper.project(alpha_r + eta_g * (paper.mean(local_alpha) - alpha_r)),
            )
            points.append((v_r, alpha_r))
        v_s, alpha_s = v_r, alpha_r
    return points


# Library against paper.


def same(problem: Problem, algorithm, clients: Clients, expected: list) -> None:
    played = play(problem, algorithm, clients, len(expected), SEED)
    moved = problem.start()
    for (state, _), (x, y) in zip(played, expected, strict=True):
        point = algorithm.point(state.server)
        scale = max(1.0, np.abs(x).max())
        assert np.abs(point.x.numpy() - x).max() <= 1e-10 * scale, f"x after round {state.round}"
        if y.size:
            assert np.abs(point.y.numpy() - y).max() <= 1e-10, f"y after round {state.round}"
        # A method that stood still would agree with nothing.
        assert not torch.equal(point.x, moved.x)
        moved = point


@pytest.mark.parametrize(
    ("problem", "clients"),
    [(cross_entropy, labelled), (least_squares, labelled), (cross_entropy, labelled_by_size)],
)
def test_fedavg(problem, clients):
    paper = paper_of(problem(), clients())
    same(problem(), FedAvg(lr=0.1, local_steps=3), clients(), fedavg(paper, lambda t: 0.1, 3, 3))


def test_fedavg_with_a_rate_per_iteration():
    paper = paper_of(cross_entropy(), labelled())
    expected = fedavg(paper, lambda t: 0.2 / np.sqrt(2 + t), 3, 3)
    same(cross_entropy(), FedAvg(lr=InverseRoot(0.2, shift=2), local_steps=3), labelled(), expected)


WITH_BEST_DUAL = [
    (quadratic, noisy),
    (quadratic, noisy_by_size),
    (linear_auc, labelled),
    (margin_auc, labelled),
]
MINIMAX = [*WITH_BEST_DUAL, (robust_least_squares, labelled)]


@pytest.mark.parametrize(("problem", "clients"), MINIMAX)
def test_local_sgda(problem, clients):
    paper = paper_of(problem(), clients())
    algorithm = LocalSGDA(primal_lr=0.1, dual_lr=0.3, local_steps=4)
    same(problem(), algorithm, clients(), local_sgda(paper, 0.1, 0.3, 4, 3))


@pytest.mark.parametrize("output", ["average", "last"])
@pytest.mark.parametrize(("problem", "clients"), MINIMAX)
def test_coda_plus_over_three_stages(problem, clients, output):
    paper = paper_of(problem(), clients())
    stages = [StagePlan(0.3 / 3**s, 0.2, 3, 2) for s in range(3)]
    algorithm = CodaPlus(
        lr=Stagewise(0.3, 3.0), proximal=0.2, local_steps=3, stage_rounds=2, stage_output=output
    )
    same(problem(), algorithm, clients(), coda_plus(paper, stages, output))


@pytest.mark.parametrize(("problem", "clients"), MINIMAX)
def test_coda_plus_with_growing_stages(problem, clients):
    paper = paper_of(problem(), clients())
    # Stages of 1, 2 and 4 rounds, with 2, 3 and 5 (4.5) local steps.
    stages = [StagePlan(0.2, 0.1, 2, 1), StagePlan(0.1, 0.1, 3, 2), StagePlan(0.05, 0.1, 5, 4)]
    algorithm = CodaPlus(
        lr=Stagewise(0.2, 2.0),
        proximal=0.1,
        local_steps=2,
        stage_rounds=1,
        stage_growth=2.0,
        local_steps_growth=1.5,
    )
    same(problem(), algorithm, clients(), coda_plus(paper, stages))


@pytest.mark.parametrize("output", ["average", "last"])
@pytest.mark.parametrize(("problem", "clients"), WITH_BEST_DUAL)
def test_coda_over_three_stages(problem, clients, output):
    paper = paper_of(problem(), clients())
    stages = [StagePlan(0.3 / 3**s, 0.2, 3, 2) for s in range(3)]
    algorithm = Coda(
        lr=Stagewise(0.3, 3.0),
        proximal=0.2,
        local_steps=3,
        stage_rounds=2,
        dual_batches=2,
        stage_output=output,
    )
    same(problem(), algorithm, clients(), coda_plus(paper, stages, output, dual_batches=2))


@pytest.mark.parametrize("server_lr", [1.0, 1.4])
@pytest.mark.parametrize(("problem", "clients"), MINIMAX)
def test_codasca_over_three_stages(problem, clients, server_lr):
    paper = paper_of(problem(), clients())
    stages = [StagePlan(0.3 / 3**s, 0.2, 3, 3 - s) for s in range(2)]
    # Stages of 3 and 2 (1.8) rounds.
    algorithm = Codasca(
        lr=Stagewise(0.3, 3.0),
        proximal=0.2,
        local_steps=3,
        stage_rounds=3,
        stage_growth=0.6,
        server_lr=server_lr,
    )
    # Where a set cuts a move short, its length no longer tells the gradients: eq. (7).
    equation = 7 if problem in (margin_auc, robust_least_squares) else 6
    same(problem(), algorithm, clients(), codasca(paper, stages, server_lr, equation))


@pytest.mark.parametrize(("problem", "clients"), MINIMAX)
def test_npa(problem, clients):
    paper = paper_of(problem(), clients())
    stages = [StagePlan(0.3 / 3**s, 0.2, 1, 3) for s in range(2)]
    algorithm = NPA(lr=Stagewise(0.3, 3.0), proximal=0.2, stage_rounds=3)
    same(problem(), algorithm, clients(), coda_plus(paper, stages))


@pytest.mark.parametrize(
    ("problem", "player"),
    [
        (margin_auc, "project"),
        (robust_least_squares, "project"),
        (robust_least_squares, "project_v"),
    ],
)
def test_the_transcriptions_meet_their_sets(problem, player):
    """The rows with sets would prove nothing about projections if no step ever left them."""
    paper, stages = paper_of(problem(), labelled()), [StagePlan(0.3, 0.2, 3, 3)]
    loose = replace(paper, **{player: lambda vector: vector})
    a, b = (codasca(p, stages, 1.4)[-1][0] for p in (paper, loose))
    assert not np.allclose(a, b, atol=1e-6)


# Losses against the naive formulas, and the saddle against the pairwise loss.


def naive_auc(problem: AUC, x: Vector, alpha: float, features: np.ndarray, labels: Vector) -> float:
    """Ying et al., row by row."""
    p, total = problem.positive_share, 0.0
    assert p is not None
    for feature, label in zip(features, labels, strict=True):
        s = float(feature @ x[:-3] + x[-3])
        s = float(sigmoid(np.array(s))) if problem.score == "sigmoid" else s
        a, b = x[-2], x[-1]
        pos, neg = float(label > 0), float(label <= 0)
        total += (1 - p) * (s - a) ** 2 * pos + p * (s - b) ** 2 * neg
        if problem.form == "square":
            total += 2 * (1 + alpha) * (p * s * neg - (1 - p) * s * pos) - p * (1 - p) * alpha**2
        else:
            m = problem.margin
            total += 2 * alpha * (p * (1 - p) * m + p * s * neg - (1 - p) * s * pos)
            total -= p * (1 - p) * alpha**2
    return total / len(labels)


@pytest.mark.parametrize("score", ["sigmoid", "raw"])
@pytest.mark.parametrize("form", ["square", "margin"])
def test_auc_is_the_naive_formula(form, score):
    problem = AUC(linear(), positive_share=0.3, form=form, score=score, margin=0.7)
    features, labels = labelled_rows((9,))[0]
    x, alpha = np.array([0.4, -0.2, 0.3, 0.1, 0.8, 0.3]), 0.6
    batch = batch_of(torch.from_numpy(features), torch.from_numpy(labels))
    found = problem.outer(torch.from_numpy(x), torch.tensor([alpha], dtype=torch.float64), batch)
    assert float(found) == pytest.approx(naive_auc(problem, x, alpha, features, labels), rel=1e-13)


def test_labels_of_minus_one_and_zero_are_the_same_class():
    features, labels = (torch.from_numpy(column) for column in labelled_rows((9,))[0])
    problem = AUC(linear(), positive_share=0.3)
    x, y = torch.linspace(-1, 1, 6).double(), torch.ones(1).double()
    zero, minus = batch_of(features, labels), batch_of(features, 2 * labels - 1)
    assert torch.equal(problem.outer(x, y, zero), problem.outer(x, y, minus))


def test_cross_entropy_is_the_naive_formula():
    problem, x = cross_entropy(), np.array([0.4, -0.2, 0.3, 0.1])
    features, labels = labelled_rows((9,))[0]
    q = sigmoid(features @ x[:-1] + x[-1])
    naive = -np.mean(labels * np.log(q) + (1 - labels) * np.log(1 - q))
    batch = batch_of(torch.from_numpy(features), torch.from_numpy(labels))
    found = problem.outer(torch.from_numpy(x), torch.zeros(0), batch)
    assert float(found) == pytest.approx(float(naive), rel=1e-12)


def test_quadratic_is_the_naive_formula():
    problem, x, y = Quadratic(2, tau=3.0), np.array([1.0, 2.0]), np.array([-1.0, 0.5])
    t, b = np.array([0.1, 0.3]), np.array([[1.0, 2.0], [3.0, -1.0]])
    naive = [
        3.0 / 2 * x @ x - (y @ y / 2 - b[i] @ y + y @ (t[i] * np.eye(2)) @ x) for i in range(2)
    ]
    batch = batch_of(torch.from_numpy(t), torch.from_numpy(b))
    found = problem.outer(torch.from_numpy(x), torch.from_numpy(y), batch)
    assert float(found) == pytest.approx(np.mean(naive), rel=1e-14)


@pytest.mark.parametrize("kind", ["uniform", "size"])
@pytest.mark.parametrize(("form", "margin"), [("square", 1.0), ("margin", 1.0), ("margin", 1.7)])
def test_the_saddle_value_is_the_weighted_pairwise_loss(kind, form, margin):
    """Sites of unequal size and prior: a pair counts by the weights of its two rows' clients."""
    clients = Clients(labelled_rows(), batch_size=4).to(torch.float64)
    weights = weights_of(clients, kind)
    problem = AUC(mlp_double(), form=form, margin=margin)
    ask = LocalQuery(problem, clients, "train", clients.weight_vector(kind))
    problem = problem.prepare(ask)
    network = problem.network.start().double()
    zeros = torch.zeros(2, dtype=torch.float64)
    rows = []  # (weight of the row, score, label)
    for k, weight in enumerate(weights):
        batch = clients.train.batch(k)
        scores = problem.scores(torch.cat([network, zeros]), batch).tolist()
        labels = batch.labels.tolist()
        rows += [(weight / len(labels), s, y) for s, y in zip(scores, labels, strict=True)]
    positive = [(w, s) for w, s, y in rows if y > 0]
    negative = [(w, s) for w, s, y in rows if y <= 0]
    p = sum(w for w, _ in positive)
    assert problem.positive_share == pytest.approx(p, rel=1e-12)
    a = sum(w * s for w, s in positive) / p
    b = sum(w * s for w, s in negative) / (1 - p)
    alpha = b - a if form == "square" else margin + b - a
    x = torch.cat([network, torch.tensor([a, b], dtype=torch.float64)])
    y = torch.tensor([alpha], dtype=torch.float64)
    values = [float(problem.outer(x, y, clients.train.batch(k))) for k in range(len(clients))]
    value = sum(w * v for w, v in zip(weights, values, strict=True))
    pairwise = sum(w * v * (margin - s + t) ** 2 for w, s in positive for v, t in negative) / (
        p * (1 - p)
    )
    constant = p * (1 - p) if form == "square" else 0.0
    assert value == pytest.approx(p * (1 - p) * pairwise - constant, rel=1e-12, abs=1e-14)
    # And it is a saddle: the mean gradient in a, b and alpha is 0 there.
    batches = [clients.train.batch(k) for k in range(len(clients))]
    slopes = [gradients(problem, Point(x, y), (batch,)) for batch in batches]
    mean = sum(w * torch.cat([g.x[-2:], g.y]) for w, g in zip(weights, slopes, strict=True))
    assert float(torch.as_tensor(mean).abs().max()) < 1e-14


def mlp_double():
    return auc().network.module(auc().network.start())


@pytest.mark.parametrize("make", [quadratic, linear_auc, margin_auc])
def test_the_dual_from_statistics_is_the_best_one(make):
    """What CODA computes at the end of a stage makes the mean gradient in y vanish."""
    problem = make()
    clients = (noisy() if isinstance(problem, Quadratic) else labelled()).to(torch.float64)
    weights = clients.weight_vector("size")
    problem = problem.prepare(LocalQuery(problem, clients, "train", weights))
    x = problem.start().x.double() + 0.1
    batches = [clients.train.batch(k) for k in range(len(clients))]
    pairs = list(zip(weights, batches, strict=True))
    mean = sum(w * problem.dual_statistics(x, batch) for w, batch in pairs)
    y = problem.dual_from(mean)
    slope = sum(w * gradients(problem, Point(x, y), (batch,)).y for w, batch in pairs)
    assert y.shape == problem.start().y.shape
    assert float(torch.as_tensor(slope).abs().max()) < 1e-14


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "make",
    [quadratic, auc, linear_auc, margin_auc, cross_entropy, least_squares, robust_least_squares],
)
def test_gradients_are_the_finite_differences(make, padded):
    problem = make()
    if isinstance(problem, AUC):
        problem.positive_share = 0.3
    clients = (noisy() if isinstance(problem, Quadratic) else labelled()).to(torch.float64)
    full = clients.train.batch(2)
    batch = full
    if padded:
        # Two repeated rows that only fill up the shape must not change a thing.
        rows = tuple(torch.cat([column, column[:2]]) for column in full.rows)
        nothing = torch.zeros(2, dtype=torch.float64)
        padding = torch.cat([torch.zeros(SIZES[2]), torch.ones(2)]).double()
        batch = Batch(rows, torch.cat([full.weight, nothing]), padding)
    x, y = (v.double() + 0.3 for v in problem.start())
    found = gradients(problem, Point(x, y), (batch,))
    step = 1e-6
    for vector, slope, rebuild in ((x, found.x, lambda v: (v, y)), (y, found.y, lambda v: (x, v))):
        assert slope.shape == vector.shape
        for i in range(vector.numel()):
            shift = torch.zeros_like(vector)
            shift[i] = step
            high, low = (problem.outer(*rebuild(vector + s), full) for s in (shift, -shift))
            assert float(slope[i]) == pytest.approx(
                float(high - low) / (2 * step), abs=2e-9, rel=1e-7
            )
