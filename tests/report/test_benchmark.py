"""The benchmark: what has a record is not run again, and the page says what the records say."""

import json
import re
import statistics
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from fedminimax.cli import main
from fedminimax.data.scikit_learn import ScikitLearn
from fedminimax.metrics.paired import paired_difference
from fedminimax.report import baselines
from fedminimax.report.benchmark import read_set
from fedminimax.report.ranks import Ranks, diagram, groups, ranks

CONTENTS = """
[budget.quick]
splits = 2
rounds = 4
evaluate_every = 2
rows = 200
tuned = true
shares = []

[[set]]
name = "heart"
data = {name = "heart"}

[[set]]
name = "cancer"
data = {name = "scikit_learn", which = "breast_cancer", concentration = 2.0}

[[set]]
name = "never"
kept_out = true
data = {name = "uci", which = "german", folder = "nowhere"}

[[row]]
name = "auto"

[[row]]
name = "FedAvg"
changes = ["problem.name=cross_entropy", "method.name=fedavg"]
grid = ["method.lr=1e-9", "method.lr=0.3"]

[[row]]
name = "pooled"
baseline = "pooled"
model = "logistic_regression"
"""


@pytest.fixture
def benchmark(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDMINIMAX_DATA", raising=False)
    (tmp_path / "entries").mkdir()
    (tmp_path / "entries" / "contents.toml").write_text(CONTENTS)

    def call(*options):
        assert main(["benchmark", "--entries", "entries", "-o", "out", *options]) == 0
        return capsys.readouterr().out

    return call


def page_of(folder):
    return (folder / "out/benchmark.md").read_text()


@pytest.mark.slow
def test_what_is_done_is_not_run_again_and_the_page_shows_it(benchmark, tmp_path):
    benchmark("--page")
    assert "| never (kept out) | | | | not run |" in page_of(tmp_path)
    first = benchmark()
    assert "kept out: never; --kept-out runs them" in first
    assert len(re.findall("split [01], ", first)) == 12
    files = {f.stem: f for f in (tmp_path / "out/records/benchmark/quick").iterdir()}
    assert sorted(files) == ["cancer", "heart"]
    held = {name: json.loads(file.read_text()) for name, file in files.items()}
    assert held["heart"]["rates"] == {"FedAvg": "method.lr=0.3"}
    page = page_of(tmp_path)
    values = [held["heart"]["units"][f"auto/{split}"] for split in (0, 1)]
    cells = next(line for line in page.splitlines() if line.startswith("| auto |"))
    assert (
        cells.split("|")[2].strip().strip("*") == f"{statistics.mean(v['auc'] for v in values):.3f}"
    )
    assert all(v["runs"] <= 3 for v in values)
    means = {
        row: [statistics.fmean([record["units"][f"{row}/{s}"]["auc"] for s in (0, 1)]) for record in
              (held["heart"], held["cancer"])]
        for row in ("auto", "FedAvg")
    }  # fmt: skip
    found = paired_difference(means["auto"], means["FedAvg"])
    assert f"| FedAvg | {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})" in page
    assert "## Set by set" in page
    ElementTree.parse(tmp_path / "out/benchmark.svg")
    best = max(values[0]["trials"].items(), key=lambda pair: pair[1]["validation"])
    assert best[0] == values[0]["chosen"]
    assert best[1]["auc"] == values[0]["auc"]
    # Again, nothing runs but what was kept out; without one unit, that one does.
    again = benchmark("--kept-out")
    assert "never: left out: There is no german.csv.gz" in again
    assert not re.findall("split [01], ", again)
    del held["heart"]["units"]["pooled/1"]
    files["heart"].write_text(json.dumps(held["heart"]))
    assert re.findall("split [01], [a-zA-Z]+", benchmark()) == ["split 1, pooled"]
    assert without_costs(page_of(tmp_path)) == without_costs(page)  # seconds differ


def without_costs(page: str) -> list[str]:
    before, _, costs = page.partition("## Costs")
    return [before, costs.splitlines()[-1]]


def test_intervals_of_many_sets_hold_at_once():
    ours, theirs = [0.90, 0.92, 0.91], [0.88, 0.87, 0.90]
    found = paired_difference(ours, theirs, among=5)
    level = 1 - 0.05 / 5
    low, high = stats.t.interval(level, 2, found.mean, stats.sem([0.02, 0.05, 0.01]))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_images_are_read_as_rows_of_pixels():
    class Pictures:
        def client_rows(self):
            return [(torch.rand(6, 1, 2, 2), torch.tensor([0, 1] * 3)) for _ in range(3)]

    sites = read_set(Pictures()).sites
    assert [site.features.shape for site in sites] == [(6, 4)] * 3
    assert [site.labels.tolist() for site in sites] == [[0, 1] * 3] * 3


def test_ranks_and_what_they_tell_apart():
    random = np.random.default_rng(0)
    values = {name: random.random(9).tolist() for name in "bc"} | {"a": [5.0] * 9}
    found = ranks(values)
    assert next(iter(found.average)) == "a"
    assert found.average["a"] == 1.0
    assert sum(found.average.values()) == pytest.approx(6)
    assert found.critical == pytest.approx(2.343 * np.sqrt(3 * 4 / (6 * 9)), abs=1e-3)
    assert groups(found) == [tuple(list(found.average)[1:])]
    three = Ranks({"a": 1.0, "b": 1.9, "c": 2.7}, 1.0, 9)
    assert groups(three) == [("a", "b"), ("b", "c")]
    drawn = ElementTree.fromstring(diagram(three, "Ranks of a < b"))
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a (1.00)", "b (1.90)", "c (2.70)"} <= set(words)


def test_baselines_are_scikit_learn_on_the_same_rows():
    sites = ScikitLearn("breast_cancer", concentration=2.0).read().sites
    rows = {site.name: (site.features, site.labels) for site in sites}
    found = baselines.pooled(baselines.logistic_regression, list(rows.values()), rows)
    X, y = (np.concatenate(parts) for parts in zip(*rows.values(), strict=True))
    model = baselines.logistic_regression().fit(X, y)
    assert found["auc"] == pytest.approx(roc_auc_score(y, model.decision_function(X)))
    one = [(X[:20], np.zeros(20))]
    assert baselines.alone(baselines.gradient_boosting, one, rows)["auc"] == 0.5
