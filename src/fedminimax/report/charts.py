"""Charts as data, and as HTML: an SVG that stretches with the page, and axes beside it.

The SVG holds lines and areas only, with strokes that do not stretch; numbers and names are text of
the page, so that they keep their size on a phone. The data stand beside it as JSON, for whoever
points at the chart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, NamedTuple

from fedminimax.report.runs import Spread

WIDE, HIGH = 1000.0, 1000.0  # the SVG's own units
COLOURS = 8
CUT = " <small>the first evaluation lies outside</small>"
FLAT = 1e-6  # of a number: what varies by less than this is drawn as a level line
MANY = 3  # lines beyond which bands are fainter
FEW = 4  # points of a line, below which none is left out of sight
DIAGONAL = ("roc", "calibration")  # charts that are held against a diagonal
MOST_MARKED = 30  # points of a line that are marked one by one


class Mark(NamedTuple):
    """A point of a line, with its range over runs."""

    x: float
    y: float
    low: float
    high: float
    count: int = 1  # type: ignore[reportIncompatibleMethodOverride]  # nobody searches in this tuple


@dataclass(frozen=True)
class Series:
    """A line of a chart. `number` decides its colour, `runs` how many it stands for."""

    label: str
    number: int
    marks: tuple[Mark, ...]
    runs: int = 1
    lower: tuple[tuple[float, float], ...] = ()  # the border of a band that is not per point
    upper: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    name: str  # of the file that it is saved to
    title: str
    x: str
    series: tuple[Series, ...]
    kind: Literal["lines", "roc", "precision", "calibration"] = "lines"
    log: bool = False  # the y axis
    cut: bool = False  # the y axis holds all but the first point of each line
    least: float = 0.0  # what the y axis spans at least, of a share
    level: float | None = None  # a dotted line across

    @property
    def square(self) -> bool:
        """Whether both axes are shares."""
        return self.kind != "lines"


def series(label: str, number: int, points: Sequence[tuple[float, Spread]], runs: int) -> Series:
    return Series(label, number, tuple(Mark(x, *over) for x, over in points), runs)


def falls_over_decades(lines: Sequence[Series]) -> bool:
    """Whether only a logarithmic axis shows it all."""
    values = [*_heights(lines)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 50


def starts_far_off(lines: Sequence[Series]) -> bool:
    """Whether the first points squeeze all others together."""
    if any(len(line.marks) < FEW for line in lines):
        return False
    return squeezed([*_heights(lines, 1)], [*_heights(lines)])


def squeezed(some: Sequence[float], all: Sequence[float]) -> bool:
    """Whether an axis that holds all numbers shows little of what some of them do."""
    return max(all) - min(all) > 3 * (max(some) - min(some)) > 0


def _heights(lines: Sequence[Series], first: int = 0) -> Iterator[float]:
    for line in lines:
        for mark in line.marks[first:]:
            yield from (mark.low, mark.high)


# Axes.


class Axis(NamedTuple):
    low: float
    high: float
    ticks: list[tuple[float, str]]
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value, from 0 to 1."""
        if self.log:
            value, low, high = (math.log10(v) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low)


def axis(values: Sequence[float], ticks: int = 5, zero: bool = False) -> Axis:
    """A linear axis that ends at round numbers, or, from zero, at the last value."""
    low, high = min(values), max(values)
    low = min(low, 0.0) if zero else low
    if high - low <= FLAT * max(abs(low), abs(high)):
        pad = abs(low) / 10 or 1.0
        low, high = (low, low + pad) if zero else (low - pad, low + pad)
    step = _round_step((high - low) / ticks)
    first = math.floor(low / step + 1e-9)
    end = math.floor(high / step + 1e-9) if zero else math.ceil(high / step - 1e-9)
    at = [number * step for number in range(first, end + 1)]
    high = high if zero else at[-1]
    return Axis(at[0], high, [(value, number_text(value, step)) for value in at])


def log_axis(values: Sequence[float], most: int = 6) -> Axis:
    # The powers of ten that a float can be.
    low, high = max(math.floor(math.log10(min(values))), -307), math.ceil(math.log10(max(values)))
    high = max(min(high, 308), low + 1)
    every = math.ceil((high - low) / most)
    ticks = [(10.0**power, power_text(power)) for power in range(low, high + 1, every)]
    return Axis(10.0**low, 10.0**high, ticks, log=True)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough * (1 - 1e-9))


def number_text(value: float, step: float) -> str:
    """A number of an axis whose ticks are a step apart: 0.25, 1,500, 20 k.

    >>> number_text(0.30000000000000004, 0.1), number_text(40000, 20000), number_text(1e-9, 1e-9)
    ('0.3', '40 k', '1e-9')
    """
    if value == 0:
        return "0"
    unit, name = (1.0, "")
    if 1e4 <= abs(value) < 1e12 and step >= 100:
        unit, name = (1e6, " M") if step >= 1e6 else (1e3, " k")
    # As many digits as tell neighbours apart.
    digits = -math.floor(math.log10(step / unit) + 1e-9)
    if abs(step / unit * 10.0**digits - round(step / unit * 10.0**digits)) > 1e-6:
        digits += 1  # steps of 2.5
    if step < 1e-4 or abs(value) >= 1e12:
        return f"{value:.{max(1, digits + math.floor(math.log10(abs(value))) + 1)}g}".replace(
            "e-0", "e-"
        )
    return f"{value / unit:,.{max(0, digits)}f}{name}".replace("-", "\N{MINUS SIGN}")


def power_text(power: int) -> str:
    """10 to a power, as text.

    >>> power_text(-12)
    '10⁻¹²'
    """
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


# HTML.


def html(chart: Chart) -> str:
    """A figure with title, plot, axes and data; empty if there is nothing to draw."""
    across, up = axes(chart)
    plot = "".join(
        [
            *(_rule(0, 1 - up.at(v), WIDE, 1 - up.at(v)) for v, _ in up.ticks),
            _line("diagonal", [(0, 1), (1, 0)]) if chart.kind in DIAGONAL else "",
            _line("diagonal", [(0, 1 - up.at(chart.level)), (1, 1 - up.at(chart.level))])
            if chart.level is not None
            else "",
            # All bands lie below all lines.
            *(_band(line, across, up, chart.kind) for line in chart.series),
            *(_drawn(line, across, up, chart.kind) for line in chart.series),
        ]
    )
    y_ticks = "".join(_label(100 * (1 - up.at(v)), text, "top") for v, text in up.ticks)
    x_ticks = "".join(_label(100 * across.at(v), text, "left") for v, text in across.ticks)
    title = escape(chart.title) + (CUT if chart.cut else "")
    return (
        f'<figure class="chart {"square" if chart.square else "lines"}{" cut" if chart.cut else ""}'
        f'{" many" if len(chart.series) > MANY else ""}" '
        f'data-name="{escape(chart.name)}"><figcaption>{title}</figcaption>'
        f'<div class="frame"><div class="y-ticks" aria-hidden="true">{y_ticks}</div>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{_spoken(chart)}">'
        f'<svg viewBox="0 0 {WIDE:g} {HIGH:g}" preserveAspectRatio="none" aria-hidden="true">'
        f'{plot}</svg><div class="cursor" hidden></div><div class="tip" role="status" hidden></div>'
        f'</div><div class="x-ticks" aria-hidden="true">{x_ticks}</div></div>'
        f'<p class="x-name" aria-hidden="true">{escape(chart.x)}</p>'
        f'<script type="application/json">{_json(_data(chart, across, up))}</script></figure>'
    )


def axes(chart: Chart) -> tuple[Axis, Axis]:
    if chart.square:
        whole = Axis(0, 1, [(v / 5, number_text(v / 5, 0.2)) for v in range(6)])
        return whole, whole
    marks = [mark for line in chart.series for mark in line.marks]
    heights = [*_heights(chart.series, int(chart.cut))]
    across = axis([mark.x for mark in marks], ticks=5, zero=True)
    if chart.log:
        return across, log_axis(heights)
    return across, axis(_widened(heights, chart.least), ticks=4)


def _widened(values: Sequence[float], least: float) -> list[float]:
    """The ends of shares, at least so far apart and within 0 and 1."""
    low, high = min(values), max(values)
    if high - low >= least or low < 0 or high > 1:
        return [low, high]
    low = min(max(0.0, (low + high - least) / 2), 1 - least)
    return [low, max(high, low + least)]


def legend(lines: Sequence[Series]) -> str:
    """Buttons that show and hide a line in all charts of the section."""
    entries = "".join(
        f'<button type="button" aria-pressed="true" data-series="{line.number}">'
        f"{key(line.number)}{escape(line.label)}</button>"
        for line in lines
    )
    return f'<div class="legend" role="group" aria-label="Lines shown">{entries}</div>'


def key(number: int) -> str:
    """The line that stands for a series beside its name."""
    return (
        f'<svg class="key {_style(number)}" viewBox="0 0 24 8" aria-hidden="true">'
        '<path class="line" d="M1 4H23"/></svg>'
    )


def _band(line: Series, across: Axis, up: Axis, kind: str) -> str:
    """The range over runs; of a ROC curve and the like, where it may run."""
    lower, upper = line.lower, line.upper
    if kind == "lines":
        lower = tuple((mark.x, mark.low) for mark in line.marks)
        upper = tuple((mark.x, mark.high) for mark in line.marks)
    if lower == upper:
        return ""
    border = _placed([*upper, *lower[::-1]], across, up)
    return _series(line, _line("band", border, closed=True))


def _drawn(line: Series, across: Axis, up: Axis, kind: str) -> str:
    path = _placed([(mark.x, mark.y) for mark in line.marks], across, up)
    marked = kind in ("lines", "calibration") and len(path) <= MOST_MARKED
    dots = "".join(f"M{_at(x)} {_at(y)}h0" for x, y in path) if marked else ""
    bars = "" if kind != "calibration" else "".join(
        _line("whisker", _placed([(mark.x, mark.low), (mark.x, mark.high)], across, up))
        for mark in line.marks
    )  # fmt: skip
    dotted = f'<path class="dots" d="{dots}"/>' if dots else ""
    return _series(line, bars + _line("line", path) + dotted)


def _series(line: Series, inside: str) -> str:
    return f'<g class="series {_style(line.number)}" data-series="{line.number}">{inside}</g>'


def _placed(points: Sequence[tuple[float, float]], across: Axis, up: Axis) -> list:
    return [(across.at(x), 1 - up.at(y)) for x, y in points]


def _style(number: int) -> str:
    """Eight colours; further lines are dashed."""
    return f"c{number % COLOURS} d{number // COLOURS % 3}"


def _line(name: str, points: Sequence[tuple[float, float]], closed: bool = False) -> str:
    text = "L".join(f"{_at(x)} {_at(y)}" for x, y in points)
    return f'<path class="{name}" d="M{text}{"Z" if closed else ""}"/>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="rule" d="M{x1:g} {_at(y1)}H{x2:g}"/>'


def _at(share: float) -> str:
    return f"{share * WIDE:.1f}".removesuffix(".0")


def _label(percent: float, text: str, side: str) -> str:
    return f'<span style="{side}:{percent:.2f}%">{escape(text)}</span>'


def _spoken(chart: Chart) -> str:
    """What a screen reader says of it."""
    ends = "; ".join(
        f"{line.label} ends at {line.marks[-1].y:.4g}" for line in chart.series if line.marks
    )
    what = f"{chart.title} against {chart.x}."
    return escape(f"{what} {'' if chart.square else ends} Arrow keys step through.")


def _data(chart: Chart, across: Axis, up: Axis) -> dict[str, Any]:
    return {
        "title": chart.title,
        "x": chart.x,
        "kind": chart.kind,
        "log": chart.log,
        "x_range": [across.low, across.high],
        "y_range": [up.low, up.high],
        "series": [
            {
                "label": line.label,
                "number": line.number,
                "runs": line.runs,
                "marks": [list(mark) for mark in line.marks],
                **({"lower": line.lower, "upper": line.upper} if line.lower else {}),
            }
            for line in chart.series
        ],
    }


def _json(data: Any) -> str:
    """JSON that can stand inside a page, whatever names it holds."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
