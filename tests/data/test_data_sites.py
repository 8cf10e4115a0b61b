"""Sites: what is refused, and that one error names every difference."""

import json

import numpy as np
import pytest

from fedminimax.data.sites import Column, DataError, Schema, Site, check_alike


def make(name="a", columns=("age", "cp=1", "cp=2"), labels=(0, 1)):
    return Site(name, columns, np.zeros((len(labels), len(columns))), np.array(labels))


def test_a_site_holds_its_rows_in_the_promised_types():
    site = Site("a", ["age"], [[1], [2], [None]], np.array([True, False, True]))  # type: ignore[arg-type]
    assert (site.features.dtype, site.labels.dtype) == (np.float64, np.int64)
    assert site.columns == ("age",)
    assert len(site) == 3
    assert np.isnan(site.features[2, 0])
    assert site.take([2, 0]).labels.tolist() == [1, 1]
    assert site.take(np.array([False, True, False])).features.tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("columns", "features", "labels", "sentence"),
    [
        (("x",), np.zeros((0, 1)), [], "'north' has no rows"),
        (("x",), np.zeros((2, 3)), [0, 1], r"shape \(2, 3\) and 1 column"),
        (("x",), np.zeros(2), [0, 1], r"shape \(2,\)"),
        (("x",), np.zeros((2, 1)), [0], "2 rows and labels of shape"),
        (("x",), np.zeros((2, 1)), [0, 2], "has the labels 2; recode"),
        (("x",), np.zeros((2, 1)), [0, np.nan], "has the labels nan"),
        (("x",), np.zeros((2, 1)), ["no", "yes"], "recode them as 0 and 1"),
        (("x", "x"), np.zeros((1, 2)), [0], "'x' more than once"),
        (
            ("x", "y"),
            np.array([[0, 0], [0, -np.inf]]),
            [0, 1],
            "infinite value in column 'y', row 1",
        ),
        (("x",), [["abc"]], [0], "not numbers"),
    ],
)
def test_a_bad_site_is_refused_by_name(columns, features, labels, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        Site("north", columns, features, np.array(labels))
    assert "'north'" in str(caught.value)


def test_taking_no_rows_is_refused_by_name():
    with pytest.raises(DataError, match="'a' has no rows"):
        make().take([])


def test_like_sites_pass_even_if_one_has_a_single_class():
    check_alike([make("a"), make("b", labels=(1, 1))])


def test_one_error_names_every_difference():
    sites = [
        make("a", ("age", "bmi", "cp=1", "cp=2", "sex")),
        make("b", ("bmi", "age", "cp=1", "sex=f", "sex=m")),
        make("c", ("age", "bmi", "cp=1", "cp=2", "sex", "extra")),
    ]
    with pytest.raises(DataError) as caught:
        check_alike(sites)
    text = str(caught.value)
    assert "column 'extra' is at c and not at a, b" in text
    assert "column 'sex' is a number at a, c and text at b" in text
    assert "column 'cp' has no code '2' at b" in text
    assert "the order: a has 'age' where b has 'bmi'" in text
    assert text.count("\n  - ") == 4


@pytest.mark.parametrize(
    ("sites", "sentence"),
    [
        ([], "no sites"),
        ([make("a"), make("a")], "Two sites are called 'a'"),
        (
            [make("a", labels=(1, 1)), make("b", labels=(1,))],
            "All rows of all 2 sites have the label 1",
        ),
    ],
)
def test_sites_that_cannot_train_together_are_refused(sites, sentence):
    with pytest.raises(DataError, match=sentence):
        check_alike(sites)


def test_a_schema_survives_json():
    columns = (Column("age", missing=("0",)), Column("cp", "text", ("1", "2"), drop_first=True))
    schema = Schema(columns, "num", ("1", "2"), ("0",), ("?",))
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert schema.features == ("age", "cp=2")


def test_text_is_coded_with_missing_cells_missing_in_all_features():
    column = Column("cp", "text", ("1", "2", "x"))
    coded = column.encode(["2.0", " x ", "?", "1", "NAN"], ["?"], str)
    nan = [np.nan] * 3
    np.testing.assert_array_equal(coded, [[0, 1, 0], [0, 0, 1], nan, [1, 0, 0], nan])
    reference = Column("cp", "text", ("1", "2", "x"), drop_first=True).encode(["1", "2"], [], str)
    assert reference.tolist() == [[0, 0], [1, 0]]


def test_numbers_know_their_own_missing_values():
    column = Column("chol", missing=("0",))
    np.testing.assert_array_equal(
        column.encode(["0", "0.0", "10", "-9.0"], ["-9"], str)[:, 0], [np.nan, np.nan, 10, np.nan]
    )
    np.testing.assert_array_equal(
        column.encode(np.array([0.0, 10.0, -9.0]), ["-9"], str)[:, 0], [np.nan, 10, np.nan]
    )


@pytest.mark.parametrize("cell", ["abc", "1_000", "12;5"])
def test_text_among_numbers_is_refused_with_its_place(cell):
    with pytest.raises(DataError, match=f"row 1: column 'age' holds '{cell}'"):
        Column("age").encode(["1", cell], [], lambda row: f"row {row}")
