"""Draws docs/architecture.svg: the way of the data from a file to the final vectors.

Each box is a module. Data flow along the arrows; an arrow stands only between two modules of which
one imports the other, which tests/test_architecture.py checks.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("architecture.svg")
WIDTH, HEIGHT = 190, 52  # of a box
ACROSS, DOWN = 236, 92  # from one box to the next


class Box(NamedTuple):
    """A module, at a column and a row of the drawing."""

    module: str
    says: str
    column: float
    row: float


BOXES = (
    Box("data/folder.py", "reads a table for each site", 0, 0),
    Box("data/prepare.py", "splits, imputes, scales", 1, 0),
    Box("experiment.py", "problem, method, clients", 2, 0),
    Box("engine/session.py", "opens the folder, assembles", 3, 0),
    Box("engine/trainer.py", "rounds and evaluations", 3, 1),
    Box("engine/round.py", "broadcast, then aggregate", 2, 1),
    Box("engine/backends/base.py", "who carries the clients?", 1, 1),
    Box("engine/backends/local.py", "this process", 1, 2),
    Box("engine/executors/choose.py", "maps over the clients", 1, 3),
    Box("remote/backend.py", "sites elsewhere", 0, 2),
    Box("remote/calls.py", "calls, checks, repeats", 0, 3),
    Box("remote/wire.py", "safetensors and JSON", 0, 4),
    Box("remote/worker.py", "a site, with its rows", 1, 4),
    Box("engine/job.py", "receive, local steps, send", 2, 3),
    Box("messages/stage.py", "stages, then the mean", 2, 2),
    Box("engine/state/folder.py", "checkpoints, final vectors", 3, 2),
)
ARROWS = (
    ("data/folder.py", "data/prepare.py"),
    ("data/prepare.py", "experiment.py"),
    ("experiment.py", "engine/session.py"),
    ("engine/session.py", "engine/trainer.py"),
    ("engine/trainer.py", "engine/round.py"),
    ("engine/round.py", "engine/backends/base.py"),
    ("engine/backends/base.py", "engine/backends/local.py"),
    ("engine/backends/base.py", "remote/backend.py"),
    ("engine/backends/local.py", "engine/executors/choose.py"),
    ("remote/backend.py", "remote/calls.py"),
    ("remote/calls.py", "remote/wire.py"),
    ("remote/wire.py", "remote/worker.py"),
    ("engine/executors/choose.py", "engine/job.py"),
    ("remote/worker.py", "engine/job.py"),
    ("engine/job.py", "messages/stage.py"),
    ("messages/stage.py", "engine/round.py"),
    ("engine/trainer.py", "engine/state/folder.py"),
)
NOTES = ((1, 2, "simulated"), (0, 2, "deployed"))
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #222; text-anchor: middle; }
  .module { font-family: ui-monospace, monospace; font-size: 11px; }
  .note { font-style: italic; fill: #3f51b5; }
  rect { fill: #f4f5fb; stroke: #3f51b5; }
  path { fill: none; stroke: #666; stroke-width: 1.4; }
  marker path { fill: #666; stroke: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #eee; } .note { fill: #9fa8da; } rect { fill: #2b2d3a; stroke: #9fa8da; }
    path { stroke: #aaa; } marker path { fill: #aaa; }
  }
"""


def _corner(box: Box) -> tuple[float, float]:
    return 20 + ACROSS * box.column, 34 + DOWN * box.row


def _drawn(box: Box) -> str:
    x, y = _corner(box)
    middle = x + WIDTH / 2
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{middle:g}" y="{y + 21:g}">{html.escape(box.says)}</text>'
        f'<text class="module" x="{middle:g}" y="{y + 40:g}">{box.module}</text>'
    )


def _arrow(start: Box, end: Box) -> str:
    """Straight within a row or a column, else sideways first."""
    (x, y), (u, v) = _corner(start), _corner(end)
    across, down = WIDTH * (u > x), HEIGHT * (v > y)
    if start.row == end.row:
        path = f"M{x + across:g} {y + HEIGHT / 2:g}H{u + WIDTH - across:g}"
    elif start.column == end.column:
        path = f"M{x + WIDTH / 2:g} {y + down:g}V{v + HEIGHT - down:g}"
    else:
        path = f"M{x + across:g} {y + HEIGHT / 2:g}H{u + WIDTH / 2:g}V{v + HEIGHT - down:g}"
    return f'<path marker-end="url(#end)" d="{path}"/>'


def drawing() -> str:
    """The picture as SVG text."""
    boxes = {box.module: box for box in BOXES}
    width = 40 + ACROSS * max(box.column for box in BOXES) + WIDTH
    height = 54 + DOWN * max(box.row for box in BOXES) + HEIGHT
    notes = [
        f'<text class="note" x="{20 + ACROSS * column + WIDTH / 2 + 46:g}" '
        f'y="{26 + DOWN * row:g}">{text}</text>'
        for column, row, text in NOTES
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">',
            "<title>From a file to the final vectors</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>',
            *(_arrow(boxes[start], boxes[end]) for start, end in ARROWS),
            *map(_drawn, BOXES),
            *notes,
            "</svg>",
            "",
        ]
    )
