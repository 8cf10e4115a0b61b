"""Daily returns of 100 portfolios of US stocks, from the data library of Kenneth R. French."""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np

from fedminimax.data.returns import Partition, check_partition, dealt
from fedminimax.data.sites import DataError
from fedminimax.data.sources import OURS, Copy, File, Source, find
from fedminimax.random import generator

Sort = Literal["ME", "OP", "INV"]

# As the library names its daily files, without ending.
FILES = {
    "ME": "100_Portfolios_10x10_Daily",
    "OP": "100_Portfolios_ME_OP_10x10_Daily",
    "INV": "100_Portfolios_ME_INV_10x10_Daily",
}
ARRAYS = Copy(
    "ff100_daily.npz",
    "sha256:d556d76606efdfb31c2590dfa309467198118d7aaa68853f9476f192d543a115",
    OURS,
)
MARKS = (-99.99, -999.0)  # what the library writes for a missing return
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
LIBRARY = "https://mba.tuck.dartmouth.edu/pages/faculty/ken.french"


@dataclass(frozen=True)
class FamaFrench:
    """Fama-French daily returns: 100 portfolios by size and a second trait, a row for each day.

    sort: the second trait: "ME" book-to-market, "OP" operating profitability, "INV" investment.
    folder: where the library's CSV or zip file lies, or ff100_daily.npz with arrays ME, OP and INV
    in hundredths of a percent, if not where FEDMINIMAX_DATA says or in the cache; itself or in its
    fama-french-100. The data may not be passed on: fetch them from the library.
    weighting: which table of a CSV: portfolios weighted by "value", or each stock "equal".
    partition: a client has a period of days ("contiguous"), or days drawn at random ("iid").
    missing: "mask" gives rows (returns, present), with 0 and 0 for a missing return; "raw" leaves
    -99.99 in as a return of -99.99 %, as published loaders do.
    unit: a return of one hundredth is 1 in "percent", as in the files, and 0.01 as a "fraction".
    """

    sort: Sort = "ME"
    folder: str = ""
    clients: int = 8
    partition: Partition = "contiguous"
    missing: Literal["mask", "raw"] = "mask"
    unit: Literal["percent", "fraction"] = "percent"
    weighting: Literal["value", "equal"] = "value"
    seed: int = 0
    source: ClassVar[Source] = Source(
        "fama_french",
        "Fama-French 100 portfolios",
        "fama-french-100",
        "none stated; copyright Kenneth R. French",
        f"{LIBRARY}/data_library.html",
        # The library adds days every month, so no checksum stays true.
        tuple(
            File(
                f"{LIBRARY}/ftp/{name}_CSV.zip",
                (Copy(f"{name}_CSV.zip"), Copy(f"{name}.csv"), ARRAYS),
            )
            for name in FILES.values()
        ),
    )

    def __post_init__(self) -> None:
        known = {
            "sort": get_args(Sort),
            "missing": ("mask", "raw"),
            "unit": ("percent", "fraction"),
            "weighting": ("value", "equal"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                listed = ", ".join(map(repr, values))
                raise DataError(f"{name} is {getattr(self, name)!r}; use one of {listed}.")
        check_partition(self.partition, self.clients)

    @property
    def dimension(self) -> int:
        return self.percent.shape[1]

    @cached_property
    def percent(self) -> np.ndarray:
        """The table as published, a row for each day."""
        return read(self.file(), self.sort, self.weighting)

    def client_rows(self) -> list[tuple[np.ndarray, ...]]:
        scale = 1.0 if self.unit == "percent" else 0.01
        parts = dealt(
            len(self.percent), self.clients, self.partition, generator(self.seed, "fama-french")
        )
        if self.missing == "raw":
            return [(scale * self.percent[days],) for days in parts]
        present = (~np.isin(self.percent, MARKS)).astype(np.float64)
        returns = scale * np.where(present, self.percent, 0.0)
        return [(returns[days], present[days]) for days in parts]

    def file(self) -> Path:
        name = FILES[self.sort]
        wanted = (f"{name}.csv", f"{name}_CSV.zip", ARRAYS.name)
        return find(self.source, wanted, self.folder)


def read(file: Path, sort: str, weighting: str) -> np.ndarray:
    """The days' returns in percent, from any of the three forms of file."""
    if file.suffix == ".npz":
        return _array(file, sort)
    text = _unpack(file) if file.suffix.lower() == ".zip" else file.read_text("latin-1")
    return parse(text, weighting, str(file))


def _array(file: Path, sort: str) -> np.ndarray:
    name = f"{sort}.npy"
    try:
        # Not by np.load, which takes a file that is no archive for a pickled object.
        with zipfile.ZipFile(file) as packed:
            found = packed.read(name) if name in packed.namelist() else None
        hundredths = None if found is None else np.lib.format.read_array(io.BytesIO(found))
    except (*DAMAGED, ValueError) as error:
        raise DataError(
            f"{file} is damaged, or holds no arrays of numbers; make it again with np.savez."
        ) from error
    if hundredths is None:
        raise DataError(f"{file} has no array {sort!r}; give it one, days by portfolios.")
    if hundredths.ndim != 2 or not np.issubdtype(hundredths.dtype, np.number):
        raise DataError(
            f"{file}, array {sort!r}: the shape is {hundredths.shape} and the type "
            f"{hundredths.dtype}; give numbers, days by portfolios."
        )
    return np.round(hundredths / 100.0, 2)


def _unpack(file: Path) -> str:
    try:
        with zipfile.ZipFile(file) as packed:
            return packed.read(packed.namelist()[0]).decode("latin-1")
    except (*DAMAGED, IndexError) as error:
        raise DataError(
            f"{file} is damaged, or no zip file with one CSV file ({error}); download it again."
        ) from error


def parse(text: str, weighting: str, where: str) -> np.ndarray:
    """A table of the library's CSV format: remarks; a title such as "Average Value Weighted Returns
    -- Daily"; a header that begins with a comma; rows of a date and returns up to an empty line;
    then further tables, which are not read."""
    title = f"average {weighting} weighted returns"
    lines = iter(text.splitlines())
    if not any(title in line.lower() for line in lines):
        raise DataError(
            f'{where} has no table "{title.title()}"; give the daily CSV file of the library as it '
            "was downloaded."
        )
    header = next(lines, "")
    rows = []
    for line in lines:
        if not line.strip():
            break
        rows.append(line)
    names = header.split(",")[1:]
    if not names or not rows:
        raise DataError(
            f'{where}: the table "{title.title()}" has {len(names)} portfolios and {len(rows)} '
            "days; download the file again."
        )
    try:
        table = np.loadtxt(io.StringIO("\n".join(rows)), delimiter=",", ndmin=2)
    except ValueError as error:
        raise DataError(f'{where}, table "{title.title()}": {error}.') from error
    if table.shape[1] != len(names) + 1:
        raise DataError(
            f"{where} has {len(names)} portfolios in its header and {table.shape[1] - 1} returns a "
            "day; download the file again."
        )
    return table[:, 1:]
