"""The estimator: scikit-learn's conventions, the same weights as a run, and what it refuses."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import sklearn.base
import sklearn.model_selection
import torch
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import fedminimax as fm
from fedminimax import FederatedClassifier
from fedminimax.cli import init, main
from fedminimax.config import Experiment
from fedminimax.data.heart import Heart
from fedminimax.engine.state.folder import json_text
from fedminimax.estimator import OBJECTIVES
from fedminimax.experiment import load as load_run
from fedminimax.tuning.auto import recipes_of

ROOT = Path(__file__).parents[2]
# scikit-learn has no types of its own, and those that are guessed are too narrow.
clone: Any = sklearn.base.clone
GridSearchCV: Any = sklearn.model_selection.GridSearchCV
cross_val_predict: Any = sklearn.model_selection.cross_val_predict
QUICK: dict[str, Any] = {
    "rounds": 8,
    "module": "linear",
    "executor": "vectorised",
    "evaluate_every": 4,
}


def made(rows=150, classes=2, seed=0, sites=3, share=None):
    """Rows of Gaussian classes at sites that differ in their means."""
    random = np.random.default_rng(seed)
    y = random.integers(0, classes, rows)
    if share is not None:
        y = (random.random(rows) < share).astype(int)
    where = random.integers(0, sites, rows)
    centres = 2 * np.random.default_rng(99).standard_normal((classes, 4))
    X = random.standard_normal((rows, 4)) + centres[y] + 0.3 * where[:, None]
    return X, y, np.array(["leeds", "york", "hull"])[where]


@pytest.fixture(scope="module")
def heart():
    sites = Heart().sites()
    X = np.concatenate([site.features for site in sites])
    y = np.concatenate([site.labels for site in sites])
    return X, y, np.concatenate([[site.name] * len(site) for site in sites])


def weights(module):
    return {name: value.numpy() for name, value in module.state_dict().items()}


def same(one, other):
    one, other = weights(one), weights(other)
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


# scikit-learn's own checks


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore:no sites are given", "ignore:none of the")
@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "auc", "lr": 1.0},
        {"objective": "cross_entropy", "lr": 1.0, "missing": "mean", "dtype": "float64"},
        pytest.param({"objective": "auto"}, marks=pytest.mark.slow),
    ],
    ids=["auc", "cross_entropy", "auto"],
)
def test_the_checks_of_scikit_learn(settings):
    model = FederatedClassifier(**{"objective": "auc", **QUICK, "rounds": 4, **settings})
    results = check_estimator(model, on_fail="raise")
    assert sum(result["status"] == "passed" for result in results) > 45
    assert {r["check_name"] for r in results if r["status"] != "passed"} <= {
        "check_array_api_input",  # needs an environment variable of SciPy's
        "check_classifier_data_not_an_array",  # needs pandas
    }


# The same as a run


@pytest.mark.parametrize("bins", [0, 8])
def test_a_fit_equals_a_run_with_the_same_settings(bins, heart, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y, sites = heart
    (tmp_path / "sites").mkdir()
    for name in np.unique(sites):
        own = sites == name
        np.savez(tmp_path / "sites" / f"{name}.npz", features=X[own], labels=y[own])
    (tmp_path / "heart.toml").write_text(
        f"""
[data]
name = "folder"
path = "sites"
label = "disease"
[split]
bins = {bins}
train = 0.75
validation = 0.25
test = 0
seed = 3
[model]
name = "mlp"
hidden = [8]
[problem]
name = "auc"
[method]
name = "codasca"
lr = 0.4
local_steps = 4
[run]
rounds = 6
seed = 3
batch_size = 16
evaluate_every = 2
weights = "size"
executor = "vectorised"
"""
    )
    assert main(["run", "heart.toml", "--quiet", "--folder", "run"]) == 0
    model = FederatedClassifier(
        "auc",
        "codasca",
        {"name": "mlp", "hidden": [8]},
        lr=0.4,
        local_steps=4,
        rounds=6,
        batch_size=16,
        evaluate_every=2,
        validation_share=0.25,
        missing="mean",
        bins=bins,
        executor="vectorised",
        random_state=3,
    ).fit(X, y, sites=sites)
    run = load_run(tmp_path / "run")
    same(model.module_, run.module())
    assert run.best is not None
    np.testing.assert_array_equal(model.dual_, run.best.point.y.numpy())
    for ours, theirs in zip(model.history_, run.history, strict=True):
        drop = ("seconds",)
        assert {k: v for k, v in ours.items() if k not in drop} == json.loads(
            json.dumps({k: v for k, v in theirs.items() if k not in drop})
        )
    # Rows in any order are the same rows, as long as each site's stay in theirs.
    order = np.argsort(
        np.random.default_rng(0).permutation(4)[np.unique(sites, return_inverse=True)[1]],
        kind="stable",
    )
    again = clone(model).fit(X[order], y[order], sites=sites[order])
    same(model.module_, again.module_)


def test_the_defaults_are_those_of_the_files(tmp_path):
    file = Experiment.from_file(ROOT / "experiments" / "my_sites.toml")
    rest = "[data]\nname = 'heart'\n" + init.REST
    (tmp_path / "written.toml").write_text(rest)
    fitted, _ = FederatedClassifier()._experiment(OBJECTIVES["auto"], 2, 0)
    for other in (fitted, Experiment.from_file(tmp_path / "written.toml")):
        mine, theirs = recipes_of(other), recipes_of(file)
        assert list(mine) == list(theirs)
        for one, another in zip(mine.values(), theirs.values(), strict=True):
            assert one.problem == another.problem
            assert one.make("method") == another.make("method")
            assert one.make("model") == another.make("model")
            assert (one.split.bins, one.split.rare) == (another.split.bins, another.split.rare)
            assert one.run == another.run


@pytest.mark.parametrize("method", ["local_scgdam", fm.methods.LocalSCGDAM(local_steps=2)])
def test_a_method_is_a_name_or_an_object(method):
    X, y, sites = made()
    model = FederatedClassifier("compositional_auc", method, **QUICK).fit(X, y, sites=sites)
    assert model.score(X, y) > 0.9


def test_rates_go_to_the_method():
    X, y, sites = made()
    by_name = FederatedClassifier(
        "fair", "local_sgda", lr=0.2, dual_lr=0.05, local_steps=3, **QUICK
    ).fit(X, y, sites=sites)
    table = {"name": "local_sgda", "primal_lr": 0.2, "dual_lr": 0.05, "local_steps": 3}
    method = fm.methods.LocalSGDA(primal_lr=0.2, dual_lr=0.05, local_steps=3)
    for other in (table, method):
        same(
            by_name.module_,
            FederatedClassifier("fair", other, **QUICK).fit(X, y, sites=sites).module_,
        )


def test_other_settings_of_a_run_reach_it():
    X, y, sites = made()
    plain = FederatedClassifier("auc", **QUICK).fit(X, y, sites=sites)
    drawn = FederatedClassifier(
        **QUICK, settings={"sampling": "balanced", "measures": ["grad_x"]}
    ).fit(X, y, sites=sites)
    assert "grad_x" in drawn.history_[-1]["optimality"]
    assert not np.array_equal(plain.module_.weight.detach(), drawn.module_.weight.detach())


def test_the_seed_decides_and_nothing_else_is_touched():
    X, y, sites = made()
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    fits = [
        FederatedClassifier("auc", **QUICK, random_state=seed).fit(X, y, sites=sites)
        for seed in (0, 0, 1, np.random.RandomState(5), np.random.RandomState(5))
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    same(fits[0].module_, fits[1].module_)
    same(fits[3].module_, fits[4].module_)
    assert not np.array_equal(fits[0].dual_, fits[2].dual_)
    assert fits[3].seed_ == fits[4].seed_


# What comes in


@pytest.mark.parametrize("kind", ["list", "torch", "strings", "booleans", "numbers"])
def test_rows_and_labels_of_any_kind_give_the_same_model(kind):
    X, y, sites = made()
    usual = FederatedClassifier("auc", **QUICK).fit(X, y, sites=sites)
    labels = {
        "strings": np.array(["healthy", "sick"])[y],
        "booleans": y == 1,
        "numbers": np.array([-3, 7])[y],
    }.get(kind, y)
    rows = {"list": X.tolist(), "torch": torch.tensor(X, requires_grad=True)}.get(kind, X)
    where = {"list": sites.tolist(), "torch": sites}.get(kind, sites)
    given = torch.from_numpy(labels) if kind == "torch" else labels
    model = FederatedClassifier("auc", **QUICK).fit(rows, given, sites=where)
    same(model.module_, usual.module_)
    assert model.classes_.tolist() == sorted(set(labels.tolist()))
    assert set(model.predict(rows)) <= set(model.classes_)
    np.testing.assert_array_equal(model.predict(X) == model.classes_[1], usual.predict(X) == 1)
    assert model.score(rows, given) == usual.score(X, y)


def test_a_data_frame_gives_names_and_they_are_held_to():
    pandas = pytest.importorskip("pandas")
    X, y, sites = made()
    frame = pandas.DataFrame(X, columns=["age", "marker", "dose", "weight"])
    labels = pandas.Series(np.array(["no", "yes"])[y], dtype="category")
    model = FederatedClassifier("auc", **QUICK).fit(frame, labels, sites=pandas.Series(sites))
    assert model.feature_names_in_.tolist() == ["age", "marker", "dose", "weight"]
    assert model.inputs_.columns == ("age", "marker", "dose", "weight")
    usual = FederatedClassifier("auc", **QUICK).fit(X, y, sites=sites)
    same(model.module_, usual.module_)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["marker", "age", "dose", "weight"]])
    holes = pandas.Series(sites).mask(np.arange(len(sites)) == 4)
    with pytest.raises(ValueError, match="sites has no name in row 4"):
        model.fit(frame, labels, sites=holes)


def test_numbers_name_sites_as_well_as_texts():
    X, y, sites = made()
    numbers = np.array([{"hull": 1, "leeds": 2, "york": 3}[site] for site in sites])
    model = FederatedClassifier("auc", **QUICK).fit(X, y, sites=torch.from_numpy(numbers))
    assert model.sites_ == ("1", "2", "3")
    same(model.module_, FederatedClassifier("auc", **QUICK).fit(X, y, sites=sites).module_)


def test_missing_values_get_the_federated_mean():
    X, y, sites = made()
    holes = X.copy()
    holes[::7, 1] = np.nan
    model = FederatedClassifier("auc", **QUICK, bins=0, missing="mean").fit(holes, y, sites=sites)
    filled = np.where(np.isnan(holes), model.inputs_.mean, holes)
    np.testing.assert_allclose(model.predict_proba(holes), model.predict_proba(filled))
    marked = FederatedClassifier("auc", **QUICK, missing="mean").fit(holes, y, sites=sites)
    assert "x1: missing" in marked.inputs_.outputs
    assert sklearn.utils.get_tags(model).input_tags.allow_nan


class Net(torch.nn.Module):
    layers: Any

    def __init__(self, features=4, outputs=1):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(features, 6),
            torch.nn.BatchNorm1d(6),
            torch.nn.ReLU(),
            torch.nn.Linear(6, outputs),
        )

    def forward(self, x):
        return self.layers(x)


def test_a_module_of_ones_own_is_trained_in_a_copy(tmp_path):
    X, y, sites = made()
    torch.manual_seed(0)
    own: Any = Net()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    model = FederatedClassifier(
        "auc", module=own, lr=0.5, **{k: v for k, v in QUICK.items() if k != "module"}
    )
    clone(model).fit(X, y, sites=sites)
    model.fit(X, y, sites=sites)
    assert model.score(X, y) > 0.9
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
    assert type(model.module_) is Net
    assert not torch.equal(model.module_.layers[1].running_mean, before["layers.1.running_mean"])
    model.save(tmp_path)
    with pytest.raises(ValueError, match=r"give load\(folder, module=...\) one of the same"):
        FederatedClassifier.load(tmp_path)
    with pytest.raises(ValueError, match="the module is not the one that was trained"):
        FederatedClassifier.load(tmp_path, module=torch.nn.Linear(4, 1))
    again = FederatedClassifier.load(tmp_path, module=Net())
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


def test_a_function_makes_a_module_for_the_data():
    X, y, sites = made(classes=3)
    rest = {k: v for k, v in QUICK.items() if k != "module"}
    fits = [
        FederatedClassifier("cross_entropy", module=Net, lr=0.5, random_state=seed, **rest).fit(
            X, y, sites=sites
        )
        for seed in (0, 0, 1)
    ]
    assert fits[0].module_.layers[-1].out_features == 3
    same(fits[0].module_, fits[1].module_)
    first, other = (fit.module_.layers[0].weight for fit in (fits[0], fits[2]))
    assert not torch.equal(first, other)


# Objectives


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns_two_classes(objective):
    X, y, sites = made(rows=300)
    X_new, y_new, sites_new = made(rows=300, seed=1)
    model = FederatedClassifier(objective, **{**QUICK, "rounds": 20}).fit(X, y, sites=sites)
    assert model.score(X_new, y_new, sites=sites_new) > 0.85
    assert model.predict_proba(X_new).shape == (300, 2)
    np.testing.assert_allclose(model.predict_proba(X_new).sum(1), 1)
    decided = model.decision_function(X_new)
    np.testing.assert_array_equal(model.predict(X_new), model.classes_[(decided > 0).astype(int)])
    assert model.outcome_ == "finished"
    assert model.rounds_ == 20
    assert [record["round"] for record in model.history_] == [0, 4, 8, 12, 16, 20]


@pytest.mark.parametrize("objective", [n for n, known in OBJECTIVES.items() if known.several])
def test_several_classes_where_the_problem_has_them(objective, tmp_path):
    X, y, sites = made(rows=300, classes=3)
    labels = np.array(["a", "b", "c"])[y]
    model = FederatedClassifier(objective, **{**QUICK, "rounds": 25}).fit(X, labels, sites=sites)
    assert model.score(X, labels) > 0.8
    assert model.decision_function(X).shape == (300, 3)
    chosen = model.classes_[model.predict_proba(X).argmax(1)]
    np.testing.assert_array_equal(model.predict(X), chosen)
    model.save(tmp_path)
    again = FederatedClassifier.load(tmp_path)
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    with pytest.raises(ValueError, match="of which the most probable is predicted"):
        model.operate_at(0.3)


def test_the_worst_class_decides_the_score_of_fair():
    X, y, sites = made(rows=400, share=0.15)
    fair = FederatedClassifier("fair", **{**QUICK, "rounds": 30}).fit(X, y, sites=sites)
    right = fair.predict(X) == y
    assert fair.score(X, y) == min(right[y == 0].mean(), right[y == 1].mean())
    weight = np.where(right, 1.0, 0.0) + 0.5
    parts = [np.average(right[y == c], weights=weight[y == c]) for c in (0, 1)]
    assert fair.score(X, y, sample_weight=weight) == pytest.approx(min(parts))


def test_the_worst_site_decides_the_score_where_sites_are_told():
    X, y, sites = made(rows=200)
    model = FederatedClassifier("worst_site", **QUICK).fit(X, y, sites=sites)
    right = model.predict(X) == y
    worst = min(right[sites == site].mean() for site in set(sites))
    assert model.score(X, y, sites=sites) == worst
    assert model.score(X, y) == right.mean()
    assert model.dual_.shape == (3,)


def test_methods_that_weigh_sites_themselves_pose_the_worst_site_as_an_average():
    X, y, sites = made()
    model = FederatedClassifier("worst_site", "drfa", lr=0.3, **QUICK).fit(X, y, sites=sites)
    assert model.score(X, y, sites=sites) > 0.8
    assert model.dual_.shape == (0,)


@pytest.mark.filterwarnings("ignore:no sites are given")
def test_without_sites_all_rows_are_of_one():
    X, y, _ = made()
    model = FederatedClassifier("auc", **QUICK).fit(X, y)
    assert model.sites_ == ("all",)
    assert model.score(X, y) > 0.9


# Calibration and operating points


@pytest.fixture(scope="module")
def rare():
    """Many rows of which few are positive, and classes that overlap."""
    random = np.random.default_rng(0)
    y = (random.random(30000) < 0.1).astype(int)
    X = random.standard_normal((30000, 3)) + y[:, None]
    return X, y, np.repeat(["hull", "leeds", "york"], 10000)


@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
def test_calibrated_probabilities_are_better_than_raw_ones_and_rank_alike(rare, calibration):
    X, y, sites = rare
    half = np.arange(len(y)) % 2 == 0
    raw, model = (
        FederatedClassifier("auc", **QUICK, calibration=kind).fit(
            X[half], y[half], sites=sites[half]
        )
        for kind in ("none", calibration)
    )
    rows, labels = X[~half], y[~half]
    p, before = model.predict_proba(rows)[:, 1], raw.predict_proba(rows)[:, 1]
    assert log_loss(labels, np.clip(p, 1e-6, 1)) < 0.9 * log_loss(labels, before)
    assert p.mean() == pytest.approx(labels.mean(), abs=0.02)
    # In every fifth of the rows, as many are positive as the probabilities say.
    for part in np.array_split(np.argsort(p), 5):
        spread = 4 * np.sqrt(p[part].mean() * (1 - p[part].mean()) / len(part))
        assert abs(p[part].mean() - labels[part].mean()) < spread + 0.01
    np.testing.assert_array_equal(raw.module_.weight.detach(), model.module_.weight.detach())
    assert model.score(rows, labels) == raw.score(rows, labels)
    assert roc_auc_score(labels, p) == pytest.approx(raw.score(rows, labels), abs=0.01)


@pytest.mark.parametrize(
    ("pos_label", "rate"),
    [(None, "sensitivity"), ("healthy", "sensitivity"), ("sick", "specificity")],
)
def test_an_operating_point_keeps_its_rate_on_new_rows(rare, rate, pos_label):
    X, y, sites = rare
    labels = np.array(["healthy", "sick"])[y]
    half = np.arange(len(y)) % 2 == 0
    model = FederatedClassifier("auc", **QUICK, threshold={rate: 0.8}, pos_label=pos_label)
    model.fit(X[half], labels[half], sites=sites[half])
    assert model.operating_point_[rate] >= 0.8
    positive = labels == (pos_label or "sick")
    found = model.predict(X) == (pos_label or "sick")
    rates = {"sensitivity": found[positive].mean(), "specificity": (~found)[~positive].mean()}
    assert rates[rate] == pytest.approx(0.8, abs=0.05)
    other = "specificity" if rate == "sensitivity" else "sensitivity"
    assert rates[other] == pytest.approx(model.operating_point_[other], abs=0.05)
    assert model.operating_point_["positives"] == pytest.approx(0.1 * positive.sum(), rel=0.05)


def test_another_operating_point_needs_no_training(rare):
    X, y, sites = rare
    model = FederatedClassifier("auc", **QUICK).fit(X, y, sites=sites)
    assert model.predict(X).mean() < 0.05  # a rare class is seldom more probable than not
    p = model.predict_proba(X)[:, 1]
    assert model.operate_at(0.2) is model
    np.testing.assert_array_equal(model.predict(X), (p > 0.2).astype(int))
    assert model.operating_point_["probability"] == pytest.approx(0.2)
    model.operate_at({"sensitivity": 0.95})
    assert model.operating_point_["sensitivity"] >= 0.95
    np.testing.assert_array_equal(model.predict_proba(X)[:, 1], p)
    with pytest.raises(ValueError, match=r"threshold is 1\.5; give a probability between 0 and 1"):
        model.operate_at(1.5)
    assert model.threshold == {"sensitivity": 0.95}
    assert (
        FederatedClassifier("auc", **QUICK, threshold=0.2, pos_label=0)
        .fit(X, y, sites=sites)
        .operate_at(0.8)
        .predict(X)
        .mean()
    ) == pytest.approx((p > 0.2).mean())


@pytest.mark.filterwarnings("ignore:none of the")
def test_isotonic_probabilities_that_are_all_small_keep_the_order(rare):
    X, y, sites = rare
    few = np.where(np.arange(len(y)) % 4 == 0, y, 0)
    model = FederatedClassifier("auc", **QUICK, bins=0, calibration="isotonic").fit(
        X, few, sites=sites
    )
    model.operate_at(0.999)
    decided = model.decision_function(X)
    assert not model.predict(X).any()
    assert np.all(decided < 0)
    assert roc_auc_score(few, decided) == pytest.approx(model.score(X, few), abs=1e-12)


def test_the_trained_decision_of_other_objectives_stays():
    X, y, sites = made(rows=400, share=0.1)
    model = FederatedClassifier("fair", **QUICK).fit(X, y, sites=sites)
    assert (model.calibration_, model.threshold_) == (None, 0.0)
    with torch.no_grad():
        logits = model.module_(torch.tensor(model.inputs_.transform(X)).float())
    np.testing.assert_array_equal(model.predict(X), (logits[:, 0] > 0).int())


def test_no_validation_rows_means_no_calibration():
    X, y, sites = made()
    model = FederatedClassifier("auc", **QUICK, validation_share=0).fit(X, y, sites=sites)
    assert (model.calibration_, model.operating_point_) == (None, None)
    assert "train" in model.history_[-1]
    with pytest.raises(ValueError, match="needs validation rows: fit with some"):
        model.operate_at({"sensitivity": 0.9})


def test_the_best_round_can_be_kept():
    X, y, sites = made()
    settings = {**QUICK, "rounds": 20, "evaluate_every": 1}
    best = FederatedClassifier("auc", **settings, keep="best").fit(X, y, sites=sites)
    values = [record["validation"]["auc"] for record in best.history_]
    number = int(np.argmax(values))
    if number:
        stopped = FederatedClassifier("auc", **{**settings, "rounds": number}).fit(
            X, y, sites=sites
        )
        same(best.module_, stopped.module_)
    else:
        assert values[0] == max(values)


# Files, pipelines, searches


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"calibration": "isotonic", "threshold": {"specificity": 0.9}, "pos_label": "sick"},
        {
            "method": fm.Codasca(lr=fm.schedules.StepDecay(0.3, at=(2,))),
            "random_state": np.random.RandomState(1),
        },
        {
            "objective": {"name": "auc", "form": "margin"},
            "module": {"name": "mlp", "hidden": (5, 3)},
        },
    ],
    ids=["plain", "isotonic", "objects", "tables"],
)
def test_a_saved_model_is_the_model(tmp_path, settings):
    X, y, sites = made()
    labels = np.array(["healthy", "sick"])[y]
    model = FederatedClassifier(**{"objective": "auc", **QUICK, **settings}).fit(
        X, labels, sites=sites
    )
    model.save(tmp_path / "model")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "estimator.json",
        "model.safetensors",
    ]
    again = FederatedClassifier.load(tmp_path / "model")
    for method in ("predict", "predict_proba", "decision_function"):
        np.testing.assert_array_equal(getattr(again, method)(X), getattr(model, method)(X))
    kept = {n: v for n, v in vars(model).items() if n.endswith("_")}
    assert set(kept) == {n for n in vars(again) if n.endswith("_")}
    assert again.history_ == json.loads(json.dumps(model.history_))
    assert again.operating_point_ == model.operating_point_
    again.operate_at({"sensitivity": 0.7})
    if "random_state" not in settings:
        same(again.fit(X, labels, sites=sites).module_, model.module_)
    # and pickled, as scikit-learn's users do
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copied.predict_proba(X), model.predict_proba(X))


def test_a_damaged_model_is_refused(tmp_path):
    X, y, sites = made()
    model = FederatedClassifier("auc", **QUICK).fit(X, y, sites=sites)
    with pytest.raises(sklearn.exceptions.NotFittedError):
        FederatedClassifier().save(tmp_path / "none")
    model.save(tmp_path / "a")
    clone(model).set_params(rounds=1).fit(X, y, sites=sites).save(tmp_path / "b")
    with pytest.raises(ValueError, match=r"there is no file .*: give a folder that save made"):
        FederatedClassifier.load(tmp_path / "c")
    text = (tmp_path / "a/estimator.json").read_text()
    (tmp_path / "a/estimator.json").write_text(text[:100])
    with pytest.raises(ValueError, match="is damaged or cut short"):
        FederatedClassifier.load(tmp_path / "a")
    (tmp_path / "a/estimator.json").write_text(text.replace('"format": 5', '"format": 2'))
    with pytest.raises(ValueError, match="is of format 2, but this version reads 5"):
        FederatedClassifier.load(tmp_path / "a")
    (tmp_path / "a/estimator.json").write_text(text.replace('"rounds": 8', '"rounds": 9'))
    with pytest.raises(ValueError, match="content is not that of its digest"):
        FederatedClassifier.load(tmp_path / "a")
    about = {**json.loads(text), "parameters": {"runds": 8}}
    del about["digest"]
    (tmp_path / "a/estimator.json").write_text(json_text(about))
    with pytest.raises(ValueError, match="is of another version"):
        FederatedClassifier.load(tmp_path / "a")
    (tmp_path / "a/estimator.json").write_text(text)
    shutil.copy(tmp_path / "b/model.safetensors", tmp_path / "a/model.safetensors")
    with pytest.raises(ValueError, match=r"is not the file that estimator\.json was written with"):
        FederatedClassifier.load(tmp_path / "a")


def test_a_pipeline_and_a_grid_search_on_the_heart_data(heart):
    X, y, sites = heart
    rows = StratifiedKFold(4, shuffle=True, random_state=0)
    train, test = next(rows.split(X, sites))
    pipeline = make_pipeline(StandardScaler(), FederatedClassifier("auc", **QUICK, missing="mean"))
    search = GridSearchCV(
        pipeline,
        {"federatedclassifier__lr": [1e-4, 0.3], "federatedclassifier__local_steps": [2]},
        cv=3,
        error_score="raise",
    )
    search.fit(X[train], y[train], federatedclassifier__sites=sites[train])
    assert search.best_params_["federatedclassifier__lr"] == 0.3
    best = search.best_estimator_[-1]
    assert best.sites_ == ("cleveland", "hungary", "switzerland", "va")
    assert search.score(X[test], y[test]) > 0.85
    measured = roc_auc_score(y[test], search.predict_proba(X[test])[:, 1])
    assert search.score(X[test], y[test]) == pytest.approx(measured)


def test_sites_are_routed_as_metadata():
    X, y, sites = made()
    with sklearn.config_context(enable_metadata_routing=True):
        model = FederatedClassifier("worst_site", **QUICK)
        model.set_fit_request(sites=True).set_score_request(sites=True)
        search = GridSearchCV(
            make_pipeline(StandardScaler(), model),
            {"federatedclassifier__lr": np.array([0.01, 0.3])},
            cv=2,
            error_score="raise",
        ).fit(X, y, sites=sites)
        assert len(search.best_estimator_[-1].sites_) == 3
        accuracies = cross_val_predict(model, X, y, cv=2, params={"sites": sites}) == y
        assert accuracies.mean() > 0.8


# What is refused


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"objective": "acu"}, "objective is 'acu'; did you mean 'auc'?"),
        ({"objective": {"name": "auc", "forn": "margin"}}, "objective has no key 'forn'; did you"),
        ({"method": "codaska"}, "method name is 'codaska'; did you mean 'codasca'?"),
        ({"method": {"name": "codasca", "lrr": 1}}, "method has no key 'lrr'; did you mean 'lr'?"),
        ({"method": "fedavg"}, "FedAvg only minimises, but AUC also has a maximising player"),
        ({"method": "fedavg", "dual_lr": 0.1}, "dual_lr is given, but the method 'fedavg' has non"),
        ({"method": fm.Codasca(), "lr": 0.1}, "lr is given beside a method that is an object"),
        ({"module": "mpl"}, "module name is 'mpl'; did you mean 'mlp'?"),
        ({"module": torch.nn.Linear(3, 1)}, "the module does not take rows of 4 features"),
        ({"module": torch.nn.Linear(4, 2)}, "the module returns 2 numbers per row; for 2 classes"),
        ({"module": lambda features, outputs: None}, "module is or makes a NoneType"),
        ({"rounds": 0}, "rounds is 0; give a whole number of at least 1"),
        ({"rounds": 2.5}, "FederatedClassifier rounds is 2.5; give a whole number"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"executor": "thread"}, "executor is 'thread'; did you mean 'threads'?"),
        ({"settings": {"sampling": "even"}}, "sampling is 'even'; known: epoch, iid, balanced"),
        ({"settings": {"rounds": 3}}, "settings has 'rounds', which is an argument of its own"),
        ({"cohort": 9, "method": "sagda"}, "9 clients per round were asked for, but there are 3"),
        ({"missing": "median"}, "missing is 'median'; did you mean 'mean'?"),
        ({"keep": "frist"}, "keep is 'frist'; known: None, last, best"),
        ({"calibration": "plat"}, "calibration is 'plat'; did you mean 'platt'?"),
        ({"validation_share": 1.0}, "validation_share is 1.0; give a share of at least 0 and b"),
        ({"validation_share": 0, "calibration": "platt"}, "calibration='platt' needs validation"),
        ({"validation_share": 0, "keep": "best"}, "keep='best' needs validation rows"),
        ({"threshold": 90}, "threshold is 90; give a probability between 0 and 1"),
        ({"threshold": {"sensitivty": 0.9}}, "threshold is by 'sensitivty'; did you mean 'sensit"),
        ({"threshold": {"sensitivity": 0.9, "specificity": 0.9}}, "give a probability between 0"),
        ({"pos_label": "yes"}, "pos_label is 'yes'; give one of the classes, [0, 1]"),
    ],
)
def test_a_setting_that_cannot_be_used_ends_in_a_sentence(settings, sentence):
    X, y, sites = made()
    with pytest.raises(ValueError) as said:  # noqa: PT011
        FederatedClassifier(**{"objective": "auc", **QUICK, **settings}).fit(X, y, sites=sites)
    assert sentence in str(said.value)


def test_rows_that_cannot_be_used_end_in_a_sentence():
    X, y, sites = made()
    model = FederatedClassifier("auc", **QUICK)
    holes = X.copy()
    holes[3, 2] = np.nan
    with pytest.raises(ValueError, match=r"Input X contains NaN \(1 values, the first in row 3, c"):
        model.fit(holes, y, sites=sites)
    fitted = FederatedClassifier("auc", **QUICK).fit(X, y, sites=sites)
    with pytest.raises(ValueError, match="set missing='mean'"):
        fitted.predict(holes)
    with pytest.raises(
        ValueError, match="X has 3 features, but FederatedClassifier is expecting 4"
    ):
        fitted.predict(X[:, :3])
    with pytest.raises(ValueError, match="y has 1 class only, 1: a classifier needs rows of two"):
        model.fit(X, np.ones(len(y), int), sites=sites)
    with pytest.raises(ValueError, match=r"sites has shape \(149,\) for 150 rows of X"):
        model.fit(X, y, sites=sites[1:])
    holes = sites.astype(object)
    holes[5] = None
    with pytest.raises(ValueError, match="sites has no name in row 5"):
        model.fit(X, y, sites=holes)
    lone = np.where(np.arange(len(y)) == 0, "alone", sites)
    with pytest.raises(ValueError, match="Site 'alone' has 1 rows, and of no class two"):
        model.fit(X, y, sites=lone)
    assert (
        len(FederatedClassifier("auc", **QUICK, validation_share=0).fit(X, y, sites=lone).sites_)
        == 4
    )
    with pytest.raises(ValueError, match="the rows to score are of one class only"):
        fitted.score(X[y == 0], y[y == 0])
    with pytest.raises(ValueError, match=r"Only binary classification is supported\..*'fair'"):
        FederatedClassifier("auto", **QUICK).fit(X, np.arange(len(y)) % 3, sites=sites)
    with pytest.raises(ValueError, match="but y has 3 classes, of which the most probable"):
        FederatedClassifier("fair", **QUICK, threshold={"sensitivity": 0.9}).fit(
            X, np.arange(len(y)) % 3, sites=sites
        )


def test_a_run_that_diverges_raises_its_sentence():
    X, y, sites = made()
    table = {"name": "codasca", "proximal": 0.0}
    model = FederatedClassifier({"name": "auc", "score": "raw"}, table, lr=1e30, **QUICK)
    with pytest.raises(ValueError, match=r"training ended without a model: non-finite .* low"):
        model.fit(X, y, sites=sites)
