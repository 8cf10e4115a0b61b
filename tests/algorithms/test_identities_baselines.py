"""What ties the baselines together, where they arrive, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from rows import (
    cross_entropy,
    federation_of,
    labelled,
    labelled_by_size,
    labelled_rows,
    least_squares,
)
from torch import Tensor

from fedminimax.algorithms._client_weights import ClientWeights
from fedminimax.algorithms.afl import AFL
from fedminimax.algorithms.drfa import DRFA
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.fedprox import FedProx
from fedminimax.algorithms.local_sgdm import LocalSGDM
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.blocks.chance import by_weight, common_number, stream_of
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.vectorised import Vectorised
from fedminimax.engine.round import play_round
from fedminimax.engine.simulate import Run, simulate
from fedminimax.problems.functions import Minimax
from fedminimax.types import Algorithm, Clock, Problem


def run(
    problem: Problem, algorithm: Algorithm, clients: Clients, rounds: int = 4, **options: Any
) -> Run:
    options = {"executor": "debug", "evaluate_every": 1000, **options}
    found = simulate(problem, algorithm, clients, rounds, dtype=torch.float64, **options)
    assert found.outcome == "finished"
    return found


on_each = pytest.mark.parametrize(
    ("problem", "clients"),
    [(cross_entropy, labelled), (cross_entropy, labelled_by_size), (least_squares, labelled)],
)


@on_each
@pytest.mark.parametrize(
    "special", [FedProx(0.1, 3, proximal=0.0), LocalSGDM(0.1, 0.0, 3)], ids=["fedprox", "sgdm"]
)
def test_without_its_own_term_a_baseline_is_fedavg(problem, clients, special):
    plain = run(problem(), FedAvg(0.1, 3), clients(), 2)
    assert torch.equal(run(problem(), special, clients(), 2).point.x, plain.point.x)


def test_the_own_terms_matter():
    plain = run(least_squares(), FedAvg(0.05, 3), labelled()).point.x
    for method in (FedProx(0.05, 3, proximal=0.5), LocalSGDM(0.05, 0.5, 3), Scaffold(0.05, 1.0, 3)):
        other = run(least_squares(), method, labelled()).point.x
        assert float((other - plain).abs().max()) > 1e-3


@dataclass(frozen=True)
class Uncontrolled(Scaffold):
    """SCAFFOLD whose controls are frozen at 0."""

    def send(self, down: Any, client: Any, clock: Clock) -> tuple[Any, Any]:
        up, _ = super().send(down, client, clock)
        return up._replace(change=torch.zeros_like(up.change)), client


@on_each
@pytest.mark.parametrize("cohort", [None, 3])
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_without_controls_is_fedavg(problem, clients, cohort, option):
    plain = run(problem(), FedAvg(0.1, 3), clients(), 2, cohort=cohort)
    bare = run(problem(), Uncontrolled(0.1, 1.0, 3, option), clients(), 2, cohort=cohort)
    # x + (mean - x) is the mean up to rounding.
    torch.testing.assert_close(bare.point.x, plain.point.x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cohort", [None, 3])
def test_the_two_options_agree_for_one_step_on_all_rows(cohort):
    clients = Clients(labelled_rows(), batch_size=None)
    one, two = (
        run(cross_entropy(), Scaffold(0.2, 1.0, 1, option), clients, 6, cohort=cohort).point.x
        for option in ("I", "II")
    )
    assert torch.equal(one, two)
    several = run(cross_entropy(), Scaffold(0.2, 1.0, 3, "I"), clients, 6, cohort=cohort).point.x
    assert not torch.equal(several, run(cross_entropy(), Scaffold(0.2, 1.0, 3), clients, 6).point.x)


def apart() -> tuple[Clients, Tensor]:
    """Five clients with least-squares problems of their own, and the solution of their mean."""
    random = np.random.default_rng(3)
    features = [np.eye(3) + 0.5 * random.standard_normal((6, 3, 3))[k] for k in range(6)]
    labels = [3 * random.standard_normal(3) for _ in range(6)]
    A = sum(f.T @ f for f in features)
    b = sum(f.T @ y for f, y in zip(features, labels, strict=True))
    rows = list(zip(features, labels, strict=True))
    return Clients(rows, batch_size=None), torch.from_numpy(np.linalg.solve(A, b))


@pytest.mark.parametrize("cohort", [None, 3])
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_arrives_where_fedavg_stalls(cohort, option):
    clients, best = apart()
    options: dict[str, Any] = {"cohort": cohort, "executor": "vectorised"}

    def distance(method: Algorithm) -> float:
        found = run(least_squares(), method, clients, 100, **options)
        return float((found.point.x - best).norm())

    assert distance(Scaffold(0.1, 1.0, 4, option)) < 1e-4
    assert distance(FedAvg(0.1, 4)) > 1e-2


def test_the_proximal_term_moves_the_floor():
    """FedProx stalls too, nearer: with a stronger pull the clients drift less."""
    clients, best = apart()

    def floor(proximal: float) -> float:
        method = FedProx(0.1, 8, proximal=proximal)
        found = run(least_squares(), method, clients, 80, executor="vectorised")
        return float((found.point.x - best).norm())

    assert 1e-3 < floor(5.0) < floor(1.0) < floor(0.0)


def test_undamped_momentum_lengthens_the_steps():
    """On a slope of 1 the steps tend to lr / (1 - heavy_ball); the server keeps the momentum."""
    problem = Minimax(lambda x, y, batch: x.sum() + 0 * batch.mean(batch.rows[0]), torch.zeros(1))
    clients = Clients([(torch.ones(2),)] * 2, batch_size=None)
    ends = [run(problem, LocalSGDM(0.1, 0.5, 2), clients, rounds).point.x for rounds in (30, 31)]
    assert float(ends[0] - ends[1]) == pytest.approx(2 * 0.1 / (1 - 0.5), rel=1e-9)


# Weights over clients.


def three_points() -> tuple[Minimax, Clients]:
    """Squared distances to 0, 1 and 4: their mean is least at 5/3, their largest at 2."""
    problem = Minimax(lambda x, y, batch: batch.mean((batch.rows[0] - x) ** 2).sum(), [0.5])
    return problem, Clients([(torch.tensor([[a]]),) for a in (0.0, 1.0, 4.0)], batch_size=None)


def test_afl_without_moving_weights_is_fedavg_with_one_step():
    problem, clients = three_points()
    still = run(problem, AFL(0.1, 0.0, "last", clients=3), clients, 5)
    plain = run(problem, FedAvg(0.1, 1), clients, 5)
    torch.testing.assert_close(still.point.x, plain.point.x, rtol=1e-13, atol=0)


@pytest.mark.parametrize("output", ["average", "last"])
def test_afl_finds_the_point_that_serves_the_worst_client(output):
    problem, clients = three_points()
    found = run(problem, AFL(0.1, 0.02, output, clients=3), clients, 400, executor="vectorised")
    assert float(found.point.x) == pytest.approx(2.0, abs=0.03)
    assert float(run(problem, FedAvg(0.1, 1), clients, 80).point.x) == pytest.approx(5 / 3)


def test_drfa_goes_towards_the_worst_clients():
    problem, clients = three_points()
    many = Clients([clients.train.rows(k) for k in (0, 1, 2) * 10], batch_size=None)
    method = DRFA(0.02, 0.001, 2, clients=30)
    federation, state, store = federation_of(problem, method, many, cohort=15)
    visited = []
    for _ in range(200):
        state = play_round(federation, state, store, Vectorised())
        visited.append(float(state.server.x))
    assert np.mean(visited[100:]) == pytest.approx(2.0, abs=0.1)
    # The middle one of the three points loses its weight.
    assert float(state.server.weights.reshape(10, 3).sum(0)[1]) < 0.05


def test_clients_are_drawn_in_proportion_to_their_weights():
    uniform = np.random.default_rng(0).random(100_000)
    weights = np.array([0.1, 0.0, 0.6, 0.3, 0.0])
    drawn = by_weight(weights.astype(np.float32), uniform)
    assert (np.diff(drawn) >= 0).all()
    assert np.abs(np.bincount(drawn, minlength=5) / 1e5 - weights).max() < 0.005
    assert np.bincount(drawn, minlength=5)[[1, 4]].sum() == 0
    ends = by_weight(weights, np.array([0.0, 1 - 2**-32]))
    assert ends.tolist() == [0, 3]


def test_the_common_step_is_even():
    drawn = common_number(stream_of("DRFA snapshot"), torch.arange(40_000), 8)
    assert float((torch.bincount(drawn, minlength=8) / 40_000 - 1 / 8).abs().max()) < 0.01


def test_equal_losses_leave_weights_as_they_are():
    method = AFL(clients=8)
    weights = method.even(torch.zeros(1, dtype=torch.float64))
    tried = [torch.full((8,), loss, dtype=torch.float64) for loss in np.linspace(0.1, 3, 30)]
    assert all(torch.equal(method.ascend(weights, 0.3, losses), weights) for losses in tried)


# What is refused.


@pytest.mark.parametrize("kind", [DRFA, AFL])
def test_the_number_of_clients_is_checked(kind: type[ClientWeights]):
    with pytest.raises(ValueError, match="refused beyond 10000"):
        kind(clients=10_001)
    kind(clients=10_000)
    for bad in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="how many clients"):
            kind(clients=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the run has 5"):
        kind(clients=4).for_clients(5)
    assert kind().for_clients(5) == kind(clients=5)
    with pytest.raises(ValueError, match="refused beyond 10000"):
        kind().for_clients(10_001)
    problem, _ = three_points()
    with pytest.raises(ValueError, match="give clients="):
        kind().init_server(problem, problem.start())


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_momentum_that_never_fades_is_refused(value):
    with pytest.raises(ValueError, match="heavy_ball"):
        LocalSGDM(heavy_ball=value)


def test_options_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match='"I" or "II"'):
        Scaffold(option="III")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"average" or "last"'):
        AFL(output="best", clients=3)  # type: ignore[arg-type]
