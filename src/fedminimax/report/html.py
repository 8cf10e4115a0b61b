"""`fedminimax report`: runs as one page that needs nothing but itself.

Every name that comes from data or settings goes through `escape`; the page's own policy (page.py)
forbids it to ask for anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fedminimax.report import (
    charts,
    costs,
    curves,
    label_tables,
    outcome,
    pieces,
    quality,
    searches,
    site_tables,
)
from fedminimax.report.charts import Chart
from fedminimax.report.curves import Asks
from fedminimax.report.page import whole
from fedminimax.report.runs import Group, Told, differing

FEW = 8  # settings that are shown unasked


def page(groups: Sequence[Group], asks: Asks) -> str:
    """The report as one text; the same runs give the same text."""
    curved = {
        "Precision and recall": quality.precision(groups, asks),
        "ROC curve": quality.roc(groups, asks),
    }
    sections = {
        "Outcome": outcome.section(groups, asks),
        **dict(curved if outcome.rare(asks) else reversed(curved.items())),
        site_tables.title(groups): site_tables.section(groups, asks),
        "Labels": label_tables.section(groups),
        "Influence of sites": site_tables.influence(groups),
        "Probabilities": quality.probabilities(groups, asks),
        "Learning curves": _learning(groups),
        "Searches": searches.section(groups),
        "What was asked": _settings(groups),
        "Dual variables": _variables(groups),
        "Optimality": _optimality(groups),
        "Communication and time": costs.section(groups),
        "Runs in full": _runs(groups),
    }
    shown = {title: body for title, body in sections.items() if body}
    links = "".join(f'<a href="#{_id(title)}">{title}</a>' for title in shown)
    bodies = "".join(
        f'<section id="{_id(title)}"><h2>{title}</h2>{body}</section>'
        for title, body in shown.items()
    )
    body = f'<nav aria-label="Sections">{links}</nav><main>{bodies}</main>'
    return whole(outcome.title(groups), "fedminimax report", body)


def figures(groups: Sequence[Group], asks: Asks) -> list[Chart]:
    """The charts of the page, each once."""
    found = [chart for each in curves.learning(groups) for chart in each.charts.values()]
    found += curves.measures(groups)
    found += [curves.precision_recall(groups, asks), curves.roc(groups, asks)]
    found += [curves.calibration(groups, asks), *map(curves.variables, groups)]
    found += [*curves.optimality(groups), curves.pace(groups)]
    return [chart for chart in found if chart is not None]


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")


# What was asked.


def _settings(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    parts = [run.experiment for run in runs]
    facts = {
        "Data": pieces.joined(part.data.name for part in parts),
        "Problem": pieces.joined(part.problem.name for part in parts),
        "Model": pieces.joined(part.model.name for part in parts if part.model),
        "Method": pieces.joined(part.method.name for part in parts),
        "Rounds": pieces.joined(str(part.run.rounds) for part in parts),
        "Runs": str(len(runs)) if len(runs) == len(groups) else f"{len(runs)}, {_seeds(groups)}",
    }
    items = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    keys = differing(groups)
    tables = [run.settings for run in runs]
    common = [(k, v) for k, v in tables[0].items() if all(table.get(k) == v for table in tables)]
    rows = [
        [f"<code>{escape(key)}</code>", *(_setting(g.first.settings.get(key)) for g in groups)]
        for key in keys
    ]
    table = pieces.table(
        ["Setting", *(group.label for group in groups)], rows, text=len(groups) + 1
    )
    opened = " open" if len(keys) <= FEW else ""
    title = f"Where they differ ({len(keys)})"
    differ = f"<details{opened}><summary>{title}</summary>{table}</details>" if keys else ""
    rows = [[f"<code>{escape(key)}</code>", _setting(value)] for key, value in common]
    shared = pieces.table(["Setting", "Value"], rows, text=2)
    title = "All settings" if not keys else "Settings that all have"
    return (
        f'<dl class="facts">{items}</dl>{differ}'
        f"<details><summary>{title} ({len(common)})</summary>{shared}</details>"
    )


def _seeds(groups: Sequence[Group]) -> str:
    counts = sorted({len(group.runs) for group in groups})
    each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{each} seeds each" if len(groups) > 1 else f"{each} seeds"


def _setting(value: str | None) -> str:
    return pieces.NONE if value is None else f"<code>{escape(value)}</code>"


# Charts.


def _learning(groups: Sequence[Group]) -> str:
    found = curves.learning(groups)
    if not found:
        return ""
    axes = [axis.name for axis in curves.against(groups)]
    named = {"round": "rounds", "bytes": "bytes sent"}
    buttons = "".join(
        f'<button type="button" data-tab="{axis}" aria-pressed="{str(axis == "round").lower()}">'
        f"{named.get(axis, axis)}</button>"
        for axis in axes
    )
    tabs = f'<div class="tabs" role="group" aria-label="Against">{buttons}</div>'
    panels = "".join(
        f'<div class="pair" data-panel="{axis}">'
        + "".join(charts.html(each.charts[axis]) for each in found)
        + "</div>"
        for axis in axes
    )
    others = curves.measures(groups)
    more = pieces.details("Other measures, by round", _charts(others)) if others else ""
    note = _band_note(groups)
    return f'<div class="linked">{tabs}{pieces.legend(groups)}{panels}{note}{more}</div>'


def _variables(groups: Sequence[Group]) -> str:
    drawn = [(group, curves.variables(group)) for group in groups]
    found = "".join(
        f'<div class="linked"><h3>{pieces.named(group)}</h3>{charts.legend(chart.series)}'
        f"{charts.html(chart)}</div>"
        for group, chart in drawn
        if chart is not None
    )
    if not found:
        return ""
    note = "" if not any(g.first.monitor == "auc" for g in groups) else (
        "<p>For AUC, a and b follow the mean scores of positives and negatives, and alpha follows "
        "b less a (in the margin form, with the margin added). A dual that runs away while the "
        "metric stands still has too high a rate.</p>"
    )  # fmt: skip
    return f'<div class="pair">{found}</div>{note}'


def _optimality(groups: Sequence[Group]) -> str:
    found = curves.optimality(groups)
    if not found:
        return ""
    numbers = {line.number for chart in found for line in chart.series}
    shown = [group for group in groups if group.number in numbers]
    unsolved = sorted(
        {
            name.removesuffix("_reached")
            for group in groups
            for run in group.runs
            for record in run.history
            for name, value in record.get("optimality", {}).items()
            if name.endswith("_reached") and value is False
        }
    )
    names = ", ".join(map(escape, unsolved))
    note = f"<p>Not solved to the tolerance at some points: {names}.</p>" if names else ""
    return (
        f'<div class="linked">{pieces.legend(shown)}{_charts(found)}</div>{note}'
        "<p>Gradients and gaps are of the federation's objective on all training rows, 0 at a "
        "solution. Drift is how far apart the clients' points are at the end of a round.</p>"
    )


def _charts(found: Iterable[Chart]) -> str:
    return f'<div class="pair">{"".join(map(charts.html, found))}</div>'


def _band_note(groups: Sequence[Group]) -> str:
    notes = []
    if any(len(group.runs) > 1 for group in groups):
        notes.append("Lines over several seeds are medians, bands the range of the seeds.")
    if any(len(g.runs) == 1 and g.first.monitor == "auc" for g in groups):
        notes.append("The band of a single run's AUC is its 95 % interval.")
    return f"<p>{' '.join(notes)}</p>" if notes else ""


# Runs in full.


def _runs(groups: Sequence[Group]) -> str:
    """Folded, seed by seed below their group."""
    found = []
    for group in groups:
        inside = "".join(_run(group, run) for run in group.runs)
        title = f"{pieces.named(group)} <small>{len(group.runs)} runs</small>"
        found.append(inside if len(group.runs) == 1 else pieces.details(title, inside))
    return "".join(found)


def _run(group: Group, run: Told) -> str:
    seeds = ", ".join(f"{name} {value}" for name, value in run.seeds.items())
    about = ", ".join(
        f"{name} {value}" for name, value in run.environment.items() if value is not None
    )
    more = f"<p>{escape(run.outcome)}. {escape(seeds)}.</p><p>{escape(about)}</p>"
    body = f"{more}<pre>{escape(run.config)}</pre>"
    return pieces.details(f"{pieces.named(group)} <code>{escape(str(run.folder))}</code>", body)
