"""Runs as they go, as HTML: what a page that is kept up to date shows of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from fedminimax.engine.state.checkpoint import CheckpointError
from fedminimax.report import charts, curves, pieces
from fedminimax.report.runs import Group, Told, metric, shares, told
from fedminimax.report.tables import bytes_text

FAULTS = 12  # the last sentences of a log that are shown


class Going(NamedTuple):
    """A run, and what its folder does not say."""

    name: str
    folder: Path
    state: str  # where it stands, in words
    heard: Mapping[str, float] = {}  # of each site: how many seconds ago
    faults: Sequence[str] = ()


def page_of(runs: Sequence[Going]) -> str:
    """A section for each run; every name in it is escaped."""
    if not runs:
        return "<section><p>No run has been asked for yet.</p></section>"
    return "".join(
        f"<section><h2>{escape(run.name)}</h2>{_state(run)}{_measured(run)}"
        f"{_heard(run)}{_faults(run)}</section>"
        for run in runs
    )


def _state(run: Going) -> str:
    return f"<p><strong>{escape(run.state)}</strong></p>"


def _measured(run: Going) -> str:
    try:
        found = told(run.folder)
    except (CheckpointError, OSError, ValueError):
        return "<p>It has not been evaluated yet.</p>"
    group = Group(0, found.experiment.method.name, (found,))
    drawn = [each.charts["round"] for each in curves.learning([group])]
    figures = "".join(map(charts.html, drawn))
    return f'{_tiles(found, group)}<div class="pair">{figures}</div>{_sites(group)}'


def _tiles(run: Told, group: Group) -> str:
    name, last = run.monitor, run.last
    tiles = [("Evaluated in round", f"{last['round']:,}", f"of {run.experiment.run.rounds:,}")]
    for split in ("validation", "test", "train"):
        value = metric(split, name)(last)
        if value is not None:
            interval = last[split].get("auc_interval") if name == "auc" else None
            more = f"95 % interval {pieces.pair(interval)}" if interval else ""
            tiles.append((f"{curves.words(name)}, {split}", pieces.value_text(value), more))
    directions = f"{bytes_text(last['bytes_up'])} up, {bytes_text(last['bytes_down'])} down"
    tiles.append(("Sent in training", bytes_text(curves.sent(last)), directions))
    asked = sum(record["evaluation_bytes"] for record in run.history)
    tiles.append(("Sent in evaluations", bytes_text(asked), ""))
    items = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{value}<small>{escape(more)}</small></dd></div>"
        for what, value, more in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _sites(group: Group) -> str:
    own = shares(group, group.shown_split())
    if own is None:
        return ""
    rows = [
        [
            escape(name) + (pieces.badge("worst") if name == own.worst else ""),
            pieces.number_or_dash(value),
        ]
        for name, value in own.values.items()
    ]
    title = f"{own.measure[0].upper()}{own.measure[1:]} of each {own.word}"
    return f"<h3>{title}</h3>{pieces.table([own.word.capitalize(), own.measure], rows)}"


def _heard(run: Going) -> str:
    if not run.heard:
        return ""
    rows = [
        [escape(name), f"{pieces.seconds_text(max(ago, 0.0))} ago"]
        for name, ago in run.heard.items()
    ]
    return f"<h3>Last answer</h3>{pieces.table(['Site', 'Heard'], rows)}"


def _faults(run: Going) -> str:
    if not run.faults:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in run.faults[-FAULTS:])
    return f"<h3>What went wrong</h3><ul>{lines}</ul>"
