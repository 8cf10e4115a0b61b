"""Returns: the files of the Kenneth R. French library, and made-up ones."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedminimax as fm
from fedminimax.data.fama_french import FamaFrench
from fedminimax.data.returns import Returns
from fedminimax.data.sites import DataError
from fedminimax.engine.query import LocalQuery
from fedminimax.problems.portfolio import Portfolio, minimum
from fedminimax.types import Batch

BESIDE = Path(__file__).parents[3] / "shared" / "data"
DATA = Path(os.environ.get("FEDMINIMAX_DATA", BESIDE))

OFFICIAL = """This file was created by CMPT_ME_BEME_RETS_DAILY using the 202312 CRSP database.
Missing data are indicated by -99.99 or -999.

  Average Value Weighted Returns -- Daily
,SMALL LoBM,ME1 BM2,BIG HiBM
19630701,   0.50,  -1.25,-99.99
19630702,   1.00,   0.00,   0.25
19630703,-999,   2.50,  -0.75
19630705,   0.10,   0.20,   0.30
19630708,  -0.40,   0.60,   0.70

  Average Equal Weighted Returns -- Daily
,SMALL LoBM,ME1 BM2,BIG HiBM
19630701,   9.00,   9.00,   9.00
19630702,   8.00,   8.00,   8.00

Copyright 2024 Kenneth R. French
"""
RETURNS = np.array([
    [0.5, -1.25, -99.99], [1.0, 0.0, 0.25], [-999, 2.5, -0.75], [0.1, 0.2, 0.3], [-0.4, 0.6, 0.7]
])  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "100_Portfolios_10x10_Daily.csv").write_text(OFFICIAL)
    return tmp_path


def test_a_file_of_the_library_is_read(folder):
    data = FamaFrench(folder=str(folder), clients=2, missing="raw")
    assert data.dimension == 3
    first, second = data.client_rows()
    np.testing.assert_array_equal(first[0], RETURNS[:3])
    np.testing.assert_array_equal(second[0], RETURNS[3:])
    fraction = FamaFrench(folder=str(folder), clients=2, missing="raw", unit="fraction")
    np.testing.assert_allclose(fraction.client_rows()[0][0], RETURNS[:3] / 100)
    equal = FamaFrench(folder=str(folder), clients=1, weighting="equal")
    np.testing.assert_array_equal(equal.client_rows()[0][0][:, 0], [9, 8])


def test_missing_returns_are_masked(folder):
    rows = FamaFrench(folder=str(folder), clients=2).client_rows()
    present = np.concatenate([part[1] for part in rows])
    np.testing.assert_array_equal(present, RETURNS > -99)
    returns = np.concatenate([part[0] for part in rows])
    np.testing.assert_array_equal(returns, np.where(RETURNS > -99, RETURNS, 0))


def test_days_are_dealt_out_by_period_or_at_random(folder):
    def parts_of(**options) -> list[list[float]]:
        data = FamaFrench(folder=str(folder), clients=2, missing="raw", **options)
        return [part[0][:, 1].tolist() for part in data.client_rows()]

    period = parts_of()
    dealt = [parts_of(partition="iid", seed=seed) for seed in range(6)]
    for parts in (period, *dealt):
        assert sorted(parts[0] + parts[1]) == sorted(RETURNS[:, 1].tolist())
        assert [len(part) for part in parts] == [3, 2]
    assert any(parts != period for parts in dealt)
    with pytest.raises(DataError, match="5 days are too few for 6 clients"):
        FamaFrench(folder=str(folder), clients=6).client_rows()


def test_a_zip_and_an_npz_hold_the_same(folder, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("data") / "fama-french-100"
    other.mkdir()
    with zipfile.ZipFile(other / "100_Portfolios_10x10_Daily_CSV.zip", "w") as packed:
        packed.writestr("100_Portfolios_10x10_Daily.csv", OFFICIAL)
    csv = FamaFrench(folder=str(folder)).percent
    monkeypatch.setenv("FEDMINIMAX_DATA", str(other.parent))  # found in its own folder there
    np.testing.assert_array_equal(FamaFrench().percent, csv)
    arrays = tmp_path_factory.mktemp("arrays")
    hundredths = np.round(np.where(RETURNS < -900, -99.99, RETURNS) * 100).astype(np.int16)
    np.savez(arrays / "ff100_daily.npz", ME=hundredths)
    data = FamaFrench(folder=str(arrays), clients=1)
    np.testing.assert_array_equal(data.client_rows()[0][1], RETURNS > -99)
    np.testing.assert_allclose(data.percent[3:], RETURNS[3:], rtol=1e-14)
    with pytest.raises(DataError, match="no array 'OP'"):
        _ = FamaFrench("OP", str(arrays)).dimension


def test_what_cannot_be_read_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDMINIMAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"set data\.folder, or the environment variable FEDMINIM"):
        FamaFrench().client_rows()
    with pytest.raises(DataError, match=r"there is no 100_Portfolios_ME_INV_10x10_Daily\.csv or"):
        FamaFrench("INV", str(tmp_path)).client_rows()
    file = tmp_path / "100_Portfolios_10x10_Daily.csv"
    for text, told in (
        ("19630701, 1, 2\n", 'no table "Average Value Weighted Returns"'),
        (OFFICIAL.replace("   0.25", "   0.25, 1"), "number of columns changed"),
        (OFFICIAL.replace(",SMALL LoBM,", ","), "2 portfolios in its header and 3 returns"),
        (OFFICIAL.replace("   0.25", "   x"), "could not convert"),
        ("Average Value Weighted Returns\n,a,b\n\n", "2 portfolios and 0 days"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=told):
            FamaFrench(folder=str(tmp_path)).client_rows()
    file.unlink()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"sort": "BM"}, "sort is 'BM'; use one of 'ME', 'OP', 'INV'"),
        ({"missing": "drop"}, "missing is 'drop'"),
        ({"unit": "bp"}, "unit is 'bp'"),
        ({"weighting": "cap"}, "weighting is 'cap'"),
        ({"partition": "even"}, "use 'contiguous' or 'iid'"),
        ({"clients": 0}, "clients is 0"),
    ]
    for options, told in bad:
        with pytest.raises(DataError, match=told):
            FamaFrench(**options)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def turned(file: Path) -> None:
    """A few bytes of the packed table are others."""
    content = bytearray(file.read_bytes())
    content[70:90] = bytes(255 - b for b in content[70:90])
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("harm", [cut_in_half, turned, lambda file: file.write_bytes(b"no file")])
def test_a_damaged_file_is_told(tmp_path, harm):
    packed = tmp_path / "100_Portfolios_10x10_Daily_CSV.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("table.csv", OFFICIAL)
    harm(packed)
    with pytest.raises(DataError, match=r"is damaged, or no zip file .* download it again"):
        FamaFrench(folder=str(tmp_path)).client_rows()
    packed.unlink()
    arrays = tmp_path / "ff100_daily.npz"
    np.savez_compressed(arrays, ME=np.arange(300).reshape(100, 3))
    harm(arrays)
    with pytest.raises(DataError, match="is damaged, or holds no arrays") as told:
        FamaFrench(folder=str(tmp_path)).client_rows()
    assert "pickle" not in str(told.value)


def test_arrays_that_are_no_tables_are_told(tmp_path):
    arrays = tmp_path / "ff100_daily.npz"
    for array, said in (
        (np.array([{"a": 1}]), "holds no arrays of numbers"),
        (np.arange(3), r"the shape is \(3,\)"),
        (np.array([["a", "b"]]), "give numbers, days by portfolios"),
    ):
        np.savez(arrays, ME=array)
        with pytest.raises(DataError, match=said) as told:
            FamaFrench(folder=str(tmp_path)).client_rows()
        assert "pickle" not in str(told.value)
    with zipfile.ZipFile(tmp_path / "100_Portfolios_10x10_Daily_CSV.zip", "w"):
        pass
    with pytest.raises(DataError, match="no zip file with one CSV file"):
        FamaFrench(folder=str(tmp_path)).client_rows()


@pytest.mark.skipif(
    not (DATA / "fama-french-100" / "ff100_daily.npz").exists(), reason="the returns are not here"
)
@pytest.mark.parametrize(
    ("sort", "missing", "ratio"), [("ME", 2111, 0.178), ("OP", 501, 0.145), ("INV", 1013, 0.177)]
)
def test_the_real_returns(sort, missing, ratio):
    """13,781 days, the counts of missing cells, and the best daily ratio of mean to deviation."""
    data = FamaFrench(sort, str(DATA))
    rows = data.client_rows()
    assert sum(len(part[0]) for part in rows) == 13_781
    assert data.dimension == 100
    assert sum(int((part[1] == 0).sum()) for part in rows) == missing
    clients = fm.Clients(rows, batch_size=None, weights="size")
    problem = Portfolio(100)
    weights = clients.weight_vector("size")
    ask = LocalQuery(problem, clients, "train", weights)
    problem = problem.prepare(ask)
    ask.problem = problem
    mean, covariance = problem.return_moments(ask)
    assert float((mean @ torch.linalg.solve(covariance, mean)).sqrt()) == pytest.approx(
        ratio, abs=2e-3
    )
    assert minimum(mean, covariance, 1.0, "none").value == 0  # so the paper's infimum is at x = 0
    best = minimum(mean, covariance, 1.0)
    assert best.value is not None
    assert 0 < best.value < 1


# Made-up returns.


def test_made_up_returns_follow_their_model():
    data = Returns(clients=4, assets=5, rows=4000, factors=2, seed=3)
    rows = data.client_rows()
    assert data.dimension == 5
    assert [part[0].shape for part in rows] == [(4000, 5)] * 4
    means = np.stack([part[0].mean(0) for part in rows])
    assert np.abs(means - means.mean(0)).max() < 0.1  # only noise between clients
    assert np.all(np.linalg.eigvalsh(np.cov(np.concatenate([p[0] for p in rows]).T)) > 0.05)
    again = Returns(clients=4, assets=5, rows=4000, factors=2, seed=3).client_rows()
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(rows, again, strict=True))
    other = Returns(clients=4, assets=5, rows=4000, factors=2, seed=4).client_rows()
    assert not np.array_equal(rows[0][0], other[0][0])


def test_spread_sets_clients_apart_and_not_their_mean():
    def means(spread: float) -> np.ndarray:
        data = Returns(clients=6, assets=4, rows=20_000, spread=spread)
        return np.stack([part[0].mean(0) for part in data.client_rows()])

    together, apart = means(0.0), means(5.0)
    assert apart.std(0).min() > 3 * together.std(0).max()
    np.testing.assert_allclose(apart.mean(0), together.mean(0), atol=0.05)


def test_missing_made_up_returns_come_with_a_mask():
    rows = Returns(clients=2, assets=3, rows=500, missing=0.2).client_rows()
    assert [len(part) for part in rows] == [2, 2]
    share = 1 - np.concatenate([part[1] for part in rows]).mean()
    assert share == pytest.approx(0.2, abs=0.04)
    assert all((part[0][part[1] == 0] == 0).all() for part in rows)
    bad: list[dict[str, Any]] = [{"assets": 0}, {"spread": -1.0}, {"missing": 1.0}]
    for options in bad:
        with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
            Returns(**options)


def test_a_batch_of_masked_rows_has_two_columns():
    clients = fm.Clients(Returns(clients=2, assets=3, rows=5, missing=0.3).client_rows())
    batch: Batch = clients.train.batch(0)
    assert [tuple(c.shape) for c in batch.rows] == [(5, 3), (5, 3)]
