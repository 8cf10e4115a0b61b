"""The figures of comparisons and reports as files. They need matplotlib: the extra `plots`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedminimax.report.charts import DIAGONAL, FEW, Chart, Series, axes, squeezed
from fedminimax.report.comparison import Change, Comparison, Line, Plan, shown
from fedminimax.report.comparison_table import naming, tied

T = TypeVar("T")
NO_FIGURE = "leave [compare] figure out"
MANY = 10  # lines whose names would cover a chart
WIDE = 20  # times the least value: a log scale
# On a transparent ground: a contrast of at least 3 to white and to the black of dark pages.
GREY = "#767676"
COLOURS = (
    *("#1f77b4", "#d95f02", "#2a9134", "#d62728", "#9467bd"),
    *("#a0622d", "#c2549d", "#7f7f7f", "#868616", "#138d99"),
)
STYLES = list(itertools.product(("-", "--", ":"), ("o", "s", "^", "v", "D", "x", "*")))


def matplotlib_or(otherwise: str = "") -> Any:
    """The library. Commands that draw after hours of runs ask for it before the first."""
    try:
        import matplotlib
    except ImportError:
        wanted = "a figure needs matplotlib: install fedminimax[plots]"
        raise ValueError(f"{wanted}, or {otherwise}" if otherwise else wanted) from None
    return matplotlib


@contextmanager
def drawing(otherwise: str) -> Iterator[None]:
    """Where matplotlib may be used; `otherwise` is what one can do without it."""
    matplotlib = matplotlib_or(otherwise)
    # No random names in the file, so that the same runs give the same bytes.
    settings: Any = {"svg.hashsalt": "fedminimax", "svg.fonttype": "none", "backend": "agg"}
    settings |= {"axes.prop_cycle": matplotlib.cycler(color=COLOURS), "legend.framealpha": 0}
    settings |= {"savefig.transparent": True}
    parts = ("text.", "axes.label", "axes.title", "axes.edge", "xtick.", "ytick.", "grid.")
    with matplotlib.rc_context(settings | {f"{part}color": GREY for part in parts}):
        yield


def save(figure: Any, path: Path) -> None:
    """As what the name says, SVG or PNG, without a date."""
    kind = path.suffix.removeprefix(".")
    figure.savefig(path, format=kind, metadata={"Date": None}, bbox_inches="tight", dpi=100)


def draw(comparison: Comparison, lines: list[Line], *paths: Path) -> None:
    """The figure that the file asks for."""
    with drawing(NO_FIGURE):
        kinds = {"last": _last, "curves": _curves}
        figure = kinds[comparison.plan.figure or "curves"](comparison.plan, lines)
        for path in paths:
            save(figure, path)


def draw_charts(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """The charts of a report as NAME.svg and NAME.png."""
    written = []
    with drawing("leave --figures out"):
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            figure = _chart(chart)
            written += [folder / f"{chart.name}.svg", folder / f"{chart.name}.png"]
            save(figure, written[-2])
            figure.savefig(written[-1], dpi=150, metadata={"Software": None}, bbox_inches="tight")
    return written


def _chart(chart: Chart) -> Any:
    from matplotlib.figure import Figure

    square = chart.square
    many = len(chart.series) > MANY
    # Beside the chart, a list of names takes its own room.
    figure = Figure((4.5, 4.5) if square else (5.5, 3.5), layout=None if many else "constrained")
    axis = figure.subplots()
    for line, style in zip(chart.series, itertools.cycle(("-", "--", ":")), strict=False):
        marker = "" if square or len(line.marks) > 30 else "."
        x, y = [mark.x for mark in line.marks], [mark.y for mark in line.marks]
        colour = f"C{line.number % 10}"  # the same group has the same in all figures
        axis.plot(x, y, style, marker=marker, label=line.label, color=colour)
        _shade(axis, line, colour)
    if square:
        axis.set_aspect("equal")
    if chart.kind in DIAGONAL:
        axis.plot([0, 1], [0, 1], ":", color="grey", linewidth=0.8)
    if chart.level is not None:
        axis.axhline(chart.level, linestyle=":", color="grey", linewidth=0.8)
    if chart.log:
        axis.set_yscale("log")
    if chart.cut or chart.least:
        axis.set_ylim(*axes(chart)[1][:2])
    axis.set_title(chart.title, fontsize="medium", loc="left", parse_math=False)
    axis.set_xlabel(chart.x)
    axis.grid(alpha=0.3)
    beside: Any = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    legend = axis.legend(fontsize="small", **(beside if many else {}))
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar in a name is a dollar
    return figure


def _shade(axis: Any, line: Series, colour: str) -> None:
    """The range over runs, or the band of a ROC curve."""
    if line.lower:
        corners = [*line.upper, *line.lower[::-1]]
        axis.fill(*zip(*corners, strict=True), color=colour, alpha=0.2, linewidth=0)
    elif any(mark.count > 1 for mark in line.marks):
        low, high = [mark.low for mark in line.marks], [mark.high for mark in line.marks]
        axis.fill_between([mark.x for mark in line.marks], low, high, color=colour, alpha=0.15)


def _last(plan: Plan, lines: list[Line]) -> Any:
    """The last value against the first varied key; a panel for each value of the others."""
    if not lines[0].varied:
        raise ValueError('[compare] figure = "last" draws against the first key of [vary]: add one')
    key = lines[0].varied[0][0]
    # Keys that change together with the first are shown by it alone.
    panels = _grouped(
        lines, lambda line: tuple(p for p in line.varied[1:] if not tied(lines, p[0], key))
    )
    figure, axes = _axes(len(panels), 1)
    for axis, (where, own) in zip(axes[0], panels.items(), strict=True):
        for style, (label, same) in _styled(_grouped(own, lambda line: line.label).items()):
            found = [[plan.value(h[-1]) for h in line.histories] for line in same]
            values = [[v for v in some if v is not None] or [math.nan] for some in found]
            middle = [statistics.median(some) for some in values]
            x = [dict(line.varied)[key] for line in same]
            axis.plot(x, middle, style, label=label)
            axis.fill_between(x, [*map(min, values)], [*map(max, values)], alpha=0.15)
        _titled(axis, where, key, plan.metric)
        along = [dict(line.varied)[key] for line in own]
        if all(isinstance(x, int | float) for x in along) and 0 < WIDE * min(along) < max(along):
            axis.set_xscale("log")
            axis.set_xticks(sorted(set(along)), map(shown, sorted(set(along))), minor=False)
            axis.set_xticks([], minor=True)
        if not plan.larger and _positive(line.get_ydata() for line in axis.lines):
            axis.set_yscale("log")
    axes[0][-1].legend(fontsize="small")
    return figure


class Curve(NamedTuple):
    """The median over the runs of a line, where each of them has a value."""

    label: str
    records: list[dict[str, Any]]  # of the first run: what it had cost by then
    values: list[float]


def _curves(plan: Plan, lines: list[Line]) -> Any:
    """The metric against gradients and against megabytes sent up; a row for each variation."""
    panels = _grouped(lines, lambda line: line.varied)
    figure, axes = _axes(2, len(panels))
    named = naming(lines)
    for row, (where, own) in zip(axes, panels.items(), strict=True):
        curves = [_curve(plan, line) for line in own]
        apart = _apart(curves)
        for style, (label, records, values) in _styled(curves):
            for axis, unit, per in zip(row, ("gradients", "bytes_up"), (1, 1e6), strict=True):
                # A log scale has no place for what is sent before the first round.
                first = int(axis is row[1] and apart and bool(records) and not records[0]["round"])
                x = [record[unit] / per for record in records[first:]]
                every = max(1, len(x) // 8)
                axis.plot(x, values[first:], style, markevery=every, label=label)
        for axis, name in zip(row, ("gradients", "megabytes up"), strict=True):
            title = tuple(pair for pair in where if pair[0] in named and axis is row[0])
            _titled(axis, title, name, plan.metric)
        if apart:
            row[1].set_xscale("log")
        _fit(row, plan, [curve.values for curve in curves])
    axes[0][-1].legend(fontsize="small")
    return figure


def _curve(plan: Plan, line: Line) -> Curve:
    length = min(map(len, line.histories))
    found = [[plan.value(history[i]) for history in line.histories] for i in range(length)]
    kept = [i for i, some in enumerate(found) if None not in some]
    # Unchecked: nothing here is None.
    middle = [statistics.median(found[i]) for i in kept]  # type: ignore[type-var]
    return Curve(line.label, [line.histories[0][i] for i in kept], middle)


def _apart(curves: list[Curve]) -> bool:
    """Whether some methods send far more in a round than others, as d^2 numbers are beside d."""
    ends = [curve.records[-1] for curve in curves if curve.records and curve.records[-1]["round"]]
    sent = [end["bytes_up"] / end["round"] for end in ends]
    return bool(sent) and 0 < WIDE * min(sent) < max(sent)


def _fit(row: Any, plan: Plan, curves: list[list[float]]) -> None:
    """The y axes of a row. Where the first points would squeeze all others together, they hold the
    others, and say so."""
    if not plan.larger and _positive(curves):
        for axis in row:
            axis.set_yscale("log")
        return
    long = [curve for curve in curves if len(curve) >= FEW]
    whole, rest = ([y for curve in long for y in curve[first:]] for first in (0, 1))
    if rest and squeezed(rest, whole):
        margin = 0.05 * (max(rest) - min(rest))
        for axis in row:
            axis.set_ylim(min(rest) - margin, max(rest) + margin)
        row[1].set_title("the first evaluation lies outside", fontsize="small", loc="right")


def _positive(curves: Iterable[Iterable[float]]) -> bool:
    return all(y > 0 for curve in curves for y in curve if math.isfinite(y))


def _axes(columns: int, rows: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 3.5 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _titled(axis: Any, where: Change, x: str, y: str) -> None:
    title = ", ".join(f"{name} = {shown(value)}" for name, value in where)
    axis.set_title(title, fontsize="small", loc="left")
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)


def _styled(things: Iterable[T]) -> Iterator[tuple[str, T]]:
    """Each with a marker and a kind of line."""
    return zip(itertools.cycle(marker + line for line, marker in STYLES), things, strict=False)


def _grouped(lines: list[Line], key: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups
