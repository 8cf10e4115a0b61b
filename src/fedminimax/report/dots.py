"""A plain SVG of a few named rows of numbers: a dot for each, and a bar at their mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean

GREY, DOT, BEST = "#767676", "#1f77b4", "#d95f02"
NAMES, WIDE, GAP, ROW, TOP = 270, 230, 40, 24, 68  # pixels

Rows = Mapping[str, Sequence[float]]


def dots(title: str, panels: Mapping[str, Rows], mark: str = "") -> str:
    """The picture: a panel for each measure, side by side, each with an axis of its own.

    Arguments:
        title: above all.
        panels: the numbers of each row, by the measure and the name of the row.
        mark: the row that stands out.
    """
    names = [*next(iter(panels.values()))]
    wide, tall = NAMES + (WIDE + GAP) * len(panels), TOP + ROW * len(names) + 34
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" '
        f'font-family="sans-serif" font-size="13" fill="{GREY}">',
        f"<title>{escape(title)}</title>",
        f'<text x="8" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for number, name in enumerate(names):
        weight = ' font-weight="bold"' if name == mark else ""
        found.append(f'<text x="8" y="{TOP + ROW * number + 4}"{weight}>{escape(name)}</text>')
    for number, (measure, rows) in enumerate(panels.items()):
        found += _panel(measure, rows, mark, NAMES + (WIDE + GAP) * number, tall)
    return "\n".join([*found, "</svg>", ""])


def _panel(measure: str, rows: Rows, mark: str, left: int, tall: int) -> Iterator[str]:
    values = [value for own in rows.values() for value in own]
    step = _step(max(values) - min(values))
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step
    high = max(high, low + step)

    def at(value: float) -> float:
        return round(left + WIDE * (value - low) / (high - low), 1)

    yield f'<text x="{left + WIDE / 2}" y="44" text-anchor="middle">{escape(measure)}</text>'
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        yield (
            f'<line x1="{at(value)}" x2="{at(value)}" y1="{TOP - 14}" y2="{tall - 32}" '
            f'stroke="{GREY}" stroke-opacity="0.3"/>'
        )
        yield f'<text x="{at(value)}" y="{tall - 16}" text-anchor="middle">{value:.4g}</text>'
    for number, (name, own) in enumerate(rows.items()):
        y, colour, mean = TOP + ROW * number, BEST if name == mark else DOT, at(fmean(own))
        for value in own:
            yield (
                f'<circle cx="{at(value)}" cy="{y}" r="3.5" fill="{colour}" fill-opacity="0.5"/>'
            )
        yield (
            f'<line x1="{mean}" x2="{mean}" y1="{y - 8}" y2="{y + 8}" stroke="{colour}" '
            f'stroke-width="3"><title>{fmean(own):.4f}</title></line>'
        )


def _step(span: float) -> float:
    """Between the lines of a grid: 1, 2 or 5 times a power of ten, four or so in all."""
    rough = max(span, 1e-6) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
