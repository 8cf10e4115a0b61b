"""Federated standardisation: sites send sums, the server learns the pooled mean and scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedminimax.data.sites import DataError, Schema, Site, check_columns, listed


def local_moments(features: np.ndarray, centre: np.ndarray | None = None) -> np.ndarray:
    """A site's (3, d): the count of present values, the sum of x - centre and of its square.

    >>> local_moments(np.array([[1.0], [3.0], [np.nan]])).tolist()
    [[2.0], [4.0], [10.0]]
    """
    present = ~np.isnan(features)
    shifted = np.where(present, features if centre is None else features - centre, 0.0)
    return np.stack([present.sum(axis=0), shifted.sum(axis=0), (shifted**2).sum(axis=0)])


@dataclass(frozen=True, eq=False)
class Standardiser:
    """x -> (x - mean) / scale; a missing value is put at the federated mean, so it becomes 0."""

    columns: tuple[str, ...]
    mean: np.ndarray  # (d,)
    scale: np.ndarray  # (d,), 1 for a constant column
    floats_up: int = 0  # sent by each site
    floats_down: int = 0  # received by each site
    exchanges: int = 0

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what comes out."""
        return self.columns

    def transform(self, features: np.ndarray) -> np.ndarray:
        features = np.asarray(features, np.float64)
        if features.ndim != 2 or features.shape[1] != len(self.columns):
            raise DataError(
                f"The features have shape {features.shape}, but the standardiser was fitted to "
                f"{len(self.columns)} columns; give (rows, {len(self.columns)})."
            )
        return np.where(np.isnan(features), 0.0, (features - self.mean) / self.scale)

    def apply(self, site: Site) -> Site:
        """The site with its features standardised."""
        check_columns(site.name, site.columns, self.columns)
        return replace(site, features=self.transform(site.features))

    def to_json(self) -> dict[str, Any]:
        arrays = {"mean": self.mean.tolist(), "scale": self.scale.tolist()}
        return {**vars(self), "columns": list(self.columns), **arrays}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Standardiser:
        mean, scale = np.array(value["mean"], np.float64), np.array(value["scale"], np.float64)
        return Standardiser(
            **{**value, "columns": tuple(value["columns"]), "mean": mean, "scale": scale}
        )


def from_ranges(schema: Schema, ranges: Mapping[str, Sequence[float]]) -> Standardiser:
    """The standardiser that puts each column of numbers between -1 and 1 by its public range. The
    marks of codes have the range from 0 to 1."""
    wrong = {name: given for name, given in ranges.items() if not _is_range(given)}
    if wrong:
        name, given = next(iter(wrong.items()))
        raise DataError(f"The range of column {name!r} is {list(given)}; give [lowest, highest].")
    numbers = [column.name for column in schema.columns if column.kind == "number"]
    if lack := [name for name in numbers if name not in ranges]:
        raise DataError(
            f"split.ranges says nothing of {listed(lack)}; give the lowest and the highest value "
            "that everyone may know of, for each column of numbers."
        )
    if other := [name for name in ranges if name not in numbers]:
        raise DataError(f"split.ranges names {listed(other)}, which are no columns of numbers.")
    bounds = np.array([ranges.get(name, (0.0, 1.0)) for name in schema.features], np.float64)
    low, high = bounds.T
    return Standardiser(schema.features, (low + high) / 2, (high - low) / 2)


def _is_range(given: Sequence[float]) -> bool:
    return len(given) == 2 and bool(np.isfinite(given).all()) and given[0] < given[1]


Total = Callable[[Sequence[np.ndarray]], np.ndarray]  # adds up what sites send


def plain_total(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum in floating point."""
    return np.sum(parts, axis=0)


def fit(sites: Sequence[Site], total: Total = plain_total) -> Standardiser:
    """The standardiser of the pooled rows, from two exchanges of sums; give training rows only."""
    if not sites:
        raise DataError("There are no sites to fit the standardiser to; give at least one.")
    columns = sites[0].columns
    for site in sites[1:]:
        check_columns(site.name, site.columns, columns)

    def summed(centre: np.ndarray | None) -> np.ndarray:
        return total([local_moments(site.features, centre) for site in sites])

    return fit_sums(columns, summed)


@np.errstate(over="ignore", invalid="ignore")  # what overflows is refused by name below
def fit_sums(
    columns: tuple[str, ...], summed: Callable[[np.ndarray | None], np.ndarray]
) -> Standardiser:
    """The same from the sites' sums: `summed` is asked twice for the sum of `local_moments`."""
    # First exchange: counts and sums go up, the mean comes down.
    count, total, _ = summed(None)
    empty = [column for column, number in zip(columns, count, strict=True) if not number]
    if empty:
        raise DataError(
            f"No site has a value in the columns {listed(empty)}; leave them out, or add rows that "
            "have them."
        )
    mean = total / count
    # Second exchange: sums and squares about that mean go up, mean and scale come down. One alone
    # would take the difference of two large numbers; and the sum corrects the mean's own rounding.
    _, rest, squares = summed(mean)
    variance = np.maximum(squares / count - (rest / count) ** 2, 0.0)
    mean, scale = mean + rest / count, np.sqrt(variance)
    if not (np.isfinite(mean) & np.isfinite(scale)).all():
        large = [
            column
            for column, value in zip(columns, mean + scale, strict=True)
            if not np.isfinite(value)
        ]
        raise DataError(
            f"The values in the columns {listed(large)} are too large to sum; rescale them."
        )
    # A spread below the resolution of the numbers themselves is no spread.
    constant = scale <= np.maximum(8 * np.finfo(np.float64).eps * np.abs(mean), 1e-150)
    width = len(columns)
    return Standardiser(
        columns, mean, np.where(constant, 1.0, scale), 4 * width, 3 * width, exchanges=2
    )
