"""The loop and what surrounds it: cohorts, weights, evaluation, outcomes, errors, files, kills."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.data.clients import Clients
from fedminimax.engine.executors import choose
from fedminimax.engine.job import ClientError
from fedminimax.engine.round import Federation
from fedminimax.engine.simulate import simulate
from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.checkpoint import CheckpointError
from fedminimax.engine.state.folder import RunFolder, commit_of
from fedminimax.engine.state.lock import locked
from fedminimax.engine.state.store import Store
from fedminimax.engine.waiting import SPINS
from fedminimax.problems.auc import AUC
from fedminimax.problems.functions import Composition, Minimax
from fedminimax.problems.quadratic import Quadratic
from fedminimax.random import distinct, key
from fedminimax.types import Point

EXECUTORS = ("debug", "threads", "vectorised")
D = torch.float64


def square(x, y, batch):
    return batch.mean((batch.rows[0] - x).square().sum(-1)) / 2


def mean_problem(start: float = 0.0) -> Minimax:
    """The minimum is the mean of the rows; a step of rate lr goes that share of the way."""
    return Minimax(square, torch.tensor([start], dtype=D))


def column(*values: float) -> tuple[torch.Tensor, ...]:
    return (torch.tensor(values, dtype=D)[:, None],)


def mean_clients(count: int = 6, **options) -> Clients:
    return Clients([column(k, k + 1.0) for k in range(count)], batch_size=None, **options)


def quadratic(count: int = 4) -> tuple[Quadratic, Clients]:
    rng = np.random.default_rng(0)
    rows = [(np.full(6, 0.1 * k), rng.standard_normal((6, 3))) for k in range(count)]
    return Quadratic(3), Clients(rows, batch_size=2)


def auc_clients(**options) -> Clients:
    rng = np.random.default_rng(1)
    rows = []
    for n in (30, 18, 24):
        labels = (np.arange(n) % 3 == 0).astype(float)
        rows.append((rng.standard_normal((n, 4)) + labels[:, None], labels))
    return Clients(rows, batch_size=8, **options)


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).to(D)


# ------------------------------------------------------------------ cohorts


def federation(clients: int, cohort: int, seed: int = 0) -> Federation:
    some = Clients([column(float(k)) for k in range(clients)])
    return Federation.of(
        mean_problem(), FedAvg(), some, some.weight_vector("uniform"), seed, cohort
    )


def test_cohorts_depend_on_seed_and_round_only():
    ours, again = federation(20, 5), federation(20, 5)
    drawn = [ours.draw_cohort(None, r, 0).tolist() for r in range(30)]
    assert [again.draw_cohort(None, r, 0).tolist() for r in reversed(range(30))] == drawn[::-1]
    assert [federation(20, 5, seed=1).draw_cohort(None, r, 0).tolist() for r in range(30)] != drawn
    assert len({tuple(d) for d in drawn}) > 25
    assert all(len(set(d)) == 5 and d == sorted(d) for d in drawn)


def test_every_client_is_drawn_as_often():
    ours = federation(20, 5)
    counts = np.bincount(
        np.concatenate([ours.draw_cohort(None, r, 0) for r in range(2000)]), minlength=20
    )
    statistic = stats.chisquare(counts).statistic / (1 - 5 / 20) * 19 / 20
    assert stats.chi2.sf(statistic, 19) > 1e-4


def test_all_clients_are_all_clients():
    assert federation(4, 4).draw_cohort(None, 3, 0).tolist() == [0, 1, 2, 3]


def test_the_cost_of_a_cohort_does_not_grow_with_the_number_of_clients():
    start = time.perf_counter()
    for r in range(200):
        assert len(distinct(key(0, "cohort", r), 10, 10**12)) == 10
    assert time.perf_counter() - start < 1.0  # as many arange(10**12) would not fit anywhere


@dataclass(frozen=True)
class Roll(FedAvg):
    """Each round's mean of the clients' numbers goes to x: who took part can be read off."""

    def local_step(self, problem, down, client, batch, clock):
        return client

    def send(self, down, client, clock):
        return Point(2.0 ** clock.client.expand(1).to(D), client.y), client


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_cohort_does_not_depend_on_the_executor(executor):
    seen = []
    simulate(
        mean_problem(),
        Roll(),
        mean_clients(10),
        6,
        cohort=3,
        executor=executor,
        evaluate_every=1,
        on_record=lambda record: seen.append(record["bytes_up"]),
    )
    run = simulate(mean_problem(), Roll(), mean_clients(10), 6, cohort=3, executor=executor)
    members = distinct(key(0, "cohort", 5, 0), 3, 10)
    assert float(run.point.x) == pytest.approx(sum(2.0**k for k in members) / 3)
    assert seen == [r * 3 * 8 for r in range(7)]


# ------------------------------------------------------------------ weights


def test_the_mean_is_over_clients_or_over_rows():
    rows = [column(0.0), column(4.0, 4.0, 4.0)]
    for weights, right in (("uniform", 2.0), ("size", 3.0), (None, 3.0)):
        clients = Clients(rows, batch_size=None, weights=weights)  # type: ignore
        run = simulate(mean_problem(), FedAvg(lr=1.0, local_steps=1), clients, 1, executor="debug")
        assert float(run.point.x) == pytest.approx(right)
        # The evaluation weighs clients in the same way.
        losses = [(0 - right) ** 2 / 2, (4 - right) ** 2 / 2]
        share = {"uniform": 0.5, "size": 0.25, None: 0.25}[weights]
        loss = share * losses[0] + (1 - share) * losses[1]
        assert run.history[-1]["train"]["loss"] == pytest.approx(loss)


def test_weights_of_a_cohort_are_those_of_its_members():
    rows = [column(*[float(k)] * (k + 1)) for k in range(5)]
    clients = Clients(rows, batch_size=None, weights="size")
    run = simulate(mean_problem(), FedAvg(1.0, 1), clients, 1, cohort=2, executor="debug")
    a, b = distinct(key(0, "cohort", 0, 0), 2, 5).tolist()
    assert float(run.point.x) == pytest.approx((a * (a + 1) + b * (b + 1)) / (a + b + 2))


def test_the_prior_is_weighted_as_the_run_is():
    rows = [(torch.zeros(n, 4, dtype=D), (torch.arange(n) < p).to(D)) for n, p in ((4, 2), (12, 3))]

    def prior(weights):
        clients = Clients(rows, weights=weights)
        run = simulate(AUC(small_net()), Codasca(), clients, 1, executor="debug")
        return run.problem.positive_share  # type: ignore[attr-defined]

    assert prior("uniform") == pytest.approx((0.5 + 0.25) / 2)
    assert prior("size") == pytest.approx(5 / 16)
    assert prior(None) == pytest.approx(5 / 16)  # the metric is pooled


# ------------------------------------------------------------------ evaluation and stopping


def test_evaluations_come_every_so_many_rounds_and_at_both_ends():
    run = simulate(mean_problem(), FedAvg(), mean_clients(), 7, evaluate_every=3, executor="debug")
    assert [record["round"] for record in run.history] == [0, 3, 6, 7]
    assert [record["gradients"] for record in run.history] == [8 * 6 * r for r in (0, 3, 6, 7)]
    assert [record["exchanges"] for record in run.history] == [0, 3, 6, 7]
    assert [record["bytes_down"] for record in run.history] == [8 * 6 * r for r in (0, 3, 6, 7)]
    assert run.history[-1]["train"]["loss"] < run.history[0]["train"]["loss"]
    assert run.best is None


def drifting(validation: float, test: float, **options):
    """x moves from 0 towards 10 by a tenth of the way per round."""
    return simulate(
        mean_problem(),
        FedAvg(lr=0.1, local_steps=1),
        Clients(
            [column(10.0)],
            batch_size=None,
            validation=[column(validation)],
            test=[column(test)],
        ),
        40,
        evaluate_every=1,
        executor="debug",
        **options,
    )


def test_the_best_round_is_chosen_on_validation_rows_only():
    run = drifting(validation=3.0, test=8.0)
    path = [10 * (1 - 0.9**r) for r in range(41)]
    by_validation = int(np.argmin([(x - 3) ** 2 for x in path]))
    by_test = int(np.argmin([(x - 8) ** 2 for x in path]))
    assert by_validation != by_test
    assert run.best is not None
    assert run.best.round == by_validation
    assert float(run.best.point.x) == pytest.approx(path[by_validation])
    assert run.best.value == pytest.approx((path[by_validation] - 3) ** 2 / 2)
    assert float(run.point.x) == pytest.approx(path[40])
    assert drifting(validation=3.0, test=-5.0).best.round == by_validation  # type: ignore[union-attr]


def test_a_run_stops_after_so_many_evaluations_without_a_better_one():
    run = drifting(validation=3.0, test=8.0, stop_early=4)
    best = drifting(validation=3.0, test=8.0).best
    assert best is not None
    assert run.rounds == best.round + 4
    assert run.outcome.startswith(f"stopped early at round {run.rounds}: no better validation loss")
    assert f"at round {best.round}" in run.outcome
    assert run.best is not None
    assert run.best.round == best.round
    assert drifting(validation=10.0, test=0.0, stop_early=4).outcome == "finished"


def test_a_run_ends_at_its_target():
    path = [10 * (1 - 0.9**r) for r in range(41)]
    first = next(r for r, x in enumerate(path) if (x - 3) ** 2 / 2 <= 0.5)
    run = drifting(validation=3.0, test=8.0, target=0.5)
    assert run.rounds == first
    assert run.outcome.startswith(f"reached the target of 0.5 at round {first}: loss ")
    assert drifting(validation=-3.0, test=10.0, target=0.5).outcome == "finished"


def test_a_larger_auc_is_better():
    clients = auc_clients(validation=[rows_of_auc(k) for k in range(3)])
    run = simulate(AUC(small_net()), Codasca(lr=0.3), clients, 6, evaluate_every=1)
    values = [record["validation"]["auc"] for record in run.history]
    assert run.best is not None
    assert run.best.value == max(values)
    assert run.best.round == int(np.argmax(values))
    assert "test" not in run.history[0]
    assert "train" not in run.history[0]


def rows_of_auc(seed: int, n: int = 40):
    rng = np.random.default_rng(100 + seed)
    labels = (np.arange(n) % 3 == 0).astype(float)
    return rng.standard_normal((n, 4)) + 0.5 * labels[:, None], labels


def test_a_first_value_that_is_no_number_does_not_stay_the_best():
    class Odd(Minimax):
        def evaluate(self, point, ask, moments=None):
            found = super().evaluate(point, ask)
            return {"loss": float("nan")} if float(point.x) == 0 else found

    clients = Clients([column(10.0)], batch_size=None, validation=[column(3.0)])
    problem = Odd(square, torch.zeros(1, dtype=D))
    run = simulate(problem, FedAvg(0.1, 1), clients, 20, evaluate_every=1, executor="debug")
    assert run.best is not None
    assert run.best.round == 3


# ------------------------------------------------------------------ warm starts


def test_a_warm_start_from_a_point_and_from_a_vector():
    problem, clients = quadratic()
    point = Point(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0]))
    still = LocalSGDA(0.0, 0.0, local_steps=1)
    run = simulate(problem, still, clients, 1, start=point, executor="debug")
    assert torch.equal(run.point.x, point.x)
    assert torch.equal(run.point.y, point.y)
    run = simulate(problem, still, clients, 1, start=point.x, executor="debug", dtype=D)
    assert torch.equal(run.point.x, point.x.double())
    assert torch.equal(run.point.y, problem.start().y.double())
    halves = simulate(problem, LocalSGDA(), clients, 4, executor="debug", dtype=D)
    again = simulate(
        problem, LocalSGDA(), clients, 4, start=halves.point, executor="debug", dtype=D
    )
    assert again.history[0]["train"] == halves.history[-1]["train"]


def test_a_warm_start_from_a_module():
    still = LocalSGDA(0.0, 0.0, local_steps=1)
    given = small_net(seed=5)
    run = simulate(AUC(small_net()), still, auc_clients(), 1, start=given, executor="debug")
    trained = run.module()
    for ours, theirs in zip(trained.parameters(), given.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert run.point.x[-2:].tolist() == [0.0, 0.0]  # a and b start as usual


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        (Point(torch.zeros(2), torch.zeros(3)), "x of length 2; Quadratic needs 3"),
        (Point(torch.zeros(3), torch.zeros(1)), "y of length 1; Quadratic needs 3"),
        (torch.zeros(5), "x of length 5; Quadratic needs 3"),
        (torch.tensor([0.0, float("nan"), 0.0]), "NaN or an infinity in x"),
        (Point(torch.zeros(3), torch.full((3,), float("inf"))), "NaN or an infinity in y"),
        (nn.Linear(7, 1), "Quadratic has no torch module"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(start, sentence):
    problem, clients = quadratic()
    with pytest.raises(ValueError, match=sentence):
        simulate(problem, LocalSGDA(), clients, 1, start=start)


def test_a_module_that_is_not_the_problem_s_is_refused():
    for other in (nn.Linear(4, 3).to(D), nn.Linear(4, 500).to(D)):
        with pytest.raises(ValueError, match="start"):
            simulate(AUC(small_net()), Codasca(), auc_clients(), 1, start=other)


# ------------------------------------------------------------------ refusals

TWO_LEVELS = Composition([lambda x, batch: x, lambda v, batch: v.sum()], [0.0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rounds": 0}, "rounds is 0; give a whole number of at least 1"),
        ({"rounds": 2.5}, "rounds is 2.5; give a whole number"),
        ({"evaluate_every": 0}, "evaluate_every is 0; give a whole number"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1; give a whole number"),
        ({"stop_early": 0}, "stop_early is 0; give a whole number"),
        ({"cohort": 0}, "cohort is 0; give a whole number"),
        ({"cohort": 5}, "5 clients per round were asked for.* 4"),
        ({"cohort": 2.5, "allow_partial": True}, "2.5"),
        ({"cohort": 2}, "LocalSGDA is defined for rounds in which all clients take part"),
        ({"stop_early": 2}, "stop_early needs validation rows"),
        ({"target": float("nan")}, "target is nan; give a finite number"),
        ({"problem": TWO_LEVELS}, "LocalSGDA solves problems of depth 1.*Composition has depth 2"),
        ({"algorithm": FedAvg()}, "FedAvg only minimises, but Quadratic also has a maximising"),
        ({"executor": "fast"}, "executor is 'fast'; give one of auto, debug, threads, vectorised"),
    ],
)
def test_what_cannot_run_is_refused_with_a_sentence(options, sentence):
    problem, clients = quadratic()
    call = {"problem": problem, "algorithm": LocalSGDA(), "clients": clients, "rounds": 1} | options
    with pytest.raises(ValueError, match=sentence):
        simulate(**call)


def test_a_method_for_all_clients_may_be_tried_with_some():
    problem, clients = quadratic()
    run = simulate(problem, LocalSGDA(), clients, 1, cohort=2, allow_partial=True)
    assert run.outcome == "finished"


def test_one_class_only_is_refused():
    clients = Clients([(torch.zeros(4, 4, dtype=D), torch.ones(4))])
    with pytest.raises(ValueError, match="of one class only"):
        simulate(AUC(small_net()), Codasca(), clients, 1)


def test_a_problem_without_a_network_has_no_module():
    problem, clients = quadratic()
    with pytest.raises(ValueError, match="Quadratic has no torch module"):
        simulate(problem, LocalSGDA(), clients, 1).module()


# ------------------------------------------------------------------ non-finite values and errors


@dataclass(frozen=True)
class Trouble(FedAvg):
    """A NaN at one place: round 2, client 3, second phase, second step."""

    def phases(self, round):
        return self.phase(steps=1, local_step=super().local_step), self.phase(steps=4)

    def local_step(self, problem, down, client, batch, clock):
        here = (clock.round == 2) & (clock.client == 3) & (clock.step == 1) & (clock.phase == 1)
        moved = super().local_step(problem, down, client, batch, clock)
        return moved._replace(x=torch.where(here, torch.full_like(moved.x, torch.nan), moved.x))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_value_that_is_not_finite_ends_the_run_with_its_place(executor):
    run = simulate(
        mean_problem(), Trouble(lr=0.1), mean_clients(), 5, executor=executor, evaluate_every=1
    )
    assert run.outcome.startswith("non-finite x at round 2, client 3, phase 1, step 1: lower")
    assert run.rounds == 2
    assert bool(torch.isfinite(run.point.x).all())
    whole = simulate(mean_problem(), Trouble(lr=0.1), mean_clients(), 2, executor=executor)
    assert torch.equal(run.point.x, whole.point.x)
    assert [record["round"] for record in run.history] == [0, 1, 2]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_rate_far_too_high_names_round_client_and_variable(executor):
    problem, clients = quadratic()
    run = simulate(problem, LocalSGDA(1e30, 1e30, 3), clients, 50, executor=executor)
    assert "non-finite" in run.outcome
    assert "round 0, client 0, phase 0, step" in run.outcome
    assert torch.equal(run.point.x, problem.start().x)


def test_a_server_that_goes_wrong_is_named():
    class BadServer(FedAvg):
        def aggregate(self, problem, server, mean, clock):
            return server._replace(x=mean.x / 0)

    run = simulate(mean_problem(), BadServer(), mean_clients(), 5, executor="debug")
    assert "non-finite x at round 0, phase 0, at the server" in run.outcome


def test_a_kept_state_that_is_not_finite_ends_the_run():
    @dataclass(frozen=True)
    class BadState(FedAvg):
        keep: ClassVar[tuple[str, ...]] = ("y",)

        def init_client(self, problem, down, batch):
            return Point(down.x, torch.zeros(1, dtype=D))

        def receive(self, down, client, clock):
            return Point(down.x, client.y)

        def local_step(self, problem, down, client, batch, clock):
            return client._replace(y=client.y / 0 * 0)

        def send(self, down, client, clock):
            return Point(client.x, down.y), client

    run = simulate(mean_problem(), BadState(local_steps=1), mean_clients(), 3, executor="debug")
    assert "non-finite y at round 0, client 0, phase 0, step 0" in run.outcome


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_error_inside_a_method_says_where_it_happened(executor):
    @dataclass(frozen=True)
    class Fails(FedAvg):
        def local_step(self, problem, down, client, batch, clock):
            if bool(clock.step == 2) and bool(clock.round == 1):
                raise RuntimeError("no more steps")
            return super().local_step(problem, down, client, batch, clock)

    with pytest.raises(ClientError, match="round 1, client 0, phase 0, step 2: no more steps"):
        simulate(mean_problem(), Fails(), mean_clients(), 3, executor=executor)


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_an_error_names_the_client(executor):
    class OneFails(Minimax):
        """The matrix of client 2 has no inverse; under vmap too it is an error."""

        def outer(self, value, y, batch):
            return torch.linalg.inv(batch.rows[0][0]).sum() * value.sum()

        def evaluate(self, point, ask, moments=None):
            return {}

    rows = [(torch.eye(2, dtype=D)[None] * (0 if k == 2 else 1),) for k in range(4)]
    problem = OneFails(square, torch.zeros(2, dtype=D))
    with pytest.raises(ClientError, match=r"round 0, client 2, phase 0, step 0: .*inv") as caught:
        simulate(problem, FedAvg(0.1, 1), Clients(rows), 1, executor=executor)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_error_while_a_client_is_first_met_says_where_it_happened(executor):
    @dataclass(frozen=True)
    class FailsFirst(FedAvg):
        keep: ClassVar[tuple[str, ...]] = ("y",)
        init_batches: ClassVar[int] = 1

        def init_client(self, problem, down, batch):
            if float(batch[0].rows[0][0]) >= 3:  # type: ignore
                raise RuntimeError("rows of client 3")
            return down

    with pytest.raises(ClientError, match=r"client 3.*rows of client 3"):
        simulate(mean_problem(), FailsFirst(), mean_clients(), 1, executor=executor)


# ------------------------------------------------------------------ choosing an executor


def test_auto_picks_an_executor_that_works_and_writes_it_down(tmp_path):
    problem, clients = quadratic()
    run = simulate(problem, LocalSGDA(), clients, 2, folder=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert run.outcome == "finished"
    assert about["executor"] in ("threads", "vectorised")
    assert about["threads"] >= 1
    assert {"torch", "python", "fedminimax"} <= set(about)


class NoVmap(Minimax):
    """A number taken out of a tensor has no batching rule."""

    def outer(self, value, y, batch):
        float(batch.rows[0].sum())
        return super().outer(value, y, batch)


def test_auto_passes_over_an_executor_that_cannot_do_it(tmp_path):
    problem = NoVmap(square, torch.zeros(1, dtype=D))
    simulate(problem, FedAvg(), mean_clients(), 1, folder=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert about["executor"] == "threads"
    with pytest.raises(Exception, match="item"):
        simulate(problem, FedAvg(), mean_clients(), 1, executor="vectorised")


@pytest.mark.parametrize("executor", ["debug", "threads", "vectorised"])
def test_resume_obeys_the_executor_of_the_run(tmp_path, executor, monkeypatch):
    made = []
    monkeypatch.setattr(
        choose,
        "make",
        lambda name, *rest, make=choose.make: made.append(name) or make(name, *rest),
    )
    problem, clients = quadratic()
    simulate(problem, LocalSGDA(), clients, 2, executor=executor, folder=tmp_path / "run")
    simulate(problem, LocalSGDA(), clients, 4, folder=tmp_path / "run", resume=True)
    assert made == [executor, executor]


def test_a_new_run_is_not_bound_by_what_a_failed_start_left(tmp_path):
    class Fails(Minimax):
        def evaluate(self, point, ask, moments=None):
            raise RuntimeError("not yet")

    problem = Fails(square, torch.zeros(1, dtype=D))
    with pytest.raises(RuntimeError, match="not yet"):
        simulate(problem, FedAvg(), mean_clients(), 1, executor="threads", folder=tmp_path / "run")
    simulate(mean_problem(), FedAvg(), mean_clients(), 1, executor="debug", folder=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert about["executor"] == "debug"


def test_the_commit_of_a_run_is_that_of_the_code_and_says_if_the_code_has_changed(
    tmp_path, monkeypatch
):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(*words):
        who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode().strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("1")
    (tmp_path / "results.md").write_text("1")
    assert commit_of(package) is None
    git("init")
    assert commit_of(package) is None
    git("add", ".")
    assert commit_of(package) is None
    git("commit", "-m", "first")
    commit = git("rev-parse", "--short", "HEAD")
    (tmp_path / "results.md").write_text("2")
    assert commit_of(package) == commit
    (package / "new.py").write_text("1")
    assert commit_of(package) == f"{commit}-dirty"
    (package / "new.py").unlink()
    (package / "code.py").write_text("2")
    assert commit_of(package) == f"{commit}-dirty"


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
@pytest.mark.parametrize(
    ("first", "given", "spins"),
    [
        ("fedminimax", {}, "3000"),
        pytest.param("fedminimax", {"GOMP_SPINCOUNT": "7"}, "7", marks=pytest.mark.slow),
        pytest.param("fedminimax", {"OMP_WAIT_POLICY": "passive"}, "0", marks=pytest.mark.slow),
        pytest.param("torch", {}, "300000", marks=pytest.mark.slow),
    ],
)
def test_threads_wait_awake_for_a_short_time_unless_told_otherwise(first, given, spins):
    told = f"import {first}, fedminimax, torch, os; print(os.environ.get('{SPINS}', 'as it was'))"
    plain = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", told],
        env=plain | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    # What the library itself says that it has read: torch's comes first, scikit-learn has another.
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)[0] == spins
    assert done.stdout.strip() == given.get("GOMP_SPINCOUNT", "as it was")


def test_the_number_of_threads_of_the_process_is_left_alone(tmp_path):
    before = torch.get_num_threads()
    problem, clients = quadratic()
    for executor in ("threads", "vectorised", "auto"):
        folder = tmp_path / executor
        simulate(problem, LocalSGDA(), clients, 1, executor=executor, folder=folder)
        simulate(problem, LocalSGDA(), clients, 2, folder=folder, resume=True)
        assert torch.get_num_threads() == before


# ------------------------------------------------------------------ files


def go(folder: Path | None, rounds: int = 6, resume: bool = False, **options):
    settings = {
        "problem": AUC(small_net()),
        "algorithm": Codasca(lr=0.1, local_steps=2, stage_rounds=4),
        "clients": auc_clients(),
        "executor": "vectorised",
        "evaluate_every": 2,
    } | options
    return simulate(rounds=rounds, folder=folder, resume=resume, **settings)


def test_a_file_of_another_schema_is_refused_by_its_number(tmp_path, monkeypatch):
    file = tmp_path / "round.safetensors"
    monkeypatch.setattr(checkpoint, "SCHEMA", 1)
    checkpoint.write(file, {}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has schema 1, and this version .* reads"):
        checkpoint.read(file)


def last_checkpoint(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("*.safetensors"))[-1]


def test_the_final_file_is_the_same_bytes_in_two_runs_and_knows_no_time_or_place(tmp_path):
    for name in ("one", "two"):
        go(tmp_path / name)
    one, two = ((tmp_path / name / "final.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    tensors, about = checkpoint.read(tmp_path / "one" / "final.safetensors")
    assert {"x", "y", "moments"} <= set(tensors)
    text = json.dumps(about)
    for word in ("second", "time", "host", "path", str(tmp_path), os.uname().nodename):
        assert word not in text
    assert about["round"] == 6
    assert about["outcome"] == "finished"


def test_the_two_last_checkpoints_are_kept(tmp_path):
    go(tmp_path / "run", rounds=9, checkpoint_every=2)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["round-0000008.safetensors", "round-0000009.safetensors"]


def test_the_trained_module_comes_out_of_a_run():
    run = go(None)
    module = run.module()
    assert [type(part) for part in module] == [type(part) for part in small_net()]  # type: ignore
    vector = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert torch.equal(vector, run.point.x[:-2])
    assert not torch.equal(vector, AUC(small_net()).start().x[:-2])


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    go(tmp_path / "run", rounds=2)
    with pytest.raises(FileExistsError, match="already holds a run: resume it, or give another"):
        go(tmp_path / "run", rounds=2)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole = go(tmp_path / "whole", rounds=10)
    for stop in (2, 5, 8):
        go(tmp_path / "cut", rounds=stop, resume=stop > 2)
    cut = go(tmp_path / "cut", rounds=10, resume=True)
    assert torch.equal(cut.point.x, whole.point.x)
    files = [tmp_path / name / "final.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert cut.history[-1]["gradients"] == whole.history[-1]["gradients"]
    # A finished run that is resumed again is left as it is.
    again = go(tmp_path / "cut", rounds=10, resume=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [r["round"] for r in again.history] == [r["round"] for r in cut.history]


def test_a_run_that_stopped_early_stays_stopped_when_it_is_resumed(tmp_path):
    run = drifting(validation=3.0, test=8.0, stop_early=4, folder=tmp_path / "run")
    before = (tmp_path / "run" / "final.safetensors").read_bytes()
    (tmp_path / "run" / "final.safetensors").unlink()  # killed before it was written
    again = drifting(validation=3.0, test=8.0, stop_early=4, folder=tmp_path / "run", resume=True)
    assert again.outcome == run.outcome
    assert again.rounds == run.rounds
    assert (tmp_path / "run" / "final.safetensors").read_bytes() == before
    assert [r["round"] for r in again.history] == [r["round"] for r in run.history]


@pytest.mark.parametrize("left", [0.5, 0.0])
def test_a_checkpoint_cut_short_is_named_and_the_one_before_it_serves(tmp_path, left):
    whole = go(tmp_path / "whole", rounds=8)
    go(tmp_path / "run", rounds=6)
    path = last_checkpoint(tmp_path / "run")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * left)])
    sentence = f"{path.name} is damaged or cut short .* The run goes on from round-"
    with pytest.warns(UserWarning, match=sentence):
        run = go(tmp_path / "run", rounds=8, resume=True)
    assert torch.equal(run.point.x, whole.point.x)


def test_a_checkpoint_with_a_flipped_header_or_of_another_program_is_a_sentence(tmp_path):
    from safetensors.torch import save_file

    go(tmp_path / "run", rounds=2)
    path = last_checkpoint(tmp_path / "run")
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="not one that fedminimax wrote"):
        go(tmp_path / "run", rounds=4, resume=True)
    path.write_bytes(b"\xff" * 200)
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        go(tmp_path / "run", rounds=4, resume=True)
    with pytest.raises(CheckpointError, match="there is no file"):
        checkpoint.read(tmp_path / "nothing")


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"algorithm": Codasca(lr=0.2, local_steps=2, stage_rounds=4)},
        {"algorithm": LocalSGDA()},
        {"clients": auc_clients(weights="uniform")},
        {"clients": auc_clients(sampling="iid")},
        {"problem": AUC(small_net(seed=3))},
        {"problem": AUC(small_net(), form="margin")},
        {"problem": AUC(small_net(), positive_share=0.4)},
        {"problem": AUC(nn.Sequential(*list(small_net())[:2], nn.Tanh(), small_net()[3]))},  # type: ignore
    ],
    ids=["seed", "rate", "method", "weights", "sampling", "start", "form", "share", "network"],
)
def test_a_checkpoint_of_another_experiment_is_refused(tmp_path, other):
    go(tmp_path / "run", rounds=2)
    with pytest.raises(CheckpointError, match=r"of another experiment.*or give another folder"):
        go(tmp_path / "run", rounds=4, resume=True, **other)
    go(tmp_path / "run", rounds=4, resume=True)


def test_numbers_of_a_problem_make_another_experiment(tmp_path):
    def run(tau, resume):
        _, clients = quadratic()
        return simulate(
            Quadratic(3, tau), LocalSGDA(), clients, 2 + 2 * resume, folder=tmp_path, resume=resume
        )

    run(10.0, False)
    with pytest.raises(CheckpointError, match="of another experiment"):
        run(5.0, True)


def test_the_history_is_cut_back_to_the_checkpoint(tmp_path):
    whole = go(tmp_path / "whole", rounds=8)
    go(tmp_path / "run", rounds=6)
    history = tmp_path / "run" / "history.jsonl"
    folder = RunFolder(tmp_path / "run")
    # Rounds that came after the last checkpoint, then a kill.
    folder.append(folder.read_history()[-1] | {"round": 8})
    resumed = go(tmp_path / "run", rounds=8, resume=True)
    rounds = [json.loads(line)["round"] for line in history.read_text().splitlines()]
    assert rounds == [r["round"] for r in resumed.history] == [0, 2, 4, 6, 8]

    def numbers(history: list[dict]) -> list[dict]:
        return [{k: v for k, v in record.items() if k != "seconds"} for record in history]

    assert numbers(resumed.history) == numbers(whole.history)


@pytest.mark.parametrize("ending", ['{"round": 8, "gradi', '{"round"', "\x00\x00"])
def test_a_history_line_cut_in_half_is_dropped(tmp_path, ending):
    go(tmp_path / "run", rounds=6)
    history = tmp_path / "run" / "history.jsonl"
    with open(history, "a") as file:
        file.write(ending)
    run = go(tmp_path / "run", rounds=8, resume=True)
    rounds = [json.loads(line)["round"] for line in history.read_text().splitlines()]
    assert rounds == [r["round"] for r in run.history] == [0, 2, 4, 6, 8]


def test_a_kill_before_the_first_checkpoint_starts_anew(tmp_path):
    whole = go(tmp_path / "whole")

    class KilledError(BaseException):
        pass

    def kill(round):
        if round == 3:
            raise KilledError

    with pytest.raises(KilledError):
        go(tmp_path / "run", checkpoint_every=5, on_round=kill)
    run = go(tmp_path / "run", checkpoint_every=5, resume=True)
    assert torch.equal(run.point.x, whole.point.x)
    assert [r["round"] for r in run.history] == [0, 2, 4, 6]


def test_leftovers_of_a_write_that_was_killed_are_removed(tmp_path):
    go(tmp_path / "run", rounds=4)
    leftover = tmp_path / "run" / "checkpoints" / ".round-0000006.safetensors.partial"
    leftover.write_bytes(b"half")
    go(tmp_path / "run", rounds=6, resume=True)
    assert not leftover.exists()


def test_client_states_do_not_hold_on_to_those_of_others():
    """A row of a stack keeps the whole stack alive: with many clients, many times the memory."""
    store = Store(("c",))
    store.save(np.array([0, 1, 2]), (torch.zeros(3, 100),))
    held = store.states[0][0].untyped_storage().nbytes()
    assert held == 100 * 4


# ------------------------------------------------------------------ full disks and kills

SCRIPT = """
import os, resource, sys, time
import numpy as np, torch
from torch import nn
from fedminimax.algorithms.codasca import Codasca
from fedminimax.data.clients import Clients
from fedminimax.engine.simulate import simulate
from fedminimax.problems.auc import AUC

folder, limit, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(4, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 1))
random = np.random.default_rng(1)
rows = []
for n in (30, 18, 24):
    labels = (np.arange(n) % 3 == 0).astype(np.float32)
    rows.append(((random.standard_normal((n, 4)) + labels[:, None]).astype(np.float32), labels))

def on_round(round):
    print(round, flush=True)
    time.sleep(pause)
    if limit and round == 7:
        # From here on no file may grow beyond this: the disk is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

simulate(
    AUC(module), Codasca(lr=0.1, local_steps=2, stage_rounds=5), Clients(rows, batch_size=8),
    rounds=15, executor="vectorised", evaluate_every=4, checkpoint_every=3, folder=folder,
    resume=os.path.exists(folder), on_round=on_round,
)
"""


def start(folder: Path, limit: int = 0, pause: float = 0.0) -> subprocess.Popen:
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(limit), str(pause)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    )


def finish(process: subprocess.Popen) -> str:
    """Runs to its end; what it wrote to its error stream."""
    _, errors = process.communicate(timeout=120)
    return errors


def kill_at_round(folder: Path, round: int) -> None:
    process = start(folder, pause=0.01)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= round:
            break
    os.kill(process.pid, signal.SIGKILL)
    finish(process)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start(folder)
    errors = finish(process)
    assert process.returncode == 0, errors
    return (folder / "final.safetensors").read_bytes()


@pytest.mark.slow  # the fast tests fill the disk of the command line
def test_a_full_disk_is_a_sentence_and_the_run_can_go_on(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    process = start(folder, limit=12_000)
    errors = finish(process)
    assert process.returncode != 0
    assert "CheckpointError: could not write" in errors
    assert "Free some space and resume" in errors
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["round-0000003.safetensors", "round-0000006.safetensors"]
    assert last_checkpoint(folder).stat().st_size > 12_000
    checkpoint.read(last_checkpoint(folder))
    process = start(folder)
    errors = finish(process)
    assert process.returncode == 0, errors
    assert (folder / "final.safetensors").read_bytes() == uninterrupted


@pytest.mark.slow  # the fast tests kill a run at any single step in test_store.py
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    kill_at_round(folder, random.randint(4, 13))
    assert not (folder / "final.safetensors").exists()
    process = start(folder)
    errors = finish(process)
    assert process.returncode == 0, errors
    assert (folder / "final.safetensors").read_bytes() == uninterrupted


@pytest.mark.slow
def test_a_run_that_is_under_way_is_not_gone_on_with_by_another_process(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    kill_at_round(folder, 5)
    with locked(folder):
        second = start(folder)
        assert f"another process is at work in {folder}: stop it first" in finish(second)
    assert second.returncode != 0
    third = start(folder)
    errors = finish(third)
    assert third.returncode == 0, errors
    assert (folder / "final.safetensors").read_bytes() == uninterrupted


@pytest.mark.full
@pytest.mark.parametrize("attempt", range(2))
def test_a_run_killed_again_and_again_at_any_moment(tmp_path, uninterrupted, attempt):
    """The moments differ each time the test runs; the bytes may not. They are counted from the
    first round, so that a slow machine does not kill the run before it has begun."""
    folder = tmp_path / "run"
    for kill in range(6):
        process = start(folder, pause=0.3)
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(timeout=random.uniform(0.0, 2.0))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        errors = finish(process)
        if process.returncode == 0:
            assert kill > 0
            break
        assert process.returncode == -signal.SIGKILL, errors
    else:
        process = start(folder)
        errors = finish(process)
        assert process.returncode == 0, errors
    assert (folder / "final.safetensors").read_bytes() == uninterrupted


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_parameter_in_a_loss_keeps_no_history(executor):
    scale = nn.Parameter(torch.ones(1, dtype=D))

    def loss(x, y, batch):
        return batch.mean((scale * (batch.rows[0] - x)).square().sum(-1))

    problem = Minimax(loss, torch.zeros(1, dtype=D))
    run = simulate(problem, Scaffold(lr=0.1), mean_clients(), 2, executor=executor)
    assert not run.point.x.requires_grad
    assert float(run.point.x) > 0
    assert scale.grad is None
