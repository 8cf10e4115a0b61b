"""How each site, or class, fares by the models of a report's runs, as a section of its page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedminimax.report import curves, pieces
from fedminimax.report.curves import Asks
from fedminimax.report.roc import Asked, Interval
from fedminimax.report.runs import Group, Shares, shares


def section(groups: Sequence[Group], asks: Asks) -> str:
    """A table for each measure that runs tell of their sites or classes."""
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


def influence(groups: Sequence[Group]) -> str:
    """How much each site moved the mean in the last round that was recorded, of runs between
    sites."""
    found = ""
    for group in groups:
        told = group.runs[0].history[-1].get("influence", {})
        rows = [
            [escape(name), *(pieces.value_text(own[n]) for n in ("norm", "cosine", "weight"))]
            for name, own in told.items()
        ]
        if rows:
            headings = ["Site", "Norm of its update", "Cosine with the mean", "Weight"]
            found += f"<h3>{pieces.named(group)}</h3>{pieces.table(headings, rows)}"
    return found


def title(groups: Sequence[Group]) -> str:
    """What they are tables of."""
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
    shown = [group for group in groups if group.number in own]
    headings = [word.capitalize(), *(["Rows", "Positives"] if counts else [])]
    headings += [group.label for group in shown]
    rows = []
    for name in names:
        cells = [escape(name)]
        if counts:
            negatives, positives = counts.get(name, (0, 0))
            total = negatives + positives
            share = f"{positives:,}<small>{positives / total:.1%}</small>" if total else pieces.NONE
            cells += [f"{total:,}" if total else pieces.NONE, share]
        rows.append(cells + [_site_cell(own[g.number], name, _of(g, asks, name)) for g in shown])
    small = any(each.small for each in own.values())
    note = " Sites with fewer than 5 rows of a class are not judged." if small else ""
    note += " Below an AUC is its 95 % interval." if measure == "AUC" and told else ""
    of = " Rows are those of the run whose ROC curve is drawn." if counts and len(told) > 1 else ""
    title = f"<h3>{measure[0].upper()}{measure[1:]} of each {word}, on {curves.ROWS[split]}</h3>"
    return f"{title}{pieces.table(headings, rows)}<p>The worst {word} is marked.{note}{of}</p>"


def _of(group: Group, asks: Asks, name: str) -> Interval:
    """The interval of a site's AUC, where one run tells it."""
    found = asks.get(group.number)
    if len(group.runs) > 1 or not isinstance(found, Asked) or found.seen is None:
        return None
    return found.seen.intervals.get(name)


def _site_cell(own: Shares, name: str, interval: Interval) -> str:
    value = own.values.get(name)
    if value is None and name in own.values and own.measure == "AUC":
        return f'<span class="few">{"few rows" if name in own.small else "one class"}</span>'
    if value is None:
        return pieces.NONE
    text = pieces.over_runs(value)
    if interval is not None and own.measure == "AUC":
        text += f"<small>{pieces.pair(interval)}</small>"
    if name in own.small:
        return f'<span class="few">{text}</span>{pieces.badge("few rows", "quiet")}'
    return text + (pieces.badge("worst") if name == own.worst else "")
