"""Things that went wrong once: each ends in a sentence, an outcome, or the right numbers."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rows import labelled_rows
from torch import nn

import fedminimax as fm
from fedminimax.data.synthetic import QuadraticData
from fedminimax.engine.executors.choose import fastest
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.state.store import Store
from fedminimax.types import Cost


def rows(sizes=(12, 9, 15), seed=0):
    return [(x.astype(np.float32), y.astype(np.float32)) for x, y in labelled_rows(sizes, 3, seed)]


def clients(**options):
    return fm.Clients(rows(), batch_size=4, **options)


def test_scores_that_overflow_are_an_outcome_not_an_error(tmp_path):
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    run = fm.simulate(
        fm.AUC(net),
        fm.Codasca(lr=1e18, local_steps=1),
        clients(test=rows()),
        rounds=5,
        evaluate_every=1,
        executor="debug",
        folder=tmp_path / "run",
    )
    assert run.outcome != "finished"
    assert "round" in run.outcome
    assert (tmp_path / "run" / "final.safetensors").exists()
    assert run.history[-1]["round"] == 0


COMPOSED = """
import sys, torch, fedminimax as fm
level = lambda x, batch: batch.mean((batch.rows[0] - x) ** 2).sum()
problem = fm.Composition([level], torch.zeros(2))
clients = fm.Clients([(torch.ones(4, 2),), (torch.zeros(3, 2),)])
run = fm.simulate(problem, fm.methods.FedAvg(), clients, rounds=int(sys.argv[2]), evaluate_every=1,
                  executor="debug", folder=sys.argv[1], resume=sys.argv[3] == "resume")
print(run.rounds)
"""


def test_a_problem_of_functions_is_known_again_in_another_process(tmp_path, monkeypatch):
    folder = str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["-c", folder, "2", "new"])
    exec(compile(COMPOSED, "<string>", "exec"), {"__name__": "__main__"})
    command = [sys.executable, "-c", COMPOSED, folder, "4", "resume"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4"


def test_another_function_is_another_experiment(tmp_path):
    def minimise(function, **options):
        problem = fm.Minimax(function, torch.zeros(3))
        return fm.simulate(
            problem,
            fm.methods.FedAvg(),
            clients(),
            2,
            executor="debug",
            folder=tmp_path / "run",
            **options,
        )

    minimise(lambda x, y, batch: batch.mean((batch.features @ x - batch.labels) ** 2))
    with pytest.raises(ValueError, match="another experiment"):
        minimise(lambda x, y, batch: batch.mean((batch.features @ x).abs()), resume=True)


def test_a_problem_that_was_used_before_is_the_same_problem(tmp_path):
    problem = fm.problems.CrossEntropy(nn.Linear(3, 1))
    for name in ("first", "second"):
        fm.simulate(
            problem, fm.methods.FedAvg(), clients(), 2, executor="debug", folder=tmp_path / name
        )
    again = fm.simulate(
        problem,
        fm.methods.FedAvg(),
        clients(),
        4,
        executor="debug",
        folder=tmp_path / "second",
        resume=True,
    )
    assert again.rounds == 4


@pytest.mark.parametrize("method", [fm.methods.CodaPlus, fm.methods.Coda, fm.Codasca])
def test_with_clients_away_no_one_keeps_the_state_of_an_older_stage(method):
    data = QuadraticData(clients=6, dimension=2, spread=3.0)
    setting = fm.Clients(data.client_rows(), batch_size=None).to(torch.float64)
    algorithm = method(lr=0.1, local_steps=2, stage_rounds=3)
    weights = setting.weight_vector("uniform")
    problem = fm.problems.Quadratic(2)
    federation = Federation.of(problem, algorithm, setting, weights, 0, 3)
    start = fm.Point(*(v.double() for v in problem.start()))
    state, store = State(0, 0, algorithm.init_server(problem, start), Cost()), Store(algorithm.keep)
    for number in range(9):
        state = play_round(federation, state, store, Debug())
        present = federation.draw_cohort(None, number, 0).tolist()
        for client in present:
            assert int(store.states[client].stage) == number // 3
            if method is not fm.Codasca:
                assert float(store.states[client].taken) <= 2 * (number % 3 + 1)


def test_codasca_with_some_clients_comes_near_the_saddle():
    data = QuadraticData(clients=10, dimension=4, spread=3.0)
    setting = fm.Clients(data.client_rows(), batch_size=None)
    method = fm.Codasca(lr=0.01, local_steps=4, proximal=0.0, stage_rounds=1000)
    run = fm.simulate(
        fm.problems.Quadratic(4),
        method,
        setting,
        rounds=300,
        cohort=5,
        allow_partial=True,
        executor="vectorised",
        evaluate_every=300,
    )
    assert run.history[-1]["train"]["distance"] < 0.2 * run.history[0]["train"]["distance"]


def test_the_module_is_that_of_the_best_round(tmp_path):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    run = fm.simulate(
        fm.AUC(net),
        fm.Codasca(lr=0.5, local_steps=2),
        clients(validation=rows(seed=1)),
        rounds=6,
        evaluate_every=1,
        executor="debug",
        folder=tmp_path / "run",
    )
    assert run.best is not None
    features = torch.as_tensor(np.concatenate([x for x, _ in rows(seed=1)]))
    wanted = run.problem.module(run.best.point, run.best.moments)(features)
    assert torch.equal(run.module(best=True)(features), wanted)
    loaded = fm.load(tmp_path / "run", fm.AUC(net))
    assert torch.equal(loaded.module(best=True)(features), wanted)
    assert torch.equal(loaded.module()(features), wanted)
    assert run.kept["round"] == run.best.round < 6
    last = run.problem.module(run.point, run.moments)(features)
    assert torch.equal(loaded.module(best=False)(features), last)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(F.dropout(x, 0.5, True))


class Twice(nn.Module):
    """One batch-norm layer used in two places."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(3)
        self.one, self.two, self.last = norm, norm, nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.two(torch.tanh(self.one(x))))


def test_random_numbers_of_torch_are_refused():
    with pytest.raises(ValueError, match="torch's own random numbers"):
        fm.simulate(fm.AUC(Noisy()), fm.methods.LocalSGDA(), clients(), 2, executor="debug")


def test_a_batch_norm_layer_may_be_used_twice():
    runs = [
        fm.simulate(
            fm.AUC(Twice()),
            fm.methods.LocalSGDA(),
            clients(),
            2,
            executor=executor,
            dtype=torch.float64,
        )
        for executor in ("debug", "vectorised")
    ]
    assert torch.isfinite(runs[0].point.x).all()


def frozen():
    module = nn.Linear(3, 1)
    module.weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fm.AUC(frozen()), "'weight' is frozen"),
        (lambda: fm.AUC(nn.Linear(3, 1), margin=-1.0), "margin is -1.0"),
        (lambda: fm.AUC(nn.Linear(3, 1), least_per_bin=-3), "least_per_bin is -3"),
        (lambda: fm.methods.Coda(dual_batches=0), "dual_batches is 0; give a whole number"),
        (lambda: fm.simulate(fm.methods.FedAvg(), fm.AUC, clients(), 1), "problem is a FedAvg"),  # type: ignore
        (
            lambda: fm.simulate(fm.AUC(nn.Linear(3, 1)), fm.methods.LocalSGDA(), rows(), 1),  # type: ignore
            "clients is a list; give a Clients",
        ),
        (
            lambda: fm.simulate(
                fm.AUC(nn.Linear(3, 1)),
                fm.methods.LocalSGDA(),
                clients(),
                1,
                folder="no/such",
                resume=True,
            ),
            "no folder no/such to resume from",
        ),
        (
            lambda: fm.simulate(
                fm.AUC(nn.Linear(3, 1)), fm.methods.LocalSGDA(), clients(), 1, measures=["slope"]
            ),
            "no measure 'slope'; known: grad_x",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("problem", [fm.AUC, fm.problems.CrossEntropy])
@pytest.mark.parametrize("labels", [(0.0, 1.0, 2.0), (1.0, 2.0)])
def test_labels_of_other_than_two_classes_are_refused(problem, labels):
    features = torch.randn(6, 3)
    wrong = [(features, torch.tensor(labels).repeat(6)[:6])] * 2
    method = fm.methods.LocalSGDA()
    with pytest.raises(ValueError, match="the labels hold"):
        fm.simulate(problem(nn.Linear(3, 1)), method, fm.Clients(wrong), 1, executor="debug")


def test_stopping_early_needs_a_metric_to_wait_for():
    one_class = [(x, np.ones_like(y)) for x, y in rows()]
    with pytest.raises(ValueError, match="validation rows have none"):
        fm.simulate(
            fm.AUC(nn.Linear(3, 1)),
            fm.methods.LocalSGDA(),
            clients(validation=one_class),
            3,
            stop_early=1,
            executor="debug",
        )


def test_a_run_that_diverges_at_once_still_has_its_environment(tmp_path):
    run = fm.simulate(
        fm.AUC(nn.Linear(3, 1), score="raw"),
        fm.methods.LocalSGDA(1e30, 1e30),
        clients(),
        3,
        executor="debug",
        folder=tmp_path / "run",
    )
    assert run.outcome.startswith("non-finite")
    assert "torch" in (tmp_path / "run" / "environment.json").read_text()


def test_measures_are_logged_with_each_evaluation():
    setting = fm.Clients(QuadraticData(spread=1.0).client_rows(), batch_size=None)
    run = fm.simulate(
        fm.problems.Quadratic(10),
        fm.methods.LocalSGDA(0.05, 0.05, local_steps=1),
        setting,
        rounds=100,
        evaluate_every=100,
        executor="vectorised",
        dtype=torch.float64,
        measures=["grad_x", "grad_phi"],
    )
    first, last = (record["optimality"] for record in run.history)
    assert last["grad_phi"] < 1e-2 * first["grad_phi"]
    assert last["grad_x"] < 1e-2 * first["grad_x"]


def test_a_close_race_between_executors_is_not_decided_by_noise(monkeypatch):
    times = iter([1e-3] * 3 + [9e-4] * 3 + [8e-4] * 3)
    monkeypatch.setattr("fedminimax.engine.executors.choose._seconds", lambda *_: next(times))
    problem, method = fm.problems.Quadratic(2), fm.methods.LocalSGDA()
    data = QuadraticData(clients=3, dimension=2)
    setting = fm.Clients(data.client_rows(), batch_size=None).to(torch.float32)
    federation = Federation.of(problem, method, setting, setting.weight_vector("uniform"), 0, 3)
    seen = []

    class Watch(Debug):
        def run(self, work):  # type: ignore[override]  # as narrow as the test needs
            seen.append(fastest(work, cores=2))
            return super().run(work)

    state = State(0, 0, method.init_server(problem, problem.start()), Cost())
    play_round(federation, state, Store(()), Watch())
    assert [choice[:2] for choice in seen] == [("vectorised", 1)]
