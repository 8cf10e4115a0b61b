"""The network problems from a file: what the data and the model supply, and what is refused."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedminimax as fm
from fedminimax.cli import main
from fedminimax.config import ConfigError, Experiment
from fedminimax.data.folder import Folder
from fedminimax.data.pooled import Pooled
from fedminimax.data.prepare import Split, prepare
from fedminimax.data.shapes import Shapes
from fedminimax.data.sites import DataError, Site
from fedminimax.engine.query import LocalQuery
from fedminimax.experiment import build, preparation, run_experiment

ROOT = Path(__file__).parents[2] / "experiments"


Section = str | dict[str, Any]


def experiment(
    data: Section,
    problem: Section = "fair",
    model: Section = "linear",
    method: Section = "local_sgda",
    rounds: int = 3,
    **sections: Any,
) -> Experiment:
    """Short settings; a section that names a class is a name or a table."""
    given = {"data": data, "model": model, "problem": problem, "method": method}
    table = {k: {"name": v} if isinstance(v, str) else v for k, v in given.items()}
    run = {"rounds": rounds, "executor": "debug", "evaluate_every": rounds, "batch_size": 8}
    return Experiment.from_table({**table, "run": run, **sections})


@pytest.fixture
def table(tmp_path):
    """400 rows of 8 classes, and a feature for each that tells it."""
    random = np.random.default_rng(0)
    labels = np.arange(400) % 8
    features = random.standard_normal((400, 8)) + 3 * np.eye(8)[labels]
    path = tmp_path / "digits.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{i}" for i in range(8)), "digit"])
        writer.writerows([*row, label] for row, label in zip(features, labels, strict=True))
    return str(path)


def pooled(table, **options):
    return {"name": "pooled", "path": table, "label": "digit", **options}


# The files of the repository


@pytest.mark.parametrize(
    ("name", "rounds", "metric", "better"),
    [
        ("heart_fair", 20, "worst_class_accuracy", lambda first, last: last > first + 0.2),
        ("heart_worst_site", 20, "worst_site_accuracy", lambda first, last: last > first + 0.1),
        ("heart_robust", 20, "perturbed_accuracy", lambda first, last: last > first + 0.1),
        ("heart_ratio_loss", 20, "worst_class_accuracy", lambda first, last: last > first + 0.1),
        ("image_gan", 40, "mean_distance", lambda first, last: last < 0.2 * first),
    ],
)
def test_the_experiments_improve_what_they_are_about(name, rounds, metric, better):
    changes = [f"rounds={rounds}", f"evaluate_every={rounds}"]
    run = run_experiment(Experiment.from_file(ROOT / f"{name}.toml", changes))
    assert run.outcome == "finished"
    first, last = (record["test"] for record in run.history)
    assert better(first[metric], last[metric])
    assert math.isfinite(last["loss"])


# What the data and the model supply


def test_a_table_supplies_shape_classes_and_sites(table):
    fair = build(experiment(pooled(table, classes="all", clients=3))).problem
    assert isinstance(fair, fm.problems.Fair)
    assert fair.groups == 8
    assert fair.network.shapes == [(8, 8), (8,)]
    robust = build(experiment("heart", "robust")).problem
    assert isinstance(robust, fm.problems.Robust)
    assert robust.shape == (22,)
    assert robust.network.shapes == [(1, 22), (1,)]  # two classes: one logit
    worst = build(experiment("heart", "worst_site"))
    assert worst.problem.start().y.numel() == 4
    for split in ("train", "validation", "test"):
        for client in range(4):
            assert set(worst.clients.splits[split].rows(client)[2].tolist()) == {client}


def test_images_supply_their_shape_and_classes():
    for model in ("linear", {"name": "mlp", "hidden": [3], "batch_norm": True}):
        made = build(experiment("shapes", "robust", model))
        assert made.problem.start().y.numel() == 64
        features = made.clients.train.rows(0)[0]
        module = made.problem.module(made.problem.start())
        assert module(features.float()).shape == (40, 1)
    run = run_experiment(experiment("shapes", "auc", method="codasca", rounds=10))
    assert run.history[-1]["test"]["auc"] > run.history[0]["test"]["auc"]


def test_the_model_of_a_gan_is_both_players():
    settings = {"name": "small_gan", "noise": 3, "width": 5}
    made = build(experiment("shapes", {"name": "image_gan", "radius": 2.0}, settings))
    x, y = made.problem.start()
    assert x.numel() == (3 + 1) * 5 + (5 + 1) * 64
    assert y.numel() == (64 + 1) * 5 + (5 + 1)
    images, noise = made.clients.train.rows(1)
    assert images.shape[1:] == (1, 8, 8)
    assert noise.shape == (40, 3)
    # Held-out pictures have noise of their own.
    assert not torch.equal(noise, made.clients.splits["test"].rows(1)[1])


def test_the_first_weights_depend_on_the_run_s_seed_alone():
    one, other, again = (
        build(experiment("shapes", "image_gan", "small_gan", run={"seed": seed})).problem.start()
        for seed in (0, 1, 0)
    )
    assert torch.equal(one.x, again.x)
    assert torch.equal(one.y, again.y)
    assert not torch.equal(one.x, other.x)


@pytest.mark.parametrize(
    ("data", "problem", "model", "sentences"),
    [
        ("heart", "auc", "small_gan", ["with [model] small_gan", "give its module"]),
        ("shapes", "image_gan", "mlp", ["image_gan cannot be posed", "generator, critic, noise"]),
        ("quadratic", "fair", "mlp", ["fair cannot be posed on [data] quadratic"]),
        ("quadratic", "robust", "mlp", ["robust cannot be posed on [data] quadratic"]),
    ],
)
def test_what_does_not_fit_together_is_named(data, problem, model, sentences):
    with pytest.raises(ConfigError) as caught:
        build(experiment(data, problem, model))
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_a_gan_with_batch_normalisation_or_too_small_a_model_is_refused():
    with pytest.raises(ValueError, match="noise is 0 and width 32; give at least 1"):
        build(experiment("shapes", "image_gan", {"name": "small_gan", "noise": 0}))
    with pytest.raises(ValueError, match="give noise_size"):
        fm.problems.ImageGAN(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)).rows_from(
            [(np.ones((2, 4)),)]
        )


# Pictures


def test_pictures_are_bars_of_two_classes():
    axis = np.arange(8)

    def width(mass):
        share = mass / mass.sum(1, keepdims=True)
        return share @ axis**2 - (share @ axis) ** 2

    for images, labels in Shapes(noise=0.0).client_rows():
        assert images.shape == (40, 1, 8, 8)
        assert sorted(labels) == [0] * 20 + [1] * 20
        assert -1 <= images.min() < -0.9 < 0.5 < images.max() <= 1
        bright = images[:, 0] + 1
        # An upright bar's brightness is spread over rows of pixels, a level one's over columns.
        upright = width(bright.sum(2)) > width(bright.sum(1))
        np.testing.assert_array_equal(upright, labels == 1)


def test_pictures_differ_between_clients_by_the_spread_and_between_draws():
    def unlike(spread):
        means = [images.mean(0) for images, _ in Shapes(spread=spread, rows=200).client_rows()]
        return float(np.var(means, axis=0).mean())

    assert unlike(1.0) > 4 * unlike(0.0)
    data = Shapes()
    np.testing.assert_array_equal(data.client_rows()[2][0], data.client_rows()[2][0])
    assert not np.array_equal(data.client_rows()[2][0], data.test_rows()[2][0])
    assert not np.array_equal(data.client_rows()[2][0], Shapes(seed=1).client_rows()[2][0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clients": 0}, "clients is 0; give at least 1"),
        ({"rows": 1}, "rows is 1; give at least 2"),
        ({"side": 3}, "side is 3; give at least 4"),
        ({"spread": 1.5}, "spread is 1.5 and noise 0.1; give a share"),
        ({"noise": -1.0}, "spread is 0.5 and noise -1.0; give a share"),
    ],
)
def test_pictures_that_cannot_be_made_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Shapes(**options)


# Labels of several classes, and the papers' AUC data


def test_fair_learns_several_classes_from_one_table(table):
    settings = experiment(
        pooled(table, classes="all", clients=4, partition="dirichlet"),
        rounds=20,
        method={"name": "local_sgda", "primal_lr": 0.5, "dual_lr": 0.02},
    )
    run = run_experiment(settings)
    first, last = (record["test"] for record in run.history)
    assert last["worst_class_accuracy"] > max(0.6, first["worst_class_accuracy"])
    assert set(last["class_accuracies"]) == {str(c) for c in range(8)}


def test_texts_are_numbered_in_order(tmp_path):
    for site, labels in {"a": ["low", "high", "mid"], "b": ["mid", "mid", "low"]}.items():
        lines = [f"{i},{label}" for i, label in enumerate(labels)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,risk", *lines]) + "\n")
    reading = Folder(str(tmp_path), "risk", classes="all").read()
    assert reading.schema.classes == ("high", "low", "mid")
    assert [site.labels.tolist() for site in reading.sites] == [[1, 0, 2], [2, 2, 1]]
    assert {site.classes for site in reading.sites} == {3}
    halves = Folder(str(tmp_path), "risk", classes="halves").read()
    assert (halves.schema.negative, halves.schema.positive) == (("high",), ("low", "mid"))
    assert halves.notes == ["label 'risk': 'low', 'mid' count as positive"]


@pytest.mark.parametrize("kind", ["csv", "npz"])
@pytest.mark.parametrize("partition", ["iid", "classes"])
def test_the_papers_auc_data_from_one_table(table, tmp_path, kind, partition):
    if kind == "npz":
        rows = np.genfromtxt(table, delimiter=",", skip_header=1)
        table = str(tmp_path / "digits.npz")
        np.savez(table, features=rows[:, :-1], labels=rows[:, -1])
    data = Pooled(table, "digit", partition, clients=4, classes="halves")
    reading = data.read()
    rows = prepare(reading, Split(positive_share=0.1)).rows
    for (_, labels), (_, untouched) in zip(rows["train"], rows["test"], strict=True):
        negatives = int((labels == 0).sum())
        assert int(labels.sum()) == max(1, int(negatives * 0.1 / 0.9))
        assert 0.3 < untouched.mean() < 0.7
    # The feature that tells a class is the largest in nearly every row of it.
    counts = [np.bincount(s.features.argmax(1), minlength=8) for s in reading.sites]
    held = np.array(counts) > (25 if partition == "classes" else 0)
    owners = 1 if partition == "classes" else 4
    assert held.sum(0).tolist() == [owners] * 8
    assert held[:, :4].sum(1).tolist() == held[:, 4:].sum(1).tolist() == [owners] * 4


@pytest.mark.parametrize("partition", ["iid", "classes"])
def test_auc_is_trained_on_either(table, partition):
    settings = experiment(
        pooled(table, classes="halves", clients=4, partition=partition),
        "auc",
        method="codasca",
        rounds=20,
        split={"positive_share": 0.2},
    )
    run = run_experiment(settings)
    assert run.problem.positive_share == pytest.approx(0.2, abs=0.03)  # type: ignore[attr-defined]
    assert run.history[-1]["test"]["auc"] > 0.85


def test_several_classes_may_be_dealt_out_one_by_one(table):
    reading = Pooled(table, "digit", "classes", clients=8, classes="all").read()
    sites = reading.sites
    assert prepare(reading, Split()).notes == []  # no AUC is missed
    assert [len(np.unique(site.labels)) for site in sites] == [1] * 8
    assert sorted(int(site.labels[0]) for site in sites) == list(range(8))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "`classes` to 'halves' or 'all'"),
        ({"classes": "all", "positive": "3"}, "positive is '3', but classes is 'all'; leave one"),
        ({"classes": "some"}, "classes is 'some'; use 'two', 'halves' or 'all'"),
        ({"classes": "halves", "partition": "classes", "clients": 5}, "4 positive and 4 negative"),
        ({"positive": "3", "partition": "classes", "clients": 2}, "1 positive and 7 negative"),
        ({"classes": "all", "partition": "classes", "clients": 9}, "there are 8 different classes"),
        ({"label": "x0", "classes": "all", "drop": ()}, "x0' has 400 values"),
    ],
)
def test_classes_that_cannot_be_are_refused(table, options, sentence, monkeypatch):
    monkeypatch.setattr("fedminimax.data.folder.MOST_CLASSES", 100)
    with pytest.raises(DataError) as caught:
        Pooled(**{"path": table, "label": "digit", **options}).read()
    assert sentence in str(caught.value)


def test_a_binary_problem_refuses_several_classes(table):
    with pytest.raises(ValueError, match=r"of 8 classes, but RatioLoss tells two apart.*\[data\]"):
        build(experiment(pooled(table, classes="all"), "ratio_loss"))
    with pytest.raises(DataError, match="The labels hold"):
        build(experiment(pooled(table, classes="all"), split={"positive_share": 0.1}))


def test_a_site_knows_how_many_classes_there_are():
    site = Site("a", ("x",), np.zeros((2, 1)), np.array([0, 2]), classes=3)
    assert site.take([1]).classes == 3
    with pytest.raises(DataError, match=r"has the labels 3; recode them as 0 \.\. 2"):
        Site("a", ("x",), np.zeros((2, 1)), np.array([0, 3]), classes=3)


# Labels and sets that do not fit


@pytest.mark.parametrize(
    ("outputs", "labels", "outside"),
    [
        (3, [0, 1, 2, 3], 1),
        (3, [-1, 1, 2, 0], 1),
        (3, [0, 0.5, 1, 2], 1),
        (1, [0, 1, 2, 2], 2),
        (1, [-1, 1, 0, 0], 2),
        (1, [-1, 1, 1, -1], 0),
        (1, [0, 1, 1, 1], 0),
        (3, [2, 2, 2, 2], 0),
    ],
)
def test_labels_without_an_output_are_refused(outputs, labels, outside):
    problem = fm.problems.Robust(torch.nn.Linear(2, outputs), shape=(2,))
    rows = [(np.zeros((4, 2)), np.array(labels, float))]
    clients = fm.Clients(rows).to(torch.float32)
    ask = LocalQuery(problem, clients, "train", clients.weight_vector("size"))
    if not outside:
        assert problem.prepare(ask) is problem
        return
    with pytest.raises(ValueError, match=f"{outside} training rows have a label that the network"):
        problem.prepare(ask)


def test_a_network_with_fewer_outputs_than_classes_is_refused():
    rows = [(np.zeros((6, 2)), np.arange(6) % 3)]
    with pytest.raises(ValueError, match="2 training rows have a label that the network has no"):
        fm.simulate(
            fm.problems.Fair(torch.nn.Linear(2, 2), 3),
            fm.methods.LocalSGDA(),
            fm.Clients(rows),
            rounds=1,
        )


def test_a_set_that_does_not_match_its_vector_is_refused():
    bounds = torch.ones(3)

    def box(v):
        return torch.minimum(v, bounds)

    def cut(v):
        return v[:1]

    def level(v, batch):
        return v.sum()

    def last(v, y, batch):
        return v.sum() * y.sum()

    for wrong in (box, cut):
        with pytest.raises(ValueError, match=r"project_y returns no vector .* y0 \(2\)"):
            fm.Composition([level, last], [0.0], [0.5, 0.5], project_y=wrong)
        with pytest.raises(ValueError, match=r"project_y returns no vector .* y0 \(2\)"):
            fm.Minimax(last, [0.0], [0.5, 0.5], project_y=wrong)
        with pytest.raises(ValueError, match=r"project_x returns no vector .* x0 \(2\)"):
            fm.Composition([level, level], [0.0, 1.0], project_x=wrong)
    fm.Composition([level, level], [0.0, 1.0], project_y=fm.simplex)  # there is no y


# Finished runs


@pytest.mark.parametrize("problem", ["fair", "robust", "worst_site"])
def test_a_finished_run_is_loaded_and_scores_rows(problem, tmp_path, capsys):
    run_experiment(experiment("heart", problem), tmp_path / "run")
    loaded = fm.load(tmp_path / "run")
    assert loaded.module()(torch.zeros(2, 22)).shape == (2, 1)
    row = "63,1,1,145,233,1,2,150,0,2.3,3,0,6"
    names = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal"
    (tmp_path / "new.csv").write_text(f"{names}\n{row}\n{row}\n")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "new.csv")]) == 0
    scores = capsys.readouterr().out.splitlines()
    assert scores[0] == "line,score"
    assert len(scores) == 3


def test_a_run_with_several_classes_is_loaded_and_has_no_single_score(table, tmp_path, capsys):
    folder = tmp_path / "run"
    run = run_experiment(experiment(pooled(table, classes="all", clients=3)), folder)
    loaded = fm.load(folder)
    rows = torch.ones(2, 8)
    torch.testing.assert_close(loaded.module()(rows), run.module()(rows))
    assert main(["predict", str(folder), table]) == 2
    assert "8 outputs per row, one for each class" in capsys.readouterr().err


def test_a_gan_s_generator_is_loaded(tmp_path):
    settings = experiment("shapes", "image_gan", {"name": "small_gan", "noise": 3})
    run = run_experiment(settings, tmp_path / "run")
    noise = torch.randn(5, 3)
    made = fm.load(tmp_path / "run").module()(noise)
    assert made.shape == (5, 1, 8, 8)
    torch.testing.assert_close(made, run.module()(noise))
    with pytest.raises(ValueError, match="was not trained on tables"):
        preparation(tmp_path / "run")


@pytest.mark.parametrize("problem", ["fair", "worst_site"])
def test_an_interrupted_run_goes_on(problem, tmp_path):
    run = {"rounds": 4, "executor": "debug", "checkpoint_every": 1}
    settings = experiment("heart", problem, run=run)
    whole = run_experiment(settings)

    def stop(round):
        if round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(settings, tmp_path / "part", on_round=stop)
    assert torch.equal(fm.resume(tmp_path / "part").point.x, whole.point.x)
