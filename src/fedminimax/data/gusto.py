"""The patients of the GUSTO-I trial, by region or by group of hospitals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from fedminimax.data.folder import Reading
from fedminimax.data.pooled import Pooled
from fedminimax.data.sites import DataError, listed
from fedminimax.data.sources import OURS, Copy, File, Source, find

By = Literal["regl", "grpl", "grps"]


@dataclass(frozen=True)
class Gusto:
    """GUSTO-I: death within 30 days of a heart attack, 40,830 patients, 7.0 % of them positive.

    by: a client for each of the 16 regions ("regl"), or for each of the 48 or 121 groups of
    hospitals ("grpl", "grps"). The treatment is no feature: it was drawn by lot.
    folder: where the file lies, if not where FEDMINIMAX_DATA says or in the cache.
    """

    folder: str = ""
    by: By = "regl"
    source: ClassVar[Source] = Source(
        "gusto",
        "GUSTO-I",
        "gusto",
        "none stated; not to be passed on",
        "https://hbiostat.org/data/",
        (
            File(
                "",
                (
                    Copy(
                        "gusto.csv.gz",
                        "sha256:f88a5f20b4839698ff89fd4fdc8e0e244437dbcde4eb0fa40927cbbb6b42f65e",
                        OURS,
                    ),
                ),
            ),
        ),
        'write it in R, with write.csv(predtools::gusto, gzfile("gusto.csv.gz"), row.names = '
        "FALSE), and put it there",
    )

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise DataError(f"by is {self.by!r}; use one of {listed(get_args(By))}.")

    def read(self) -> Reading:
        path = str(find(self.source, ("gusto.csv.gz",), self.folder))
        others = tuple(name for name in get_args(By) if name != self.by)
        drop = ("tpa", "tx", *others)
        return Pooled(path, "day30", partition="column", column=self.by, drop=drop).read()
