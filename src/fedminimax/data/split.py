"""Training, validation and test rows of a site."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedminimax.data.sites import DataError
from fedminimax.random import generator

# Where rows are too few for all parts: something to learn from first, then something to judge by.
_FIRST = (0, 2, 1)


def stratified_split(
    labels: np.ndarray, fractions: Sequence[float] = (0.6, 0.2, 0.2), seed: int = 0, number: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ascending indices of the training, validation and test rows, each class cut alike.

    `number` is the site's number. A part with a fraction of 0 stays empty; a class with a row for
    each other part is in all of them; a smaller class goes to training, then to test. Of several
    labels, `strata` says which class a row is of.

    >>> [len(part) for part in stratified_split(np.array([0] * 10 + [1] * 5))]
    [9, 3, 3]
    """
    check_fractions(fractions)
    labels = strata(np.asarray(labels))
    parts: list[list[np.ndarray]] = [[], [], []]
    for place, value in enumerate(np.unique(labels)):
        rows = generator(seed, "split", number, place).permutation(np.flatnonzero(labels == value))
        cuts = np.cumsum(_counts(len(rows), fractions))[:-1]
        for part, chosen in zip(parts, np.split(rows, cuts), strict=True):
            part.append(chosen)
    train, validation, test = (
        np.sort(np.concatenate([np.empty(0, np.int64), *part])) for part in parts
    )
    return train, validation, test


def strata(labels: np.ndarray) -> np.ndarray:
    """The class of each row; with several labels, the rarest that it has, as the number of its
    column, or -1.

    >>> strata(np.array([[1, 0], [1, 1], [0, 0], [-1, 0]])).tolist()
    [0, 1, -1, -1]
    """
    if labels.ndim == 1:
        return labels
    has = labels > 0
    order = np.argsort(has.sum(axis=0), kind="stable")
    return np.where(has.any(axis=1), order[has[:, order].argmax(axis=1)], -1)


def check_fractions(fractions: Sequence[float]) -> None:
    valid = len(fractions) == 3 and all(0 <= fraction <= 1 for fraction in fractions)
    if not valid or not math.isclose(sum(fractions), 1, abs_tol=1e-9) or fractions[0] == 0:
        raise DataError(
            f"The fractions are {tuple(fractions)}; give three for training, validation and test "
            "that add up to 1, the first above 0, such as (0.6, 0.2, 0.2)."
        )


def _counts(rows: int, fractions: Sequence[float]) -> list[int]:
    """Rows of a class for each part: by largest remainder, no part left out if it can be helped."""
    used = [part for part in _FIRST if fractions[part] > 0]
    if rows < len(used):
        return [int(part in used[:rows]) for part in range(3)]
    counts = [math.floor(rows * fraction) for fraction in fractions]
    # math.floor may fall one short of a whole product (0.29 * 100); its remainder near 1 then
    # brings it back.
    by_remainder = sorted(used, key=lambda part: counts[part] - rows * fractions[part])
    for part in by_remainder[: rows - sum(counts)]:
        counts[part] += 1
    for part in used:
        if not counts[part]:
            counts[counts.index(max(counts))] -= 1
            counts[part] = 1
    return counts
