"""The Heart Disease files: the published counts, and the coding of every cell."""

import csv
import hashlib
from importlib.resources import files

import numpy as np
import pytest

from fedminimax.data.heart import FILES, HEADER, Heart
from fedminimax.data.sites import DataError
from fedminimax.data.tables import raw_csv, read_table

# Of the files as UCI publishes them.
SHA256 = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungary": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}


def raw(name):
    text = (
        files("fedminimax.data") / "heart_disease" / f"processed.{FILES[name]}.data"
    ).read_text()
    return list(csv.reader(text.splitlines()))


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_those_of_uci(name):
    data = (
        files("fedminimax.data") / "heart_disease" / f"processed.{FILES[name]}.data"
    ).read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256[name]


def test_all_rows_and_positives_are_there():
    sites = Heart().sites()
    assert [site.name for site in sites] == ["cleveland", "hungary", "switzerland", "va"]
    assert [len(site) for site in sites] == [303, 294, 123, 200]
    assert [site.labels.sum() for site in sites] == [139, 106, 115, 149]
    assert sites[0].features.shape[1] == 22


def test_the_flamby_subset_has_flambys_counts():
    sites, notes, _ = Heart(columns="flamby").read()
    assert [len(site) for site in sites] == [303, 261, 46, 130]
    assert sites[0].columns == (
        *("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak"),
        *("cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2"),
    )
    assert not any(np.isnan(site.features).any() for site in sites)
    assert (sites[2].features[:, 3] == 0).all()
    assert notes == []


@pytest.mark.parametrize("name", FILES)
def test_every_cell_is_coded_as_documented(name):
    site = {site.name: site for site in Heart(zeros="keep").sites()}[name]
    held = dict(zip(site.columns, site.features.T, strict=True))
    for i, row in enumerate(raw(name)):
        for column, text in zip(HEADER[:-1], row, strict=False):
            group = {code: held[code][i] for code in held if code.partition("=")[0] == column}
            if text == "?":
                assert all(np.isnan(value) for value in group.values())
            elif len(group) == 1:
                assert group[column] == float(text)
            else:
                chosen = f"{column}={int(float(text))}"
                assert group == {code: float(code == chosen) for code in group}
                assert chosen in group
        assert site.labels[i] == (int(row[-1]) > 0)


def test_impossible_zeros_are_missing_unless_kept():
    kept = {site.name: site for site in Heart(zeros="keep").sites()}
    for site in Heart().sites():
        for column in ("chol", "trestbps"):
            place = site.columns.index(column)
            zero = kept[site.name].features[:, place] == 0
            assert np.isnan(site.features[zero, place]).all()
            assert not (site.features[:, place] == 0).any()
        sure = ~np.isnan(site.features)
        np.testing.assert_array_equal(site.features[sure], kept[site.name].features[sure])
    zeros = [
        int((site.features[:, site.columns.index("chol")] == 0).sum()) for site in kept.values()
    ]
    assert zeros == [0, 0, 123, 49]
    # Chosen by hand, zeros are missing in FLamby's rows too, and the rows stay the same.
    flamby = Heart(columns="flamby", zeros="missing").sites()
    assert [len(site) for site in flamby] == [303, 261, 46, 130]
    assert np.isnan(flamby[2].features[:, 3]).all()


def test_a_column_that_a_site_lacks_is_noted():
    assert Heart().read().notes == [
        "column 'chol' has no value at switzerland: the other sites' mean stands in"
    ]


@pytest.mark.parametrize("columns", ["all", "flamby"])
def test_a_raw_file_with_a_header_can_be_scored(tmp_path, columns):
    rows = raw("cleveland")
    table = tmp_path / "new.csv"
    table.write_text("\n".join(",".join(row) for row in [HEADER, *rows]))
    sites, _, schema = Heart(columns=columns).read()
    new = read_table(table, schema)
    np.testing.assert_array_equal(new.features, sites[0].features)
    np.testing.assert_array_equal(new.labels, sites[0].labels)


def test_bad_and_missing_cells_of_new_rows(tmp_path):
    row = dict(zip(HEADER, raw("cleveland")[0], strict=True))
    table = tmp_path / "new.csv"

    def read(**changes):
        table.write_text("\n".join([",".join(HEADER), ",".join({**row, **changes}.values())]))
        return read_table(table, Heart().schema())

    # -9 is the documented mark for a missing value, though these four files write "?".
    assert np.isnan(read(thal="-9.0").features[0, -3:]).all()
    assert np.isnan(read(chol="0").features).sum() == 1
    with pytest.raises(
        DataError, match=r"new\.csv, line 2: column 'cp' holds '5'.*'1', '2', '3', '4'"
    ):
        read(cp="5")


def test_a_file_without_header_counts_its_lines_from_one():
    text = "\n".join([",".join(raw("va")[0]), "1,2"])
    with pytest.raises(DataError, match=r"va\.data, line 2: 2 cells, but the header has 14"):
        raw_csv("va", "va.data", text, "num", header=HEADER)


def test_options_are_checked_and_the_description_is_one_line():
    with pytest.raises(DataError, match="columns is 'some'"):
        Heart(columns="some")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="zeros is 'drop'"):
        Heart(zeros="drop")  # type: ignore[arg-type]
    assert (Heart.__doc__ or "").splitlines()[0].endswith(".")
