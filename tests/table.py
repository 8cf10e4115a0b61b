"""All rows: the common tests run every one of them."""

from __future__ import annotations

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


def extra_floats(row: Row, round: int) -> tuple[float, float]:
    """What a round sends beside FLOATS."""
    extra = [family.extra_floats for family in FAMILIES if hasattr(family, "extra_floats")]
    parts = [more(row, round) for more in extra]
    return sum(up for up, _ in parts), sum(down for _, down in parts)
