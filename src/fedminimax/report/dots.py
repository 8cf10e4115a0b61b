"""A plain SVG of a few named rows of numbers: a dot for each, and a bar at their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

GREY, DOT, BEST = "#767676", "#1f77b4", "#d95f02"
NAMES, WIDE, ROW, TOP = 330, 420, 24, 46  # pixels


def dots(title: str, axis: str, rows: Mapping[str, Sequence[float]], mark: str = "") -> str:
    """The picture; the row called `mark` stands out."""
    values = [value for own in rows.values() for value in own]
    step = _step(max(values) - min(values))
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step
    high = max(high, low + step)

    def at(value: float) -> float:
        return round(NAMES + WIDE * (value - low) / (high - low), 1)

    tall = TOP + ROW * len(rows) + 34
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {NAMES + WIDE + 30} {tall}" '
        f'font-family="sans-serif" font-size="13" fill="{GREY}">',
        f"<title>{escape(title)}</title>",
        f'<text x="8" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        found += [
            f'<line x1="{at(value)}" x2="{at(value)}" y1="{TOP - 12}" y2="{tall - 32}" '
            f'stroke="{GREY}" stroke-opacity="0.3"/>',
            f'<text x="{at(value)}" y="{tall - 16}" text-anchor="middle">{value:.4g}</text>',
        ]
    found.append(f'<text x="{NAMES + WIDE}" y="20" text-anchor="end">{escape(axis)}</text>')
    for number, (name, own) in enumerate(rows.items()):
        y, colour = TOP + ROW * number, BEST if name == mark else DOT
        weight = ' font-weight="bold"' if name == mark else ""
        mean = at(fmean(own))
        found.append(f'<text x="8" y="{y + 4}"{weight}>{escape(name)}</text>')
        found += [
            f'<circle cx="{at(v)}" cy="{y}" r="3.5" fill="{colour}" fill-opacity="0.5"/>'
            for v in own
        ]
        found.append(
            f'<line x1="{mean}" x2="{mean}" y1="{y - 8}" y2="{y + 8}" stroke="{colour}" '
            f'stroke-width="3"><title>{fmean(own):.4f}</title></line>'
        )
    return "\n".join([*found, "</svg>", ""])


def _step(span: float) -> float:
    """Between the lines of a grid: 1, 2 or 5 times a power of ten, four or so in all."""
    rough = max(span, 1e-6) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
