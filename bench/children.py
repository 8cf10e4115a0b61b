"""What a process that measures for the bench says, or how it ended if it says nothing."""

from __future__ import annotations

import json
from typing import Any

from bench.table import CannotMeasureError

LONGEST = 1_000_000  # characters of a line


def told(who: str, line: str) -> dict[str, Any]:
    """The line as JSON."""
    try:
        found = json.loads(line) if len(line) < LONGEST else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        size = f"{len(line):,} characters" + " or more" * (len(line) >= LONGEST)
        raise CannotMeasureError(
            f"{who} printed {size} where a line of JSON was expected: {line[:60]!r}"
        )
    return found


def gone(who: str, errors: str, status: int | None) -> CannotMeasureError:
    """Why it said nothing: the last line of its errors, or its exit status."""
    last = errors.strip().splitlines()[-1:] or [f"no message, exit status {status}"]
    return CannotMeasureError(f"{who} ended before its job was done: {last[0][:300]}")
