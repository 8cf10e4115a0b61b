"""All rows: the common tests run every one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import rows
import rows_baselines
import rows_compositional
import rows_jacobians
import rows_momentum
import rows_recursive
import rows_server
from rows import Row

FAMILIES = (
    rows,
    rows_baselines,
    rows_momentum,
    rows_server,
    rows_compositional,
    rows_recursive,
    rows_jacobians,
)
ROWS = tuple(row for family in FAMILIES for row in family.ROWS)
FLOATS = {kind: floats for family in FAMILIES for kind, floats in family.FLOATS.items()}


def first_of_each(rows: Iterable[Row]) -> list[Row]:
    """The first row of every method."""
    return list({type(row.algorithm): row for row in reversed([*rows])}.values())[::-1]


def marked(
    rows: Iterable[Row], fast: Callable[[Row], bool], full: Collection[str] = ()
) -> list[Any]:
    """As parameters of a test: rows that are not fast are run by `make test-slow`, and those of the
    names `full` by `make test-full`."""
    marks = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(
            row, id=row.name, marks=pytest.mark.full if row.name in full else marks[fast(row)]
        )
        for row in rows
    ]


def extra_floats(row: Row, round: int) -> tuple[float, float]:
    """What a round sends beside FLOATS."""
    extra = [family.extra_floats for family in FAMILIES if hasattr(family, "extra_floats")]
    parts = [more(row, round) for more in extra]
    return sum(up for up, _ in parts), sum(down for _, down in parts)
