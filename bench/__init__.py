"""`fedminimax bench`: how fast this is, side by side with what one would write by hand and with
other libraries, as ratios within one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench import compositional, masks, mlp, networks, overhead, peers, portfolio, scale, tables
from bench.environments import Folder
from bench.measure import FULL, QUICK
from bench.table import (
    FAILED,
    HEADINGS,
    Result,
    Row,
    as_json,
    cells,
    markdown,
    measured,
)
from fedminimax.data.sources import cache
from fedminimax.report.tables import console

GROUPS = (overhead, masks, portfolio, mlp, networks, compositional, scale, tables)


def bench(
    quick: bool = False,
    only: Sequence[str] = (),
    peers_too: bool = False,
    folder: Path | None = None,
    output: Path | None = None,
    json_too: bool = False,
) -> int:
    """1 if a row failed; one that falls short, or cannot be measured here, is a result."""
    chosen = choose(all_rows(peers_too, folder), only)
    results: list[Result] = []
    try:
        for number, row in enumerate(chosen, start=1):
            print(f"{number} of {len(chosen)}: {row.name} ", end="", file=sys.stderr, flush=True)
            results.append(measured(row, QUICK if quick else FULL))
            *_, figure, asked, verdict = cells(results[-1])
            print(f"{figure}, asked {asked}: {verdict}", file=sys.stderr, flush=True)
            if output is not None:
                to_come = len(chosen) - len(results)
                write(output, results, markdown(results, command(quick, only, peers_too), to_come))
    finally:  # whoever interrupts it sees what it has measured
        if json_too:
            print(json.dumps(as_json(results)))
        else:
            console().print(screen(results))
    return int(any(result.verdict == FAILED for result in results))


def write(path: Path, results: list[Result], text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    as_text = json.dumps(as_json(results), indent=1)
    path.with_suffix(".json").write_text(as_text + "\n", encoding="utf-8")


def all_rows(peers_too: bool, folder: Path | None) -> list[Row]:
    found = [row for group in GROUPS for row in group.rows()]
    if peers_too:
        place = Folder(folder or cache() / "peers")
        found += [*portfolio.peer_rows(place), *peers.rows(place)]
    return found


def choose(rows: list[Row], only: Sequence[str]) -> list[Row]:
    for name in only:
        if not any(row.matches(name) for row in rows):
            known = ", ".join(row.name for row in rows)
            raise ValueError(f"there is no row or group {name!r}; give one of {known}")
    return [row for row in rows if not only or any(row.matches(name) for name in only)]


def command(quick: bool, only: Sequence[str], peers_too: bool) -> str:
    options = ["--quick"] * quick + ["--peers"] * peers_too
    return " ".join(["fedminimax bench", *options, *(f"--only {name}" for name in only)])


def screen(results: list[Result]) -> Table:
    table = Table(*HEADINGS, box=SIMPLE_HEAD)
    for result in results:
        table.add_row(*cells(result))
    return table
