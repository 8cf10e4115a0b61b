"""Several labels, or classes, ranked by one network: as many single problems where it must be."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from deployment import SITES, assert_same, experiment, site_file
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

import fedminimax as fm
from fedminimax import cli
from fedminimax.config import Experiment, messages_of
from fedminimax.data.clients import Clients
from fedminimax.data.folder import Folder
from fedminimax.data.sites import DataError
from fedminimax.engine.query import LocalQuery
from fedminimax.experiment import build, load, run_experiment
from fedminimax.problems.binary import BinaryProblem
from fedminimax.problems.labels import label_measures
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.server import run_sites
from fedminimax.remote.site import Site
from fedminimax.types import Batch, Point

NAMES = ("cough", "fever", "rash")
WIDTH, LABELS = 4, len(NAMES)


def rows(seed: int, unknown: float = 0.0, sizes: tuple[int, ...] = (24, 36, 30)) -> list:
    """Clients whose labels follow the features; some are not known."""
    random = np.random.default_rng(seed)
    clients = []
    for size in sizes:
        features = random.standard_normal((size, WIDTH))
        margins = features[:, :LABELS] + random.standard_normal((size, LABELS)) - 0.3
        marks = (margins > 0).astype(float)
        marks[random.random((size, LABELS)) < unknown] = -1
        clients.append((features, marks))
    return clients


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, LABELS)


def head(label: int) -> nn.Linear:
    """The part of the network that is of one label."""
    whole, own = linear(), nn.Linear(WIDTH, 1)
    with torch.no_grad():
        own.weight.copy_(whole.weight[label : label + 1])
        own.bias.copy_(whole.bias[label : label + 1])
    return own


def prepared(problem: BinaryProblem, clients: Clients) -> tuple[BinaryProblem, LocalQuery]:
    weights = clients.weight_vector("size")
    ask = LocalQuery(problem, clients, "train", weights)
    known = problem.prepare(ask)
    return known, LocalQuery(known, clients, "train", weights)


def part(x: torch.Tensor, label: int) -> torch.Tensor:
    """What of the weights and of a and b is of one label."""
    weight, bias, rest = x.split([WIDTH * LABELS, LABELS, len(x) - (WIDTH + 1) * LABELS])
    own = rest.view(-1, LABELS)[:, label] if len(rest) else rest
    return torch.cat([weight.view(LABELS, WIDTH)[label], bias[label : label + 1], own])


TRAINED = {
    "coda": (fm.methods.Coda(lr=0.2, local_steps=2, stage_rounds=2, dual_batches=2), fm.AUC),
    "coda_plus": (fm.methods.CodaPlus(lr=0.2, local_steps=2), fm.AUC),
    "codasca": (fm.methods.Codasca(lr=0.2, local_steps=2), fm.AUC),
    "fgda": (fm.methods.FGDA(local_steps=2), fm.AUC),
    "fess_gda": (fm.methods.FESSGDA(local_steps=2), fm.AUC),
    "local_scgdam": (fm.methods.LocalSCGDAM(local_steps=2), fm.problems.CompositionalAUC),
    "fedavg": (fm.methods.FedAvg(local_steps=2), fm.problems.CrossEntropy),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_linear_network_trains_each_label_as_alone(name):
    method, kind = TRAINED[name]
    data = rows(1)
    options = {"rounds": 5, "dtype": torch.float64, "executor": "debug", "evaluate_every": 5}
    form = {"form": "margin"} if name == "coda_plus" else {}
    together = fm.simulate(
        kind(linear(), labels=NAMES, **form), method, Clients(data, batch_size=8), **options
    )
    moved = together.point.x - together.problem.start().x.double()
    assert moved.abs().max() > 1e-3
    for label in range(LABELS):
        own = Clients([(x, y[:, label]) for x, y in data], batch_size=8)
        alone = fm.simulate(kind(head(label), **form), method, own, **options)
        torch.testing.assert_close(part(together.point.x, label), alone.point.x)
        torch.testing.assert_close(together.point.y[label : label + 1], alone.point.y[:1])
        record, single = together.history[-1]["train"], alone.history[-1]["train"]
        for measure in ("auc", "auc_federated", "auc_bound", "auprc", "auprc_federated"):
            assert record["labels"][NAMES[label]][measure] == pytest.approx(single[measure])


@pytest.mark.parametrize("kind", [fm.AUC, fm.problems.CrossEntropy])
def test_the_objective_is_the_mean_over_the_rows_that_know_a_label(kind):
    data = rows(2, unknown=0.4)
    problem, ask = prepared(kind(linear().double(), labels=NAMES), Clients(data))
    start = problem.start()
    torch.manual_seed(3)
    point = Point(*(torch.randn_like(v) for v in start))
    (found,) = ask.mean("loss", *point)
    total = 0.0
    for label in range(LABELS):
        there = [marks[:, label] >= 0 for _, marks in data]
        known = [(x[k], y[k, label]) for (x, y), k in zip(data, there, strict=True)]
        _, own = prepared(kind(head(label).double()), Clients(known))
        y = point.y[label : label + 1]
        total += float(own.mean("loss", part(point.x, label), y)[0])
    assert float(found) == pytest.approx(total, rel=1e-12)


def test_the_saddle_is_the_pairwise_loss_of_each_label():
    data = rows(4, unknown=0.3)
    problem, ask = prepared(fm.AUC(linear().double(), score="raw", labels=NAMES), Clients(data))
    x = torch.cat([problem.network.start(), torch.zeros(2 * LABELS)]).double()
    marks = np.concatenate([y for _, y in data])
    scores = problem.ranking_scores(x, None, torch.cat([torch.tensor(f) for f, _ in data])).numpy()
    wanted, best = 0.0, []
    for label in range(LABELS):
        upper, lower = (scores[marks[:, label] == sign, label] for sign in (1, 0))
        p = len(upper) / (len(upper) + len(lower))
        pairs = (1 - upper[:, None] + lower[None, :]) ** 2
        wanted += p * (1 - p) * (pairs.mean() - 1)
        best.append((upper.mean(), lower.mean()))
    x[-2 * LABELS :] = torch.tensor(best).T.reshape(-1)
    (statistics,) = ask.mean("dual_statistics", x)
    y = problem.best_dual_from(statistics)
    torch.testing.assert_close(problem.dual_from(statistics), y)
    assert float(ask.mean("loss", x, y)[0]) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("form", ["square", "margin"])
def test_derivatives_are_finite_differences_and_unknown_rows_have_none(form):
    data = rows(5, unknown=0.4, sizes=(9,))
    problem, _ = prepared(
        fm.AUC(linear().double(), labels=NAMES, form=form), Clients(data, batch_size=None)
    )
    batch = Clients(data).train.batch(0)
    torch.manual_seed(6)
    point = [torch.randn_like(v, requires_grad=True) for v in problem.start()]
    torch.autograd.gradcheck(lambda x, y: problem.outer(x, y, batch), point)
    none = Batch((batch.features, torch.full_like(batch.labels, -1)), batch.weight, batch.padding)
    x, y = point
    assert problem.outer(x, y, none).item() == 0


def test_classes_are_each_against_the_others():
    data = rows(7)
    classes = [(x, np.argmax(x[:, :LABELS], axis=1)) for x, _ in data]
    marks = [(x, np.eye(LABELS)[y]) for x, y in classes]
    options = {"rounds": 4, "dtype": torch.float64, "executor": "debug"}
    runs = [
        fm.simulate(fm.AUC(linear(), labels=NAMES), TRAINED["codasca"][0], own, **options)
        for own in (Clients(classes, batch_size=8), Clients(marks, batch_size=8))
    ]
    torch.testing.assert_close(runs[0].point.x, runs[1].point.x)
    assert runs[0].history[-1]["train"] == runs[1].history[-1]["train"]


EXECUTORS = ["threads", "vectorised", pytest.param("compiled", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", ["coda", "local_scgdam"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_executors_agree_on_unknown_labels(executor, name):
    method, kind = TRAINED[name]
    clients = Clients(rows(8, unknown=0.3), batch_size=8)
    problem = kind(
        nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, LABELS)), labels=NAMES
    )
    options = {"rounds": 3, "dtype": torch.float64, "evaluate_every": 5}
    one, other = (
        fm.simulate(problem, method, clients, executor=e, **options).point
        for e in ("debug", executor)
    )
    assert_same(other, one)


def test_measures_of_labels_in_the_exchanges_of_one():
    data = rows(9, unknown=0.2)
    for features, marks in data:
        marks[:, 2] = np.where(np.arange(len(features)) == 0, 1, np.minimum(marks[:, 2], 0))
    clients = Clients(data)
    problem, ask = prepared(fm.AUC(linear().double(), labels=NAMES), clients)
    x = problem.start().x
    scores = problem.ranking_scores(x, None, torch.cat([torch.tensor(f) for f, _ in data])).numpy()
    marks = np.concatenate([y for _, y in data])
    ask.sees_rows = False
    found = label_measures(NAMES, (x,), ask)
    single, one = prepared(fm.AUC(head(0).double()), Clients([(f, y[:, 0] > 0) for f, y in data]))
    one.sees_rows = False
    before, own_before = ask.cost.exchanges, one.cost.exchanges
    label_measures(NAMES, (x,), ask)
    single.evaluate(single.start(), one)
    assert ask.cost.exchanges - before == one.cost.exchanges - own_before - 1  # it asks for a loss
    exact = []
    for label, name in enumerate(NAMES):
        known, own = marks[:, label] >= 0, found["labels"][name]
        truth = marks[known, label], scores[known, label]
        assert own["positives"] + own["negatives"] == known.sum()
        assert abs(own["auc"] - roc_auc_score(*truth)) <= own["auc_bound"] + 1e-12
        assert abs(own["auprc"] - average_precision_score(*truth)) <= own["auprc_bound"] + 1e-9
        exact.append(roc_auc_score(*truth))
    assert found["labels_too_small"] == ["rash"]
    assert abs(found["auc"] - np.mean(exact[:2])) <= found["auc_bound"] + 1e-12
    counts = [found["labels"][name]["positives"] for name in NAMES[:2]]
    assert abs(found["auc_by_positives"] - np.average(exact[:2], weights=counts)) < 0.01
    assert found["worst_label"] == NAMES[int(np.argmin(exact[:2]))]


@pytest.fixture
def tables(tmp_path):
    """A file for each site; the first does not know the second label."""
    folder = tmp_path / "sites"
    folder.mkdir()
    for number, (features, marks) in enumerate(rows(10, unknown=0.1, sizes=(60, 60, 60))):
        lines = [",".join([*(f"x{i}" for i in range(WIDTH)), *NAMES])]
        for x, y in zip(features, marks, strict=True):
            cells = ["" if m < 0 or (number == 0 and i == 1) else f"{m:g}" for i, m in enumerate(y)]
            lines.append(",".join([*(f"{v:.4f}" for v in x), *cells]))
        (folder / f"{SITES[number]}.csv").write_text("\n".join(lines) + "\n")
    return folder


def from_tables(folder, **run):
    table = experiment(
        {"name": "folder", "path": str(folder), "label": list(NAMES)},
        "auc",
        {"name": "codasca", "lr": 0.3, "local_steps": 2},
        **run,
    ).to_table()
    table["model"] = {"name": "linear"}
    return Experiment.from_table(table)


def test_tables_of_several_labels_are_trained_reported_and_scored(tables, tmp_path, capsys):
    built = build(from_tables(tables, rounds=2))
    first = built.clients.train.batch(0).labels
    assert first.shape[1] == LABELS
    assert (first[:, 1] == -1).all()
    assert set(first[:, 0].tolist()) == {-1.0, 0.0, 1.0}
    settings = tmp_path / "labels.toml"
    settings.write_text(
        f'[data]\nname = "folder"\npath = "{tables}"\nlabel = {list(NAMES)}\n'
        '[model]\nname = "linear"\n[problem]\nname = "auc"\n'
        '[method]\nname = "codasca"\nlr = 0.3\n[run]\nrounds = 4\nevaluate_every = 2\n'
    )
    run = tmp_path / "run"
    assert cli.main(["run", str(settings), "--quiet", "--folder", str(run)]) == 0
    test = load(run).kept["test"]
    assert list(test["labels"]) == list(NAMES)
    capsys.readouterr()
    new = tables / f"{SITES[1]}.csv"
    assert cli.main(["predict", str(run), str(new), "-o", str(tmp_path / "scores.csv")]) == 0
    told = capsys.readouterr().err
    assert all(f"AUC of {name} on " in told for name in NAMES)
    heading, *lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert len(lines) == 60
    assert [c for c in heading.split(",") if c.startswith("prob")] == [
        f"probability {name}" for name in NAMES
    ]
    assert cli.main(["compare", str(run)]) == 0
    assert cli.main(["export", str(run), str(tmp_path / "model.pt2")]) == 2
    assert "ranks 3 labels, but an exported file has one score" in capsys.readouterr().err
    page = tmp_path / "report.html"
    assert cli.main(["report", str(run), "-o", str(page)]) == 0
    assert f"{test['labels']['cough']['auc']:.3f}" in page.read_text().split('id="labels"')[1]


def test_sites_in_process_train_several_labels_as_the_simulator_does(tables, tmp_path):
    which = from_tables(tables, rounds=2)
    sites = SITES[:3]
    names = {"name": "folder", "label": list(NAMES)}
    files = [site_file(n, tmp_path, {**names, "path": str(tables / f"{n}.csv")}) for n in sites]
    handlers = {f.name: Site(f, log=lambda text: None).handle for f in files}
    run = run_sites(which, InProcess(handlers), sites, tmp_path / "run", log=lambda text: None)
    here = run_experiment(which)
    assert_same(run.point, here.point)
    told, own = run.history[-1]["test"], here.history[-1]["test"]
    for name in NAMES:
        assert told["labels"][name]["auc"] == pytest.approx(own["labels"][name]["auc_federated"])


BAD_ROWS = {
    "all training rows that know the label 'fever' are negative": lambda y: np.where(
        np.arange(LABELS) == 1, 0, y
    ),
    "no client has training rows that know the label 'fever'": lambda y: np.where(
        np.arange(LABELS) == 1, -1, y
    ),
    "the labels hold [0.0, 1.0, 2.0]": lambda y: y + (y > 0) * (np.arange(len(y)) == 3)[:, None],
    "rows have (2,) labels, but 3 were named": lambda y: y[:, :2],
    "3 were promised, numbered 0 .. 2": lambda y: np.arange(len(y)) % 4,
}


@pytest.mark.parametrize("sentence", BAD_ROWS)
def test_labels_that_cannot_be_trained_are_refused(sentence):
    clients = Clients([(x, BAD_ROWS[sentence](y)) for x, y in rows(11)])
    with pytest.raises(ValueError, match=re.escape(sentence)):
        prepared(fm.AUC(linear(), labels=NAMES), clients)


def test_what_several_labels_exclude_is_refused():
    module, data = linear(), rows(12)
    for make, sentence in (
        (lambda: fm.AUC(module, positive_share=0.1, labels=NAMES), "each with its own"),
        (lambda: fm.AUC(module, labels=("a",)), "at least two"),
        (lambda: Clients(data, sampling="balanced"), "rows have several"),
        (lambda: prepared(fm.AUC(module), Clients(data)), "name them"),
        (
            lambda: fm.AUC(nn.Linear(WIDTH, 2), labels=NAMES).raw_scores(
                torch.zeros(10).double(), Clients(data).train.batch(0)
            ),
            "there are 3 labels",
        ),
        (
            lambda: prepared(
                fm.AUC(module, labels=NAMES),
                Clients([(x, y[:, 0]) for x, y in data], sampling="balanced"),
            ),
            'use sampling "epoch"',
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()


def test_bad_columns_of_labels_are_named(tables):
    def changed(**options):
        return Folder(**{"path": str(tables), "label": NAMES, **options})

    for folder, sentence in (
        (lambda: changed(label=("cough",)), "at least two different"),
        (lambda: changed(positive="1"), "leave positive and classes out"),
        (lambda: changed(label=("cough", "rsh")).read(), "no label column 'rsh'.*'rash'"),
        (lambda: changed(label=("cough", "x1")).read(), "the label 'x1' is '.*but of several"),
    ):
        with pytest.raises(DataError, match=sentence):
            folder()
    fair = from_tables(tables).to_table() | {"problem": {"name": "fair"}}
    with pytest.raises(ValueError, match="the data have 3 labels, but Fair has one"):
        build(Experiment.from_table(fair))
    table = from_tables(tables).to_table()
    table["split"]["positive_share"] = 0.1
    with pytest.raises(DataError, match="thins the positives of one label"):
        build(Experiment.from_table(table))


def test_masks_hide_the_labels_of_a_site_from_no_number(tables):
    """The sums of a masked run are those of the plain one."""
    which = from_tables(tables, rounds=2)
    masked = dataclasses.replace(which, messages=messages_of({"reduce": "masked"}))
    assert torch.allclose(run_experiment(masked).point.x, run_experiment(which).point.x, atol=1e-6)
