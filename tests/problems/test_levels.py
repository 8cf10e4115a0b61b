"""The synthetic composition: its exact minimum, its dials, and that it tells methods apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rows import value_and_pullback
from torch import Tensor

from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.levelwise_dr_scgd import LevelwiseDRSCGD
from fedminimax.data.clients import Clients
from fedminimax.data.levels import LevelsData
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.simulate import simulate
from fedminimax.metrics.optimality import Full
from fedminimax.problems.levels import Levels
from fedminimax.types import Batch, Point, batch_of

NONE = torch.zeros(0, dtype=torch.float64)


def made(depth: int = 3, dimension: int = 4, **dials: Any) -> Clients:
    data = LevelsData(depth=depth, dimension=dimension, **dials)
    return Clients(data.client_rows(), batch_size=None)


def full_of(problem: Levels, clients: Clients) -> Full:
    return Full(problem, LocalQuery(problem, clients, "train", clients.weight_vector("uniform")))


def transcribed(rows: list, x: np.ndarray, depth: int, bend: float, pull: float) -> float:
    """Phi in plain numpy, level by level, each the mean over clients and rows."""
    goal = np.append(np.ones(len(x)), 0.0)
    u = np.append(x, 0.0)
    for k in range(depth - 1):
        e = u - goal
        phi = np.sin(e) + 1 - np.cos(e)
        outputs = [
            goal + (e + bend * phi) / (1 + bend) + A[k] @ phi + b[k]
            for matrices, offsets in rows
            for A, b in zip(matrices, offsets, strict=True)
        ]
        u = np.mean(outputs, 0)
    e = u - goal
    losses = [e[:-1] @ e[:-1] / 2 - b[-1] @ e for _, offsets in rows for b in offsets]
    return float(np.mean(losses) + pull * e[-1])


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_loss_is_the_formula_and_its_minimum_is_where_it_is_said_to_be(depth):
    data = LevelsData(clients=4, depth=depth, dimension=3, noise=0.4, rows=6, seed=depth)
    clients = Clients(data.client_rows(), batch_size=None)
    problem = Levels(3, depth, bend=0.4, pull=0.7)
    full, rows = full_of(problem, clients), data.client_rows()
    x = np.array([0.3, -0.8, 2.1])
    phi = lambda x: transcribed(rows, x, depth, 0.4, 0.7)  # noqa: E731
    assert full.value(Point(torch.from_numpy(x), NONE)) == pytest.approx(phi(x), rel=1e-12)
    slope = [(phi(x + s) - phi(x - s)) / 2e-5 for s in 1e-5 * np.eye(3)]
    found = full.gradients(Point(torch.from_numpy(x), NONE)).x
    np.testing.assert_allclose(found.numpy(), slope, rtol=1e-7)
    best = problem.evaluate(Point(torch.ones(3, dtype=torch.float64), NONE), full.ask)
    assert best == pytest.approx({"loss": 0.0, "slope": 0.0, "distance": 0.0}, abs=1e-14)


def test_nothing_that_makes_clients_differ_moves_the_objective():
    x = torch.linspace(-1, 2, 4, dtype=torch.float64)
    plain = full_of(Levels(4), made(value_spread=0.0, jacobian_spread=0.0)).value(Point(x, NONE))
    dials = {"value_spread": 2.0, "jacobian_spread": 1.5, "noise": 0.5, "rows": 5}
    for more in ({"clients": 1}, {"clients": 7}, {"seed": 3}, {"independent": True}):
        found = full_of(Levels(4, pull=1.0), made(**dials | more)).value(Point(x, NONE))
        assert found == pytest.approx(plain, rel=1e-12)
    assert plain > 0.1


def test_the_minimum_is_the_only_stationary_point():
    problem, clients = Levels(1, depth=4, bend=0.7), made(depth=4, dimension=1, clients=2)
    full = full_of(problem, clients)
    grid = torch.linspace(-20, 22, 42, dtype=torch.float64)
    slopes = torch.cat([full.gradients(Point(x.reshape(1), NONE)).x for x in grid])
    assert bool(((slopes > 0) == (grid > 1)).all())


@pytest.mark.parametrize("clients", [2, 3, 16])
def test_the_dials_are_the_spreads_of_values_and_jacobians_at_the_solution(clients):
    rows = made(4, clients=clients, value_spread=0.3, jacobian_spread=0.2, noise=1.0, rows=4)
    problem, best = Levels(4, 4), torch.ones(4, dtype=torch.float64)
    value, before = best, torch.zeros(0)

    def jacobian(level: int, at: Tensor, batch: Batch) -> Tensor:
        return torch.func.jacrev(lambda v: problem.inner(level, v, batch))(at)

    for level in (1, 2, 3):
        batches = [rows.train.batch(k) for k in range(clients)]
        values = torch.stack([problem.inner(level, value, b) for b in batches])
        jacobians = torch.stack([jacobian(level, value, b) for b in batches])
        around = values - values.mean(0)
        turned = torch.linalg.matrix_norm(jacobians - jacobians.mean(0), ord=2)
        assert float(around.square().sum(1).mean().sqrt()) == pytest.approx(0.3)
        assert float(turned.square().mean().sqrt()) == pytest.approx(0.2)
        if level > 1:
            together = (jacobians - jacobians.mean(0)) @ before[:, :, None]
            assert float(together.mean(0).norm()) == pytest.approx(0.3 * 0.2)
        before, value = around, values.mean(0)


def covariance(independent: bool) -> tuple[float, float]:
    """The lengths, over levels, of the covariance of a Jacobian with the value before it, and the
    largest distance of a spread from its dial."""
    rows = made(4, clients=64, value_spread=0.3, jacobian_spread=0.2, independent=independent)
    matrices, offsets = (np.stack([rows.train.rows(k)[c][0] for k in range(64)]) for c in (0, 1))
    spread = np.sqrt((offsets**2).sum(2).mean(0)), np.linalg.norm(matrices, 2, (2, 3))
    off = max(np.abs(spread[0] - 0.3).max(), np.abs(np.sqrt((spread[1] ** 2).mean(0)) - 0.2).max())
    together = np.einsum("nkij,nkj->kni", matrices[:, 1:], offsets[:, :2]).mean(1)
    return float(np.linalg.norm(together, axis=1).max()), float(off)


def test_one_number_drives_all_levels_unless_they_are_drawn_independently():
    together, off = covariance(False)
    assert together == pytest.approx(0.3 * 0.2)
    assert off < 1e-12
    apart, off = covariance(True)
    assert apart < 0.3 * 0.2 / 2  # about an eighth is expected
    assert off < 1e-12  # the dials are the same
    # And a deeper problem still begins with the same levels.
    shallow, deep = (LevelsData(depth=k, independent=True).client_rows() for k in (2, 5))
    assert np.array_equal(shallow[1][0], deep[1][0][:, :1])
    assert np.array_equal(shallow[1][1], deep[1][1][:, :2])


def test_the_noise_is_the_spread_of_rows_and_of_nothing_else():
    data = LevelsData(clients=3, depth=3, dimension=3, noise=0.7, rows=4000)
    quiet = LevelsData(clients=3, depth=3, dimension=3).client_rows()
    for noisy, still in zip(data.client_rows(), quiet, strict=True):
        for column, exact in zip(noisy, still, strict=True):
            np.testing.assert_allclose(column.mean(0), exact[0], atol=1e-12)
            sizes = ((column - exact) ** 2).reshape(4000, exact.shape[1], -1).sum(2)
            np.testing.assert_allclose(np.sqrt(sizes.mean(0)), 0.7, rtol=0.05)
    # More clients do not change the noise of the first ones.
    more = LevelsData(clients=5, depth=3, dimension=3, noise=0.7, rows=4000, value_spread=0.0)
    fewer = LevelsData(clients=3, depth=3, dimension=3, noise=0.7, rows=4000, value_spread=0.0)
    assert np.array_equal(more.client_rows()[1][1], fewer.client_rows()[1][1])


def test_a_deeper_problem_begins_with_the_same_levels():
    shallow, deep = (LevelsData(clients=3, depth=k).client_rows() for k in (2, 5))
    assert np.array_equal(shallow[1][0], deep[1][0][:, :1])
    assert np.array_equal(shallow[1][1], deep[1][1][:, :2])


def test_levels_that_there_are_not_and_rows_for_others_are_refused():
    problem, batch = Levels(4, 3), made(4).train.batch(0)
    x = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="4 levels and dimension 4, the problem has depth 3"):
        problem.inner(1, x, batch)
    with pytest.raises(ValueError, match="no inner level 3"):
        problem.inner(3, x, batch)
    with pytest.raises(ValueError, match=r"bend is 0\.8"):
        Levels(4, bend=0.8)
    nan = float("nan")
    bad: list[dict[str, Any]] = [
        {"depth": 0}, {"depth": 2.5}, {"dimension": 2.5}, {"dimension": nan}, {"bend": nan},
        {"pull": nan}, {"x0": nan}, {"x0": float("inf")}
    ]  # fmt: skip
    for options in bad:
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f"^{name} is {value}; give"):
            Levels(**{"dimension": 4, **options})
    bad = [{"clients": 0}, {"value_spread": -1.0}, {"noise": 0.1}, {"depth": 0}]
    for options in [*bad, {"depth": 2.5}, {"rows": nan}, {"jacobian_spread": nan}]:
        with pytest.raises(ValueError, match=f"^{next(iter(options))} is .* give"):
            LevelsData(**options)


def test_the_pullback_of_a_level_on_a_batch_is_its_jacobian_transposed():
    batch = made(3, noise=0.5, rows=4, jacobian_spread=0.5).train.batch(2)
    part = batch_of(*(rows[:2] for rows in batch.rows))
    problem, value = Levels(4), torch.linspace(-1, 1, 5, dtype=torch.float64)
    vector = torch.linspace(1, 2, 5, dtype=torch.float64)
    jacobian = torch.stack(
        [
            (problem.inner(2, value + s, part) - problem.inner(2, value - s, part)) / 2e-6
            for s in 1e-6 * torch.eye(5, dtype=torch.float64)
        ],
        dim=1,
    )
    reached, pulled = value_and_pullback(problem, 2, value, vector, part)
    torch.testing.assert_close(reached, problem.inner(2, value, part))
    torch.testing.assert_close(pulled, jacobian.T @ vector, rtol=1e-7, atol=1e-8)


def floor(
    method: Any,
    value: float,
    jacobian: float,
    rounds: int = 60,
    data: dict[str, Any] | None = None,
    **options: float,
) -> float:
    data = {"clients": 4, "value_spread": value, "jacobian_spread": jacobian} | (data or {})
    clients = made(**data)
    run = simulate(
        Levels(4, **options),  # type: ignore[arg-type]
        method,
        clients,
        rounds,
        executor="vectorised",
        dtype=torch.float64,
        evaluate_every=rounds,
    )
    assert run.outcome == "finished"
    return run.history[-1]["train"]["slope"]


def test_the_printed_method_keeps_a_floor_that_grows_with_both_spreads():
    """The floors of the printed Fed-DR-SCGD on full batches."""
    printed = FedDRSCGD(lr=0.6, recursion_rate=0.4, local_steps=1)
    small, large = floor(printed, 0.1, 0.1), floor(printed, 0.3, 0.3)
    assert small > 0.01  # measured 0.035
    assert large > 4 * small
    assert floor(printed, 0.0, 0.3) < 1e-10
    assert floor(printed, 0.3, 0.0, bend=0.0) < 1e-10
    assert floor(printed, 0.0, 0.3, pull=1.0) > 0.01
    # The bias does not depend on the recursion rate; that of the curvature does.
    other = FedDRSCGD(lr=0.6, recursion_rate=0.8, local_steps=1)
    assert floor(other, 0.1, 0.1) == pytest.approx(small, rel=0.1)
    assert floor(other, 0.3, 0.0) > 1.5 * floor(printed, 0.3, 0.0) > 1e-4


def test_independent_levels_leave_a_smaller_floor():
    printed = FedDRSCGD(lr=0.6, recursion_rate=0.4, local_steps=1)
    together, apart = (
        floor(printed, 0.3, 0.3, data={"clients": 32, "independent": independent})
        for independent in (False, True)
    )
    assert 0 < apart < together / 2, (apart, together)


def test_the_level_wise_method_has_no_floor():
    level_wise = LevelwiseDRSCGD(lr=0.6, recursion_rate=0.5, local_steps=1)
    assert floor(level_wise, 0.5, 0.5, pull=1.0) < 1e-10


def test_it_runs_under_all_executors_and_on_minibatches():
    clients = LevelsData(clients=3, noise=0.5, rows=8).client_rows()
    points: list[Tensor] = []
    for executor in ("debug", "threads", "vectorised"):
        run = simulate(
            Levels(5),
            FedDRSCGD(lr=0.1, local_steps=2),
            Clients(clients, batch_size=3),
            2,
            executor=executor,
            dtype=torch.float64,
        )
        points.append(run.point.x)
    for other in points[1:]:
        torch.testing.assert_close(other, points[0], rtol=1e-12, atol=1e-12)
