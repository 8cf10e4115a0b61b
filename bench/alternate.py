"""`python -m bench.alternate OLD`: this checkout's bench and another's in alternation, row by row.

Both measure a row `--turns` times, a process each time. What is compared is the row's figure, which
each finds beside the same work by hand in one process: what else the machine does slows both sides
of a figure. Of five ratios of figures, the median of all there could be lies between the smallest
and the largest with a probability of 94 %; a row fails if these are all below 0.95.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import all_rows, choose
from bench.measure import Ratio, spread
from bench.table import CannotMeasureError, Row

LEAST = 0.95  # of the old speed
NEW = Path(__file__).resolve().parents[1]


def main(words: Sequence[str] | None = None) -> int:
    """1 if a row is slower than in the other checkout; a row that one of them does not have, or
    cannot measure, is not compared."""
    parser = argparse.ArgumentParser("python -m bench.alternate", description=__doc__)
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("rows", nargs="*", help="rows or groups of them (default: all but peers)")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(words)
    slower = 0
    print("| row | new / old | from | to | verdict |\n|---|---|---|---|---|", flush=True)
    for row in choose(all_rows(peers_too=False, folder=None), options.rows):
        try:
            found = [ratio(row, options.old) for _ in range(options.turns)]
        except CannotMeasureError as error:
            print(f"| {row.name} | - | - | - | not compared: {error} |", flush=True)
            continue
        slow = max(found) < LEAST
        slower += slow
        cells = (f"{number:.3f}" for number in (spread(found).median, min(found), max(found)))
        verdict = "slower" if slow else "pass"
        print("|", row.name, "|", " | ".join(cells), "|", verdict, "|", flush=True)
    return int(slower > 0)


def ratio(row: Row, old: Path) -> float:
    """How many times as good the row's figure is here as in the other checkout."""
    before, now = (figure(row, checkout).median for checkout in (old, NEW))
    return now / before if row.asked.least else before / now


def figure(row: Row, checkout: Path) -> Ratio:
    """What the bench of a checkout finds for the row."""
    command = [sys.executable, "-m", "fedminimax", "bench", "--quick", "--json", "--only", row.name]
    path = os.pathsep.join([str(checkout / "src"), str(checkout)])
    done = subprocess.run(
        command,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    try:
        entry: dict[str, Any] = json.loads(done.stdout)["rows"][0]
        return Ratio(**entry["figure"])
    except (ValueError, KeyError, IndexError) as error:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise CannotMeasureError(f"{checkout} gave no figure and said: {said[:200]}") from error


if __name__ == "__main__":
    sys.exit(main())
