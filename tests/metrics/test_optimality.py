"""Measures of optimality against closed forms, and against derivatives taken another way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from rows import (
    labelled,
    labelled_rows,
    linear,
    linear_auc,
    margin_auc,
    noisy,
    noisy_by_size,
    quadratic,
)
from torch import Tensor

from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.blocks.projections import ball, simplex
from fedminimax.data.clients import Clients
from fedminimax.data.gaussian import TiltData
from fedminimax.engine.executors import choose
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.round import Federation, State, play_round, play_with_drift
from fedminimax.engine.state.store import Store
from fedminimax.metrics.optimality import (
    MEASURES,
    Full,
    best_dual,
    best_primal,
    check_names,
    dual_gradient,
    duality_gap,
    gradient_dissimilarity,
    measure,
    moreau_gradient,
    phi_gradient,
    primal_gradient,
)
from fedminimax.problems.auc import AUC
from fedminimax.problems.functions import Composition, Minimax
from fedminimax.problems.gradients import gradients
from fedminimax.problems.pl_pl import PLPL
from fedminimax.types import Algorithm, Cost, Point, Problem


def full_of(problem: Problem, clients: Clients) -> Full:
    clients = clients.to(torch.float64)
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    problem = problem.prepare(LocalQuery(problem, clients, "train", weights))
    return Full(problem, LocalQuery(problem, clients, "train", weights))


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class Without:
    """A problem that hides its closed form, so that the ascent has to find it."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self.dual_from = self.best_dual_from = None

    def __getattr__(self, name: str):
        return getattr(self._problem, name)


POINT = Point(vector(0.7, -0.4, 1.1), vector(-0.2, 0.9, 0.3))


def quadratic_means(full: Full) -> tuple[Tensor, Tensor]:
    t, b = full.ask.mean("means")
    return t, b


# On the quadratic everything is known: f = tau/2 |x|^2 - |y|^2/2 + b'y - t y'x.


@pytest.mark.parametrize("clients", [noisy, noisy_by_size])
def test_gradients_on_the_quadratic(clients):
    full = full_of(quadratic(), clients())
    t, b = quadratic_means(full)
    slope_x, slope_y = 2.0 * POINT.x - t * POINT.y, -POINT.y + b - t * POINT.x
    assert primal_gradient(full, POINT) == pytest.approx(float(slope_x.norm()), rel=1e-12)
    assert dual_gradient(full, POINT) == pytest.approx(float(slope_y.norm()), rel=1e-12)
    best = quadratic().saddle(t, b)
    assert primal_gradient(full, best) < 1e-12
    assert dual_gradient(full, best) < 1e-12


def test_the_gradient_of_phi_on_the_quadratic():
    full = full_of(quadratic(), noisy_by_size())
    t, b = quadratic_means(full)
    # Phi(x) = tau/2 |x|^2 + |b - t x|^2 / 2
    expected = float((2.0 * POINT.x - t * (b - t * POINT.x)).norm())
    assert phi_gradient(full, POINT) == pytest.approx(expected, rel=1e-12)
    hidden = Full(Without(full.problem), full.ask)  # type: ignore[arg-type]
    found = best_dual(hidden, POINT, tolerance=1e-9)
    assert found.reached
    assert found.gradients > 0
    torch.testing.assert_close(found.vector, b - t * POINT.x, rtol=0, atol=1e-8)
    assert phi_gradient(hidden, POINT, tolerance=1e-9) == pytest.approx(expected, rel=1e-7)
    closed = best_dual(full, POINT)
    assert (closed.gradients, closed.reached) == (0, True)
    torch.testing.assert_close(closed.vector, b - t * POINT.x)


def test_the_gap_on_the_quadratic():
    full = full_of(quadratic(), noisy())
    t, b = quadratic_means(full)
    x, y = POINT
    upper = x @ x + (b - t * x).square().sum() / 2
    lower = -(y @ y) / 2 + b @ y - t**2 * (y @ y) / (2 * 2.0)
    found = duality_gap(full, POINT, tolerance=1e-9)
    assert found.reached
    assert found.upper == pytest.approx(float(upper), rel=1e-10)
    assert found.lower == pytest.approx(float(lower), rel=1e-10)
    assert found.gap == pytest.approx(float(upper - lower), rel=1e-10)
    assert abs(duality_gap(full, quadratic().saddle(t, b), tolerance=1e-9).gap) < 1e-10


def test_the_moreau_envelope_on_the_quadratic():
    full = full_of(quadratic(), noisy())
    t, b = quadratic_means(full)
    m = 1.5
    # (tau + t^2) u - t b + 2m (u - x) = 0
    nearest = (t * b + 2 * m * POINT.x) / (2.0 + t**2 + 2 * m)
    found = moreau_gradient(full, POINT, m, tolerance=1e-10)
    assert found.reached
    torch.testing.assert_close(found.nearest, nearest, rtol=0, atol=1e-9)
    assert found.gradient == pytest.approx(2 * m * float((POINT.x - nearest).norm()), rel=1e-8)


# A kink: Phi(x) = max( (x - 1)^2, (x + 1)^2 ) = x^2 + 2 |x| + 1, the dual on the simplex.


def kinked() -> Full:
    def loss(x: Tensor, y: Tensor, batch) -> Tensor:
        side = batch.mean(batch.rows[0])
        return y[0] * (x[0] - side) ** 2 + y[1] * (x[0] + side) ** 2

    problem = Minimax(loss, [1.0], [0.5, 0.5], project_y=simplex)
    return full_of(problem, Clients([(vector(1.0),), (vector(1.0),)], batch_size=None))


def test_the_best_dual_on_a_simplex_is_a_corner():
    full = kinked()
    found = best_dual(full, Point(vector(0.3), vector(0.5, 0.5)))
    assert found.reached
    assert found.vector.tolist() == pytest.approx([0, 1])
    assert phi_gradient(full, Point(vector(0.3), vector(0.5, 0.5))) == pytest.approx(2.6)
    # y is best already: its gradient is not 0, its projected gradient is.
    assert dual_gradient(full, Point(vector(0.3), vector(0.0, 1.0))) == 0
    assert dual_gradient(full, Point(vector(0.3), vector(1.0, 0.0))) == pytest.approx(0.6 * 2**0.5)


@pytest.mark.parametrize("x", [1.5, 0.3, -0.8, 0.0])
def test_the_moreau_envelope_sees_through_a_kink(x):
    m = 2.0
    nearest = np.sign(x) * max(m * abs(x) - 1, 0) / (1 + m)
    found = moreau_gradient(kinked(), Point(vector(x), vector(0.5, 0.5)), m)
    assert found.reached
    assert found.gradient == pytest.approx(2 * m * abs(x - nearest), abs=1e-4)


def test_near_the_kink_only_the_envelope_is_small():
    full, near = kinked(), Point(vector(1e-3), vector(0.5, 0.5))
    assert phi_gradient(full, near) > 2
    assert moreau_gradient(full, near, 2.0).gradient < 1e-2


# AUC: Phi differentiated by hand.


@pytest.mark.parametrize("make", [linear_auc, margin_auc])
def test_the_gradient_of_phi_is_that_of_the_maximum(make):
    full = full_of(make(), labelled())
    x = full.problem.start().x.double() + torch.linspace(-0.5, 0.5, 6, dtype=torch.float64)
    point = Point(x, vector(0.4))

    def phi(x: Tensor) -> float:
        return full.value(Point(x, best_dual(full, Point(x, point.y)).vector))

    slope = []
    for i in range(6):
        shift = torch.zeros_like(x)
        shift[i] = 1e-5
        slope.append((phi(x + shift) - phi(x - shift)) / 2e-5)
    assert phi_gradient(full, point) == pytest.approx(float(np.linalg.norm(slope)), rel=1e-6)
    # And the maximum is one.
    best = best_dual(full, point).vector
    for away in (-0.1, 0.1):
        assert full.value(Point(x, best + away)) < phi(x)


def test_the_ascent_agrees_with_the_closed_form_of_auc():
    full = full_of(margin_auc(), labelled())
    point = Point(full.problem.start().x.double(), vector(0.4))
    hidden = Full(Without(full.problem), full.ask)  # type: ignore[arg-type]
    found = best_dual(hidden, point, tolerance=1e-10)
    torch.testing.assert_close(found.vector, best_dual(full, point).vector, rtol=0, atol=1e-8)


def balanced() -> Clients:
    """Clients with both classes, in other shares than their batches have."""
    return Clients(labelled_rows((7, 5, 12)), batch_size=4, sampling="balanced")


@pytest.mark.parametrize("form", ["square", "margin"])
@pytest.mark.parametrize(("share", "clients"), [(0.5, labelled), (0.7, labelled), (None, balanced)])
def test_the_best_dual_of_auc_is_that_of_its_own_prior(form, share, clients):
    full = full_of(AUC(linear(), share, form, margin=0.5), clients())
    point = Point(full.problem.start().x.double(), vector(0.4))
    best = Point(point.x, best_dual(full, point).vector)
    assert dual_gradient(full, best) < 1e-12
    (mean,) = full.ask.mean("dual_statistics", point.x)
    classes = full.problem.project_y(full.problem.dual_from(mean))  # CODA's rule
    assert dual_gradient(full, Point(point.x, classes)) > 1e-3


# Compositions, sets, and problems without a dual.


def test_gradients_of_a_composition_use_averaged_levels():
    random = np.random.default_rng(0)
    rows = [(random.standard_normal((3, 2, 2)), random.standard_normal((3, 2))) for _ in range(4)]
    problem = Composition(
        [
            lambda x, batch: batch.mean(torch.tanh(batch.rows[0] @ x)),
            lambda v, batch: batch.mean(torch.sin(batch.rows[0] @ v)),
            lambda v, y, batch: batch.mean((v - batch.rows[1]).square()) @ y - y @ y,
        ],
        vector(0.3, -0.2),
        y0=vector(0.5, 0.1),
    )
    full = full_of(problem, Clients(rows, batch_size=None))
    batches = [Clients(rows).to(torch.float64).train.batch(k) for k in range(4)]

    def pooled(x: Tensor, y: Tensor) -> Tensor:
        for level in (1, 2):
            x = torch.stack([problem.inner(level, x, b) for b in batches]).mean(0)
        return torch.stack([problem.outer(x, y, b) for b in batches]).mean()

    point = Point(vector(0.4, 0.6), vector(0.2, -0.3))
    expected = torch.func.grad(pooled, argnums=(0, 1))(*point)
    for found, right in zip(full.gradients(point), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    assert full.value(point) == pytest.approx(float(pooled(*point)), rel=1e-12)
    # The value is taken at the same x, whose levels are known by then.
    assert full.ask.cost.exchanges == (2 + 1 + 2) + 1  # type: ignore[attr-defined]
    assert full.value(Point(point.x + 1, point.y)) != full.value(point)


def compositional() -> tuple[Full, Tensor]:
    """f(x, y) = (F_1(x) - c)'y - |y|^2 / 2 over two clients, and the mean of F_1(x) - c."""
    rows = [(vector(0.5), vector(1.0)), (vector(1.5), vector(-3.0))]
    problem = Composition(
        [
            lambda x, batch: batch.mean(batch.rows[0]) * x.square(),
            lambda v, y, batch: (v - batch.mean(batch.rows[1])) @ y - y @ y / 2,
        ],
        vector(0.4, 0.6),
        y0=vector(0.0, 0.0),
    )
    return full_of(problem, Clients(rows, batch_size=None)), vector(0.4, 0.6).square() + 1.0


def test_the_gradient_of_phi_of_a_composition_solves_for_y_behind_the_levels():
    full, best = compositional()
    point = Point(vector(0.4, 0.6), vector(0.0, 0.0))
    found = best_dual(full, point, tolerance=1e-10)
    torch.testing.assert_close(found.vector, best, rtol=0, atol=1e-9)
    # One question to the inner level for the whole ascent, two a step to the last, none pulled.
    assert full.ask.cost.exchanges == 1 + 2 * found.gradients  # type: ignore[attr-defined]
    # Phi(x) = |F_1(x) - c|^2 / 2
    expected = float((2 * point.x * best).norm())
    assert phi_gradient(full, point, tolerance=1e-10) == pytest.approx(expected, rel=1e-8)
    assert primal_gradient(full, Point(point.x, best)) == pytest.approx(expected, rel=1e-12)
    assert dual_gradient(full, point) == pytest.approx(float(best.norm()), rel=1e-12)


def test_clients_of_a_composition_have_no_gradients_to_compare():
    full, _ = compositional()
    with pytest.raises(ValueError, match="composition of 2 levels a client has none"):
        gradient_dissimilarity(full, POINT)


def test_a_primal_set_is_respected():
    problem = Minimax(
        lambda x, y, batch: batch.mean((x - batch.rows[0]).square().sum(-1)),
        vector(0.0, 0.0),
        project_x=ball(1.0),
    )
    full = full_of(problem, Clients([(np.array([[3.0, 4.0]]),)] * 2, batch_size=None))
    none = vector()
    assert primal_gradient(full, Point(vector(0.6, 0.8), none)) < 1e-12
    assert primal_gradient(full, Point(vector(0.0, 0.0), none)) == pytest.approx(1.0)
    found = best_primal(full, Point(vector(0.0, 0.0), none))
    assert found.reached
    assert found.vector.tolist() == pytest.approx([0.6, 0.8])
    # Without a dual Phi is the objective.
    assert phi_gradient(full, Point(vector(0.0, 0.0), none)) == pytest.approx(1.0)
    assert dual_gradient(full, Point(vector(0.0, 0.0), none)) == 0.0


def test_the_ascent_finds_the_maximum_of_a_pl_function():
    clients = Clients(TiltData(clients=3, dimension=2).client_rows(), batch_size=None)
    full = full_of(PLPL(2), clients)
    found = best_dual(full, Point(vector(0.5, -1.0), vector(2.0, -2.5)))
    assert found.reached
    assert found.vector.abs().max() < 1e-6


def test_an_ascent_that_is_cut_short_says_so():
    hidden = full_of(quadratic(), noisy())
    hidden = Full(Without(hidden.problem), hidden.ask)  # type: ignore[arg-type]
    found = best_dual(hidden, POINT, tolerance=1e-12, most=1)
    assert (found.gradients, found.reached) == (1, False)
    assert found.residual > 0.1
    short = moreau_gradient(hidden, POINT, tolerance=1e-12, most=3)
    assert not short.reached
    unbounded = Minimax(lambda x, y, batch: x @ y, vector(1.0), vector(1.0))
    endless = full_of(unbounded, Clients([(vector(0.0),)]))
    assert not duality_gap(endless, Point(vector(1.0), vector(1.0)), most=5).reached


# Clients that disagree.


def test_the_dissimilarity_is_the_spread_of_the_clients_gradients():
    full = full_of(quadratic(), noisy_by_size())
    clients = noisy_by_size().to(torch.float64)
    own = [gradients(quadratic(), POINT, (clients.train.batch(k),)) for k in range(5)]
    weights = clients.weight_vector("size")
    for found, player in zip(
        gradient_dissimilarity(full, POINT), zip(*own, strict=True), strict=True
    ):
        stacked = torch.stack(player)
        mean = weights @ stacked
        expected = float((weights @ (stacked - mean).square().sum(1)).sqrt())
        assert found == pytest.approx(expected, rel=1e-9)
    assert full.ask.cost.exchanges == 1  # type: ignore[attr-defined]


class Watched(NamedTuple):
    point: Point  # before the round
    found: dict[str, float]
    state: State
    federation: Federation


def watched_round(
    algorithm: Algorithm, executor: str = "vectorised", problem: Problem | None = None
) -> Watched:
    """The second round of a run, with the drift found in it."""
    problem, clients = problem or quadratic(), noisy_by_size().to(torch.float64)
    weights = clients.weight_vector("size")
    federation = Federation.of(problem, algorithm, clients, weights, 0, len(clients))
    start = Point(*(v.double() for v in problem.start()))
    state, store = State(0, 0, algorithm.init_server(problem, start), Cost()), Store(algorithm.keep)
    runner = choose.make(executor)
    state = play_round(federation, state, store, runner)
    point = algorithm.point(state.server)
    state, found = play_with_drift(federation, state, store, runner)
    return Watched(point, found, state, federation)


@pytest.mark.parametrize("executor", ["debug", "vectorised"])
def test_the_drift_of_a_round_is_that_of_the_clients_ends(executor):
    method = LocalSGDA(0.05, 0.1, local_steps=3)
    point, found, state, federation = watched_round(method, executor)
    clients, weights = federation.clients, federation.weights
    ends = []
    for k in range(len(clients)):
        own = point
        for step in range(3):
            draw = federation.sampler.draw(np.array([k]), 3 + step, 1).client(0, 0, 1)
            slope = gradients(federation.problem, own, draw)
            own = Point(own.x - 0.05 * slope.x, own.y + 0.1 * slope.y)
        ends.append(own)
    for player in ("x", "y"):
        points = torch.stack([getattr(end, player) for end in ends])
        expected = float((weights @ (points - weights @ points).square().sum(1)).sqrt())
        assert found[f"drift_{player}"] == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(getattr(state.server, player), weights @ points)
    assert found["bytes"] == 8 * (3 + 3 + 2) * len(clients)


def test_watching_does_not_change_a_round():
    method = Codasca(lr=0.05, local_steps=3)
    _, found, state, federation = watched_round(method)
    plain, store = State(0, 0, None, Cost()), Store(method.keep)
    start = Point(*(v.double() for v in quadratic().start()))
    plain = plain._replace(server=method.init_server(federation.problem, start))
    for _ in range(2):
        plain = play_round(federation, plain, store, choose.make("vectorised"))
    assert torch.equal(plain.server.x, state.server.x)
    assert state.cost.bytes_up == plain.cost.bytes_up
    assert found["bytes"] > 0
    assert found["drift_x"] > 0


def test_clients_that_are_alike_do_not_drift():
    same = Minimax(lambda x, y, batch: (x * x).sum() - y @ y, vector(1.0, 2.0), vector(1.0))
    found = watched_round(LocalSGDA(0.05, 0.1, local_steps=3), problem=same).found
    assert [found[f"drift_{n}"] for n in "xy"] == pytest.approx([0.0, 0.0], abs=1e-7)


# By name.


def test_measures_go_by_name_and_are_paid_for():
    full = full_of(quadratic(), noisy())
    found = measure(list(MEASURES), full.problem, POINT, full.ask)
    assert found["grad_x"] == primal_gradient(full, POINT)
    assert found["grad_phi"] == phi_gradient(full, POINT)
    assert found["gap_reached"] is found["moreau_reached"] is found["grad_phi_reached"] is True
    assert all(isinstance(value, float | bool) for value in found.values())
    paid = full.ask.cost  # type: ignore[attr-defined]
    assert paid.bytes_up > 0
    assert paid.exchanges > len(MEASURES)
    with pytest.raises(ValueError, match="no measure 'grad_z'; known: grad_x"):
        measure(["grad_z"], full.problem, POINT, full.ask)
    with pytest.raises(ValueError, match="modulus"):
        moreau_gradient(full, POINT, 0.0)
    with pytest.raises(ValueError, match=r"no measure 'grad_z'; known: .*drift"):
        check_names(["grad_z"])


def test_moreau_takes_its_modulus_by_name():
    full = full_of(quadratic(), noisy())
    found = measure(["moreau:2.5"], full.problem, POINT, full.ask)["moreau"]
    assert found == moreau_gradient(full, POINT, 2.5).gradient
    assert found != moreau_gradient(full, POINT).gradient
    check_names(["moreau:1e3", "drift", "grad_x"])
    for bad in ("moreau:", "moreau:0", "moreau:two", "moreau:inf", "moreau:-1"):
        with pytest.raises(ValueError, match=f"'{bad}' has the modulus"):
            check_names([bad])
    with pytest.raises(ValueError, match="only grad_y and moreau take one"):
        check_names(["grad_x:2"])


def test_the_dual_s_measure_takes_the_smoothness_of_fess_gda_s_definition():
    full = full_of(quadratic(), noisy())
    t, b = quadratic_means(full)
    y = (b - t * POINT.x) / 2  # the slope points out of a ball around 0, a little askew
    y[0] += 0.1
    point, slope, radius = Point(POINT.x, y), -y + b - t * POINT.x, float(y.norm())

    def measured(smoothness):
        return measure([f"grad_y:{smoothness}"], full.problem, point, full.ask)["grad_y"]

    assert measured(3) == pytest.approx(float(slope.norm()), rel=1e-12)  # without a set, for any l
    full.problem.project_y = ball(radius)  # type: ignore[method-assign]
    for smoothness in (0.5, 3.0):
        moved = y + slope / smoothness
        expected = smoothness * float((moved * radius / moved.norm() - y).norm())
        assert measured(smoothness) == pytest.approx(expected, rel=1e-9)
    assert measured(0.5) < 0.9 * measured(3) < measured(3)
    with pytest.raises(ValueError, match="'grad_y:0' has the smoothness '0'"):
        check_names(["grad_y:0"])


def test_the_drift_is_watched_and_not_asked_for():
    full = full_of(quadratic(), noisy())
    assert measure(["drift"], full.problem, POINT, full.ask) == {}


def test_a_question_that_has_no_answer_is_refused():
    problem = Minimax(lambda x, y, batch: x @ y, vector(1.0), vector(1.0))
    full = full_of(problem, Clients([(vector(0.0),)]))
    with pytest.raises(ValueError, match="does not answer"):
        full.ask.mean("dual_statistics", vector(1.0))
