"""A user's folder: good files in every form, and one clear sentence for every bad one."""

import gzip
import io
import json
import pickle
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from fedminimax.data.folder import Folder
from fedminimax.data.sites import DataError, Schema
from fedminimax.data.tables import encode, open_table, raw_csv, read_table

GOOD = "age,sex,num\n60,m,1\n50,f,0\n"


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def reading(folder, **options):
    return Folder(str(folder), **{"label": "num", **options}).read()


def error(folder, **options):
    with pytest.raises(DataError) as caught:
        reading(folder, **options)
    return str(caught.value)


def test_sites_are_the_files_in_sorted_order(tmp_path):
    write(tmp_path, south=GOOD, north=GOOD.replace("60", ""))
    (tmp_path / "west.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + GOOD.encode()))
    (tmp_path / ".hidden.csv").write_text("rubbish")
    sites, notes, schema = reading(tmp_path)
    assert [site.name for site in sites] == ["north", "south", "west"]
    assert sites[1].columns == schema.features == ("age", "sex=f", "sex=m")
    np.testing.assert_array_equal(sites[0].features, [[np.nan, 0, 1], [50, 1, 0]])
    assert sites[1].labels.tolist() == [1, 0]
    assert notes == []
    assert [site.name for site in Folder(str(tmp_path), "num").sites()] == [
        "north",
        "south",
        "west",
    ]


def test_windows_lines_quotes_blank_lines_and_a_quoted_break_are_read(tmp_path):
    write(tmp_path, a='age,"note, long",num\r\n1,"x\ny",1\r\n\r\n2,z,0\r\n')
    sites, _, schema = reading(tmp_path)
    assert schema.columns[1].codes == ("x\ny", "z")
    assert len(sites[0]) == 2


def test_npz_and_csv_give_the_same_site(tmp_path):
    write(tmp_path, a="age,bmi,num\n60,,1\n50,22.5,0\n")
    features = np.array([[60, np.nan], [50, 22.5]])
    np.savez(tmp_path / "b.npz", features=features, labels=[1, 0], columns=["age", "bmi"])
    a, b = reading(tmp_path).sites
    np.testing.assert_array_equal(a.features, b.features)
    assert a.columns == b.columns
    assert a.labels.tolist() == b.labels.tolist()


@pytest.mark.parametrize(
    ("labels", "positive"),
    [([True, False], ""), ([1.0, 0.0], ""), (["yes", "no"], "yes"), ([b"yes", b"no"], "yes")],
)
def test_npz_labels_of_every_type(tmp_path, labels, positive):
    np.savez(tmp_path / "a.npz", features=np.eye(2, dtype=np.int8), labels=np.array(labels))
    sites, _, schema = reading(tmp_path, positive=positive)
    assert sites[0].labels.tolist() == [1, 0]
    assert schema.features == ("feature 0", "feature 1")


def test_numbers_that_are_codes(tmp_path):
    write(tmp_path, a="cp,num\n1,1\n10,0\n", b="cp,num\n2.0,1\n1.0,0\n")
    np.savez(tmp_path / "c.npz", features=[[2.0], [10]], labels=[0, 1], columns=["cp"])
    sites, notes, _ = reading(tmp_path, categorical=("cp",))
    assert sites[0].columns == ("cp=1", "cp=2", "cp=10")
    assert sites[2].features.tolist() == [[0, 1, 0], [0, 0, 1]]
    assert notes[1] == "column 'cp' has the code '2' at b, c and not at a"


def test_a_code_at_some_sites_only_is_noted_or_refused(tmp_path):
    write(tmp_path, a=GOOD, b=GOOD + "40,x,1\n", c="age,sex,num\n1,,1\n")
    assert reading(tmp_path).notes == [
        "column 'sex' has the code 'x' at b and not at a",
        "column 'sex' has no value at c: the other sites' mean stands in",
    ]
    assert "code 'x' at b and not at a" in error(tmp_path, codes="strict")


def test_other_files_are_noted(tmp_path):
    write(tmp_path, a=GOOD)
    (tmp_path / "b.xlsx").write_text("")
    assert reading(tmp_path).notes == ["ignored, neither CSV, Parquet nor npz: b.xlsx"]


def test_more_than_two_labels_are_one_against_the_rest_and_said_so(tmp_path):
    write(tmp_path, a="x,num\n1,0\n2,1\n3,2\n")
    sites, notes, schema = reading(tmp_path, positive="2")
    assert sites[0].labels.tolist() == [0, 0, 1]
    assert schema.negative == ("0", "1")
    assert notes == ["label 'num': '0', '1' all count as negative"]


def test_every_difference_is_named_in_one_error(tmp_path):
    write(
        tmp_path,
        a="age,bmi,sex,num\n1,2,m,1\n2,2,f,0\n",
        b="bmi,age,sex,chol,num\n1,1,0,9,1\n",
        c="age,bmi,sex,num\n1,2,m,0\nold,2,f,1\n",
    )
    text = error(tmp_path)
    assert "column 'chol' is at b and not at a, c" in text
    assert "the order: a has 'age' where b has 'bmi'" in text
    assert "column 'sex' is a number at b, but a.csv, line 2 has the text 'm'" in text
    assert "column 'age' is a number at a, b, but c.csv, line 3 has the text 'old'" in text
    assert text.count("\n  - ") == 5


ROWS = "1,m,1\n2,f,0\n"


@pytest.mark.parametrize(
    ("text", "options", "sentences"),
    [
        (
            GOOD,
            {"label": "Nums"},
            ["a.csv has no label column 'Nums'", "'age', 'sex', 'num'", "mean 'num'?"],
        ),
        ("age;num\n1;0\n", {}, ["Separate the cells with commas"]),
        ("x,num\n1,a\n2,b\n", {}, ["values 'a', 'b'", "positive = 'b'"]),
        ("x,num\n1,0\n2,1\n3,2\n", {}, ["values '0', '1', '2'", "positive = '2'"]),
        ("x,num\n1,a\n2,b\n", {"positive": "bb"}, ["positive is 'bb'", "'a', 'b'"]),
        ("x,num\n1,a\n2,b\n", {"positive": "1"}, ["positive is '1'", "Set positive = 'b'?"]),
        ("x,num\n1,0\n2,-1\n", {}, ["values '-1', '0'", "positive = '0'"]),
        ("x,num\n1,Yes\n2,no\n3,yes\n", {"positive": "yes"}, ["'yes' and 'Yes'", "capitals"]),
        ("x,num\n1,1\n2,1\n", {}, ["All rows of all 1 sites have the label 1"]),
        ("age,sex,num\n", {}, ["Site 'a' has no rows"]),
        ("", {}, ["a.csv is empty"]),
        ("num\n1\n0\n", {}, ["no column but the label"]),
        ("x,num\n1,1\n\n2,0,5\n", {}, ["a.csv, line 4: 3 cells, but the header has 2"]),
        ('x,y,num\n1,"a\nb",1\n2,0\n', {}, ["a.csv, line 4: 2 cells"]),
        ("x,num\n1,1\n2,\n", {}, ["a.csv, line 3: the label 'num' is missing"]),
        ("x,num\n1,1\n2,NA\n", {"positive": "1"}, ["a.csv, line 3: the label 'num' is missing"]),
        ("x,x,num\n1,1,1\n", {}, ["column 'x' more than once"]),
        (",x,num\n1,1,1\n", {}, ["column 1 has no name"]),
        ("x,num\n1,1\ninf,0\n", {}, ["a.csv, line 3: column 'x' holds inf; a finite number"]),
        ("x,num\n1,1\n2,0\n1e999,0\n", {}, ["a.csv, line 4: column 'x' holds 1e999"]),
        (
            "x,num\n1,1\n2,0\nO,0\n",
            {},
            ["'x' is a number in most rows", "a.csv, line 4", "text 'O'"],
        ),
        ("x,y,num\n1,,1\n2,?,0\n", {}, ["column 'y' has no value at any site", "`drop`"]),
        ('x,num\n1,"1\n2,0\n', {}, ["from line 2: this is not CSV"]),
        (GOOD, {"drop": ("sx",)}, ["drop names column 'sx'", "mean 'sex'?"]),
        (GOOD, {"categorical": ("agee",)}, ["categorical names column 'agee'", "mean 'age'?"]),
        (GOOD, {"most_codes": 1}, ["'sex' has 2 codes", "most_codes = 1"]),
        (GOOD, {"drop": "sex"}, ["drop is 'sex'; give a list"]),
        (GOOD, {"codes": "some"}, ["codes is 'some'"]),
        (GOOD, {"label": ""}, ["label is empty"]),
    ],
)
def test_a_bad_file_ends_in_a_sentence(tmp_path, text, options, sentences):
    write(tmp_path, a=text)
    message = error(tmp_path, **options)
    for sentence in sentences:
        assert sentence in message


def test_dropped_columns_may_be_odd(tmp_path):
    write(tmp_path, a=",x,x,age,num\n1,a,b,60,1\n2,c,d,50,0\n", b="age,num\n4,1\n")
    assert reading(tmp_path, drop=("", "x")).schema.features == ("age",)


def test_an_npz_may_drop_the_label_from_its_features(tmp_path):
    np.savez(tmp_path / "a.npz", features=np.eye(2), labels=[0, 1], columns=["age", "num"])
    assert reading(tmp_path, drop=("num",)).schema.features == ("age",)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv.gz", b"not gzip", "not a whole gzip file"),
        ("a.csv.gz", gzip.compress(GOOD.encode(), mtime=0)[:-12], "not a whole gzip file"),
        ("a.csv", "größe,num\n1,1\n".encode("latin-1"), "not UTF-8"),
        ("a.csv", b"PK\x03\x04\x14\x00\xff", "is a spreadsheet or a zip file"),
        ("a.npz", b"not a zip", "cannot be read as npz"),
        ("a.npz", pickle.dumps([1]), "cannot be read as npz"),
        ("a.parquet", b"PAR1 and no more", "a.parquet cannot be read as Parquet ("),
        ("a.txt", GOOD.encode(), "it holds 'a.txt'"),
    ],
)
def test_a_broken_file_ends_in_a_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    assert sentence in error(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"labels": [0, 1]}, "`features` is needed"),
        ({"features": np.eye(2)}, "no array `labels`"),
        ({"features": np.zeros(2), "labels": [0, 1]}, "shape (2,)"),
        ({"features": np.array([["a"], ["b"]]), "labels": [0, 1]}, "give numbers"),
        ({"features": np.eye(2), "labels": [0]}, "one label per row"),
        ({"features": np.eye(2), "labels": [0, 1], "columns": ["a"]}, "one name per column"),
        ({"features": np.eye(2), "labels": [0, 1], "columns": ["a", "num"]}, "also a column"),
        ({"features": np.eye(2), "labels": [0, 1], "columns": ["a", "a"]}, "more than once"),
        (
            {"features": np.eye(2), "labels": [0, np.nan]},
            "a.npz, row 1: the label 'num' is missing",
        ),
        ({"features": [[1, 2], [np.inf, 1]], "labels": [0, 1]}, "a.npz, row 1: column 'feature 0'"),
        ({"features": np.array([[object()]]), "labels": [0]}, "cannot be read as npz"),
    ],
)
def test_a_bad_npz_ends_in_a_sentence(tmp_path, arrays, sentence):
    np.savez(tmp_path / "a.npz", **arrays)
    assert sentence in error(tmp_path)


def test_a_bare_array_is_not_an_npz(tmp_path):
    with open(tmp_path / "a.npz", "wb") as file:
        np.save(file, np.eye(2))
    assert "cannot be read as npz" in error(tmp_path)


def test_a_header_that_asks_for_more_than_there_is_is_refused(tmp_path):
    header = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (10**12, 10)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("features.npy", header.getvalue() + bytes(80))
    assert (
        "features.npy says that it is of shape (1000000000000, 10), 80000000000000 bytes, but has "
        "80 of them"
    ) in error(tmp_path)


def test_bad_folders_end_in_a_sentence(tmp_path):
    assert "does not exist" in error(tmp_path / "nowhere")
    assert "it is empty" in error(tmp_path)
    write(tmp_path, a=GOOD)
    assert "is a file, not a folder" in error(tmp_path / "a.csv")
    np.savez(tmp_path / "a.npz", features=np.eye(2), labels=[0, 1])
    assert "are called 'a'" in error(tmp_path)


def test_new_rows_are_read_as_in_training(tmp_path):
    (tmp_path / "sites").mkdir()
    write(tmp_path / "sites", a="age,sex,num\n60,m,sick\n,f,well\n50,x,well\n")
    sites, _, schema = reading(tmp_path / "sites", positive="sick")
    stored = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    write(tmp_path, new="id,num,sex,age\n7,sick,m,60\n8,well,f,?\n9,well,x,50\n")
    rows = read_table(tmp_path / "new.csv", stored)
    np.testing.assert_array_equal(rows.features, sites[0].features)
    assert rows.labels is not None
    assert rows.labels.tolist() == [1, 0, 0]
    assert rows.columns == sites[0].columns
    assert list(rows.lines) == [2, 3, 4]


@pytest.mark.parametrize("text", ["sex,age\nm,60\n", "sex,age,num\nm,60,\n"])
def test_new_rows_need_no_labels(tmp_path, text):
    write(tmp_path / ".", a=GOOD)
    schema = reading(tmp_path).schema
    write(tmp_path, new=text)
    assert read_table(tmp_path / "new.csv", schema).labels is None


def test_new_rows_that_do_not_fit_are_refused(tmp_path):
    write(tmp_path, a=GOOD)
    schema = reading(tmp_path).schema
    bad = {
        "Sexe,age\nm,60\n": "lacks the columns 'sex'.* Did you mean 'Sexe'",
        "sex,age\nm,old\n": "line 2: column 'age' holds 'old'",
        "sex,age\nz,60\n": "line 2: column 'sex' holds 'z'.*codes 'f', 'm'",
        "sex,age,num\nm,60,2\n": "line 2: the label 'num' is '2'",
        "sex,age,num\nm,60,1\nm,60,\n": "line 3: the label 'num' is ''",
        "sex,age\n": "no rows",
    }
    for text, sentence in bad.items():
        write(tmp_path, new=text)
        with pytest.raises(DataError, match=sentence):
            read_table(tmp_path / "new.csv", schema)
    with pytest.raises(DataError, match="no file"):
        read_table(tmp_path / "nowhere.csv", schema)
    write(tmp_path, new="sex,age\nz,60\n")
    rows = read_table(tmp_path / "new.csv", schema, unknown="missing")
    np.testing.assert_array_equal(rows.features, [[60, np.nan, np.nan]])


# A faster reader must read what Python's reads, and leave to it what it would read otherwise.

ODD = {
    "quotes": '"x","y","num"\n"1","a",1\n"2.5","b ""c""",0\n',
    "quotes inside a cell": 'x,y,num\n1,5" wide,1\n2,6" wide,0\n',
    "a space before quotes": 'x,y,num\n1, "a",1\n2, "b",0\n',
    "spaces": "x , y,num\n 1 , a,1 \n 2,b ,0\n",
    "markers": "x,y,num\nNA,?,1\n2,b,0\nnull,c,1\n",
    "markers in spaces": "x,y,num\n NA ,b,1\n2,b,0\n",
    "a number as a marker": "x,y,num\n-9,-9,1\n-9.0,3,0\n4,5,1\n",
    "big integers": "x,y,num\n9007199254740993,123456789012345678901,1\n1,2,0\n",
    "leading zeros": "x,y,num\n007,1e3,1\n010,+5,0\n",
    "old line ends": "x,y,num\r1,a,1\r2,b,0\r",
    "a text far below": "x,y,num\n" + "1,2,1\n" * 60 + "2,b,0\n" + "3,c,0\n" * 90,
    "not a number": "x,y,num\nnan,NaN,1\n2,-nan,0\n5,6,0\n",
    "underscores": "x,y,num\n1_000,1,1\n2_000,2,0\n",
    "letters": "x,y,num\n\u0661,\u00e9,1\n2,\u00e8,0\n",
    "no last line end": "x,y,num\n1,a,1\n2,b,0",
    "blank lines": "\n\nx,y,num\n\n1,a,1\n\n\n2,b,0\n\n",
}


@pytest.mark.parametrize("name", ODD)
def test_columns_are_what_pythons_reader_reads(tmp_path, name):
    folder = Folder("", "num", missing=("", "NA", "?", "null", "-9"), categorical=())
    (tmp_path / "a.csv").write_bytes(ODD[name].encode())
    fast = open_table(tmp_path / "a.csv", "num", missing=folder.missing)
    slow = raw_csv("a", "a.csv", ODD[name], "num")
    columns, values, _ = folder.outline([slow], others=True)
    assert folder.outline([fast], others=True)[:2] == (columns, values)
    schema = folder.schema(columns, values)[0]
    np.testing.assert_array_equal(encode(fast, schema), encode(slow, schema))
    assert list(fast.lines) == list(slow.lines)


def test_codes_stay_as_they_are_written(tmp_path):
    write(tmp_path, a="ward,num\n007,1\n7,0\n9007199254740993,1\n")
    schema = reading(tmp_path, categorical=("ward",)).schema
    assert schema.columns[0].codes == ("007", "7", "9007199254740993")
    rows = read_table(tmp_path / "a.csv", schema)
    np.testing.assert_array_equal(rows.features, np.eye(3))


def test_true_and_false_are_a_number_however_they_are_written(tmp_path):
    write(tmp_path, a="smoker,num\nTrue,1\nFalse,0\n,0\n", b="smoker,num\ntrue,1\nFALSE,0\n")
    parquet.write_table(pa.table({"smoker": [True, None], "num": [1, 0]}), tmp_path / "c.parquet")
    sites, _, schema = reading(tmp_path)
    assert schema.features == ("smoker",)
    assert [site.features[:, 0].tolist()[:2] for site in sites[:2]] == [[1, 0], [1, 0]]
    assert np.isnan(sites[0].features[2, 0])
    np.testing.assert_array_equal(sites[2].features, [[1], [np.nan]])


def as_parquet(folder):
    for file in folder.glob("*.csv"):
        parquet.write_table(arrow_csv.read_csv(file), file.with_suffix(".parquet"))
        file.unlink()


def test_parquet_gives_what_csv_gives(tmp_path):
    table = "age,sex,ward,num\n60,m,a,sick\n,f,b,well\n50.5,m,,sick\n70,f,a,well\n"
    write(tmp_path, a=table, b=table.replace("sick", "?"))
    (tmp_path / "b.csv").unlink()
    before = reading(tmp_path, positive="sick")
    as_parquet(tmp_path)
    after = reading(tmp_path, positive="sick")
    assert after.schema == before.schema
    np.testing.assert_array_equal(after.sites[0].features, before.sites[0].features)
    assert after.sites[0].labels.tolist() == before.sites[0].labels.tolist()
    rows = read_table(tmp_path / "a.parquet", after.schema)
    assert list(rows.lines) == [0, 1, 2, 3]


def test_parquet_columns_of_every_type(tmp_path):
    columns = {
        "small": pa.array([1, None], pa.int8()),
        "big": pa.array([2**60 + 1, 2], pa.uint64()),
        "money": pa.array([1, 2], pa.decimal128(5, 2)),
        "group": pa.array(["x", "y"]).dictionary_encode(),
        "codes": pa.array(["1", "2"]).dictionary_encode(),
        "day": pa.array([0, 1], pa.date32()),
        "texts": pa.array(["1", " 2 "], pa.large_string()),
        "num": [True, False],
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    sites, _, schema = reading(tmp_path)
    assert schema.features == (
        *("small", "big", "money", "group=x", "group=y", "codes"),
        *("day=1970-01-01", "day=1970-01-02", "texts"),
    )
    assert sites[0].features[0, 1] == float(2**60 + 1)
    assert sites[0].features[1, 5:].tolist() == [2, 0, 1, 2]
    assert sites[0].labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"x": [1, 2]}, "a.parquet has no label column 'num'"),
        ({"x": [1.0, np.inf], "num": [0, 1]}, "a.parquet, row 1: column 'x' holds inf; a finite"),
        ({"x": [1, 2], "num": [0, None]}, "a.parquet, row 1: the label 'num' is missing"),
        ({"x": [[1], [2]], "num": [0, 1]}, "column 'x' holds list<"),
        ({"x": pa.array([], pa.int8()), "num": pa.array([], pa.int8())}, "has no rows"),
        ({"x": ["1", "2", "O"], "num": [0, 1, 1]}, "a.parquet, row 2 has the text 'O'"),
    ],
)
def test_a_bad_parquet_ends_in_a_sentence(tmp_path, columns, sentence):
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert sentence in error(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "positive"),
    [
        ("0", "1", ""),
        ("-1", "1", ""),
        ("false", "true", ""),
        ("FALSE", "TRUE", ""),
        ("0.0", "1.0", ""),
        ("False", "True", "1"),
        ("-1", "1", "1"),
        ("0", "1", "true"),
        ("True", "False", "0"),
        ("1", "2", "2"),
    ],
)
def test_labels_in_every_usual_form(tmp_path, low, high, positive):
    write(tmp_path, a=f"x,num\n1,{low}\n2,{high}\n")
    sites, notes, schema = reading(tmp_path, positive=positive)
    assert sites[0].labels.tolist() == [0, 1]
    assert notes == []
    again = read_table(tmp_path / "a.csv", schema).labels
    assert again is not None
    assert again.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (range(100, 160), True),
        ([9000 + 7 * i for i in range(60)], True),
        (["", *range(100, 159)], True),
        ([i + 0.5 for i in range(60)], False),
        ([i // 2 for i in range(60)], False),
    ],
)
def test_numbers_that_differ_in_every_row_are_named_as_identifiers(tmp_path, values, named):
    rows = [f"{value},{i % 7},{i % 2}" for i, value in enumerate(values)]
    for name, held in (("large", rows[:57]), ("small", rows[57:])):
        write(tmp_path, **{name: "\n".join(["nr,x,num", *held]) + "\n"})
    notes = reading(tmp_path).notes
    sentence = "column 'nr' has another whole number in every row: if it is an identifier"
    assert [sentence in note for note in notes] == [True] * named


def test_a_row_that_is_wrong_far_below_is_named_with_its_line(tmp_path):
    rows = [f"{i},{i % 2}" for i in range(300)]
    for change, sentence in {
        "1,1,1": "line 202: 3 cells",
        "1e999,1": "line 202: column 'x'",
    }.items():
        write(tmp_path, a="\n".join(["x,num", *rows[:200], change, *rows[200:]]) + "\n")
        assert sentence in error(tmp_path)


cell = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(cell, cell), min_size=2, max_size=8))
def test_numbers_come_back_bit_for_bit(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("folder")
    cells = [["" if value is None else repr(value) for value in row] for row in rows]
    lines = [",".join([*row, str(i % 2)]) for i, row in enumerate(cells)]
    write(folder, a="\n".join(["x,y,num", *lines, ""]), b="x,y,num\n1,2,0\n")
    got = reading(folder).sites[0].features
    np.testing.assert_array_equal(got, np.array(rows, dtype=np.float64))
