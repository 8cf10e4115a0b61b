"""How long a user's own tables take to read, beside the library that reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import csv, parquet

from bench.measure import Effort, in_turn
from bench.table import Found, Row, at_least, faster
from fedminimax.data.folder import Folder

ROWS, COLUMNS, SITES = 37_311, 300, 4


def rows() -> list[Row]:
    what = f"{ROWS:,} x {COLUMNS} in {SITES} files, to the sites' arrays"
    return [
        Row(
            "tables.csv",
            f"a folder of CSV, {what}",
            "pyarrow's read_csv alone, to its own tables",
            at_least(0.5),
            partial(beside, "csv", csv.read_csv),
        ),
        Row(
            "tables.parquet",
            f"a folder of Parquet, {what}",
            "pyarrow's read_table, and numpy's column_stack of its columns",
            at_least(0.5),
            partial(beside, "parquet", stacked),
        ),
    ]


def stacked(file: Path) -> np.ndarray:
    table = parquet.read_table(file)
    return np.column_stack([table.column(i).to_numpy() for i in range(COLUMNS)])


def beside(kind: str, read: Callable[[Path], Any], effort: Effort) -> Found:
    with tempfile.TemporaryDirectory() as place:
        files = write(Path(place), kind)
        ways = {
            "ours": Folder(place, "label").read,
            "theirs": lambda: [read(file) for file in files],
        }
        times = in_turn(ways, effort)
    return faster(times["ours"], times["theirs"], lambda: "columns are checked, then copied")


def write(place: Path, kind: str, rows: int = ROWS, columns: int = COLUMNS) -> list[Path]:
    """A file per site: numbers, of which 2 % are missing, a text, and a label."""
    random, files = np.random.default_rng(0), []
    for number, part in enumerate(np.array_split(np.arange(rows), SITES)):
        file = place / f"{number}.csv"
        values = random.normal(size=(len(part), columns))
        values[random.random(values.shape) < 0.02] = np.nan
        with file.open("w", encoding="utf-8") as out:
            print(*(f"x{i}" for i in range(columns)), "ward", "label", sep=",", file=out)
            for i, row in enumerate(values.tolist()):
                cells = ["" if value != value else f"{value:.5f}" for value in row]
                print(*cells, "abc"[i % 3], int(i % 5 == 0), sep=",", file=out)
        if kind == "parquet":
            table = csv.read_csv(file)
            file.unlink()
            file = file.with_suffix(".parquet")
            parquet.write_table(table, file)
        files.append(file)
    return files
