"""`auto`: validation rows choose, at a bounded cost, and the result is an ordinary run."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from deployment import HEART, SITES, assert_same, in_process

from fedminimax import FederatedClassifier
from fedminimax.cli import main
from fedminimax.config import ConfigError, Experiment, Part, read_toml, write_toml
from fedminimax.data.arrays import reading_of
from fedminimax.data.heart import Heart
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.trainer import Interrupted
from fedminimax.experiment import experiment_of, load, read, read_tables, run_experiment
from fedminimax.remote.calls import Faults
from fedminimax.remote.search import search_sites
from fedminimax.remote.server import check_experiment
from fedminimax.tuning.auto import (
    MOST,
    RECORD,
    Trial,
    best_of,
    recipes_of,
    run_auto,
    stages_of,
)


def asked(problem=None, **run):
    run = {"rounds": 16, "evaluate_every": 2, "batch_size": 8, "executor": "vectorised", **run}
    return Experiment.from_table(
        {
            "data": HEART,
            "problem": {"name": "auto", "local_steps": 2, **(problem or {})},
            "model": {"name": "mlp", "hidden": [4]},
            "split": {"bins": 4, "positive_share": 0.3},
            "run": {"dtype": "float64", "weights": "size", **run},
        }
    )


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto") / "run"
    lines = []
    return folder, run_auto(asked(), folder, say=lines.append), lines


def test_the_best_by_validation_is_chosen_and_the_folder_is_that_of_its_run(searched):
    folder, found, lines = searched
    record = RunFolder(folder).read_json(RECORD)
    ends = [trial for trial in record["trials"] if trial["rounds"] == 16]
    assert record == found.record
    assert len(ends) == 2
    assert record["value"] == max(trial["value"] for trial in ends)
    assert found.run.best is not None
    assert (found.run.best.round, found.run.best.value) == (record["round"], record["value"])
    assert {name for line in lines for name in recipes_of(asked()) if line.startswith(f"{name}:")}
    again = load(folder)
    assert torch.equal(again.point.x, found.run.point.x)
    assert again.history == json.loads(json.dumps(found.run.history))
    # It is what its settings alone give.
    resolved = experiment_of(folder)
    assert resolved == Experiment.from_table(found.experiment.to_table())
    assert torch.equal(run_experiment(resolved).point.x, again.point.x)


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rungs_keep_the_recipes_that_were_ahead(searched):
    folder, found, _ = searched
    best = {}
    for name in recipes_of(asked()):
        history = records(folder / "search" / name / "history.jsonl")
        best[name] = {r["round"]: r["validation"]["auc"] for r in history}

    def value(name, until):
        return max(v for number, v in best[name].items() if number <= until)

    left = list(best)
    reached = 0
    for count, until in stages_of(16, 2, len(left)):
        ranked = sorted(left, key=lambda name: -value(name, reached))
        left = ranked[:count] if reached else left[:count]
        if reached and "cross_entropy_numbers" in ranked[count:]:
            left[-1] = "cross_entropy_numbers"
        assert all(max(best[name]) >= until for name in left)
        reached = until
    assert found.record["chosen"] == max(left, key=lambda name: value(name, 16))


def test_numbers_that_are_not_encoded_stay_until_the_end():
    recipes = recipes_of(asked())
    trials = {
        name: Trial(name, 2, value, 2, None, 0, 0, None)
        for name, value in zip(recipes, (0.8, 0.9, 0.7, 0.95, 0.6), strict=True)
    }
    numbers = "cross_entropy_numbers"
    assert best_of(list(recipes), 3, trials, recipes) == ["auc", "linear", numbers]
    assert best_of(list(recipes), 2, trials, recipes) == ["auc", numbers]
    assert best_of(list(recipes), 1, trials, recipes) == ["auc"]
    trials[numbers] = trials[numbers]._replace(value=0.99)
    assert best_of(list(recipes), 2, trials, recipes) == [numbers, "auc"]
    trials["auc"] = trials["auc"]._replace(value=0.5)
    trials[numbers] = trials[numbers]._replace(outcome="round 3: the vectors are not finite")
    assert best_of(list(recipes), 2, trials, recipes) == ["linear", "cross_entropy"]


@pytest.mark.parametrize("every", [1, 3, 10, 200])
@pytest.mark.parametrize("rounds", [1, 2, 7, 20, 100, 150, 1000])
def test_a_search_costs_at_most_three_runs(rounds, every):
    for recipes in range(1, 12):
        stages = stages_of(rounds, every, recipes)
        ends = [0, *(until for _, until in stages)]
        spent = sum(n * (b - a) for (n, _), a, b in zip(stages, ends, ends[1:], strict=False))
        assert spent <= MOST * rounds
        assert ends[-1] == rounds
        assert stages[0][0] >= 1


def test_all_gradients_are_counted(searched):
    folder, found, _ = searched
    last = [records(file)[-1] for file in folder.glob("search/*/history.jsonl")]
    assert found.record["gradients"] == sum(record["gradients"] for record in last)
    assert found.record["gradients"] <= MOST * found.run.history[-1]["gradients"]


def test_a_search_that_was_stopped_anywhere_goes_on_to_the_same(searched, tmp_path):
    folder, found, _ = searched
    rounds = 0
    for stop in (1, 4, 8):

        def interrupted(stop=stop):
            nonlocal rounds
            rounds += 1
            return rounds >= stop

        with pytest.raises(Interrupted):
            run_auto(asked(), tmp_path / "run", rounds > 0, interrupted=interrupted)
    again = run_auto(asked(), tmp_path / "run", resume=True)
    assert again.record == found.record
    for name in (RECORD, "config.toml", "final.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()
    with pytest.raises(ConfigError, match="is of another experiment"):
        run_auto(asked(seed=4), tmp_path / "run", resume=True)
    with pytest.raises(FileExistsError, match="already holds a search: resume it"):
        run_auto(asked(), tmp_path / "run")


def test_test_rows_choose_nothing(searched, tmp_path):
    _, found, _ = searched

    def spoilt(experiment):
        data = read(experiment)
        rows = {**data.rows, "test": [(x, 1 - y) for x, y in data.rows["test"]]}
        return data._replace(rows=rows)

    again = run_auto(asked(), tmp_path / "run", reader=spoilt)
    assert again.record == found.record
    assert again.run.kept["test"]["auc"] != found.run.kept["test"]["auc"]


def test_validation_rows_of_one_class_are_told_at_once(tmp_path):
    def of_one_class(experiment):
        data = read(experiment)
        return data._replace(
            rows={**data.rows, "validation": [(x, 0 * y) for x, y in data.rows["validation"]]}
        )

    with pytest.raises(ConfigError, match="of validation rows, and those of all sites tell none"):
        run_auto(asked(), tmp_path / "run", reader=of_one_class)
    assert len(list((tmp_path / "run/search").iterdir())) == 1


@pytest.mark.slow
def test_sites_come_to_what_the_simulator_does(searched, tmp_path):
    _, found, _ = searched
    which, lines = asked(executor="debug"), []
    sites = in_process(which, tmp_path)
    run = search_sites(which, sites, SITES, tmp_path / "run", log=lines.append)
    record = RunFolder(tmp_path / "run").read_json(RECORD)
    assert record["chosen"] == found.record["chosen"]
    assert run.best is not None
    assert found.run.best is not None
    assert run.best.round == found.run.best.round
    assert_same(run.best.point, found.run.best.point)
    assert_same(run.point, found.run.point)
    assert any(line.startswith("auto chose") for line in lines)
    # Asked for again, nothing is trained.
    shutil.rmtree(tmp_path / SITES[0])
    again = search_sites(which, sites, SITES, tmp_path / "run", log=lines.append)
    assert torch.equal(again.point.x, run.point.x)


@pytest.mark.slow
def test_the_estimator_searches_as_a_run_does():
    sites = Heart().sites()
    X = np.concatenate([site.features for site in sites])
    y = np.concatenate([site.labels for site in sites])
    names = np.concatenate([[site.name] * len(site) for site in sites])
    model = FederatedClassifier(
        module={"name": "mlp", "hidden": (4,)},
        local_steps=2,
        bins=4,
        missing="mean",
        validation_share=0.25,
        rounds=16,
        evaluate_every=2,
        batch_size=8,
        executor="vectorised",
        dtype="float64",
    ).fit(X, y, sites=names)
    reading = reading_of(X, y, [0, 1], names, None)
    like = asked()
    like = replace(like, split=replace(like.split, train=0.75, validation=0.25, test=0.0))
    like = replace(like, split=replace(like.split, positive_share=None))

    run = run_auto(like, reader=lambda each: read_tables(reading, each.split)).run
    assert model.search_ is not None
    assert model.search_["chosen"] in recipes_of(like)
    for name, value in run.module().state_dict().items():
        assert torch.equal(model.module_.state_dict()[name], value)


def test_another_measure_chooses_the_best_round_and_recipe(tmp_path):
    found = run_auto(asked({"measure": "auprc"}, rounds=8), tmp_path / "run")
    values = {r["round"]: r["validation"]["auprc"] for r in found.run.history}
    assert found.record["measure"] == "auprc"
    assert found.run.best is not None
    assert found.run.best.value == max(values.values()) == values[found.run.best.round]
    assert experiment_of(tmp_path / "run").run.monitor == "auprc"


def test_what_cannot_be_searched_is_refused():
    given = replace(asked(), method=Part("fedavg", {}))
    with pytest.raises(ConfigError, match="finds the method: leave"):
        recipes_of(given)
    without = replace(asked(), split=replace(asked().split, validation=0.0, test=0.4))
    with pytest.raises(ConfigError, match=r"\[split\] validation is 0, but auto chooses by"):
        recipes_of(without)
    with pytest.raises(ConfigError, match="needs rows at the server"):
        check_experiment(
            replace(asked(), split=replace(asked().split, auxiliary=1)), SITES, Faults()
        )
    with pytest.raises(ValueError, match="is a choice between experiments"):
        run_experiment(replace(asked(), method=Part("fedavg", {})))
    private = Experiment.from_table({**asked().to_table(), "privacy": {"level": "record"}})
    with pytest.raises(ConfigError, match="bounds what one run tells, and auto makes several"):
        recipes_of(private)
    assert "auc" not in recipes_of(asked(cohort=2))  # CODASCA needs all clients
    with pytest.raises(ValueError, match="lr is given, but objective 'auto' finds it"):
        FederatedClassifier(lr=0.1).fit([[0.0], [1.0]] * 20, [0, 1] * 20, sites=[0, 0, 1, 1] * 10)


def test_the_command_searches_goes_on_and_predicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heart.toml").write_text(write_toml(asked(rounds=8).to_table()))
    assert main(["run", "heart.toml", "--folder", "run"]) == 0
    told = capsys.readouterr().out
    assert "auto chose" in told
    assert "test auc" in told
    assert "method" not in read_toml(tmp_path / "run" / "asked.toml")
    assert main(["run", "run", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == "run"
    assert main(["run", "heart.toml", "--sites"]) == 2
    assert "auto tries several" in capsys.readouterr().err
