"""Arrays in memory with a column that says which site each row is of, as sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedminimax.data.folder import Reading
from fedminimax.data.sites import Column, DataError, Schema, Site, plain, repeated
from fedminimax.data.split import stratified_split

LABEL = "label"
NO_NAME = ("", "nan", "NaT", "<NA>")  # as numpy's and pandas' missing values write themselves


def on_host(values: Any) -> Any:
    """A torch tensor as a numpy array; anything else as it is, so that no other library is needed
    to tell."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values


def reading_of(
    features: np.ndarray,
    numbers: np.ndarray,
    classes: Sequence[Any],
    sites: Any = None,
    names: Sequence[str | Column] | None = None,
    labels: Sequence[str] = (),
) -> Reading:
    """The sites in the order of their names; `numbers` says which of `classes` a row is of, or has
    a column for each of several `labels`; `names` are those of the columns, or the columns
    themselves where some were texts."""
    whose = site_names(sites, len(features))
    known = [
        name if isinstance(name, Column) else Column(name)
        for name in (() if names is None else names)
    ]
    columns = [feature for column in known for feature in column.features]
    if not known or repeated(columns):
        columns = [f"x{i}" for i in range(features.shape[1])]
        known = list(map(Column, columns))
    count = len(classes)
    found = [
        Site(name, tuple(columns), features[rows], numbers[rows], count)
        for name, rows in ((name, whose == name) for name in np.unique(whose).tolist())
    ]
    texts = tuple(plain(value) for value in classes)
    sides = {"positive": texts[1:], "negative": texts[:1]} if count == 2 else {"classes": texts}
    if labels:
        return Reading(found, [], Schema(tuple(known), "", labels=tuple(labels)))
    return Reading(found, [], Schema(tuple(known), LABEL, **sides))


def site_names(sites: Any, rows: int) -> np.ndarray:
    """The name of each row's site; without any, all rows are of one."""
    if sites is None:
        return np.full(rows, "all")
    given = np.asarray(on_host(sites), dtype=object)
    if given.shape != (rows,):
        raise DataError(
            f"sites has shape {given.shape} for {rows} rows of X; give the name or number of its "
            "site for every row."
        )
    names = ["" if name is None else plain(name) for name in given]
    lack = [row for row, name in enumerate(names) if name in NO_NAME]
    if lack:
        raise DataError(
            f"sites has no name in row {lack[0]} ({len(lack)} rows in all); say which site they "
            "are of, or leave them out."
        )
    return np.array(names)


def check_validation(sites: Sequence[Site], share: float, seed: int) -> None:
    """Refuse a site that is too small to keep rows for validation."""
    if not share:
        return
    for number, site in enumerate(sites):
        if not len(stratified_split(site.labels, (1 - share, share, 0.0), seed, number)[1]):
            raise DataError(
                f"Site {site.name!r} has {len(site)} rows, and of no class two, so none can be "
                "kept for validation; give it more, leave it out, or set validation_share=0."
            )
