"""What searches by `auto` have tried, in the report of the runs that they chose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from fedminimax.report import pieces
from fedminimax.report.runs import Group
from fedminimax.tuning.auto import RECORD, verdict


def section(groups: Sequence[Group]) -> str:
    """A table and a sentence for each search; nothing without one."""
    found = []
    for run in (run for group in groups for run in group.runs):
        file = run.folder / RECORD
        if not file.is_file():
            continue
        record = json.loads(file.read_text(encoding="utf-8"))
        rows = [
            [
                escape(trial["recipe"]),
                str(trial["rounds"]),
                "-" if trial["value"] is None else f"{trial['value']:.4f}",
                str(trial["round"]),
                f"{trial['gradients']:,}",
            ]
            for trial in sorted(record["trials"], key=lambda t: -(t["value"] or 0.0))
        ]
        headings = ("recipe", "rounds", record["measure"], "best round", "gradients")
        found.append(f"<p>{escape(run.folder.name)}: {escape(verdict(record))}.</p>")
        found.append(pieces.table(headings, rows))
    return "".join(found)
