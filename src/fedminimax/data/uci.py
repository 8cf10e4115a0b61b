"""Tables of the UCI repository with rare positives, from files as they are widely mirrored."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, get_args

import numpy as np

from fedminimax.data.folder import Reading
from fedminimax.data.pooled import Pooled
from fedminimax.data.sites import DataError
from fedminimax.data.sources import VARIABLE, places
from fedminimax.random import generator

Which = Literal["abalone", "adult", "ai4i", "credit_default", "german", "wine"]
LABEL, SITE = "label", "site"
Row = Mapping[str, str]


class Known(NamedTuple):
    """How a file is read."""

    file: str
    positive: Callable[[Row], bool]
    drop: tuple[str, ...]  # the label, what tells it, and numbers of rows
    columns: int = 0  # of a file without a header, called c0, c1, ...
    site: Callable[[Row], str] | None = None  # None: rows are dealt out
    uses: tuple[str, ...] = ()  # columns that only say whose a row is


def _employer(row: Row) -> str:
    kind = row["c1"]
    known = {"Private": "private", "Self": "self_employed"}
    return known.get(kind.split("-")[0], "government" if kind.endswith("gov") else "other")


def _education(row: Row) -> str:
    return {"1": "graduate", "2": "university", "3": "school"}.get(row["X3"], "other")


FAILURES = ("TWF", "HDF", "PWF", "OSF", "RNF")
KNOWN = {
    "abalone": Known("abalone.csv.gz", lambda row: float(row["c8"]) >= 17, ("c8",), 9),
    "adult": Known(
        "adult-train.csv.gz", lambda row: row["c14"] == ">50K", ("c14",), 15, _employer, ("c1",)
    ),
    "ai4i": Known(
        "ai4i2020.csv.gz",
        lambda row: row["Machine_failure"] == "1",
        ("UDI", "Product ID", "Machine_failure", *FAILURES),
    ),
    "credit_default": Known(
        "credit-default.csv.gz", lambda row: row["Y"] == "1", ("ID", "Y"), 0, _education, ("X3",)
    ),
    "german": Known("german.csv.gz", lambda row: row["c20"] == "2", ("c20",), 21),
    "wine": Known("winequality-white.csv.gz", lambda row: float(row["c11"]) >= 8, ("c11",), 12),
}


@dataclass(frozen=True)
class UCI:
    """A table of the UCI repository (CC BY 4.0), as sites.

    which: "abalone" (17 rings or more, 4.6 % positive), "adult" (income above 50,000, 24 %),
    "ai4i" (failures of machines, 3.4 %), "credit_default" (22 %), "german" (bad credit, 30 %) or
    "wine" (white wines of grade 8 or more, 3.7 %). Sites of adult are kinds of employers, of
    credit_default grades of education; rows of the others are dealt out to so many clients, by
    class, with the concentration of a Dirichlet distribution. rows: so many at most, drawn by
    class; 0: all. folder: where the file lies, or a folder `tabular` with it, if not where
    FEDMINIMAX_DATA says or in the cache.
    """

    which: Which
    rows: int = 0
    clients: int = 5
    concentration: float = 2.0
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        if self.which not in get_args(Which):
            raise DataError(f"which is {self.which!r}; use one of {', '.join(get_args(Which))}.")
        if self.rows < 0:
            raise DataError(f"rows is {self.rows}; give how many are used at most, or 0 for all.")

    def read(self) -> Reading:
        known = KNOWN[self.which]
        rows = _read(self._file(known.file), known.columns)
        labels = np.array([known.positive(row) for row in rows])
        left_out = {*known.drop, *known.uses}
        names = [name for name in rows[0] if name not in left_out]
        with TemporaryDirectory() as place:
            file = Path(place) / f"{self.which}.csv"
            with open(file, "w", newline="", encoding="utf-8") as opened:
                writer = csv.writer(opened)
                writer.writerow([*names, LABEL, *([SITE] if known.site else [])])
                for number in self._choose(labels):
                    row = rows[number]
                    own = [known.site(row)] if known.site else []
                    writer.writerow([*(row[n] for n in names), int(labels[number]), *own])
            if known.site:
                return Pooled(str(file), LABEL, "column", column=SITE).read()
            how = (self.clients, self.concentration)
            return Pooled(str(file), LABEL, "dirichlet", *how, seed=self.seed).read()

    def _choose(self, labels: np.ndarray) -> list[int]:
        """The numbers of the rows that are used, in their order."""
        count = len(labels)
        if not self.rows or self.rows >= count:
            return list(range(count))
        found: list[int] = []
        for place, value in enumerate((False, True)):
            own = np.flatnonzero(labels == value)
            most = max(1, round(len(own) * self.rows / count))
            found += generator(self.seed, "rows", place).permutation(own)[:most].tolist()
        return sorted(found)

    def _file(self, name: str) -> Path:
        for place in places(self.folder):
            for file in (place / name, place / "tabular" / name):
                if file.is_file():
                    return file
        raise DataError(
            f"There is no {name} in {', '.join(map(str, places(self.folder)))} (nor in its "
            f"tabular): write it from the files of https://archive.ics.uci.edu, or set "
            f"data.folder, or the environment variable {VARIABLE}, to the folder that holds it."
        )


def _read(file: Path, columns: int) -> list[dict[str, str]]:
    with gzip.open(file, "rt", encoding="utf-8-sig", newline="") as opened:
        lines = [
            [cell.strip() for cell in line]
            for line in csv.reader(opened, skipinitialspace=True)
            if line
        ]
    names = [f"c{i}" for i in range(columns)] if columns else lines.pop(0)
    return [dict(zip(names, line, strict=True)) for line in lines]
