"""Deal the rows of pooled data out to clients: one ascending index array for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedminimax.data.imbalance import keep_positives
from fedminimax.data.sites import DataError
from fedminimax.random import generator


def iid(labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    """Equal shares (to one row) of a random order."""
    _check(len(labels), clients)
    order = generator(seed, "iid").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(
    labels: np.ndarray, clients: int, concentration: float, seed: int
) -> list[np.ndarray]:
    """Each class dealt out in shares from a Dirichlet distribution: the smaller, the more unlike.

    A client left with nothing gets a row of the richest: no resampling that might never end.
    """
    labels = np.asarray(labels)
    _check(len(labels), clients)
    if not 0 < concentration < np.inf:
        raise DataError(
            f"The concentration is {concentration}; give a number above 0, such as 0.5."
        )
    parts: list[list[int]] = [[] for _ in range(clients)]
    for place, value in enumerate(np.unique(labels)):
        draw = generator(seed, "dirichlet", place)
        rows = draw.permutation(np.flatnonzero(labels == value))
        shares = draw.dirichlet(np.full(clients, concentration))
        # Beyond what the generator can represent, the limits stand in: all to one, or equal shares.
        if not np.isfinite(shares).all() or not np.isclose(shares.sum(), 1):
            one = np.eye(clients)[draw.integers(clients)]
            shares = one if concentration < 1 else np.full(clients, 1 / clients)
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for part, chosen in zip(parts, np.split(rows, cuts), strict=True):
            part.extend(chosen.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [np.sort(np.array(part, np.int64)) for part in parts]


def positive_classes(labels: np.ndarray) -> np.ndarray:
    """The upper half of the classes, in order: what the papers' code takes as positive."""
    classes = np.unique(labels)
    return classes[len(classes) // 2 :]


def own_classes(
    labels: np.ndarray, clients: int, seed: int, sides: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """The classes of each named side dealt out to the clients, so that no two clients share one."""
    labels = np.asarray(labels)
    _check(len(labels), clients)
    most = min(map(len, sides.values()))
    if clients > most:
        there = " and ".join(f"{len(side)} {name}" for name, side in sides.items())
        raise DataError(
            f"{clients} clients cannot each have classes of their own: there are {there} classes. "
            f"Ask for at most {most} clients."
        )
    draw = generator(seed, "class groups")
    dealt = [draw.permutation(side) for side in sides.values()]
    own = [np.concatenate([side[k::clients] for side in dealt]) for k in range(clients)]
    return [np.flatnonzero(np.isin(labels, classes)) for classes in own]


def class_groups(
    labels: np.ndarray,
    clients: int,
    positive_share: float | None,
    seed: int,
    positive: Sequence[int] | np.ndarray | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """CODASCA's imbalanced heterogeneous (IH) data, in which no two clients share a class.

    The positive classes (by default the upper half, as in the authors' code; their text says a
    random half) and the negative ones are each dealt out to the clients, and positives are removed
    at each client to `positive_share`; None removes none. Returns the clients' indices, without the
    removed rows, and the 0/1 labels of all rows.
    """
    labels = np.asarray(labels)
    classes = np.unique(labels)
    above = positive_classes(labels) if positive is None else np.unique(positive)
    unknown = np.setdiff1d(above, classes)
    if len(unknown):
        raise DataError(
            f"The positive classes hold {unknown[0]}, which no row has; the classes are {classes}."
        )
    binary = np.isin(labels, above).astype(np.int64)
    sides = {"positive": above, "negative": np.setdiff1d(classes, above)}
    dealt = own_classes(labels, clients, seed, sides)
    if positive_share is None:
        return dealt, binary
    index = [
        rows[keep_positives(binary[rows], positive_share, seed, client)]
        for client, rows in enumerate(dealt)
    ]
    return index, binary


def by_column(values: Sequence[object] | np.ndarray) -> tuple[list[str], list[np.ndarray]]:
    """One client per distinct value, such as a hospital: the names, sorted, and the indices."""
    column = np.asarray(values)
    if column.ndim != 1 or not len(column):
        raise DataError(
            f"The column has shape {column.shape}; give one value per row, and at least one row."
        )
    empty = [
        row for row, value in enumerate(column) if value is None or value != value or value == ""
    ]
    if empty:
        row = empty[0]
        raise DataError(
            f"Row {row} has no value in the column that names its client; fill it in or drop the "
            "row."
        )
    if column.dtype.kind == "O":
        column = np.array([str(value) for value in column])
    names, owner = np.unique(column, return_inverse=True)
    return [str(name) for name in names], [np.flatnonzero(owner == i) for i in range(len(names))]


def _check(rows: int, clients: int) -> None:
    if not 1 <= clients <= rows:
        raise DataError(
            f"{clients} clients cannot share {rows} rows; ask for at least 1 client and at most "
            "one per row."
        )
