"""Federated encoding of tables: numbers piecewise linearly over quantile bins, rare codes as one,
missing values marked.

Everything is learnt from sums of counts, so secure aggregation fits underneath. The server sends
edges for each column, each site counts its training rows between them, and the server keeps the
sums. The first edges suit numbers of any size; each further exchange splits the bins in which a
wanted quantile lies, until the bin holds at most max(1/1000 of the rows, `rare` rows) or one number
only. Two or three exchanges of 4,096 bins do for most tables.

A site with `least` > 1 does not count its values but means of groups: it sorts the values of a
column, cuts them into groups of at least `least` rows, and puts each group at its mean. It tells
the same groups in every exchange, so counts between other edges tell no more than these means. A
threshold divides one group of a site at the most, so its counts are off by fewer than 2 `least`
rows. In all, an edge is off its quantile by at most

    max(1/1000, rare / rows) + sites * 2 least / rows     (the second term only with least > 1)

where `rows` are the rows that have a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedminimax.data.sites import Column, DataError, Schema, listed, tuples
from fedminimax.metrics.federated_auc import LARGEST, first_edges, split_bin

# The edges of each column -> the sums over sites of what `answer` returns.
Ask = Callable[[Sequence[np.ndarray]], np.ndarray]

BINS = 4096  # of the histogram of a column
EXCHANGES = 8  # at most
TOLERANCE = 1e-3  # of the rank of an edge, in rows per row
TOO_LARGE = 1e150


# A site's side


def answer(features: np.ndarray, edges: Sequence[np.ndarray], least: int = 0) -> np.ndarray:
    """A site's counts, column after column: its values in each bin, then its missing values.

    >>> answer(np.array([[1.0], [3.0], [np.nan]]), [np.array([2.0])]).tolist()
    [1.0, 1.0, 1.0]
    """
    found = []
    for column, own in zip(features.T, edges, strict=True):
        values = group_values(column[~np.isnan(column)], least)
        missing = np.isnan(column).sum()
        found.append(np.bincount(np.searchsorted(own, values, "right"), minlength=len(own) + 1))
        found.append([missing if missing >= least else 0])
    return np.concatenate(found).astype(np.float64)


def group_values(values: np.ndarray, least: int) -> np.ndarray:
    """The values in order, those that fewer than `least` rows have at the mean of a group.

    >>> group_values(np.array([0, 0, 0, 1, 3, 5, 7]), 2).tolist()
    [0.0, 0.0, 0.0, 2.0, 2.0, 6.0, 6.0]
    """
    values = np.sort(values).astype(np.float64)
    if least < 2:
        return values
    if len(values) < least:
        return values[:0]
    _, run, ties = np.unique(values, return_inverse=True, return_counts=True)
    alone = ties[run] < least
    # Stretches of rows alone, and piles, in turns.
    stretch = np.cumsum(np.concatenate([[False], alone[1:] != alone[:-1]]))
    starts = np.searchsorted(stretch, np.arange(stretch[-1] + 1))
    sizes = np.diff(np.append(starts, len(values)))
    few = alone & (sizes[stretch] < least)
    # Too few between piles count as on the one before, or after.
    before = starts[stretch] - 1
    after = np.minimum(starts[stretch] + sizes[stretch], len(values) - 1)
    values = np.where(few, values[np.where(before >= 0, before, after)], values)
    groups = np.maximum(sizes // least, 1)[stretch]
    place = (np.arange(len(values)) - starts[stretch]) * groups // sizes[stretch]
    own = np.where(alone & ~few, place, 0)
    first = np.concatenate([[True], (stretch[1:] != stretch[:-1]) | (own[1:] != own[:-1])])
    begin = np.flatnonzero(first)
    counts = np.diff(np.append(begin, len(values)))
    means = np.add.reduceat(values, begin) / counts
    # Of equal numbers the mean may differ in the last bit.
    means = np.clip(means, values[begin], values[begin + counts - 1])
    return np.where(alone & ~few, np.repeat(means, counts), values)


# What is learnt


@dataclass(frozen=True)
class Part:
    """How one raw column, which is `width` features, is encoded."""

    name: str
    width: int
    edges: tuple[float, ...] = ()  # of the bins of a number
    kept: tuple[int, ...] = ()  # which codes have a feature of their own
    codes: tuple[str, ...] = ()  # and what they are
    other: bool = False  # one for all other codes
    missing: bool = False  # one for missing values

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the encoded features."""
        bins = [f"{self.name} bin {i}" for i in range(1, len(self.edges))]
        codes = [f"{self.name}={code}" for code in self.codes]
        other = [f"{self.name}: other"] if self.other else []
        return (*bins, *codes, *other, *([f"{self.name}: missing"] if self.missing else []))

    def encode(self, features: np.ndarray) -> np.ndarray:
        """NaN where the value is missing, but for the feature that says so."""
        lack = np.isnan(features[:, :1])
        if len(self.edges) > 1:
            inside = _inside(features[:, 0], np.array(self.edges))
        else:
            inside = features[:, list(self.kept)]
            if not self.other:
                inside = np.where(inside.any(axis=1, keepdims=True), inside, np.nan)
        other = [1.0 - inside.sum(axis=1, keepdims=True)] if self.other else []
        return np.hstack([inside, *other, *([lack.astype(np.float64)] if self.missing else [])])


def _inside(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How far each value is in each bin, from 0 to 1."""
    return np.clip((values[:, None] - edges[:-1]) / np.diff(edges), 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class Encoder:
    """Raw features as a network takes them: encoded, centred and doubled; 0 for what is missing.

    A number x becomes, for each bin [low, high), (x - low) / (high - low) between 0 and 1
    (Gorishniy, Rubachev and Babenko, On Embeddings for Numerical Features in Tabular Deep Learning,
    NeurIPS 2022); what is beyond the outer edges counts as on them. A 0/1 column, and a code of a
    text column, stays as it is. A code that training never saw counts as one of the rare ones, or,
    where there were none, as missing.
    """

    columns: tuple[str, ...]
    parts: tuple[Part, ...]
    mean: np.ndarray  # of the encoded features
    exchanges: int = 0
    rank_error: float = 0.0  # how far edges are off their quantiles, in the counts as told

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the encoded features."""
        return tuple(name for part in self.parts for name in part.outputs)

    def transform(self, features: np.ndarray) -> np.ndarray:
        """The encoded rows, (n, len(outputs))."""
        features = np.asarray(features, np.float64)
        if features.ndim != 2 or features.shape[1] != len(self.columns):
            raise DataError(
                f"The features have shape {features.shape}, but the encoder was fitted to "
                f"{len(self.columns)} columns; give (rows, {len(self.columns)})."
            )
        starts = np.cumsum([0, *(part.width for part in self.parts)])
        found = [
            part.encode(features[:, start : start + part.width])
            for part, start in zip(self.parts, starts, strict=False)
            if part.outputs
        ]
        encoded = np.hstack(found)
        return np.where(np.isnan(encoded), 0.0, 2 * (encoded - self.mean))

    def to_json(self) -> dict[str, Any]:
        parts = [asdict(part) for part in self.parts]
        return {**vars(self), "parts": parts, "mean": self.mean.tolist()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Encoder:
        parts = tuple(Part(**tuples(part)) for part in value["parts"])
        mean, columns = np.array(value["mean"], np.float64), tuple(value["columns"])
        return Encoder(**{**value, "columns": columns, "parts": parts, "mean": mean})


# The server's side


class Counts(NamedTuple):
    """The rows of all sites in one raw feature."""

    edges: np.ndarray  # of the bins
    counts: np.ndarray
    missing: float

    @property
    def ends(self) -> np.ndarray:
        return np.concatenate([[-LARGEST], self.edges, [LARGEST]])

    @property
    def below(self) -> np.ndarray:
        """The rows below each of the ends."""
        return np.concatenate([[0.0], np.cumsum(self.counts)])


class Learnt(NamedTuple):
    """How a raw column is encoded, and the means of what comes out."""

    part: Part
    mean: np.ndarray = np.empty(0)
    error: float = 0.0  # of the edges, in rank

    def mark_missing(self, own: Counts, rare: int) -> Learnt:
        """With a mark of missing values, where enough rows miss one."""
        rows = own.missing + own.counts.sum()
        if own.missing < _enough(rows, rare):
            return self
        share = own.missing / rows
        part = replace(self.part, missing=True)
        return self._replace(part=part, mean=np.append(self.mean, share))


def fit(schema: Schema, ask: Ask, bins: int = 16, rare: int = 10) -> Encoder:
    """The encoder of the pooled training rows: at most `bins` even bins per number and a few more
    in its tails; a bin, a code and a mark of missing values need `rare` rows of all sites, or a
    quarter of them where that is fewer."""
    numbers = [_as_numbers(column) for column in schema.columns for _ in column.features]
    found, exchanges = _histograms(numbers, ask, bins, rare)
    empty = [n for n, own in zip(schema.features, found, strict=True) if not own.counts.sum()]
    lacking = [c.name for c in schema.columns if c.features and set(c.features) <= set(empty)]
    if lacking:
        raise DataError(
            f"No site has values in the columns {listed(lacking)}; leave them out, or add rows "
            "that have them."
        )
    learnt, start = [], 0
    for column in schema.columns:
        own = found[start : start + len(column.features)]
        start += len(own)
        if _as_numbers(column):
            pairs = zip(column.features, own, strict=True)
            learnt += [_bins(name, c, bins, rare).mark_missing(c, rare) for name, c in pairs]
        else:
            learnt.append(_codes(column, own, rare).mark_missing(own[0], rare))
    mean = np.concatenate([each.mean for each in learnt])
    if not len(mean):
        raise DataError(
            f"No column has two values that {rare} training rows, or a quarter of them, have each: "
            "give more rows, or set split.bins = 0."
        )
    return Encoder(
        schema.features,
        tuple(each.part for each in learnt),
        mean,
        exchanges,
        max(each.error for each in learnt),
    )


def _as_numbers(column: Column) -> bool:
    """Beside a code of reference, which has no feature, the others are 0/1 numbers."""
    return column.kind == "number" or column.drop_first


def _histograms(
    numbers: Sequence[bool], ask: Ask, bins: int, rare: int
) -> tuple[list[Counts], int]:
    """The counts of each feature, in bins that are small where a quantile is, and the exchanges."""
    # A feature of a text column is 0 or 1.
    edges = [first_edges(BINS) if number else np.array([0.5]) for number in numbers]
    found = _counts(edges, ask(edges))
    for exchange in range(1, EXCHANGES):
        finer = {
            i: own
            for i, number in enumerate(numbers)
            if number and (own := _refine(found[i], bins, rare)) is not None
        }
        if not finer:
            return found, exchange
        edges = [finer.get(i, np.empty(0)) for i in range(len(numbers))]
        again = _counts(edges, ask(edges))
        found = [again[i] if i in finer else own for i, own in enumerate(found)]
    return found, EXCHANGES


def _counts(edges: Sequence[np.ndarray], told: np.ndarray) -> list[Counts]:
    """The sums of what sites answered, by feature."""
    stops = np.cumsum([len(own) + 2 for own in edges])[:-1]
    parts = np.split(told, stops)
    return [Counts(own, part[:-1], part[-1]) for own, part in zip(edges, parts, strict=True)]


def _enough(rows: float, rare: int) -> int:
    """The rows that a bin, a code or a mark needs: of few, a quarter."""
    return max(1, min(rare, int(rows) // 4))


def _targets(rows: float, bins: int, rare: int) -> np.ndarray:
    """The ranks at which edges are wanted: even ones, a few in the tails, and the outer ones."""
    tail, tails = 1 / bins / 4, []
    while tail * rows > 2 * rare:
        tails.append(tail)
        tail /= 4
    tails = np.array([*tails, rare / rows])
    return rows * np.unique(np.concatenate([np.arange(1, bins) / bins, tails, 1 - tails]))


def _find_bins(own: Counts, targets: np.ndarray) -> np.ndarray:
    """The bin that holds each target."""
    return np.clip(np.searchsorted(own.below, targets, "right") - 1, 0, len(own.counts) - 1)


def _single(own: Counts) -> np.ndarray:
    """Which bins hold one number only."""
    return own.ends[1:] <= np.nextafter(own.ends[:-1], np.inf)


def _refine(own: Counts, bins: int, rare: int) -> np.ndarray | None:
    """Finer edges where a target's bin has too many rows; None: there is none."""
    rows = own.counts.sum()
    rare = _enough(rows, rare)
    if rows < 2 * rare:
        return None
    held = np.unique(_find_bins(own, _targets(rows, bins, rare)))
    wide = (own.counts > max(TOLERANCE * rows, rare)) & ~_single(own)
    wide = held[wide[held]]
    if not len(wide):
        return None
    ends = own.ends
    kept = np.unique(np.concatenate([ends[held], ends[held + 1]]))
    pieces = (BINS - len(kept)) // len(wide) - 2
    parts = [kept]
    for i in wide.tolist():
        low, high = float(ends[i]), float(ends[i + 1])
        pile = _plainest(low, high)
        parts += [split_bin(low, high, pieces), np.array([pile, np.nextafter(pile, np.inf)])]
    finer = np.unique(np.concatenate(parts))
    return finer[(finer > -LARGEST) & (finer < LARGEST)]


def _plainest(low: float, high: float) -> float:
    """A number in [low, high) of few decimals, as people write them: there, rows may tie."""
    for digits in range(-12, 16):
        value = round(float(np.ceil(low * 10.0**digits)) / 10.0**digits, digits)
        if low <= value < high:
            return value
    return low


def _bins(name: str, own: Counts, bins: int, rare: int) -> Learnt:
    """How a number is encoded."""
    rows = own.counts.sum()
    rare = _enough(rows, rare)
    if rows < 2 * rare:
        return Learnt(Part(name, 1))
    targets, ends, below = _targets(rows, bins, rare), own.ends, own.below
    held = _find_bins(own, targets)
    exact = _single(own)[held]
    # The number of a bin of one number; else the nearer end.
    nearer = held + (targets - below[held] > below[held + 1] - targets)
    chosen = np.clip(np.where(exact, held, nearer), 1, len(ends) - 2)
    error = np.where(exact, 0.0, np.abs(below[chosen] - targets)).max() / rows
    edges = ends[_merge_bins(np.unique(chosen), below, rare)]
    if np.abs(edges).max() > TOO_LARGE:
        raise DataError(f"The values in the column {name!r} are too large; rescale them.")
    if len(edges) < 2:
        return Learnt(Part(name, 1))
    part = Part(name, 1, tuple(edges.tolist()))
    low, high = (
        _inside(np.clip(side, edges[0], edges[-1]), edges) for side in (ends[:-1], ends[1:])
    )
    # As if rows lay evenly within a bin.
    return Learnt(part, own.counts @ (low + high) / 2 / rows, float(error))


def _merge_bins(chosen: np.ndarray, below: np.ndarray, rare: int) -> np.ndarray:
    """The edges without those that would leave fewer than `rare` rows in a bin."""
    kept = [chosen[0]]
    for edge in chosen[1:]:
        if below[edge] - below[kept[-1]] >= rare:
            kept.append(edge)
    if kept[-1] != chosen[-1] and len(kept) > 1:
        kept[-1] = chosen[-1]  # the outermost one stays
    return np.array(kept)


def _codes(column: Column, own: Sequence[Counts], rare: int) -> Learnt:
    """How a text column is encoded: codes that enough rows have, and one for all others."""
    ones = np.array([counts.counts[1] for counts in own])
    rows = own[0].counts.sum()
    kept = np.flatnonzero(ones >= _enough(rows, rare))
    if not len(kept):
        return Learnt(Part(column.name, len(own)))
    shares = ones[kept] / rows
    other = len(kept) < len(ones)
    if other:
        shares = np.append(shares, max(0.0, 1.0 - shares.sum()))
    codes = tuple(column.codes[i] for i in kept)
    part = Part(column.name, len(own), (), tuple(kept.tolist()), codes, other)
    return Learnt(part, shares)
