"""The risk-averse portfolio: its levels, missing returns, measures, and closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from fedminimax.algorithms.scsc import SCSC
from fedminimax.algorithms.smvr import SMVR
from fedminimax.cli import main
from fedminimax.config import Experiment
from fedminimax.data.clients import Clients
from fedminimax.data.returns import Returns
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.simulate import simulate
from fedminimax.experiment import load, run_experiment
from fedminimax.problems.gradients import gradients
from fedminimax.problems.portfolio import (
    Moments,
    Portfolio,
    frontier,
    minimum,
    regular,
    tangency,
)
from fedminimax.types import Point, batch_of

NONE = torch.zeros(0, dtype=torch.float64)


def clients_of(sizes=(9, 4, 6), assets: int = 3, weights: Any = None, missing=0.0) -> Clients:
    whole = Returns(len(sizes), assets, max(sizes), spread=0.5, missing=missing).client_rows()
    rows = [tuple(c[:n] for c in own) for own, n in zip(whole, sizes, strict=True)]
    return Clients(rows, batch_size=None, weights=weights).to(torch.float64)


def asking(problem: Portfolio, clients: Clients) -> LocalQuery:
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    return LocalQuery(problem, clients, "train", weights)


def prepared(problem: Portfolio, clients: Clients) -> tuple[Portfolio, LocalQuery]:
    problem = problem.prepare(asking(problem, clients))
    return problem, asking(problem, clients)


def pooled(clients: Clients) -> tuple[np.ndarray, np.ndarray]:
    """All rows, and a weight for each as its client's says."""
    weights = clients.weight_vector(clients.weights or "size").numpy()
    parts = [clients.train.rows(k)[0].numpy() for k in range(len(clients))]
    share = [np.full(len(p), w / len(p)) for p, w in zip(parts, weights, strict=True)]
    return np.concatenate(parts), np.concatenate(share)


def naive(x: np.ndarray, returns: np.ndarray, share: np.ndarray, risk: float) -> float:
    """Eq. (13)."""
    gained = returns @ x
    mean = share @ gained
    return float(risk * np.sqrt(share @ (gained - mean) ** 2) - mean)


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_phi_is_the_formula_of_the_paper(weights):
    clients = clients_of(weights=weights)
    problem, ask = prepared(Portfolio(3, risk=0.8), clients)
    for x in ([0.2, 0.5, 0.3], [-1.0, 2.0, 0.5], [1e-3, 0.0, -2e-3]):
        found = problem.evaluate(Point(torch.tensor(x, dtype=torch.float64), NONE), ask)
        expected = naive(np.array(x), *pooled(clients), 0.8)
        assert found["loss"] == pytest.approx(expected, rel=1e-12)
        # Homogeneous: the measures at the normalised weights do not see the scale.
        assert found["weight_sum"] == pytest.approx(sum(x))
        twice = problem.evaluate(Point(2 * torch.tensor(x, dtype=torch.float64), NONE), ask)
        assert twice["loss"] == pytest.approx(2 * expected, rel=1e-12)
        assert twice["return"] == pytest.approx(found["return"], rel=1e-12)
        assert twice["deviation"] == pytest.approx(found["deviation"], rel=1e-12)
        assert found["ratio"] == pytest.approx(found["return"] / found["deviation"])


def test_levels_of_one_row_are_those_of_the_sheet():
    problem = Portfolio(2)
    r = torch.tensor([[3.0, -1.0]])
    batch = batch_of(r)
    assert problem.inner(1, torch.tensor([0.5, 2.0]), batch).tolist() == [-0.5, 0.5, 2.0]
    assert problem.inner(2, torch.tensor([1.0, 0.5, 2.0]), batch).tolist() == [1.0, 2.25]
    assert float(problem.outer(torch.tensor([1.0, 2.25]), NONE, batch)) == 0.5
    with pytest.raises(ValueError, match="has no inner level 3"):
        problem.inner(3, torch.ones(2), batch)


def test_the_square_root_is_guarded():
    problem, batch = Portfolio(1, floor=1e-4), batch_of(torch.zeros(1, 1))
    for z2 in (0.0, -1.0, 5e-5):
        point = Point(torch.tensor([0.3, z2], dtype=torch.float64), NONE)
        assert float(problem.outer(*point, batch)) == pytest.approx(-0.3 + 1e-2)
        assert gradients(problem, point, (batch,)).x.tolist() == [-1.0, 0.0]
    slope = gradients(problem, Point(torch.tensor([0.3, 4.0]), torch.zeros(0)), (batch,)).x
    assert slope.tolist() == [-1.0, 0.25]


# Budgets.


def test_the_sum_of_weights_is_kept_by_every_step_and_average():
    clients = clients_of((9, 4, 6))
    clients = Clients([clients.train.rows(k) for k in range(3)], batch_size=2)
    for method in (SMVR, SCSC):
        run = simulate(
            Portfolio(3, budget="sum"), method(lr=0.05, local_steps=3), clients, 10,
            dtype=torch.float64, executor="vectorised", evaluate_every=1
        )  # fmt: skip
        sums = [record["train"]["weight_sum"] for record in run.history[1:]]
        assert sums == pytest.approx([1.0] * 10, abs=1e-14)
        assert float((run.point.x - 1 / 3).abs().max()) > 1e-2


def test_the_projection_onto_the_budget_is_the_nearest_point():
    project = Portfolio(3, budget="sum").project_x
    x = torch.tensor([2.0, -1.0, 4.0], dtype=torch.float64)
    near = project(x)
    assert float(near.sum()) == pytest.approx(1)
    assert torch.allclose(x - near, (x - near).mean().expand(3))  # along the normal
    assert torch.allclose(project(near), near, rtol=0, atol=1e-15)
    assert torch.equal(Portfolio(3).project_x(x), x)


def test_long_only_weights_are_a_softmax():
    clients = clients_of()
    problem, ask = prepared(Portfolio(3, budget="long_only"), clients)
    x = torch.tensor([0.3, -2.0, 1.0], dtype=torch.float64)
    w = torch.softmax(x, 0).numpy()
    found = problem.evaluate(Point(x, NONE), ask)
    assert found["loss"] == pytest.approx(naive(w, *pooled(clients), 1.0), rel=1e-12)
    assert found["return"] == pytest.approx(pooled(clients)[1] @ pooled(clients)[0] @ w)
    assert found["weight_sum"] == pytest.approx(1)
    assert "gap" not in found  # no closed form
    assert torch.softmax(problem.start().x, 0).tolist() == pytest.approx([1 / 3] * 3)


def test_bad_options_are_refused():
    bad: list[tuple[dict[str, Any], str]] = [
        ({"dimension": 0}, "dimension is 0; give the number of assets"),
        ({"dimension": 2.5}, "dimension is 2.5; give the number of assets"),
        ({"risk": -1.0}, "risk is -1.0; give a finite number of at least 0"),
        ({"risk": float("nan")}, "risk is nan; give"),
        ({"floor": 0.0}, "floor is 0.0; give a finite number above 0"),
    ]
    for options, told in bad:
        with pytest.raises(ValueError, match=f"^{told}"):
            Portfolio(**{"dimension": 2, **options})
    with pytest.raises(ValueError, match="'none', 'sum', 'long_only'"):
        Portfolio(2, budget="simplex")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hold \(3,\) returns each, but dimension is 2"):
        prepared(Portfolio(2), clients_of())


def test_rows_of_another_kind_are_refused_before_the_first_round():
    returns, labels = torch.ones(4, 3), torch.ones(4)
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(\); give .* has no labels"):
        prepared(Portfolio(3), Clients([(returns, labels)]))
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(3,\), \(3,\); give \(returns,\)"):
        prepared(Portfolio(3), Clients([(returns, returns, returns)]))
    with pytest.raises(ValueError, match=r"has an entry 0\.5; give 1 for a present return"):
        prepared(Portfolio(3), Clients([(returns, torch.full((4, 3), 0.5))]))


# Missing returns.


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_masked_means_are_those_of_the_present_returns(weights):
    clients = clients_of(weights=weights, missing=0.3)
    _, ask = prepared(Portfolio(3), clients)
    client_weights = clients.weight_vector(weights).numpy()
    total, share = np.zeros(3), np.zeros(3)
    for k, w in enumerate(client_weights):
        returns, present = (c.numpy() for c in clients.train.rows(k))
        assert (returns[present == 0] == 0).all()
        total += w * (returns * present).mean(0)
        share += w * present.mean(0)
    assert share.min() < 0.9
    means = total / share
    # Level 1 gives exactly these, asset by asset, and an absent return has no deviation.
    for asset in range(3):
        unit = torch.eye(3, dtype=torch.float64)[asset]
        (first,) = ask.mean("inner", unit, torch.tensor(1))
        assert float(first[0]) == pytest.approx(means[asset], rel=1e-12)
        (second,) = ask.mean("inner", first, torch.tensor(2))
        variance = sum(
            w * ((r.numpy() - means)[:, asset] ** 2 * m.numpy()[:, asset]).mean()
            for w, (r, m) in zip(
                client_weights, (clients.train.rows(k) for k in range(3)), strict=True
            )
        )
        assert float(second[1]) == pytest.approx(variance, rel=1e-12)


def test_nothing_missing_is_the_same_with_and_without_a_mask():
    plain = clients_of()
    masked = Clients(
        [(r, torch.ones_like(r)) for r in (plain.train.rows(k)[0] for k in range(3))],
        batch_size=None,
    )
    x = Point(torch.tensor([0.1, 0.5, 0.7], dtype=torch.float64), NONE)
    measures = [
        problem.evaluate(x, ask)
        for problem, ask in (prepared(Portfolio(3), c) for c in (plain, masked))
    ]
    assert measures[0] == pytest.approx(measures[1], rel=1e-12)


def test_an_asset_without_any_return_is_refused():
    returns, present = torch.ones(4, 3), torch.ones(4, 3)
    present[:, 1] = 0
    with pytest.raises(ValueError, match="no client has a return of asset 1"):
        prepared(Portfolio(3), Clients([(returns, present)]))
    with pytest.raises(ValueError, match="call prepare"):
        Portfolio(3).inner(1, torch.ones(3), batch_of(returns, present))


# Closed forms.


def moments_of(assets: int = 4, seed: int = 0) -> Moments:
    random = np.random.default_rng(seed)
    factor = random.standard_normal((assets, assets + 3))
    mean = torch.from_numpy(0.3 + 0.3 * random.standard_normal(assets))
    return Moments(mean, torch.from_numpy(factor @ factor.T / assets))


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_the_moments_are_those_of_the_pooled_rows(weights):
    clients = clients_of(weights=weights)
    problem, ask = prepared(Portfolio(3), clients)
    found = problem.return_moments(ask)
    rows, share = pooled(clients)
    mean = share @ rows
    np.testing.assert_allclose(found.mean.numpy(), mean, rtol=1e-12)
    covariance = (share[:, None] * (rows - mean)).T @ (rows - mean)
    np.testing.assert_allclose(found.covariance.numpy(), covariance, rtol=1e-10, atol=1e-12)
    x = torch.tensor([0.7, -0.2, 0.4], dtype=torch.float64)
    loss = float((x @ found.covariance @ x).sqrt() - found.mean @ x)
    assert problem.evaluate(Point(x, NONE), ask)["loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_frontier_satisfies_its_conditions(seed):
    """Feasible, and the gradient of the variance is a combination of those of the constraints."""
    mean, covariance = moments_of(5, seed)
    targets = torch.linspace(-1, 2, 7, dtype=torch.float64)
    found = frontier(mean, covariance, targets)
    for target, deviation, w in zip(targets, *found, strict=True):
        assert float(w.sum()) == pytest.approx(1)
        assert float(w @ mean) == pytest.approx(float(target), abs=1e-12)
        assert float((w @ covariance @ w).sqrt()) == pytest.approx(float(deviation))
        normals = torch.stack([torch.ones(5, dtype=torch.float64), mean], 1)
        slope = covariance @ w
        left = slope - normals @ torch.linalg.lstsq(normals, slope[:, None]).solution[:, 0]
        assert float(left.abs().max()) < 1e-10


@pytest.mark.parametrize("seed", range(3))
def test_the_minimum_under_the_budget_is_that_of_a_solver(seed):
    mean, covariance = (v.numpy() for v in moments_of(4, seed))
    risk = 1.5

    def phi(w: np.ndarray) -> float:
        return float(risk * np.sqrt(w @ covariance @ w) - mean @ w)

    best = minimum(torch.from_numpy(mean), torch.from_numpy(covariance), risk)
    budget = {"type": "eq", "fun": lambda w: w.sum() - 1}
    solved = optimize.minimize(
        phi, np.full(4, 0.25), method="SLSQP", constraints=[budget],
        options={"ftol": 1e-14, "maxiter": 1000}
    )  # fmt: skip
    assert solved.success
    assert best.weights is not None
    assert best.value == pytest.approx(solved.fun, rel=1e-8)
    assert phi(best.weights.numpy()) == pytest.approx(best.value, rel=1e-12)
    assert float(best.weights.sum()) == pytest.approx(1)
    np.testing.assert_allclose(best.weights.numpy(), solved.x, atol=1e-4)
    slope = risk * covariance @ best.weights.numpy()
    slope = slope / np.sqrt(best.weights.numpy() @ covariance @ best.weights.numpy()) - mean
    np.testing.assert_allclose(slope, slope.mean(), atol=1e-10)  # equal for all: the multiplier
    # It lies on the frontier.
    target = torch.tensor([float(best.weights.numpy() @ mean)])
    on = frontier(torch.from_numpy(mean), torch.from_numpy(covariance), target.double())
    np.testing.assert_allclose(on.weights[0].numpy(), best.weights.numpy(), atol=1e-6)


def test_equal_means_give_the_portfolio_of_least_variance():
    _, covariance = moments_of(3)
    mean = torch.full((3,), 0.2, dtype=torch.float64)
    best = minimum(mean, covariance, 0.7)
    least = torch.linalg.solve(covariance, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(best.weights, least / least.sum())
    assert not regular(Moments(mean, covariance))
    assert regular(moments_of(3))
    assert not regular(Moments(mean, torch.ones(3, 3, dtype=torch.float64)))


def test_where_there_is_no_minimum_a_sentence_says_so():
    mean, covariance = moments_of(4)
    steep = frontier(mean, covariance, torch.tensor([1e6, 2e6], dtype=torch.float64)).deviation
    least = 1e6 / float(steep[1] - steep[0])  # return per deviation, far out on the frontier
    none = minimum(mean, covariance, 0.99 * least)
    assert none.value is None
    assert none.weights is None
    assert f"up to {least:.4g} for each unit" in none.reason
    assert minimum(mean, covariance, 1.01 * least).value is not None

    ratio = float((mean @ torch.linalg.solve(covariance, mean)).sqrt())
    assert minimum(mean, covariance, 1.01 * ratio, "none").value == 0
    unbounded = minimum(mean, covariance, 0.99 * ratio, "none")
    assert unbounded.value is None
    assert f"is {ratio:.4g}, and scaling" in unbounded.reason
    assert "no closed form" in minimum(mean, covariance, 1.0, "long_only").reason


def test_a_run_on_whole_batches_reaches_the_minimum():
    """With identical maps at all levels but the data, and clients alike, nothing is lost."""
    rows = Returns(1, 4, 60).client_rows()[0]
    problem = Portfolio(4, budget="sum")
    run = simulate(
        problem, SMVR(lr=0.2, averaging_rate=0.5, local_steps=8), Clients([rows] * 2, None), 25,
        dtype=torch.float64, executor="vectorised", evaluate_every=25
    )  # fmt: skip
    first, last = (record["train"] for record in run.history)
    assert first["gap"] > 1e-2
    assert -1e-12 < last["gap"] < 1e-6
    assert 0 <= last["excess"] + 1e-12 < first["excess"]
    assert first["excess"] > 1e-2


def test_measures_that_need_rows_are_left_out_where_rows_cannot_be_seen():
    problem, ask = prepared(Portfolio(3, budget="sum"), clients_of())
    point = Point(torch.full((3,), 1 / 3, dtype=torch.float64), NONE)
    assert {"gap", "excess"} <= set(problem.evaluate(point, ask))
    ask.sees_rows = False  # type: ignore[misc]
    assert set(problem.evaluate(point, ask)) == {
        "loss", "weight_sum", "return", "deviation", "ratio"
    }  # fmt: skip
    empty = Point(torch.zeros(3, dtype=torch.float64), NONE)
    assert set(problem.evaluate(empty, ask)) == {"loss", "weight_sum"}


def test_weights_of_sum_zero_have_a_gap_and_nothing_that_divides_by_it():
    problem, ask = prepared(Portfolio(3, risk=5.0, floor=1e-6), clients_of())
    for x in ([0.0, 0.0, 0.0], [0.5, -0.5, 0.0]):
        found = problem.evaluate(Point(torch.tensor(x, dtype=torch.float64), NONE), ask)
        assert set(found) == {"loss", "weight_sum", "gap"}
        assert found["gap"] == found["loss"]  # the infimum without a budget is 0
    # At 0 the guard is what is left.
    empty = problem.evaluate(Point(torch.zeros(3, dtype=torch.float64), NONE), ask)
    assert empty["gap"] == pytest.approx(5.0 * 1e-3)


def test_a_minimum_that_is_not_there_reaches_the_user():
    point = Point(torch.full((3,), 1 / 3, dtype=torch.float64), NONE)
    few = Clients([(torch.eye(3, dtype=torch.float64)[:2],)], batch_size=None)
    for problem, clients, told in (
        (Portfolio(3, risk=0.0), clients_of(), "without a budget there is no minimum: risk is 0"),
        (Portfolio(3, risk=0.0, budget="sum"), clients_of(), "there is no minimum: risk is 0"),
        (Portfolio(3, budget="long_only"), clients_of(), "no closed form"),
        (Portfolio(3), few, "fewer rows than assets"),
    ):
        found = problem.evaluate(point, prepared(problem, clients)[1])
        assert told in found["minimum"]
        assert "gap" not in found
    assert "minimum" not in Portfolio(3, risk=5.0).evaluate(point, asking(problem, clients_of()))
    run = simulate(
        Portfolio(3, risk=0.0), SCSC(), clients_of(), 1, executor="debug", evaluate_every=1
    )
    assert "no minimum" in run.history[-1]["train"]["minimum"]


# The page of the efficient frontier.


def finished(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    table: dict[str, Any] = {
        "data": {"name": "returns", "clients": 3, "assets": 4, "rows": 60, "spread": 0.5},
        "problem": {"name": "portfolio", "budget": "sum", "risk": 0.8},
        "method": {"name": "smvr", "lr": 0.05, "averaging_rate": 0.5, "local_steps": 2},
        "run": {"rounds": 4, "evaluate_every": 4, "executor": "debug", "dtype": "float64"},
    }
    for section, values in (changes or {}).items():
        # Another class has other options.
        table[section] = values if "name" in values else table[section] | values
    run_experiment(Experiment.from_table(table), folder)
    return folder


def cells(text: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[2:] for line in lines}


def test_the_page_shows_runs_against_the_frontier_of_the_same_moments(tmp_path, capsys):
    runs = [
        finished(tmp_path / "budget"),
        finished(tmp_path / "free", {"problem": {"budget": "none"}, "method": {"lr": 0.2}}),
    ]
    assert main(["frontier", *map(str, runs)]) == 0
    text = capsys.readouterr().out
    found = cells(text)
    rows = [r[0] for r in Returns(3, 4, 60, spread=0.5).client_rows()]
    returns = np.concatenate(rows)
    mean, covariance = returns.mean(0), np.cov(returns.T, bias=True)
    inverse, ones = np.linalg.inv(covariance), np.ones(4)
    for folder in runs:
        x = load(folder).point.x.numpy()
        w = x / x.sum()
        gained, deviation = w @ mean, np.sqrt(w @ covariance @ w)
        # The least deviation from its first-order conditions, a linear system.
        system = np.block([
            [covariance, ones[:, None], mean[:, None]],
            [ones, 0.0, 0.0],
            [mean, 0.0, 0.0],
        ])  # fmt: skip
        best = np.linalg.solve(system, [0, 0, 0, 0, 1, gained])[:4]
        least = np.sqrt(best @ covariance @ best)
        phi = naive(x, returns, np.full(180, 1 / 180), 0.8)
        expected = [phi, gained, deviation, gained / deviation, least]
        assert [float(v) for v in found[str(folder)]] == pytest.approx(expected, rel=1e-4)
        assert least < deviation
    least = found["least variance"]
    assert float(least[2]) == pytest.approx(1 / np.sqrt(ones @ inverse @ ones), rel=1e-4)
    assert least[2] == least[4]  # it lies on the frontier
    top = found["tangency (largest ratio)"]
    assert float(top[3]) == pytest.approx(np.sqrt(mean @ inverse @ mean), rel=1e-4)
    assert top[2] == top[4]
    assert text.count("| run |") == 1  # both are on the same returns


def test_the_figure_has_a_panel_for_each_set_of_returns(tmp_path, capsys):
    runs = [finished(tmp_path / "one"), finished(tmp_path / "two", {"data": {"seed": 1}})]
    page = tmp_path / "deep" / "page.md"
    assert main(["frontier", *map(str, runs), "-o", str(page)]) == 0
    text = page.read_text()
    assert text == capsys.readouterr().out
    assert text.count("| run |") == 2
    assert "](page.svg)" in text
    figure = page.with_suffix(".svg").read_text()
    assert all(str(folder) in figure for folder in runs)
    assert figure.count(">frontier<") == figure.count(">least variance<") == 2
    main(["frontier", *map(str, runs), "-o", str(page)])
    assert page.with_suffix(".svg").read_text() == figure
    assert main(["frontier", str(runs[0]), "-o", str(page.with_suffix(".svg"))]) == 2
    assert "give the page another name" in capsys.readouterr().err


def test_runs_that_have_no_frontier_are_told(tmp_path, capsys):
    other = finished(
        tmp_path / "other",
        {
            "data": {"name": "levels", "depth": 1},
            "problem": {"name": "levels", "depth": 1},
            "method": {"name": "fedavg"},
        },
    )
    assert main(["frontier", str(other)]) == 2
    assert "is on the problem 'levels', which has no efficient frontier" in capsys.readouterr().err
    few = finished(tmp_path / "few", {"data": {"rows": 1}})
    assert main(["frontier", str(few)]) == 0
    text = capsys.readouterr().out
    assert "There is no frontier: some weights have no risk" in text
    assert cells(text)[str(few)][-1] == "-"
    assert main(["frontier", str(few), "-o", str(tmp_path / "few.md")]) == 0
    assert main(["frontier", str(tmp_path)]) == 2
    assert "there is no config.toml" in capsys.readouterr().err


def test_the_largest_ratio_may_not_be_there():
    mean, covariance = moments_of(4)
    assert tangency(mean, covariance) is not None
    assert tangency(-mean.abs() - 1, torch.eye(4, dtype=torch.float64)) is None
