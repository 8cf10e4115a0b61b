"""Compositional AUC: the inner step, its Jacobian, what is evaluated, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rows import labelled, labelled_rows, linear, mlp, seeded, value_and_pullback
from torch import Tensor, nn
from torch.func import vmap

from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.data.clients import Clients
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.simulate import simulate
from fedminimax.metrics.ranking import auc as exact_auc
from fedminimax.problems.auc import AUC
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.gradients import gradients
from fedminimax.types import Batch, Point, batch_of

SHARE: dict[str, Any] = {"positive_share": 0.3}


def normed() -> nn.Module:
    """Batch-norm between the layers: the rows of a batch depend on each other."""
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    )


on_modules = pytest.mark.parametrize("module", [linear, mlp, normed])


def rows(count: int = 7, seed: int = 0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 3, generator=random, dtype=torch.float64)
    return batch_of(features, (torch.arange(count) % 3 == 0).double())


def padded(batch: Batch) -> Batch:
    n = len(batch.weight)
    columns = tuple(torch.cat([column, 3 * column[:2] + 1]) for column in batch.rows)
    weight = torch.cat([batch.weight, torch.zeros(2)])
    return Batch(columns, weight, torch.cat([torch.zeros(n), torch.ones(2)]).double())


def point_of(problem: CompositionalAUC) -> Point:
    random = torch.Generator().manual_seed(1)
    x, y = (v.double() for v in problem.start())
    return Point(x + 0.3 * torch.randn(len(x), generator=random, dtype=torch.float64), y + 0.2)


def vector_of(problem: CompositionalAUC) -> Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randn(len(problem.start().x), generator=random, dtype=torch.float64)


# The inner step.


@on_modules
def test_the_inner_level_is_a_step_on_cross_entropy(module):
    problem, entropy = CompositionalAUC(module(), **SHARE, inner_lr=0.7), CrossEntropy(module())
    x, d = point_of(problem).x, problem.network.length
    slope = gradients(entropy, Point(x[:d], x[:0]), (rows(),)).x
    found = problem.inner(1, x, rows())
    torch.testing.assert_close(found[:d], x[:d] - 0.7 * slope, rtol=0, atol=1e-14)
    assert torch.equal(found[d:], x[d:])
    assert float(slope.norm()) > 1e-2


@on_modules
@pytest.mark.parametrize("filled", [False, True])
def test_the_pullback_is_the_finite_differences(module, filled):
    problem = CompositionalAUC(module(), **SHARE, inner_lr=0.7)
    x, vector, h = point_of(problem).x, vector_of(problem), 1e-6
    batch = padded(rows()) if filled else rows()
    value, found = value_and_pullback(problem, 1, x, vector, batch)
    torch.testing.assert_close(value, problem.inner(1, x, rows()), rtol=0, atol=1e-13)
    for i in range(len(x)):
        e = h * torch.eye(len(x), dtype=torch.float64)[i]
        change = problem.inner(1, x + e, rows()) - problem.inner(1, x - e, rows())
        assert float(found[i]) == pytest.approx(float(change @ vector) / (2 * h), abs=1e-8)
    assert float((found - vector).abs().max()) > 1e-2  # the Hessian is there


def test_the_pullback_of_a_convolutional_network_is_that_of_torch_func():
    layers = (
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(27, 1)),
    )
    problem = CompositionalAUC(seeded(lambda: nn.Sequential(*layers)), **SHARE, inner_lr=0.7)
    x, vector, labels = point_of(problem).x, vector_of(problem), torch.arange(6) % 2
    batch = batch_of(torch.randn(6, 1, 8, 8, dtype=torch.float64), labels.double())
    found = value_and_pullback(problem, 1, x, vector, batch)
    value, pull = torch.func.vjp(lambda v: problem.inner(1, v, batch), x)[:2]
    for ours, theirs in zip(found, (value, *pull(vector)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@on_modules
def test_without_hessian_the_pullback_is_the_vector(module):
    exact, none = (
        CompositionalAUC(module(), **SHARE, inner_lr=0.7, hessian=h)  # type: ignore[arg-type]
        for h in ("exact", "none")
    )
    x, vector = point_of(exact).x, vector_of(exact)
    value, found = value_and_pullback(none, 1, x, vector, rows())
    assert torch.equal(found, vector)
    assert torch.equal(value, exact.inner(1, x, rows()))


@on_modules
def test_without_an_inner_step_the_pullback_is_the_vector(module):
    problem = CompositionalAUC(module(), **SHARE, inner_lr=0.0)
    x, vector = point_of(problem).x, vector_of(problem)
    value, found = value_and_pullback(problem, 1, x, vector, rows())
    assert torch.equal(found, vector)
    assert torch.equal(value, x)


@on_modules
def test_all_clients_at_once_and_in_one_graph(module):
    problem = CompositionalAUC(module(), **SHARE, inner_lr=0.7)
    x, vector = point_of(problem).x, vector_of(problem)
    batches = [rows(seed=s) for s in range(3)]
    features, labels = (torch.stack([b.rows[i] for b in batches]) for i in (0, 1))

    def pull(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return value_and_pullback(problem, 1, x, vector, batch_of(features, labels))

    each = [value_and_pullback(problem, 1, x, vector, b) for b in batches]
    torch._dynamo.reset()
    graph = torch.compile(vmap(pull), fullgraph=True, backend="eager")
    for together in (vmap(pull), graph):
        for found, own in zip(together(features, labels), zip(*each, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(own), rtol=1e-10, atol=1e-13)


def test_the_last_level_is_the_auc_loss():
    problem, plain = CompositionalAUC(mlp(), **SHARE), AUC(mlp(), **SHARE)
    point = point_of(problem)
    found = gradients(problem, point, (rows(),))
    for mine, theirs in zip(found, gradients(plain, point, (rows(),)), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="has no inner level 2"):
        problem.inner(2, point.x, rows())


# Batches without positives.


@on_modules
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_batch_of_one_class_follows_the_algebra(module, label):
    problem = CompositionalAUC(module(), **SHARE, inner_lr=0.7)
    point, vector = point_of(problem), vector_of(problem)
    batch = batch_of(rows().features, torch.full((7,), label, dtype=torch.float64))
    value, pulled = value_and_pullback(problem, 1, point.x, vector, batch)
    slope = gradients(problem, point, (batch,))
    assert all(bool(torch.isfinite(v).all()) for v in (value, pulled, *slope))
    # Only the terms of that class are there: a has no slope without positives, b none without
    # negatives, and alpha's is 2 p mean(s) or -2 (1 - p) mean(s), less 2 p (1 - p) alpha.
    a, b = slope.x[-2:].tolist()
    p, s = 0.3, float(problem.scores(point.x, batch).mean())
    absent, present = (b, a) if label else (a, b)
    assert absent == 0 != present
    expected = -2 * (1 - p) * s if label else 2 * p * s
    assert float(slope.y) == pytest.approx(expected - 2 * p * (1 - p) * float(point.y))


def test_a_client_without_positives_takes_part():
    clients = Clients([(f, y * (k != 1)) for k, (f, y) in enumerate(labelled_rows())], batch_size=2)
    run = simulate(CompositionalAUC(mlp()), LocalSCGDAM(local_steps=2), clients, 3)
    assert run.outcome == "finished"
    assert "1" in run.history[-1]["train"]["one_class_sites"]


# What is evaluated.


def asking(problem: CompositionalAUC, clients: Clients, split: str = "train") -> LocalQuery:
    return LocalQuery(problem, clients, split, clients.weight_vector("size"))


def with_test_rows() -> Clients:
    other = [(f[:4] + 0.5, y[:4]) for f, y in labelled_rows((9, 8, 6, 5, 7), seed=4)]
    return Clients(labelled_rows(), batch_size=4, test=other).to(torch.float64)


@pytest.mark.parametrize("module", [mlp, normed])
def test_stepped_measures_the_weights_after_the_federation_s_inner_step(module):
    clients = with_test_rows()
    problem = CompositionalAUC(module(), **SHARE, inner_lr=2.0, evaluated="stepped")
    plain = CompositionalAUC(module(), **SHARE, inner_lr=2.0)
    point, weights = point_of(problem), clients.weight_vector("size")
    own = [problem.inner(1, point.x, clients.train.batch(k)) for k in range(5)]
    stepped = Point(sum(w * g for w, g in zip(weights, own, strict=True)), point.y)  # type: ignore
    moments = problem.moments(point, asking(problem, clients))
    # By the training rows, also where test rows are measured.
    found = problem.evaluate(point, asking(problem, clients, "test"), moments)
    norms = plain.moments(stepped, asking(plain, clients))
    expected = plain.evaluate(stepped, asking(plain, clients, "test"), norms)
    same = [name for name in expected if name not in ("loss",)]
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    outer = [problem.outer(*stepped, clients.splits["test"].batch(k)) for k in range(5)]
    loss = sum(float(w * v) for w, v in zip(weights, outer, strict=True))
    assert found["loss"] == pytest.approx(loss, rel=1e-12)

    # And the module is the one that was measured.
    features = clients.train.rows(2)[0]
    with torch.no_grad():
        scores = problem.module(point, moments)(features).flatten()
        assert torch.equal(scores, plain.module(stepped, norms)(features).flatten())
        usual = plain.module(point, plain.moments(point, asking(plain, clients)))
        assert float((scores - usual(features).flatten()).abs().max()) > 1e-3
    with pytest.raises(ValueError, match="were not asked for"):
        problem.module(point)


def test_the_usual_choice_measures_x():
    clients = with_test_rows()
    problem, plain = CompositionalAUC(mlp(), **SHARE), AUC(mlp(), **SHARE)
    point = point_of(problem)
    found = problem.evaluate(point, asking(problem, clients, "test"))
    expected = plain.evaluate(
        point, LocalQuery(plain, clients, "test", clients.weight_vector("size"))
    )
    assert found["auc"] == expected["auc"]
    value = asking(problem, clients, "test").mean("inner", point.x, torch.tensor(1))[0]
    (loss,) = asking(problem, clients, "test").mean("loss", value, point.y)
    assert found["loss"] == float(loss) != expected["loss"]


@pytest.mark.parametrize("evaluated", ["x", "stepped"])
@pytest.mark.parametrize("module", [mlp, normed])
def test_a_run_reports_the_auc_of_the_module_it_returns(module, evaluated):
    problem = CompositionalAUC(module(), inner_lr=0.5, evaluated=evaluated)
    run = simulate(problem, LocalSCGDAM(local_steps=2), labelled(), 3, evaluate_every=3)
    columns = [labelled().train.rows(k) for k in range(5)]
    features = torch.cat([torch.as_tensor(f).float() for f, _ in columns])
    labels = np.concatenate([np.asarray(y) for _, y in columns]) > 0
    with torch.no_grad():
        scores = run.module()(features).flatten().double().numpy()
    assert run.history[-1]["train"]["auc"] == pytest.approx(exact_auc(scores, labels))


def test_training_ranks_better_than_the_start():
    problem = CompositionalAUC(mlp(), inner_lr=0.5)
    clients = Clients(labelled_rows((40, 30, 20, 50, 30)), batch_size=8)
    method = LocalSCGDAM(local_steps=4)
    run = simulate(problem, method, clients, 30, evaluate_every=30, executor="vectorised")
    first, last = (record["train"] for record in run.history)
    assert last["auc"] > first["auc"] + 0.05
    assert last["loss"] < first["loss"]


# Bad input.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"inner_lr": -0.1}, "inner_lr is -0.1; give a finite number of at least 0"),
        ({"inner_lr": float("nan")}, "inner_lr is nan"),
        ({"inner_lr": float("inf")}, "inner_lr is inf"),
        ({"hessian": "diagonal"}, 'hessian is \'diagonal\'; give "exact" or "none"'),
        ({"evaluated": "h"}, 'evaluated is \'h\'; give "x" or "stepped"'),
        ({"margin": 0.0}, "margin is 0.0"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(options: dict[str, Any], told):
    with pytest.raises(ValueError, match=told):
        CompositionalAUC(mlp(), **options)


def test_the_share_of_positives_is_that_of_the_federation():
    clients = with_test_rows()
    problem = CompositionalAUC(mlp(), inner_lr=0.3, hessian="none", evaluated="stepped")
    known = problem.prepare(asking(problem, clients))
    labels = np.concatenate([y for _, y in labelled_rows()])
    assert known.positive_share == pytest.approx(labels.mean())
    assert isinstance(known, CompositionalAUC)
    assert (known.inner_lr, known.hessian, known.evaluated) == (0.3, "none", "stepped")


# What it costs.


@pytest.mark.parametrize("module", [linear, mlp])
def test_a_round_sends_three_times_the_weights_and_eight(module):
    """x and its inner value with a and b, two momenta, y and its own: 3 d + 8."""
    problem, method = CompositionalAUC(module()), LocalSCGDAM(local_steps=2)
    short, long = (
        simulate(problem, method, labelled(), rounds, dtype=torch.float64, executor="debug")
        for rounds in (1, 2)
    )
    for way in ("bytes_up", "bytes_down"):
        sent = long.history[-1][way] - short.history[-1][way]
        assert sent == 8 * 5 * (3 * problem.network.length + 8)
