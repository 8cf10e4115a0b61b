"""One pooled table, dealt out to clients: for studies of how heterogeneity matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from fedminimax.data.folder import Folder, Reading, absent
from fedminimax.data.partition import by_column, dirichlet, iid, own_classes
from fedminimax.data.sites import MISSING, DataError, Schema, check_alike, listed, nearest, plain
from fedminimax.data.split import strata
from fedminimax.data.tables import KINDS, open_table


@dataclass(frozen=True)
class Pooled:
    """A pooled CSV, Parquet or npz file, dealt out to clients evenly, unevenly or by a column.

    partition: "iid", "dirichlet" (by class; the smaller the concentration, the more unlike),
    "classes" (no two clients share a label; with positives and negatives, each client has some of
    both) or "column" (a client per value of `column`, which is then no feature).
    label, classes, positive, drop, missing and categorical are as for a folder of tables. The
    papers' AUC data are classes = "halves" with partition "iid" or "classes", and their imratio is
    positive_share in [split].
    """

    path: str
    label: str | tuple[str, ...]
    partition: Literal["iid", "dirichlet", "classes", "column"] = "iid"
    clients: int = 10
    concentration: float = 0.5
    column: str = ""
    seed: int = 0
    positive: str = ""
    drop: tuple[str, ...] = ()
    missing: tuple[str, ...] = MISSING
    categorical: tuple[str, ...] = ()
    classes: Literal["two", "halves", "all"] = "two"

    def read(self) -> Reading:
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise DataError(f"There is no file {str(file)!r}; give a {KINDS} file.")
        owners = self._owners(file) if self.partition == "column" else None
        drop = self.drop if owners is None else (*self.drop, self.column)
        options = (self.label, self.positive, drop, self.missing, self.categorical)
        folder = Folder(str(file.parent), *options, classes=self.classes)
        reading = folder.read_files([file])
        pooled = reading.sites[0]
        if folder.labels and self.partition in ("dirichlet", "classes"):
            raise DataError(
                f"partition is {self.partition!r}, which deals rows out by one label, but label "
                "names several; use 'iid' or 'column'."
            )
        if owners is not None:
            names, parts = by_column(owners)
        else:
            parts = self._dealt(file, strata(pooled.labels), reading.schema)
            names = [str(k) for k in range(len(parts))]
        sites = [
            replace(pooled.take(rows), name=name) for name, rows in zip(names, parts, strict=True)
        ]
        check_alike(sites)
        return Reading(sites, reading.notes + absent(sites, reading.schema), reading.schema)

    def _owners(self, file: Path) -> np.ndarray:
        """Which client each row belongs to."""
        raw = open_table(file, None, lambda name: name == self.column, (self.column,), self.missing)
        labels = (self.label,) if isinstance(self.label, str) else self.label
        if self.column not in raw.cells or self.column in labels:
            others = [name for name in raw.names if name not in labels]
            raise DataError(
                f"{file.name} has no column {self.column!r} to deal out by; set `column` to one of "
                f"{listed(others, 30)}.{nearest(self.column, others)}"
            )
        return np.asarray(raw.cells[self.column])

    def _dealt(self, file: Path, labels: np.ndarray, schema: Schema) -> list[np.ndarray]:
        if self.partition == "iid":
            return iid(labels, self.clients, self.seed)
        if self.partition == "dirichlet":
            return dirichlet(labels, self.clients, self.concentration, self.seed)
        # As they were written: of two classes, each may have several labels.
        written = open_table(file, str(self.label), lambda name: False).labels or ()
        values = np.array([plain(value) for value in written])
        sides = {"positive": schema.positive, "negative": schema.negative}
        if schema.classes:
            sides = {"different": schema.classes}
        arrays = {name: np.array(side) for name, side in sides.items()}
        return own_classes(values, self.clients, self.seed, arrays)
