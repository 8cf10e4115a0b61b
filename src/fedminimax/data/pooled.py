"""One pooled table, dealt out to clients: for studies of how heterogeneity matters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedminimax.data.folder import Folder, Reading, absent
from fedminimax.data.partition import by_column, dirichlet, iid
from fedminimax.data.sites import MISSING, DataError, Site, check_alike, listed, nearest
from fedminimax.data.tables import open_table


@dataclass(frozen=True)
class Pooled:
    """A pooled CSV (or npz) file, dealt out to clients evenly, unevenly or by a column.

    partition: "iid", "dirichlet" (by class; the smaller the concentration, the more unlike) or
    "column" (a client per value of `column`, which is then no feature).
    label, positive, drop, missing and categorical are as for a folder of tables.
    """

    path: str
    label: str
    partition: Literal["iid", "dirichlet", "column"] = "iid"
    clients: int = 10
    concentration: float = 0.5
    column: str = ""
    seed: int = 0
    positive: str = ""
    drop: tuple[str, ...] = ()
    missing: tuple[str, ...] = MISSING
    categorical: tuple[str, ...] = ()

    def read(self) -> Reading:
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise DataError(f"There is no file {str(file)!r}; give a CSV, csv.gz or npz file.")
        drop = (*self.drop, self.column) if self.partition == "column" else self.drop
        folder = Folder(
            str(file.parent), self.label, self.positive, drop, self.missing, self.categorical
        )
        reading = folder.read_files([file])
        names, parts = self._parts(reading.sites[0], file)
        sites = [reading.sites[0].take(rows) for rows in parts]
        sites = [
            Site(name, s.columns, s.features, s.labels)
            for name, s in zip(names, sites, strict=True)
        ]
        check_alike(sites)
        return Reading(sites, reading.notes + absent(sites, reading.schema), reading.schema)

    def _parts(
        self, pooled: Site, folder: Folder, file: Path
    ) -> tuple[list[str], list[np.ndarray]]:
        if self.partition == "column":
            raw = open_table(file, self.label, lambda name: name == self.column)
            if self.column not in raw.cells:
                raise DataError(
                    f"{file.name} has no column {self.column!r} to deal out by; its columns are "
                    f"{listed(raw.names, 30)}.{nearest(self.column, raw.names)}"
                )
            return by_column(np.asarray(raw.cells[self.column]))
        if self.partition == "iid":
            parts = iid(pooled.labels, self.clients, self.seed)
        else:
            parts = dirichlet(pooled.labels, self.clients, self.concentration, self.seed)
        return [str(k) for k in range(len(parts))], parts
