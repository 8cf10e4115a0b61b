"""Meta-learning as a composition: the objective against plain MAML, its data, and its measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rows import seeded, value_and_pullback
from torch import Tensor, nn

from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.levelwise_dr_scgd import LevelwiseDRSCGD
from fedminimax.config import Experiment
from fedminimax.data.clients import Clients
from fedminimax.data.sinusoids import SinusoidData
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.simulate import simulate
from fedminimax.experiment import run_experiment
from fedminimax.metrics.optimality import Full
from fedminimax.problems.maml import MAML
from fedminimax.types import Point

DATA = SinusoidData(clients=4, tasks=3, tasks_per_client=2, support=5, query=4, seed=1)
NONE = torch.zeros(0, dtype=torch.float64)


def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)))


MODULE = network().double()


def asking(problem: MAML, clients: Clients, split: str = "train") -> LocalQuery:
    return LocalQuery(problem, clients, split, clients.weight_vector("uniform"))


def prepared(depth: int = 3, data: SinusoidData = DATA) -> tuple[MAML, Clients]:
    clients = Clients(data.client_rows(), batch_size=None, test=data.test_rows())
    problem = MAML(network(), depth, inner_lr=0.02)
    return problem.prepare(asking(problem, clients)), clients


def plain_maml(rows: list, x: Tensor, steps: int, lr: float) -> Tensor:
    """The mean over tasks of the query loss after steps on the support loss, on pooled rows."""
    return torch.stack(_adapt(rows, x, steps, lr)[1]).mean()


def adapted(rows: list, x: Tensor, steps: int, lr: float) -> Tensor:
    """The weights of every task after its steps."""
    return torch.stack(_adapt(rows, x, steps, lr)[0])


def _adapt(rows: list, x: Tensor, steps: int, lr: float) -> tuple[list[Tensor], list[Tensor]]:
    columns = [torch.as_tensor(np.concatenate(c)) for c in zip(*rows, strict=True)]
    inputs, target, task, query = columns
    names = [(name, p.shape) for name, p in MODULE.named_parameters()]

    def loss(weights: Tensor, chosen: Tensor) -> Tensor:
        parts = weights.split([s.numel() for _, s in names])
        tensors = {n: p.reshape(s) for (n, s), p in zip(names, parts, strict=True)}
        outputs = torch.func.functional_call(MODULE, tensors, (inputs[chosen],)).flatten()
        return (outputs - target[chosen]).square().mean()

    ends, losses = [], []
    for t in range(int(task.max()) + 1):
        weights = x
        for _ in range(steps):
            support = (task == t) & (query == 0)
            weights = weights - lr * torch.func.grad(loss)(weights, support)
        losses.append(loss(weights, (task == t) & (query == 1)))
        ends.append(weights)
    return ends, losses


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_objective_and_its_gradient_are_those_of_maml(depth):
    problem, clients = prepared(depth)
    full = Full(problem, asking(problem, clients))
    x = problem.start().x.double() + 0.1
    expected = plain_maml(DATA.client_rows(), x, depth - 1, 0.02)
    slope = torch.func.grad(lambda v: plain_maml(DATA.client_rows(), v, depth - 1, 0.02))(x)
    assert full.value(Point(x, NONE)) == pytest.approx(float(expected), rel=1e-12)
    torch.testing.assert_close(full.gradients(Point(x, NONE)).x, slope, rtol=1e-9, atol=1e-12)


def test_measures_are_before_and_after_adaptation_on_each_split():
    problem, clients = prepared(3)
    x = problem.start().x.double()
    for split, rows in (("train", DATA.client_rows()), ("test", DATA.test_rows())):
        found = problem.evaluate(Point(x, NONE), asking(problem, clients, split))
        assert found["loss"] == pytest.approx(float(plain_maml(rows, x, 2, 0.02)), rel=1e-10)
        before = float(plain_maml(rows, x, 0, 0.02))
        assert found["loss_before"] == pytest.approx(before, rel=1e-10)
        weights = adapted(rows, x, 2, 0.02)
        for name, tasks in (("worst_before", x.expand(3, -1)), ("worst", weights)):
            own = []
            for inputs, target, task, query in rows:
                made = [problem.network(tasks[t], torch.from_numpy(inputs)) for t in range(3)]
                outputs = torch.stack(made).flatten(1).detach().numpy()[task, np.arange(len(task))]
                own.append(((outputs - target)[query == 1] ** 2).mean())
            assert found[name] == pytest.approx(max(own), rel=1e-10)
        assert found["worst"] != pytest.approx(found["worst_before"], rel=1e-3)


def test_splits_may_have_shares_of_their_own():
    """Unequal numbers of rows per task: the loss is that of the split's own tasks."""
    problem, _ = prepared(2)
    rows = [tuple(c[:-3] for c in DATA.test_rows()[0]), *DATA.test_rows()[1:]]
    clients = Clients(DATA.client_rows(), test=rows, weights="size")
    weights = torch.tensor([len(r[0]) for r in rows]).double()
    ask = LocalQuery(problem, clients, "test", weights / weights.sum())
    x = problem.start().x.double()
    right = float(plain_maml(rows, x, 1, 0.02))
    assert problem.evaluate(Point(x, NONE), ask)["loss"] == pytest.approx(right, rel=1e-10)


def test_a_minibatch_is_unbiased_and_its_pullback_is_the_jacobian_transposed():
    problem, clients = prepared(3)
    length = problem.network.length
    batch = clients.train.batch(1)
    value = torch.linspace(-1, 1, 3 * length, dtype=torch.float64)
    pieces = [batch._replace(weight=row) for row in torch.eye(len(batch.weight)).double()]
    single = torch.stack([problem.inner(2, value, piece) for piece in pieces]).mean(0)
    torch.testing.assert_close(single, problem.inner(2, value, batch))
    vector = torch.linspace(1, -2, 3 * length, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda v: problem.inner(2, v, batch))(value)
    pulled = value_and_pullback(problem, 2, value, vector, batch)[1]
    torch.testing.assert_close(pulled, jacobian.T @ vector)
    # Level 1 leaves from one x and arrives at the weights of all tasks.
    assert problem.inner(1, value[:length], batch).shape == (3 * length,)


def test_training_makes_adaptation_better():
    data = SinusoidData(clients=3, tasks=2, tasks_per_client=1, support=6, query=6, seed=2)
    clients = Clients(data.client_rows(), batch_size=None)
    problem = MAML(network(), 3, inner_lr=0.02)
    runs = [
        simulate(
            problem,
            LevelwiseDRSCGD(lr=0.04, local_steps=1),
            clients,
            rounds,
            executor=executor,
            dtype=torch.float64,
            evaluate_every=rounds,
        )
        for executor, rounds in (("vectorised", 30), ("vectorised", 2), ("debug", 2))
    ]
    first, last = (runs[0].history[i]["train"] for i in (0, -1))
    assert last["loss"] < 0.8 * first["loss"]
    torch.testing.assert_close(runs[1].point.x, runs[2].point.x, rtol=1e-10, atol=1e-12)
    assert runs[0].module()(torch.zeros(2, 1).double()).shape == (2, 1)


def test_the_experiment_of_the_repository_learns_to_adapt():
    file = Path(__file__).parents[2] / "experiments" / "maml.toml"
    experiment = Experiment.from_file(file, ["rounds=25", "evaluate_every=25"])
    assert experiment.method.name == "levelwise_dr_scgd"
    run = run_experiment(experiment)
    assert run.outcome == "finished"
    first, last = (record["test"] for record in run.history)
    assert last["loss"] < 0.8 * first["loss"]
    assert last["loss"] < last["loss_before"]


def test_without_inner_steps_it_is_regression():
    clients = Clients(DATA.client_rows(), batch_size=8)
    method = FedAvg(lr=0.02, local_steps=4)
    run = simulate(MAML(network(), 1), method, clients, 20, evaluate_every=20)
    first, last = (run.history[i]["train"] for i in (0, -1))
    assert last["loss"] == last["loss_before"] < first["loss"]


def test_tasks_are_sine_waves_spread_over_clients():
    rows = SinusoidData(clients=5, tasks=4, tasks_per_client=2, support=3, query=2).client_rows()
    for client, (inputs, target, task, query) in enumerate(rows):
        assert task.tolist() == [client % 4] * 5 + [(client + 1) % 4] * 5
        assert query.tolist() == [0, 0, 0, 1, 1] * 2
        assert np.abs(inputs).max() <= 5
        assert np.abs(target).max() <= 5
    for t in range(4):
        x, y = (
            np.concatenate([r[c][r[2] == t].reshape(-1) for r in rows]) for c in (0, 1)
        )  # amplitude sin(x - phase) is a mixture of sin x and cos x
        waves = np.stack([np.sin(x), np.cos(x)], 1)
        weights, residual, *_ = np.linalg.lstsq(waves, y, rcond=None)
        assert residual.sum() < 1e-20
        assert 0.1 <= np.linalg.norm(weights) <= 5
    again, other = (SinusoidData(seed=s).client_rows() for s in (0, 1))
    assert np.array_equal(again[0][1], SinusoidData().client_rows()[0][1])
    assert not np.array_equal(again[0][1], other[0][1])
    assert not np.array_equal(again[0][1], SinusoidData().test_rows()[0][1])


def test_bad_settings_are_refused():
    for bad in (
        {"tasks": 3, "tasks_per_client": 4},
        {"clients": 2, "tasks": 9},
        {"support": 0},
        {"noise": -1.0},
    ):
        with pytest.raises(ValueError, match="give"):
            SinusoidData(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inner_lr is -1"):
        MAML(network(), inner_lr=-1.0)
    with pytest.raises(ValueError, match="depth is 0"):
        MAML(network(), 0)
    with pytest.raises(ValueError, match="batch-norm"):
        MAML(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)))
    with pytest.raises(ValueError, match="prepare"):
        MAML(network()).outer(network_start(), NONE, Clients(DATA.client_rows()).train.batch(0))
    lacking = [(*r[:2], np.where(r[2] == 1, 2, r[2]), r[3]) for r in DATA.client_rows()]
    problem = MAML(network())
    with pytest.raises(ValueError, match="task 1 has no support rows"):
        problem.prepare(asking(problem, Clients(lacking)))
    for wrong in ([r[:2] for r in DATA.client_rows()], [(*r, r[3]) for r in DATA.client_rows()]):
        with pytest.raises(ValueError, match=r"columns of shapes \(1,\), \(\).* give \(input, tar"):
            problem.prepare(asking(problem, Clients(wrong)))
    wide = [(r[0], r[1][:, None], *r[2:]) for r in DATA.client_rows()]
    with pytest.raises(ValueError, match=r"columns of shapes \(1,\), \(1,\), \(\), \(\); give"):
        problem.prepare(asking(problem, Clients(wide)))


def network_start() -> Tensor:
    return MAML(network()).start().x.double()
