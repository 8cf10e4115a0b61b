"""Average ranks of methods over data sets, and Nemenyi's critical difference between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata, studentized_range

GREY, LINE = "#767676", "#1f77b4"
WIDE, SIDE, ROW = 420, 250, 22  # pixels


class Ranks(NamedTuple):
    """The average rank of each method, 1 the best, and how far two must be apart."""

    average: dict[str, float]  # the best first
    critical: float
    sets: int


def ranks(values: Mapping[str, Sequence[float]]) -> Ranks:
    """By one value of each method on each set, the larger the better (Demsar, JMLR 2006).

    The critical difference at 5 %: q sqrt(k (k + 1) / (6 N)), with q the quantile of the
    studentised range over the square root of 2, k methods and N sets.

    >>> found = ranks({"a": [3.0, 5.0, 2.0], "b": [2.0, 4.0, 2.0]})
    >>> found.average, round(found.critical, 2)
    ({'a': 1.1666666666666667, 'b': 1.8333333333333333}, 1.13)
    """
    table = np.array([list(own) for own in values.values()])
    average = rankdata(-table, axis=0).mean(axis=1)
    methods, sets = table.shape
    quantile = float(studentized_range.ppf(0.95, methods, np.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(methods * (methods + 1) / (6 * sets))
    order = np.argsort(average, kind="stable")
    names = list(values)
    return Ranks({names[i]: float(average[i]) for i in order}, critical, sets)


def groups(found: Ranks) -> list[tuple[str, str]]:
    """The first and the last of each stretch of methods that are not told apart.

    >>> groups(Ranks({"a": 1.0, "b": 1.5, "c": 3.0}, 1.0, 5))
    [('a', 'b')]
    """
    names, stretches = list(found.average), []
    for i, first in enumerate(names):
        near = [n for n in names[i:] if found.average[n] - found.average[first] <= found.critical]
        reach = names.index(near[-1])
        if len(near) > 1 and (not stretches or reach > names.index(stretches[-1][1])):
            stretches.append((first, near[-1]))
    return stretches


def diagram(found: Ranks, title: str) -> str:
    """The critical-difference diagram as SVG: bars join methods that are not told apart."""
    names = list(found.average)
    count, half = len(names), math.ceil(len(names) / 2)

    def at(rank: float) -> float:
        return round(SIDE + WIDE * (rank - 1) / max(count - 1, 1), 1)

    bars = groups(found)
    below = 84 + 8 * len(bars)
    tall = below + ROW * half + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * SIDE + WIDE} {tall}" '
        f'font-family="sans-serif" font-size="13" fill="{GREY}">',
        f"<title>{escape(title)}</title>",
        _rule(at(1), 60, at(count), 60, GREY, 1),
        f'<text x="{SIDE}" y="16">critical difference {found.critical:.2f}</text>',
        _rule(at(1), 26, at(min(1 + found.critical, count)), 26, GREY, 3),
    ]
    for rank in range(1, count + 1):
        lines.append(_rule(at(rank), 54, at(rank), 60, GREY, 1))
        lines.append(f'<text x="{at(rank)}" y="48" text-anchor="middle">{rank}</text>')
    for number, (first, last) in enumerate(bars):
        y = 70 + 8 * number
        ends = at(found.average[first]) - 4, at(found.average[last]) + 4
        lines.append(_rule(ends[0], y, ends[1], y, LINE, 4))
    for number, name in enumerate(names):
        left = number < half
        y = below + ROW * (number if left else count - 1 - number)
        x, side = at(found.average[name]), SIDE - 8 if left else SIDE + WIDE + 8
        lines += [_rule(x, 60, x, y, GREY, 1), _rule(x, y, side, y, GREY, 1)]
        text = f"{escape(name)} ({found.average[name]:.2f})"
        place = side - 4 if left else side + 4
        anchor = "end" if left else "start"
        lines.append(f'<text x="{place}" y="{y + 4}" text-anchor="{anchor}">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, width: int) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}"/>'
    )
