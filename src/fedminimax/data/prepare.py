"""From sites' tables to the clients of a run: split, thin, impute and encode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedminimax.data import encoding
from fedminimax.data.encoding import Encoder, answer
from fedminimax.data.folder import Reading
from fedminimax.data.imbalance import keep_positives
from fedminimax.data.sites import DataError, Schema, Site, named
from fedminimax.data.split import stratified_split
from fedminimax.data.statistics import Standardiser, Total, fit, from_ranges, plain_total


@dataclass(frozen=True)
class Split:
    """How the rows of each site are used.

    positive_share (the papers' imratio) thins the positives of the training and validation rows of
    every site to that share; the test rows stay as they are, as in the papers. standardise: with
    means and variances that the sites send as sums; without it, features are centred but not
    scaled. bins: numbers are encoded piecewise linearly over about so many quantile bins, missing
    values are marked, and each bin, code of a text column and mark needs `rare` training rows of
    all sites; 0: numbers stay numbers. auxiliary: how many training rows of each class the server
    holds as well, for a method that needs some. sites: only the first so many take part, whose rows
    stay cut as they were; 0: all. ranges: the lowest and highest value of each column of numbers,
    as everyone may know them, such as {age = [20, 90]}: numbers then go from -1 to 1, a missing one
    is 0, and no training row is asked.
    """

    train: float = 0.6
    validation: float = 0.2
    test: float = 0.2
    positive_share: float | None = None
    auxiliary: int = 0
    standardise: bool = True
    bins: int = 0
    rare: int = 10
    sites: int = 0
    ranges: dict[str, tuple[float, ...]] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ranges and (self.bins or not self.standardise):
            raise DataError(
                "split.ranges scales the features already; leave split.bins and split.standardise "
                "out."
            )
        for name, least in (("bins", 0), ("rare", 1)):
            if getattr(self, name) < least:
                raise DataError(f"split.{name} is {getattr(self, name)}; give {least} or more.")
        if self.bins and not self.standardise:
            raise DataError(
                f"split.standardise is false, but with split.bins = {self.bins} features have one "
                "scale already; leave standardise out, or set bins = 0."
            )


Inputs = Standardiser | Encoder  # from raw features to what a network takes


class Prepared(NamedTuple):
    """Rows per client and split, and what is needed to treat new rows alike."""

    names: tuple[str, ...]
    rows: dict[str, list[tuple[np.ndarray, np.ndarray]]]
    inputs: Inputs
    schema: Schema
    notes: list[str]

    def about(self) -> dict[str, Any]:
        return {**inputs_table(self.inputs), "schema": self.schema.to_json()}


def inputs_table(inputs: Inputs) -> dict[str, Any]:
    """What `inputs_of` reads."""
    return {"encoder" if isinstance(inputs, Encoder) else "standardiser": inputs.to_json()}


def inputs_of(table: dict[str, Any]) -> Inputs:
    """How rows are encoded, from JSON."""
    if "encoder" in table:
        return Encoder.from_json(table["encoder"])
    return Standardiser.from_json(table["standardiser"])


def prepare(reading: Reading, split: Split, least: int = 0, total: Total = plain_total) -> Prepared:
    """Only sums of the training rows decide how rows are imputed and encoded; with `least` > 1
    counts of values are of groups of that many rows. `total` adds up what sites send."""
    if not 0 <= split.sites <= len(reading.sites):
        raise DataError(
            f"split.sites is {split.sites}, but there are {len(reading.sites)} sites; give at most "
            "as many, or 0 for all."
        )
    reading = reading._replace(sites=reading.sites[: split.sites or None])
    parts = split_sites(reading.sites, split)
    inputs = learnt(parts["train"], reading.schema, split, least, total)
    return Prepared(
        tuple(site.name for site in reading.sites),
        {name: [rows(inputs, site) for site in sites] for name, sites in parts.items()},
        inputs,
        reading.schema,
        reading.notes + _one_class(reading.sites),
    )


def learnt(
    train: Sequence[Site], schema: Schema, split: Split, least: int = 0, total: Total = plain_total
) -> Inputs:
    """How rows are encoded: from ranges that are public, or from the sums of these sites,
    which `total` adds up."""
    if split.ranges:
        return from_ranges(schema, split.ranges)
    if not split.bins:
        return scaled(fit(train, total), split)

    def summed(edges: Sequence[np.ndarray]) -> np.ndarray:
        return total([answer(site.features, edges, least) for site in train])

    return encoding.fit(schema, summed, split.bins, split.rare)


def scaled(standardiser: Standardiser, split: Split) -> Standardiser:
    """As the split wants it: scaled, or centred only."""
    if split.standardise:
        return standardiser
    return replace(standardiser, scale=np.ones_like(standardiser.scale))


def split_sites(sites: list[Site], split: Split, first: int = 0) -> dict[str, list[Site]]:
    """The sites' rows by use; a use with a fraction of 0 is left out. `first` is the number of the
    first of these sites."""
    fractions = (split.train, split.validation, split.test)
    parts: dict[str, list[Site]] = {"train": [], "validation": [], "test": []}
    for number, site in enumerate(sites, first):
        cut = stratified_split(site.labels, fractions, split.seed, number)
        for (name, collected), index, fraction in zip(parts.items(), cut, fractions, strict=True):
            if not fraction:
                continue
            if not len(index):
                raise DataError(
                    f"Site {site.name!r} has {len(site)} rows, too few for {name} rows; give it "
                    f"more, leave it out, or set split.{name} = 0 and another part higher."
                )
            if split.positive_share is not None and name != "test":
                place = 2 * number + (name == "validation")
                kept = keep_positives(site.labels[index], split.positive_share, split.seed, place)
                index = index[kept]
            collected.append(site.take(index))
    return {name: collected for name, collected in parts.items() if collected}


def auxiliary(clients: Sequence[Sequence[Any]], count: int) -> tuple[np.ndarray, ...] | None:
    """The first `count` rows of each class, whoever's they are; None of 0.

    >>> one, two = (np.zeros((3, 1)), np.array([0, 0, 1])), (np.ones((2, 1)), np.array([1, 0]))
    >>> auxiliary([one, two], 2)[1]
    array([0, 0, 1, 1])
    """
    if count < 0:
        raise DataError(f"split.auxiliary is {count}; give a number of rows per class, or 0.")
    if not count:
        return None
    columns = [np.concatenate([np.asarray(c) for c in same]) for same in zip(*clients, strict=True)]
    if columns[1].ndim > 1:
        raise DataError(
            f"split.auxiliary is {count} rows of each class, but there are several labels; set it "
            "to 0, and choose a method that needs no rows at the server."
        )
    classes, found = np.unique(columns[1], return_counts=True)
    if (found < count).any():
        few = classes[found.argmin()]
        raise DataError(
            f"split.auxiliary is {count}, but there are only {found.min()} training rows of class "
            f"{few:g}; give a smaller number."
        )
    chosen = np.concatenate([np.flatnonzero(columns[1] == label)[:count] for label in classes])
    return tuple(column[chosen] for column in columns)


def _one_class(sites: list[Site]) -> list[str]:
    lone = [s.name for s in sites if _single(s) and len(np.unique(s.labels)) == 1]
    if not lone:
        return []
    return [f"all rows have the same label at {named(lone)}: no AUC can be told there"]


def _single(site: Site) -> bool:
    """Has it one label, of two classes?"""
    return site.classes == 2 and site.labels.ndim == 1


def rows(inputs: Inputs, site: Site) -> tuple[np.ndarray, np.ndarray]:
    """A site's rows as a run takes them."""
    return inputs.transform(site.features), site.labels.astype(np.float64)
