"""Privacy for rows in whole runs: the account, the budget, and what is refused."""

import json
import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from deployment import RANGES
from torch import nn

import fedminimax as fm
from fedminimax.algorithms import METHODS
from fedminimax.config import Experiment, write_toml
from fedminimax.engine.privacy import Budget, count_releases
from fedminimax.engine.round import Federation
from fedminimax.experiment import build
from fedminimax.privacy.accountant import epsilon_of
from fedminimax.privacy.settings import Privacy

RECORD = Privacy("record", epsilon=3.0)
HEART: dict[str, Any] = {
    "data": {"name": "heart"},
    "split": {"train": 0.8, "validation": 0.0, "ranges": RANGES},
    "model": {"name": "linear"},
    "problem": {"name": "auc", "positive_share": 0.5},
    "method": {"name": "codasca", "lr": 0.3, "local_steps": 2},
    "run": {"rounds": 3, "batch_size": 0, "evaluate_every": 1, "executor": "vectorised"},
    "privacy": {"level": "record"},
}


def clients(batch_size: int | None = None, sizes: tuple[int, ...] = (9, 14, 6), **settings: Any):
    chance = np.random.default_rng(1)

    def rows(size: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(size) % 2
        return chance.normal(size=(size, 3)) + labels[:, None], labels.astype(float)

    given = [rows(size) for size in sizes]
    return fm.Clients(given, batch_size, test=[rows(6) for _ in sizes], **settings)


def auc(kind: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    kind = kind or fm.problems.AUC
    return kind(nn.Linear(3, 1).double(), **{"positive_share": 0.5, **settings})


def simulate(method: Any, data: Any = None, problem: Any = None, rounds: int = 4, **settings: Any):
    usual = {"privacy": RECORD, "executor": "debug", "evaluate_every": 1}
    data = data or clients()
    return fm.simulate(problem or auc(), method, data, rounds, **{**usual, **settings})


def federation(method: Any, problem: Any, data: Any) -> Federation:
    data = data.to(torch.float64)
    return Federation.of(problem, method, data, data.weight_vector("size"), 0, len(data))


# Releases of a step on each level, in the first and the second round, and of a first state.
RELEASES = {
    "fedavg": ([1], [1], [0]),
    "scaffold": ([1], [1], [0]),
    "local_sgda": ([1], [1], [0]),
    "local_sgda_plus": ([1], [1], [0]),
    "coda_plus": ([1], [1], [0]),
    "codasca": ([1], [1], [0]),
    "fess_gda": ([1], [1], [0]),
    "afl": ([2], [2], [0]),
    "fgda": ([2], [2], [1]),
    "fedsgda_m": ([2], [2], [1]),
    "local_scgdam": ([2, 1], [2, 1], [2, 1]),
    "fed_dr_scgd": ([4, 2], [4, 2], [2, 1]),
    "smvr": ([4, 2], [4, 2], [3, 1]),
}


@pytest.mark.parametrize("name", RELEASES)
def test_releases_of_a_step_are_counted_by_method(name):
    method, deep = METHODS[name](), METHODS[name].levels is None
    problem = auc(fm.problems.CompositionalAUC) if deep else auc()
    if not method.maximises:
        problem = _minimised(deep)
    made = federation(method, problem, clients())
    counted = count_releases(made, 2)
    first, second, start = RELEASES[name]
    assert counted.made[:, 0].tolist() == first
    assert counted.made[:, -1].tolist() == second
    assert counted.whole.tolist() == [0, sum(start), sum(start)]
    steps = [made.algorithm.steps(round, 0) for round in (0, 1)]
    expected = steps[0] * sum(first) + steps[1] * sum(second) + sum(start)
    assert counted.of_row(2, passes=1) == expected


class _Stepped(fm.problems.CompositionalAUC):
    """A composition without a maximising player."""

    def start(self) -> fm.Point:
        return super().start()._replace(y=torch.zeros(0, dtype=torch.float64))

    def outer(self, value, y, batch):
        return self.cross_entropy(value, batch)


def _minimised(deep: bool) -> Any:
    if deep:
        return auc(_Stepped)
    torch.manual_seed(0)
    return fm.problems.CrossEntropy(nn.Linear(3, 1).double())


def test_a_row_is_counted_once_for_each_pass_over_batches():
    """By brute force: which batches each row is in, as the sampler draws them."""
    data = clients(batch_size=4)
    made = federation(fm.methods.LocalSGDA(local_steps=3), auc(), data)
    rounds = 7
    counted = count_releases(made, rounds)
    budget = Budget.of(RECORD, counted, made.clients, rounds, asked=False)
    times = np.zeros(int(data.train.sizes.sum()), dtype=int)
    drawn = made.sampler.draw(made.everyone, 0, 3 * rounds)
    for step in range(3 * rounds):
        for batch in drawn.source.index[step, 0].tolist():
            for row in set(batch):
                times[row] += 1
    for client, passes in enumerate((2, 3, 1)):
        own = slice(int(data.train.starts[client]), None)
        most = times[own][: int(data.train.sizes[client])].max()
        assert most <= counted.of_row(rounds, passes) == -(-3 * rounds // passes)
    assert budget.passes == (1, 2, 3)
    assert budget.noise[0] > budget.noise[1] > budget.noise[2]
    assert budget.spent(rounds)["epsilon"] == pytest.approx(3.0)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("name", ["codasca", "local_scgdam", "fed_dr_scgda"])
def test_executors_agree_and_the_whole_budget_is_spent(name, batch_size):
    deep = METHODS[name].levels is None
    problem = auc(fm.problems.CompositionalAUC if deep else None)
    method: Any = METHODS[name]
    ended = [
        simulate(method(local_steps=2), clients(batch_size), problem, executor=executor)
        for executor in ("debug", "vectorised")
    ]
    torch.testing.assert_close(ended[0].point.x, ended[1].point.x)
    spent = [record["privacy"]["epsilon"] for record in ended[0].history]
    assert spent[0] == 0.0
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(3.0)
    exact = simulate(method(local_steps=2), clients(batch_size), problem, privacy=None)
    assert "privacy" not in exact.history[-1]
    assert not torch.allclose(exact.point.x, ended[0].point.x, atol=1e-3)


def test_a_run_stops_at_its_budget_with_its_last_model():
    privacy = Privacy("record", epsilon=1.0, noise=20.0)
    run = simulate(fm.methods.LocalSGDA(local_steps=2), rounds=500, privacy=privacy)
    rounds = run.rounds
    assert rounds < 500
    assert run.outcome.startswith(f"the privacy budget is spent after round {rounds}: epsilon 0.9")
    assert run.history[-1]["round"] == rounds
    assert epsilon_of(2 * rounds / 400, 1e-5) <= 1.0 < epsilon_of(2 * (rounds + 1) / 400, 1e-5)
    shorter = simulate(fm.methods.LocalSGDA(local_steps=2), rounds=rounds, privacy=privacy)
    assert shorter.outcome == "finished"
    assert torch.equal(shorter.point.x, run.point.x)


def test_a_run_that_is_gone_on_with_keeps_its_account(tmp_path):
    method, privacy = fm.methods.FGDA(local_steps=2), Privacy("record", noise=15.0)
    whole = simulate(method, rounds=6, privacy=privacy)
    simulate(method, rounds=3, privacy=privacy, folder=tmp_path / "run")
    again = simulate(method, rounds=6, privacy=privacy, folder=tmp_path / "run", resume=True)
    assert torch.equal(whole.point.x, again.point.x)
    assert again.history[-1]["privacy"] == whole.history[-1]["privacy"]
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["privacy"]["epsilon"] for line in lines] == pytest.approx(
        [record["privacy"]["epsilon"] for record in whole.history]
    )
    other = replace(privacy, row_clip=2.0)
    with pytest.raises(ValueError, match="another experiment"):
        simulate(method, rounds=6, privacy=other, folder=tmp_path / "run", resume=True)


def test_the_share_of_positives_is_told_with_noise_and_charged():
    run = simulate(fm.methods.LocalSGDA(), problem=auc(positive_share=None))
    exact = simulate(fm.methods.LocalSGDA(), problem=auc(positive_share=None), privacy=None)
    shares = [vars(r.problem)["positive_share"] for r in (run, exact)]
    assert shares[0] != shares[1]
    assert run.history[0]["privacy"]["epsilon"] > 0
    assert run.history[-1]["privacy"]["epsilon"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"problem": fm.problems.Fair(nn.Linear(3, 1), 2)}, "does not say that it is a mean over"),
        (
            {"problem": fm.problems.AUC(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), 0.5)},
            "makes the loss of a row depend on the others",
        ),
        ({"data": clients(4, sampling="balanced")}, 'sampling "balanced" may use a row'),
        ({"data": clients(4, sampling="iid")}, 'sampling "iid" may use a row in several'),
        ({"measures": ["grad_x"]}, "is computed on training rows: leave it out"),
        ({"executor": "compiled"}, 'the executor "compiled" has no gradients row by row'),
        (
            {
                "method": fm.methods.LocalSCGDAM(),
                "problem": auc(fm.problems.CompositionalAUC, evaluated="stepped"),
            },
            "asks training rows: use x",
        ),
        ({"privacy": Privacy("record", epsilon=0.1, noise=1.0)}, "one round with noise 1 spends"),
    ],
)
def test_what_would_tell_of_rows_is_refused(changed, sentence):
    method = changed.get("method") or fm.methods.LocalSGDA()
    with pytest.raises(ValueError, match=sentence):
        simulate(method, **{k: v for k, v in changed.items() if k != "method"})


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        ({"validation": [(np.ones((4, 3)), np.ones(4))] * 3}, "validation rows choose a round"),
        ({"test": None}, "without test rows a run is evaluated on training rows"),
    ],
)
def test_rows_that_choose_or_that_train_evaluate_nothing(split, sentence):
    rows = [(np.ones((4, 3)), np.ones(4))] * 3
    given = fm.Clients(rows, None, **{"test": rows, **split})
    with pytest.raises(ValueError, match=sentence):
        simulate(fm.methods.LocalSGDA(), given)


@pytest.mark.parametrize(
    ("section", "values", "sentence"),
    [
        ("split", {"ranges": None}, "features would be scaled by sums over training rows"),
        ("split", {"ranges": {"age": [20, 90]}}, "split.ranges says nothing of"),
        ("split", {"ranges": {**RANGES, "ages": [0, 1]}}, "'ages', which are no columns"),
        ("split", {"ranges": {**RANGES, "age": [90, 20]}}, r"give \[lowest, highest\]"),
        ("split", {"bins": 8}, "split.ranges scales the features already"),
        ("privacy", {"epsilon": 0}, "epsilon is 0"),
        ("privacy", {"delta": 1.0}, "delta is 1.0"),
        ("privacy", {"row_clip": -1.0}, "row_clip is -1.0; give a finite number above 0"),
    ],
)
def test_files_that_promise_what_cannot_be_kept_are_refused(section, values, sentence):
    table = {**HEART, section: {**HEART[section], **values}}
    table[section] = {k: v for k, v in table[section].items() if v is not None}
    with pytest.raises(ValueError, match=sentence):
        build(Experiment.from_table(table))


def test_a_file_round_trips_and_its_features_are_scaled_by_public_ranges():
    experiment = Experiment.from_table(HEART)
    again = Experiment.from_table(tomllib.loads(write_toml(experiment.to_table())))
    assert (again.split, again.privacy) == (experiment.split, experiment.privacy)
    built = build(experiment)
    features = built.clients.train.columns[0]
    assert float(features.abs().max()) < 2.5  # one value of cholesterol is beyond 400
    assert built.about["standardiser"]["mean"][0] == 55.0
