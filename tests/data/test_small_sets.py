"""Sets that come with scikit-learn, and those of the UCI repository as their files are written."""

import csv
import gzip

import numpy as np
import pytest

from fedminimax.data.scikit_learn import ScikitLearn
from fedminimax.data.sites import DataError
from fedminimax.data.uci import KNOWN, UCI


@pytest.mark.parametrize(
    ("which", "rows", "positive", "columns"),
    [("digits", 1797, 174, 64), ("breast_cancer", 569, 212, 30)],
)
def test_all_rows_are_dealt_out_once(which, rows, positive, columns):
    sites = ScikitLearn(which).read().sites
    assert sum(map(len, sites)) == rows
    assert sum(site.labels.sum() for site in sites) == positive
    assert {site.features.shape[1] for site in sites} == {columns}
    with pytest.raises(DataError, match="which is 'iris'; use one of digits, breast_cancer"):
        ScikitLearn("iris")  # type: ignore[arg-type]


CELLS = {
    "abalone": (["M", *["0.5"] * 7], ["15"], ["17"]),
    "adult": (["39", "State-gov", *["1"] * 12], ["<=50K"], [">50K"]),
    "german": (["A11", *["6"] * 19], ["1"], ["2"]),
    "wine": (["7"] * 11, ["7"], ["8"]),
}


@pytest.mark.parametrize("which", KNOWN)
def test_a_file_is_read_as_it_is_written(which, tmp_path):
    known = KNOWN[which]
    random = np.random.default_rng(0)
    if known.columns:
        cells, no, yes = CELLS[which]
        numbers = [i for i, cell in enumerate(cells) if cell[0] in "0123456789"]
        lines = []
        for row in range(100):
            own = list(cells)
            for i in numbers:
                own[i] = f"{random.random():.3f}"
            lines.append(own + (yes if row % 4 == 0 else no))
    else:
        names = {
            "ai4i": ["UDI", "Product ID", "Type", "Torque", "Machine_failure", "TWF", "HDF", "PWF"]
            + ["OSF", "RNF"],
            "credit_default": ["ID", "X1", "X2", "X3", "Y"],
        }[which]
        label = "Machine_failure" if which == "ai4i" else "Y"
        lines = [names]
        for row in range(100):
            sick = int(row % 4 == 0)
            told = {label: sick, "TWF": sick, "X3": row % 3 + 1, "Product ID": f"M{row}"}
            lines.append([str(told.get(name, f"{random.random():.3f}")) for name in names])
    (tmp_path / "tabular").mkdir()
    with gzip.open(tmp_path / "tabular" / known.file, "wt", newline="") as file:
        csv.writer(file).writerows(lines)
    reading = UCI(which, folder=str(tmp_path)).read()
    assert sum(map(len, reading.sites)) == 100
    assert sum(site.labels.sum() for site in reading.sites) == 25
    used = {name.partition("=")[0] for name in reading.schema.features}
    assert not used & {*known.drop, *known.uses, "label", "site"}
    few = UCI(which, rows=40, folder=str(tmp_path)).read()
    assert sum(map(len, few.sites)) == 40
    assert sum(site.labels.sum() for site in few.sites) == 10


def test_a_file_that_is_not_there_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMINIMAX_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"There is no winequality-white.csv.gz in .*uci.edu"):
        UCI("wine").read()
