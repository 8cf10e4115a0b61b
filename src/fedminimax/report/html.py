"""`fedminimax report`: runs as one page that needs nothing but itself.

Every name that comes from data or settings goes through `escape`; the page's own policy forbids it
to ask for anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from fedminimax import __version__
from fedminimax.report import charts, costs, curves, pieces
from fedminimax.report.charts import Chart
from fedminimax.report.curves import Asks
from fedminimax.report.roc import Asked, asked
from fedminimax.report.runs import (
    Group,
    Shares,
    Told,
    differing,
    last,
    metric,
    shares,
)
from fedminimax.report.tables import bytes_text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
BEST = ' <span class="badge good">best on validation rows</span>'
FEW = 8  # settings that are shown unasked


def ask_all(groups: Sequence[Group]) -> dict[int, Asked | str]:
    """One run of each group tells of its rows again: the median one."""
    found: dict[int, Asked | str] = {}
    for group in groups:
        split = group.shown_split()
        run = group.middle_run(split)
        if "auc" not in run.last[split]:
            continue
        found[group.number] = asked(run.folder, split) if run.finished else run.outcome
    return found


def page(groups: Sequence[Group], asks: Asks) -> str:
    """The report as one text; the same runs give the same text."""
    sections = {
        "What was asked": _settings(groups),
        "Outcome": _outcome(groups),
        "Learning curves": _learning(groups),
        "ROC curve": _roc(groups, asks),
        _site_title(groups): _sites(groups, asks),
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
    name = _title(groups)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<title>{escape(name)}</title><link rel="icon" href="data:,">'
        f"<style>{_own('page.css')}</style></head><body>"
        f'<header><div><p class="kind">fedminimax report</p><h1>{escape(name)}</h1></div>'
        '<button type="button" id="theme" hidden>Dark</button></header>'
        f'<nav aria-label="Sections">{links}</nav><main>{bodies}</main>'
        f"<footer>fedminimax {__version__}. One file: it asks nothing of any network.</footer>"
        f"<script>{_own('page.js')}</script></body></html>\n"
    )


def figures(groups: Sequence[Group], asks: Asks) -> list[Chart]:
    """The charts of the page, each once."""
    found = [chart for each in curves.learning(groups) for chart in each.charts.values()]
    found += curves.measures(groups)
    found += [curves.roc(groups, asks), curves.precision_recall(groups, asks)]
    found += map(curves.variables, groups)
    found += [*curves.optimality(groups), curves.pace(groups)]
    return [chart for chart in found if chart is not None]


def _own(name: str) -> str:
    return (files("fedminimax.report") / name).read_text(encoding="utf-8")


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")


def _title(groups: Sequence[Group]) -> str:
    parts = [group.first.experiment for group in groups]
    problems = pieces.joined(part.problem.name for part in parts)
    return f"{problems} on {pieces.joined(part.data.name for part in parts)}"


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


# Outcome.


def _outcome(groups: Sequence[Group]) -> str:
    best = _best(groups)
    names = dict.fromkeys(group.first.monitor for group in groups)
    if "auc" in names:
        names["auprc"] = None
    columns = [
        (split, name)
        for name in names
        for split in ("validation", "test", "train")
        if any(metric(split, name)(run.last) is not None for g in groups for run in g.runs)
    ]
    rows = []
    for group in groups:
        cells = [pieces.named(group) + (BEST if group is best and len(groups) > 1 else "")]
        cells += [_outcomes(group)]
        cells += [pieces.over_runs(last(group, metric(split, name))) for split, name in columns]
        cells += [pieces.over_runs(last(group, lambda record: record["round"]), pieces.count)]
        rows.append(cells)
    headings = ["Run", "Outcome", *(f"{curves.words(n)}, {s}" for s, n in columns), "Rounds"]
    several = any(len(group.runs) > 1 for group in groups)
    note = "<p>Median over seeds, and the range below it.</p>" if several else ""
    table = pieces.table(headings, rows, text=2) + note
    if len(groups) == 1:
        return _tiles(groups[0]) + table
    return table if best is None else f"<p>{pieces.named(best)}{BEST}</p>{_tiles(best)}{table}"


def _best(groups: Sequence[Group]) -> Group | None:
    """By validation rows, if all runs have the same and have ended; test rows decide nothing."""
    if any(key.startswith(("data.", "split.")) for key in differing(groups)):
        return None
    name = groups[0].first.monitor
    values = [last(group, metric("validation", name)) for group in groups]
    if any(group.first.monitor != name for group in groups) or None in values:
        return None
    if any(not run.finished for group in groups for run in group.runs):
        return None
    sign = -1 if groups[0].first.larger_is_better else 1
    known = [(value.middle, group) for value, group in zip(values, groups, strict=True) if value]
    return min(known, key=lambda pair: sign * pair[0])[1]


def _tiles(group: Group) -> str:
    """The few numbers that matter, of one group."""
    name = group.first.monitor
    split = group.shown_split()
    value = last(group, metric(split, name))
    tiles = [
        (f"{curves.words(name)}, {split}", pieces.number_or_dash(value), _interval(group, split))
    ]
    own = shares(group, split)
    # A run that is judged by its worst site has just told it.
    if own and own.worst is not None and not name.startswith("worst"):
        worst = own.values[own.worst]
        tiles.append(
            (f"Worst {own.word}, {own.measure}", pieces.number_or_dash(worst), escape(own.worst))
        )
    total = last(group, curves.sent)
    tiles.append(("Sent, up and down", bytes_text(total.middle) if total else pieces.NONE, ""))
    rounds = last(group, lambda record: record["round"])
    tiles.append(("Rounds", pieces.count(rounds.middle) if rounds else pieces.NONE, ""))
    items = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{number}<small>{more}</small></dd></div>"
        for what, number, more in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _interval(group: Group, split: str) -> str:
    """Of one run the 95 % interval of its AUC, of several their range."""
    found = last(group, metric(split, group.first.monitor))
    if found and found.count > 1:
        low, high = pieces.value_text(found.low), pieces.value_text(found.high)
        return f"{low} to {high} over {found.count} runs"
    interval = group.first.last[split].get("auc_interval")
    if group.first.monitor != "auc" or not interval:
        return ""
    return f"95 % interval {interval[0]:.3f} to {interval[1]:.3f}"


def _outcomes(group: Group) -> str:
    counts: dict[str, int] = {}
    for run in group.runs:
        counts[run.outcome] = counts.get(run.outcome, 0) + 1
    return "<br>".join(
        escape(text) + (f" ({count} of {len(group.runs)} runs)" if len(counts) > 1 else "")
        for text, count in counts.items()
    )


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


def _roc(groups: Sequence[Group], asks: Asks) -> str:
    chart = curves.roc(groups, asks)
    missing = [
        f"<p>{pieces.named(group)}: no curve, because {escape(str(asks[group.number]))}.</p>"
        for group in groups
        if isinstance(asks.get(group.number), str)
    ]
    if chart is None:
        return "".join(missing)
    rows = []
    for group in groups:
        found = asks.get(group.number)
        if isinstance(found, Asked):
            record = group.middle_run(found.split).last[found.split]
            negatives, positives = (sum(each) for each in zip(*found.rows.values(), strict=True))
            rows.append(
                [
                    pieces.named(group),
                    f"{found.auc:.4f} ± {pieces.bound(found.bound)}",
                    pieces.pair(record.get("auc_interval")),
                    f"{found.auprc:.4f} ± {pieces.bound(found.auprc_bound)}",
                    f"{positives:,}",
                    f"{negatives:,}",
                ]
            )
    headings = ["Run", "Federated AUC", "95 % interval", "Federated AUPRC"]
    table = pieces.table([*headings, "Positives", "Negatives"], rows)
    several = any(len(group.runs) > 1 for group in groups)
    which = " Of several seeds it is that of the median run." if several else ""
    withheld = max((a.withheld for a in asks.values() if isinstance(a, Asked)), default=0)
    less = f" Sites that withhold a class for want of rows: {withheld}." if withheld else ""
    note = (
        "<p>From the clients' counts of scores in bins, at the run's last point. The curves of the "
        "scores themselves lie within the bands: nowhere else can they be, given the counts. ± is "
        "the largest error that this leaves in the AUC and the AUPRC; the interval is what other "
        "patients, or rows, would change. A ranking by chance has the share of positives as its "
        f"AUPRC.{which}{less}</p>"
    )
    shown = [group for group in groups if isinstance(asks.get(group.number), Asked)]
    other = curves.precision_recall(groups, asks)
    both = "".join(charts.html(each) for each in (chart, other) if each)
    body = f'<div class="pair">{both}</div>{table}{note}'
    return f'<div class="linked">{pieces.legend(shown)}{body}</div>' + "".join(missing)


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
    if all(len(group.runs) == 1 for group in groups):
        return ""
    return "<p>Lines are medians over seeds, bands the range from the lowest to the highest.</p>"


# Sites and classes.


def _sites(groups: Sequence[Group], asks: Asks) -> str:
    tables: dict[tuple[str, str, str], dict[int, Shares]] = {}
    for group in groups:
        split = group.shown_split()
        own = shares(group, split)
        if own is not None:
            tables.setdefault((split, own.word, own.measure), {})[group.number] = own
    return "".join(
        _site_table(split, word, measure, own, groups, asks)
        for (split, word, measure), own in tables.items()
    )


def _site_title(groups: Sequence[Group]) -> str:
    found = {own.word for group in groups if (own := shares(group, group.shown_split()))}
    return {("class",): "Classes", ("class", "site"): "Sites and classes"}.get(
        tuple(sorted(found)), "Sites"
    )


def _site_table(
    split: str,
    word: str,
    measure: str,
    own: dict[int, Shares],
    groups: Sequence[Group],
    asks: Asks,
) -> str:
    names = dict.fromkeys(name for each in own.values() for name in each.values)
    told = [found for n in own if isinstance(found := asks.get(n), Asked)]
    counts: dict[str, tuple[int, int]] = {}
    for found in reversed(told):  # of several, the first that has the site
        counts |= found.rows
    headings = [word.capitalize(), *(["Rows", "Positive"] if counts else [])]
    headings += [group.label for group in groups if group.number in own]
    rows = []
    for name in names:
        cells = [escape(name)]
        if counts:
            negatives, positives = counts.get(name, (0, 0))
            total = negatives + positives
            cells += [f"{total:,}", f"{positives / total:.0%}"] if total else [pieces.NONE] * 2
        rows.append(cells + [_site_cell(own[g.number], name) for g in groups if g.number in own])
    small = any(each.small for each in own.values())
    note = " Sites with fewer than 5 rows of a class are not judged." if small else ""
    of = " Rows are those of the run whose ROC curve is drawn." if counts and len(told) > 1 else ""
    title = f"<h3>{measure[0].upper()}{measure[1:]} of each {word}, on {curves.ROWS[split]}</h3>"
    return f"{title}{pieces.table(headings, rows)}<p>The worst {word} is marked.{note}{of}</p>"


def _site_cell(own: Shares, name: str) -> str:
    value = own.values.get(name)
    if value is None and name in own.values and own.measure == "AUC":
        return '<span class="few">one class</span>'
    if value is None:
        return pieces.NONE
    if name in own.small:
        return (
            f'<span class="few">{pieces.over_runs(value)}</span>{pieces.badge("few rows", "quiet")}'
        )
    return pieces.over_runs(value) + (pieces.badge("worst") if name == own.worst else "")


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
