"""`fedminimax report`: the numbers of the page are those of the runs, and it needs only itself."""

import hashlib
import importlib
import json
import re
import shutil
import statistics
import struct
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from browser import CHROMIUM, Browser
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, roc_curve

import fedminimax as fm
from fedminimax import cli
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import build, experiment_of, load
from fedminimax.metrics.federated_auc import (
    auc_from_counts,
    first_edges,
    histogram,
    roc_from_counts,
)
from fedminimax.metrics.ranking import auc_interval
from fedminimax.report import curves, figures, html, quality
from fedminimax.report.charts import Chart, Mark, Series, axis, log_axis, starts_far_off
from fedminimax.report.charts import html as drawn
from fedminimax.report.operating import calibration_of
from fedminimax.report.page import own as page_file
from fedminimax.report.roc import Asked
from fedminimax.report.runs import grouped, runs_in
from fedminimax.report.tracking import scalars

EVIL = "<script>alert(1)</script>"
SITES = (EVIL, 'north & "west"', "south")
SETTINGS = """
[data]
name = "pooled"
path = "{path}"
label = "disease"
partition = "column"
column = "site"
[model]
name = "linear"
[problem]
name = "{problem}"
[method]
name = "{method}"
[run]
rounds = 6
evaluate_every = 2
executor = "vectorised"
"""


def table(rows=240, of=5, positive=2):
    random = np.random.default_rng(0)
    lines = ["site,age,marker,disease"]
    for i in range(rows):
        label, site = int(i % of < positive), SITES[i % 3].replace('"', '""')
        age, marker = 50 + 10 * random.normal(), random.normal() + 0.8 * label
        lines.append(f'"{site}",{age:.1f},{marker:.3f},{label}')
    return "\n".join(lines) + "\n"


def ran(home, name, problem, method, *changes):
    path = home / f"{name}.toml"
    path.write_text(
        SETTINGS.format(path=home / "patients.csv", problem=problem, method=method), "utf-8"
    )
    folder = home / "runs" / name
    assert cli.main(["run", str(path), *changes, "--quiet", "--folder", str(folder)]) == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two seeds of one method with its measures, one run of another, and one for fairness."""
    home = tmp_path_factory.mktemp("report")
    (home / "patients.csv").write_text(table(), "utf-8")
    for seed in (0, 1):
        seeds = (f"run.seed={seed}", f"split.seed={seed}", 'run.measures=["grad_phi", "drift"]')
        ran(home, f"auc-{seed}", "auc", "codasca", *seeds)
    ran(home, "average", "cross_entropy", "fedavg")
    ran(home, "fair", "fair", "local_sgda")
    return home


@pytest.fixture
def report(home, tmp_path, capsys):
    """The page of some runs, read."""

    def call(*names, more=()):
        folders = [str(home / "runs" / name) for name in names]
        output = tmp_path / "report.html"
        assert cli.main(["report", *folders, "-o", str(output), *map(str, more)]) == 0
        return Page(output.read_text(encoding="utf-8")), capsys.readouterr()

    return call


def records(home, name):
    return RunFolder(home / "runs" / name).read_history()


def kept(home, name):
    """The record of the model that the run returns: of the best round by validation rows."""
    found = records(home, name)
    monitor = "auc" if "auc" in found[0]["validation"] else "worst_class_accuracy"
    return max(found, key=lambda record: (record["validation"][monitor], -record["round"]))


class Page(HTMLParser):
    """The charts' data, the tables' cells, the text, and the tags of a page."""

    VOID = ("meta", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.source = text
        self.text, self.tags, self.attributes, self.open = "", [], [], []
        self.charts, self.tables, self.ids = {}, [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "figure":
            self.name = known["data-name"]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if "id" in known:
            self.ids.append(known["id"])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open and "figure" in self.open:
            self.charts[self.name] = json.loads(data)
            return
        if "style" not in self.open and "script" not in self.open:
            self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data + " "

    def table(self, *headings):
        """The rows of the table that begins with these headings, by their first cell."""
        for rows in self.tables:
            head = [cell.strip() for cell in rows[0]]
            if head[: len(headings)] == list(headings):
                return {
                    row[0].strip(): dict(zip(head[1:], map(_clean, row[1:]), strict=True))
                    for row in rows[1:]
                }
        raise AssertionError(f"no table begins with {headings}")


def _clean(cell):
    return " ".join(cell.split())


# Numbers


def test_curves_are_the_records(home, report):
    page, _ = report("auc-0", "auc-1", "average")
    pair = [records(home, f"auc-{seed}") for seed in (0, 1)]
    alone = records(home, "average")
    for split in ("validation", "test"):
        for name, x in {
            "round": lambda r: r["round"],
            "gradients": lambda r: r["gradients"],
            "bytes": lambda r: (r["bytes_up"] + r["bytes_down"]) / 1e3,
            "seconds": lambda r: r["seconds"],
        }.items():
            chart = page.charts[f"auc-{split}-by-{name}"]
            codasca, fedavg = chart["series"]
            assert (codasca["label"], codasca["runs"]) == ("codasca", 2)
            assert (fedavg["label"], fedavg["runs"]) == ("fedavg", 1)
            for mark, *both in zip(codasca["marks"], *pair, strict=True):
                values = [record[split]["auc"] for record in both]
                middle = statistics.median(map(x, both))
                assert mark == pytest.approx(
                    [middle, statistics.median(values), min(values), max(values), 2]
                )
            assert [mark[:2] for mark in fedavg["marks"]] == [
                pytest.approx([x(record), record[split]["auc"]]) for record in alone
            ]
    assert "kB sent" in page.charts["auc-test-by-bytes"]["x"]


def test_duals_and_measures_are_the_records(home, report):
    page, _ = report("auc-0", "fair")
    history, fair = records(home, "auc-0"), records(home, "fair")
    (name,) = [name for name in page.charts if name.startswith("variables-1")]
    for line in page.charts[name]["series"]:
        values = [record["variables"][line["label"]] for record in history]
        assert [mark[1] for mark in line["marks"]] == values
    assert [line["label"] for line in page.charts[name]["series"]] == ["a", "b", "alpha"]
    (name,) = [name for name in page.charts if name.startswith("variables-2")]
    weights = page.charts[name]["series"]
    assert [line["label"] for line in weights] == ["class 0", "class 1"]
    for number, record in enumerate(fair):
        assert sum(line["marks"][number][1] for line in weights) == pytest.approx(1, abs=1e-5)
        assert weights[1]["marks"][number][1] == record["variables"]["class 1"]
    found = page.charts["gradient-of-max-over-y-grad-phi"]["series"]
    assert [m[1] for m in found[0]["marks"]] == [r["optimality"]["grad_phi"] for r in history]
    # The first record has no drift.
    (drift,) = page.charts["spread-of-the-clients-x-after-a-round-drift-x"]["series"]
    assert [m[1] for m in drift["marks"]] == [r["optimality"]["drift_x"] for r in history[1:]]


def test_the_dual_of_a_run_is_that_of_its_point(home):
    run = load(home / "runs" / "auc-0")
    recorded = run.history[-1]["variables"]
    assert recorded == {
        "a": float(run.point.x[-2]),
        "b": float(run.point.x[-1]),
        "alpha": float(run.point.y[0]),
    }


def test_a_long_dual_is_not_recorded():
    clients = fm.Clients([(torch.ones(2, 60),)])
    for length, kept in ((60, False), (3, True)):
        problem = fm.Minimax(lambda x, y, b: x @ y - y @ y, torch.ones(length), torch.ones(length))
        run = fm.simulate(problem, fm.methods.LocalSGDA(), clients, rounds=1)
        assert ("variables" in run.history[-1]) is kept
    assert run.history[-1]["variables"] == {
        f"y{i + 1}": value for i, value in enumerate(run.point.y.tolist())
    }


def test_site_table_names_the_worst(home, report):
    page, _ = report("auc-0")
    rows = page.table("Site", "Rows", "Positives")
    last = kept(home, "auc-0")["test"]
    assert set(rows) == set(SITES)
    clients = build(experiment_of(home / "runs" / "auc-0")).clients
    for name in SITES:
        labels = clients.splits["test"].rows(clients.names.index(name))[1]
        row = rows[name]
        assert row["Rows"] == str(len(labels))
        positive = int((labels > 0).sum())
        assert row["Positives"] == f"{positive} {positive / len(labels):.1%}"
        assert row["codasca"].split()[0] == f"{last['sites'][name]:.3f}"
        assert ("worst" in row["codasca"]) is (name == last["worst_site"])


def test_site_table_over_seeds(home, report):
    page, _ = report("auc-0", "auc-1")
    rows = page.table("Site", "Rows", "Positives")
    both = [kept(home, f"auc-{seed}")["test"]["sites"] for seed in (0, 1)]
    middles = {name: statistics.median(sites[name] for sites in both) for name in SITES}
    for name, row in rows.items():
        values = sorted(sites[name] for sites in both)
        assert row["codasca"].startswith(f"{middles[name]:.3f} {values[0]:.3f} to {values[1]:.3f}")
        assert ("worst" in row["codasca"]) is (name == min(middles, key=middles.__getitem__))


def test_classes_have_a_table(home, report):
    page, _ = report("fair")
    last = kept(home, "fair")["test"]
    rows = page.table("Class")
    for name, value in last["class_accuracies"].items():
        assert rows[name]["local_sgda"].split()[0] == f"{value:.3f}"
        assert ("worst" in rows[name]["local_sgda"]) is (name == last["worst_class"])
    assert "roc-curve" not in page.ids


def test_outcome_costs_and_settings(home, report):
    page, _ = report("auc-0", "average")
    last = records(home, "average")[-1]
    row = page.table("Run", "Outcome")
    best = max(("auc-0", "average"), key=lambda n: kept(home, n)["validation"]["auc"])
    for name, label in (("auc-0", "codasca"), ("average", "fedavg")):
        (key,) = [key for key in row if key.startswith(label)]
        assert ("best" in key) is (name == best)
        assert row[key]["Outcome"] == "finished"
        assert row[key]["AUC, test"] == f"{kept(home, name)['test']['auc']:.3f}"
    costs = page.table("Run", "Exchanges")["fedavg"]
    assert costs["Gradients"] == str(last["gradients"])
    assert costs["Up"] == f"{last['bytes_up']} B"
    evaluations = sum(record["evaluation_bytes"] for record in records(home, "average"))
    assert "Evaluations" not in costs
    (training, apart) = re.findall(r"<h3>What [^<]* sent.*?</h3>.*?</div></div>", page.source)[:2]
    assert f"{evaluations / 1e6:.1f} MB" in apart
    assert f"{evaluations / 1e6:.1f} MB" not in training
    differ = page.table("Setting", "codasca", "fedavg")
    assert differ["problem.name"] == {"codasca": '"auc"', "fedavg": '"cross_entropy"'}
    assert "run.seed" not in differ
    assert 'name = "fedavg"' in page.text


def scored_sites(home, name):
    """The scores and labels of each site's test rows, by the model that the run returns."""
    folder = home / "runs" / name
    run, clients = load(folder), build(experiment_of(folder)).clients.to(torch.float32)
    ask = LocalQuery(run.problem, clients, "test", clients.weight_vector("size"))
    assert run.best is not None
    return dict(zip(ask.names, ask.each("scores", run.best.point.x), strict=True))


def scored(home, name):
    """Those of all sites together."""
    return [torch.cat(part) for part in zip(*scored_sites(home, name).values(), strict=True)]


def off_line(point, corners):
    """How far a point is from the line through the corners."""
    start, along = corners[:-1], np.diff(corners, axis=0)
    share = ((point - start) * along).sum(1) / np.maximum((along**2).sum(1), 1e-300)
    return np.linalg.norm(start + share.clip(0, 1)[:, None] * along - point, axis=1).min()


def test_roc_is_that_of_pooled_scores(home, report):
    page, _ = report("auc-0")
    (line,) = page.charts["roc"]["series"]
    found = np.array(line["marks"])[:, :2]
    # Corners are those of the exact curve, and its other points lie on the lines between them.
    scores, labels = scored(home, "auc-0")
    exact = np.stack(roc_curve(labels, scores, drop_intermediate=False)[:2], axis=1)
    assert np.abs(found[:, None] - exact[None]).max(2).min(1).max() < 1e-5
    assert max(off_line(point, found) for point in exact) < 2e-3
    row = page.table("Run", "Federated AUC")["codasca"]
    last = kept(home, "auc-0")["test"]
    assert row["Federated AUC"] == f"{last['auc']:.4f} ± 0"
    low, high = last["auc_interval"]
    assert row["95 % interval"] == f"{low:.3f} to {high:.3f}"


def test_precision_recall_is_that_of_pooled_scores(home, report):
    page, _ = report("auc-0")
    scores, labels = scored(home, "auc-0")
    exact = average_precision_score(labels, scores)
    row = page.table("Run", "Federated AUPRC")["codasca"]
    value, bound = map(float, row["Federated AUPRC"].split(" ± "))
    assert abs(value - exact) <= bound + 1e-4 < 0.1
    (line,) = page.charts["precision-recall"]["series"]
    assert line["marks"][-1][0] == 1
    assert f"AUPRC, test</dt><dd>{exact:.3f}" in page.source


def test_rare_positives_put_precision_first(home, report):
    (home / "rare.csv").write_text(table(480, of=8, positive=1), "utf-8")
    ran(home, "rare", "auc", "codasca", f"data.path={home / 'rare.csv'}")
    for name, first in (("auc-0", "AUC, test"), ("rare", "AUPRC, test")):
        page, _ = report(name)
        places = [page.ids.index(part) for part in ("roc-curve", "precision-and-recall")]
        assert places == sorted(places, reverse=name == "rare")
        assert re.findall('<dl class="tiles"><div><dt>([^<]*)', page.source) == [first]
    shutil.rmtree(home / "runs" / "rare")


def test_probabilities_and_operating_points_are_those_of_the_test_rows(home, report):
    page, _ = report("auc-0")
    scores, labels = (part.double().numpy() for part in scored(home, "auc-0"))
    known = calibration_of(home / "runs" / "auc-0", best=True)
    assert known is not None
    chances = known.platt.probabilities(scores)
    (line,) = page.charts["calibration"]["series"]
    for probability, share, low, high, _ in line["marks"]:
        inside = np.floor(chances * 10) == np.floor(probability * 10)
        assert share == pytest.approx(labels[inside].mean())
        assert (low, high) == pytest.approx(proportion(labels[inside]))
    row = page.table("Positive above", "Probability")["sensitivity 0.9"]
    above = scores > known.score_at("sensitivity", 0.9)
    assert row["Flagged"] == str(above.sum())
    assert row["Positives found"].split()[0] == f"{above[labels > 0].mean():.1%}"
    assert row["False alarms"].split()[0] == f"{above[labels == 0].mean():.1%}"
    assert row["Precision"].split()[0] == f"{labels[above].mean():.1%}"


def proportion(labels):
    """Wilson's interval, by scipy."""
    found = binomtest(int(labels.sum()), len(labels)).proportion_ci(method="wilson")
    return found.low, found.high


def test_sites_have_intervals(home, report):
    page, _ = report("auc-0")
    rows = page.table("Site", "Rows", "Positives")
    for name, (scores, labels) in scored_sites(home, "auc-0").items():
        low, high = auc_interval(scores.numpy(), labels.numpy()) or (0, 0)
        assert f"{low:.3f} to {high:.3f}" in rows[name]["codasca"]


def test_axes_of_shares_do_not_exaggerate(home, report):
    page, _ = report("auc-0")
    interval = kept(home, "auc-0")["test"]["auc_interval"]
    chart = page.charts["auc-test-by-round"]
    assert any(mark[2:4] == pytest.approx(interval) for mark in chart["series"][0]["marks"])
    for name, found in page.charts.items():
        if any(word in name for word in ("auc", "auprc", "accuracy")):
            assert found["y_range"][1] - found["y_range"][0] >= 0.1 - 1e-9


@pytest.mark.parametrize("bins", [17, 64, 4096])
def test_band_holds_the_curve_of_the_scores(bins):
    random = np.random.default_rng(bins)
    labels = random.random(400) < 0.3
    scores = np.round(random.normal(size=400) + labels, 2)  # with ties
    edges = first_edges(bins)
    counts = histogram(scores, labels, edges)
    curve, value = roc_from_counts(counts, edges), auc_from_counts(counts, edges)
    assert curve is not None
    assert value is not None
    area = [np.trapezoid(part[:, 1], part[:, 0]) for part in curve]
    assert area[0] == pytest.approx(value[0])
    assert area[2] - area[1] == pytest.approx(2 * value[1])
    for x, y in zip(*roc_curve(labels, scores, drop_intermediate=False)[:2], strict=True):
        # Steps have a lowest and a highest y at an x.
        low = max(curve.lower[curve.lower[:, 0] < x - 1e-12, 1], default=0.0)
        high = min(curve.upper[curve.upper[:, 0] > x + 1e-12, 1], default=1.0)
        assert low - 1e-12 <= y <= high + 1e-12


def test_a_single_number_is_no_band():
    edges = np.array([0.5, np.nextafter(0.5, 1)])
    curve = roc_from_counts(np.array([[3.0, 2, 0], [0, 2, 1]]), edges)
    assert curve is not None
    assert np.array_equal(curve.lower, curve.middle)
    assert np.array_equal(curve.upper, curve.middle)
    assert roc_from_counts(np.array([[3.0, 2, 0], [0, 0, 0]]), edges) is None


def test_small_counts_leave_a_band(home, tmp_path):
    ran(home, "withheld", "auc", "codasca", "problem.least_per_bin=4")
    (group,) = grouped(runs_in([home / "runs" / "withheld"], print))
    asks = quality.ask_all([group])
    (line,) = Page(html.page([group], asks)).charts["roc"]["series"]
    last = kept(home, "withheld")["test"]
    assert isinstance(asks[0], Asked)
    assert asks[0].bound == pytest.approx(last["auc_bound"])
    assert asks[0].auc == pytest.approx(last["auc_federated"])
    lower, upper = (np.array(line[side]) for side in ("lower", "upper"))
    areas = [np.trapezoid(side[:, 1], side[:, 0]) for side in (lower, upper)]
    assert areas[1] - areas[0] == pytest.approx(2 * last["auc_bound"], abs=5e-3)
    assert last["auc_bound"] > 0.01
    shutil.rmtree(home / "runs" / "withheld")


# What is not there


def test_rows_that_are_gone_or_changed_leave_out_the_curve(home, report):
    before = (home / "patients.csv").read_text(encoding="utf-8")
    try:
        (home / "patients.csv").write_text(table(300), encoding="utf-8")
        page, _ = report("auc-0")
        assert "no curve, because the rows are not those that the run was evaluated on" in page.text
        assert "roc" not in page.charts
        (home / "patients.csv").unlink()
        page, _ = report("auc-0")
        assert "no curve, because the rows could not be read again (There is no file" in page.text
        assert page.charts["auc-test-by-round"]
    finally:
        (home / "patients.csv").write_text(before, encoding="utf-8")


def test_an_unfinished_run_is_shown_as_far_as_it_is(home, report, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(home / "runs" / "auc-0", cut)
    (cut / "final.safetensors").unlink()
    lines = (cut / "history.jsonl").read_text(encoding="utf-8").splitlines()
    (cut / "history.jsonl").write_text("\n".join(lines[:2]) + "\n", encoding="utf-8")
    page, _ = report(cut)
    assert "not finished: the last record is of round 2 of 6" in page.text
    assert len(page.charts["auc-test-by-round"]["series"][0]["marks"]) == 2


def test_a_run_that_ended_between_evaluations_has_no_curve(home, report, tmp_path):
    """One that diverged, say: its last point is not that of its last record."""
    ended = tmp_path / "ended"
    shutil.copytree(home / "runs" / "auc-0", ended)
    lines = (ended / "history.jsonl").read_text(encoding="utf-8").splitlines()
    (ended / "history.jsonl").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    page, _ = report(ended)
    assert "no curve, because the run ended at round 6, which was not evaluated" in page.text


def test_evaluations_that_asked_some_clients(home, report):
    ran(home, "some", "auc", "codasca", "run.evaluate_clients=2", "method.lr=0.05")
    own = kept(home, "some")["test"]
    page, _ = report("some", "auc-0")
    shutil.rmtree(home / "runs" / "some")
    curve, _ = page.charts["roc"]["series"]
    x, y = ([mark[place] for mark in curve["marks"]] for place in (0, 1))
    assert np.trapezoid(y, x) == pytest.approx(own["auc"], abs=5e-3)
    (table,) = [rows for rows in page.tables if rows[0][0].strip() == "Site"]
    told = {row[0].strip(): row[3].strip() for row in table[1:]}
    assert all(int(row[1]) > 0 for row in table[1:])
    assert {name for name, cell in told.items() if cell != "\N{EN DASH}"} == own["sites"].keys()
    assert len(told) == 3 > len(own["sites"])


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("history.jsonl", lambda text: text + b"null\n", "line 5 of .* is damaged"),
        ("history.jsonl", lambda text: text.replace(b"exchanges", b"x"), "line 1 of .* is damaged"),
        ("history.jsonl", lambda text: b"\xff\xfe\n", "line 1 of .* is damaged"),
        (
            "config.toml",
            lambda text: text.replace(b"lr =", b"lrr ="),
            "config.toml is not as it was written",
        ),
        ("environment.json", lambda text: b"{", "environment.json is damaged"),
        ("final.safetensors", lambda text: text[:9], "final.safetensors is damaged"),
    ],
)
def test_a_damaged_run_is_left_out_with_a_sentence(home, report, tmp_path, name, change, why):
    damaged = tmp_path / "damaged"
    shutil.copytree(home / "runs" / "auc-0", damaged)
    (damaged / name).write_bytes(change((damaged / name).read_bytes()))
    page, said = report("auc-1", damaged)
    assert re.search(f"note: left out: .*{why}", said.err)
    assert page.charts


def test_a_last_line_that_is_no_text_is_what_a_kill_leaves(home, report, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(home / "runs" / "auc-0", cut)
    (cut / "final.safetensors").unlink()
    with open(cut / "history.jsonl", "ab") as file:
        file.write(b'{"round": \xff')
    page, _ = report(cut)
    assert len(page.charts["auc-test-by-round"]["series"][0]["marks"]) == 4


def test_a_model_that_cannot_be_made_again_leaves_out_the_curve(home, report, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(home / "runs" / "auc-0", copied)
    (copied / "preparation.json").unlink()
    page, _ = report(copied)
    assert "no curve, because the rows could not be read again (there is no prep" in page.text


def test_numbers_of_a_run_that_diverged_do_not_break_the_page(home, report, tmp_path):
    folder = tmp_path / "diverged"
    shutil.copytree(home / "runs" / "auc-0", folder)
    found = records(home, "auc-0")
    found[1]["test"]["loss"], found[2]["test"]["loss"], found[3]["test"]["loss"] = (
        -1e308,
        1e308,
        1.0,
    )
    found[3]["test"]["auc"] = found[3]["test"]["auc_interval"] = None
    found[3]["test"]["sites"] = dict.fromkeys(found[3]["test"]["sites"])
    found[3]["variables"] = dict.fromkeys(found[3]["variables"])
    (folder / "history.jsonl").unlink()
    for record in found:
        RunFolder(folder).append(record)
    page, _ = report(folder)
    assert [mark[0] for mark in page.charts["loss-on-test-rows"]["series"][0]["marks"]] == [0, 6]
    assert [mark[0] for mark in page.charts["auc-test-by-round"]["series"][0]["marks"]] == [0, 2, 4]


def test_folders_without_runs(home, report, capsys, tmp_path):
    page, said = report("", tmp_path / "nothing")
    assert "note: left out: there is no config.toml in" in said.err
    # The folder of all runs stands for them.
    assert {"codasca", "fedavg", "local_sgda"} <= {
        line["label"] for chart in page.charts.values() for line in chart["series"]
    }
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    assert "none of these is the folder of a run" in capsys.readouterr().err


# The page itself


def test_page_asks_for_nothing_and_escapes_names(home, report):
    page, _ = report("auc-0", "average")
    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "data"), (tag, name)
        if name == "href":
            assert value.startswith("#") or value == "data:,"
        assert not name.startswith("on")
        assert not re.search(r"https?:", value or "") or name == "content"
    own = [page_file(name) for name in ("page.css", "page.js")]
    assert not any(re.search(r"https?:|url\(|@import|fetch\(|import\(", text) for text in own)
    policy = [value for tag, name, value in page.attributes if (tag, name) == ("meta", "content")]
    assert any("default-src 'none'" in value for value in policy)
    # One script of the page, and one of data in each figure: the site's name made none.
    assert page.tags.count("script") == 1 + page.tags.count("figure")
    assert EVIL in page.text
    assert len(page.ids) == len(set(page.ids))


def test_names_in_charts_cannot_end_their_script():
    chart = Chart("c", EVIL, EVIL, (Series(EVIL, 0, (Mark(0, 1, 1, 1), Mark(1, 2, 2, 2))),))
    page = Page(drawn(chart))
    assert page.tags.count("script") == 1
    assert page.charts["c"]["series"][0]["label"] == EVIL
    assert EVIL in page.text


def test_the_same_runs_give_the_same_page(home, tmp_path):
    groups = grouped(runs_in([home / "runs"], print))
    first, second = (html.page(groups, quality.ask_all(groups)) for _ in range(2))
    assert first == second


def test_labels_tell_groups_apart(home, tmp_path):
    for name, change in (("slow", "method.lr=0.01"), ("fast", "method.lr=0.3")):
        path = home / "auc-0.toml"
        folder = tmp_path / name
        assert cli.main(["run", str(path), change, "--quiet", "--folder", str(folder)]) == 0
    # Where client states were does not tell runs apart.
    changes = ("run.store=disk", "--quiet", "--folder", str(tmp_path / "disk"))
    assert cli.main(["run", str(home / "average.toml"), *changes]) == 0
    folders = [tmp_path / "slow", tmp_path / "fast", home / "runs" / "average", tmp_path / "disk"]
    labels = [group.label for group in grouped(runs_in(folders, print))]
    assert labels == ["codasca, lr 0.01", "codasca, lr 0.3", "fedavg"]


def test_a_start_far_off_is_cut_from_the_axis(home):
    (group,) = grouped(runs_in([home / "runs" / "average"], print))
    (chart, *_) = [each.charts["round"] for each in curves.learning([group])]
    (line,) = chart.series
    far = tuple(mark._replace(y=y, low=y, high=y) for mark, y in zip(
        line.marks, (0.1, 0.8, 0.82, 0.83), strict=True))  # fmt: skip
    assert starts_far_off([replace(line, marks=far)])
    assert not starts_far_off([replace(line, marks=far[1:] + far[1:])])
    shown = Page(drawn(replace(chart, series=(replace(line, marks=far),), cut=True, least=0)))
    data = shown.charts[chart.name]
    assert data["y_range"] == pytest.approx([0.8, 0.83])
    assert data["series"][0]["marks"][0][1] == 0.1  # it is still told
    assert "the first evaluation lies outside" in shown.text


def test_axes_hold_their_values():
    for values in (
        *([0.1, 0.97], [3.0], [-2e-9, 5e-9], [0, 123456], [1e6, 7e6], [0.0]),
        *([0.00141, 0.00159], [0.5, 0.50001], [1 / 3, 1 / 3 + 6e-17], [1234567, 1234600]),
        *([3e8, 3.0001e8], [1e38, 3e38], [-20000, 20000]),
    ):
        found = axis(values)
        assert found.low <= min(values)
        assert found.high >= max(values)
        assert len({text for _, text in found.ticks}) == len(found.ticks) >= 2
        assert all(0 <= found.at(value) <= 1 for value in values)
    widest = log_axis([5e-324, 1.7e308])
    assert widest.at(1e308) == 1
    found = log_axis([3e-14, 20.0])
    assert (found.low, found.high) == (1e-14, 100.0)
    assert found.at(1e-14) == 0
    assert found.ticks[0][1] == "10⁻¹⁴"


# Files for others


def test_names_of_many_lines_do_not_cover_the_chart(tmp_path):
    pytest.importorskip("matplotlib")
    marks = (Mark(0, 1, 1, 1), Mark(1, 2, 2, 2))
    chart = Chart("many", "", "", tuple(Series(f"line {n}", n, marks) for n in range(40)))
    figure = figures._chart(chart)
    figure.canvas.draw()
    (axis,) = figure.axes
    names = axis.get_legend().get_window_extent()
    assert names.x0 >= axis.get_window_extent().x1
    assert names.x1 <= figure.get_tightbbox().x1 * figure.dpi


@pytest.mark.slow
def test_figures_are_written(home, report, tmp_path):
    pytest.importorskip("matplotlib")
    page, said = report("auc-0", "auc-1", "average", more=("--figures", tmp_path / "figures"))
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {f"{name}.{kind}" for name in page.charts for kind in ("svg", "png")}
    assert f"figures: {len(drawn)} files in {tmp_path / 'figures'}" in said.out
    for path in (tmp_path / "figures").iterdir():
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    text = (tmp_path / "figures" / "roc.svg").read_text(encoding="utf-8")
    assert "false positive rate" in text


def test_scalars_name_every_number(home):
    last = records(home, "auc-0")[-1]
    found = dict(scalars(last))
    assert found["test/auc"] == last["test"]["auc"]
    assert found[f"test/sites/{EVIL}"] == last["test"]["sites"][EVIL]
    assert found["variables/alpha"] == last["variables"]["alpha"]
    assert found["cost/bytes_up"] == last["bytes_up"]
    assert "test/worst_site" not in found
    assert "optimality/grad_phi_reached" not in found


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_a_sentence(home, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    folder, page = str(home / "runs" / "average"), str(tmp_path / "r.html")
    assert cli.main(["report", folder, "-o", page, f"--{name}", str(tmp_path / "out")]) == 2
    assert f"fedminimax: {name} is not installed: pip install " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_tensorboard_reads_the_records(home, report, tmp_path):
    pytest.importorskip("tensorboard")
    place = "tensorboard.backend.event_processing.event_accumulator"
    read = importlib.import_module(place).EventAccumulator
    report("auc-0", "auc-1", more=("--tensorboard", tmp_path / "board"))
    for seed in (0, 1):
        events = read(str(tmp_path / "board" / f"codasca {seed + 1}")).Reload()
        found = [(event.step, event.value) for event in events.Scalars("test/auc")]
        expected = [(r["round"], r["test"]["auc"]) for r in records(home, f"auc-{seed}")]
        assert found == [(step, pytest.approx(value)) for step, value in expected]


def test_mlflow_reads_the_records(home, report, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")
    from mlflow.tracking import MlflowClient

    report("auc-0", more=("--mlflow", tmp_path / "store"))
    client = MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    experiment = client.get_experiment_by_name("fedminimax")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "test/auc")
    expected = [(r["round"], r["test"]["auc"]) for r in records(home, "auc-0")]
    assert [(each.step, each.value) for each in history] == expected
    assert found.data.params["method.name"] == '"codasca"'


# In a browser


def size(path):
    return struct.unpack(">II", path.read_bytes()[16:24])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_in_chromium(home, report, tmp_path, dark):
    report("auc-0", "auc-1", "average", "fair")
    page = tmp_path / "report.html"
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 390, 360):
            browser.open(page, width, dark)
            # Nothing sticks out: a phone does not scroll sideways.
            assert browser.value("document.documentElement.scrollWidth") == width
            paper = browser.value("getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")
            picture = tmp_path / f"{width}.png"
            browser.picture(picture)
            assert size(picture)[0] == width
            assert size(picture)[1] > 2000
        # The other theme, by the button.
        browser.value("document.getElementById('theme').click()")
        paper = browser.value("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if dark else "rgb(20, 24, 28)")
        # One of four panels is shown; a click shows another.
        shown = "[...document.querySelectorAll('[data-panel]')].filter(p => !p.hidden)"
        assert browser.value(f"{shown}.map(p => p.dataset.panel).join()") == "round"
        browser.value("document.querySelector('[data-tab=gradients]').click()")
        assert browser.value(f"{shown}.map(p => p.dataset.panel).join()") == "gradients"
        # A line is hidden by its name in the legend.
        browser.value("document.querySelector('#learning-curves .legend button').click()")
        off = "document.querySelectorAll('#learning-curves .series.off').length"
        assert browser.value(off) > 0
        browser.value("document.querySelector('#learning-curves .legend button').click()")
        assert browser.value(off) == 0
        # Values under the pointer, and by the keyboard.
        plot = "document.querySelector('[data-panel=gradients] .plot')"
        browser.value(f"{plot}.scrollIntoView({{block: 'center'}})")
        box = browser.value(
            f"(b => [b.left, b.top, b.width, b.height])({plot}.getBoundingClientRect())"
        )
        browser.move(box[0] + box[2] - 3, box[1] + box[3] / 2)
        last = records(home, "average")[-1]
        tip = browser.value(f"{plot}.querySelector('.tip').innerText")
        assert f"{last['validation']['auc']:.4f}" in tip
        assert f"{last['gradients']:,}" in tip
        browser.value(f"{plot}.focus()")
        browser.press("Home")
        tip = browser.value(f"{plot}.querySelector('.tip').innerText")
        assert f"{records(home, 'average')[0]['validation']['auc']:.4f}" in tip
        browser.press("Escape")
        assert browser.value(f"{plot}.querySelector('.tip').hidden") is True
        browser.print(tmp_path / "report.pdf")
        assert browser.complaints == []
        assert {address for address in browser.asked if not address.startswith("data:")} == {
            page.as_uri()
        }


def test_a_card_says_what_the_folder_and_the_rows_say(home, report):
    _, said = report("auc-0", more=("--card",))
    folder = home / "runs" / "auc-0"
    assert f"model card: {folder / 'model-card.md'}" in said.out
    text = (folder / "model-card.md").read_text(encoding="utf-8")
    found = kept(home, "auc-0")["test"]
    low, high = found["auc_interval"]
    assert f"| AUC | {found['auc']:.3f} | {low:.3f} to {high:.3f} |" in text
    digest = hashlib.sha256((folder / "final.safetensors").read_bytes()).hexdigest()
    assert f"| final.safetensors | {digest} |" in text
    assert "the model is that of round" in text
    # Names of sites cannot leave their cell, nor become tags.
    assert EVIL not in text
    page = Page((folder / "model-card.html").read_text(encoding="utf-8"))
    assert "script" in page.tags  # of the page itself
    assert page.tags.count("script") == 1
    assert set(page.table("Site", "Rows")) == set(SITES)


def test_a_run_without_rows_has_a_card_that_says_so(home, report):
    before = (home / "patients.csv").read_text(encoding="utf-8")
    try:
        (home / "patients.csv").unlink()
        report("auc-0", more=("--card",))
    finally:
        (home / "patients.csv").write_text(before, encoding="utf-8")
    text = (home / "runs" / "auc-0" / "model-card.md").read_text(encoding="utf-8")
    assert "Rows could not be asked again: the rows could not be read again" in text
    assert "## Sites" not in text
