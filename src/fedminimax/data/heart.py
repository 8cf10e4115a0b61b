"""The UCI Heart Disease files of the package (CC BY 4.0, see heart_disease/ATTRIBUTION.md)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from fedminimax.data.folder import Reading, absent, site
from fedminimax.data.sites import MISSING, Column, DataError, Schema, Site, check_alike
from fedminimax.data.sources import Copy, File, Source
from fedminimax.data.tables import Raw, encode, raw_csv

# fmt: off
HEADER = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg",
    "thalach", "exang", "oldpeak", "slope", "ca", "thal", "num",
)
# fmt: on
FILES = {"cleveland": "cleveland", "hungary": "hungarian", "switzerland": "switzerland", "va": "va"}

# From the documentation (heart-disease.names): a hospital need not have seen every code.
# `ca` stays a number: it counts vessels. `sex`, `fbs` and `exang` are 0/1 already.
CODES = {
    "cp": ("1", "2", "3", "4"),  # typical angina, atypical angina, non-anginal pain, asymptomatic
    "restecg": ("0", "1", "2"),  # normal, ST-T abnormality, left ventricular hypertrophy
    "slope": ("1", "2", "3"),  # up, flat, down: the order has no unit, so it is not a number
    "thal": ("3", "6", "7"),  # normal, fixed defect, reversible defect
}
FLAMBY = ["age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "cp", "restecg"]

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"
RECORD = "our record of UCI's files"
SHA256 = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungary": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}


@dataclass(frozen=True)
class Heart:
    """UCI Heart Disease: 920 patients of four hospitals, 55 % with disease by angiography.

    columns = "all": every variable, 22 features, all rows, missing values left missing.
    columns = "flamby": the 13 features and the complete rows of the benchmark FLamby.
    zeros: a cholesterol of 0 (172 patients, all of Switzerland's among them) and a resting blood
    pressure of 0 (one patient) are impossible; "missing" reads them as missing, "keep" as numbers.
    "auto" means missing for "all", and keep for "flamby", because FLamby keeps them.
    """

    columns: Literal["all", "flamby"] = "all"
    zeros: Literal["auto", "missing", "keep"] = "auto"
    source: ClassVar[Source] = Source(
        "heart",
        "UCI Heart Disease",
        "uci-heart-disease",
        "CC BY 4.0",
        "https://archive.ics.uci.edu/dataset/45/heart+disease",
        tuple(
            File(
                f"{UCI}/processed.{file}.data",
                (Copy(f"processed.{file}.data", f"sha256:{SHA256[name]}", RECORD),),
            )
            for name, file in FILES.items()
        ),
        home=Path(str(files("fedminimax.data"))) / "heart_disease",
    )

    def __post_init__(self) -> None:
        if self.columns not in ("all", "flamby"):
            raise DataError(f"columns is {self.columns!r}; use 'all' or 'flamby'.")
        if self.zeros not in ("auto", "missing", "keep"):
            raise DataError(f"zeros is {self.zeros!r}; use 'auto', 'missing' or 'keep'.")

    def sites(self) -> list[Site]:
        return self.read().sites

    def read(self) -> Reading:
        schema, raws = self.schema(), [_raw(name) for name in FILES]
        sites = [site(raw, schema).take(self._rows(raw)) for raw in raws]
        check_alike(sites)
        return Reading(sites, absent(sites, schema), schema)

    def schema(self) -> Schema:
        """How the raw files are read; it also reads new rows from a CSV with UCI's column names."""
        flamby = self.columns == "flamby"
        zeros = ("keep" if flamby else "missing") if self.zeros == "auto" else self.zeros
        return _schema(FLAMBY if flamby else list(HEADER[:-1]), flamby, zeros == "missing")

    def _rows(self, raw: Raw) -> np.ndarray:
        if self.columns == "all":
            return np.arange(len(raw.lines))
        # A row that is complete in the file stays, whatever its zeros are taken for.
        written = encode(raw, _schema(FLAMBY, flamby=True, zeros_missing=False))
        return np.flatnonzero(~np.isnan(written).any(axis=1))


def _schema(names: list[str], flamby: bool, zeros_missing: bool) -> Schema:
    columns = []
    for name in names:
        missing = ("0",) if zeros_missing and name in ("chol", "trestbps") else ()
        if name in CODES:
            columns.append(Column(name, "text", CODES[name], drop_first=flamby))
        else:
            columns.append(Column(name, missing=missing))
    # The grades 1 to 4 of the diagnosis are all "disease"; -9 is the documented mark for a missing
    # value.
    return Schema(tuple(columns), "num", ("1", "2", "3", "4"), ("0",), (*MISSING, "-9"))


def _raw(name: str) -> Raw:
    file = f"processed.{FILES[name]}.data"
    text = (files("fedminimax.data") / "heart_disease" / file).read_text("utf-8")
    return raw_csv(name, file, text, "num", header=HEADER)
