"""How each of several labels, or classes, is ranked by the models of a report's runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from fedminimax.report import curves, pieces
from fedminimax.report.runs import Group, Record, kept

SHOWN = {"auc": "AUC", "auprc": "AUPRC"}


def section(groups: Sequence[Group]) -> str:
    """A table of AUC and AUPRC per label, with the rows that know it; empty without any."""
    shown = [group for group in groups if _table(group.first.kept, group.shown_split())]
    if not shown:
        return ""
    split = shown[0].shown_split()
    tables = [_table(group.first.kept, split) for group in shown]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = []
    for name in names:
        known = next(table[name] for table in tables if name in table)
        total = known["positives"] + known["negatives"]
        small = any(name in g.first.kept[split].get("labels_too_small", ()) for g in shown)
        cells = [escape(name) + (pieces.badge("few rows", "quiet") if small else "")]
        cells += [f"{total:,}", f"{known['positives']:,}"]
        for measure in SHOWN:
            cells += [_cell(group, split, name, measure) for group in shown]
        rows.append(cells)
    headings = [
        f"{word}, {group.label}" if len(shown) > 1 else word
        for word in SHOWN.values()
        for group in shown
    ]
    table = pieces.table(["Label", "Rows", "Positives", *headings], rows)
    note = (
        "Rows are those that know the label. Below a number is how far the federated one may be "
        "off. Labels with fewer than 5 rows of a class are in no mean."
    )
    return f"<h3>Each label, on {curves.ROWS[split]}</h3>{table}<p>{note}</p>"


def _table(record: Record, split: str) -> Record:
    return record.get(split, {}).get("labels", {})


def _cell(group: Group, split: str, name: str, measure: str) -> str:
    def value(key: str) -> Callable[[Record], float | None]:
        return lambda record: _table(record, split).get(name, {}).get(key)

    found, off = kept(group, value(measure)), kept(group, value(f"{measure}_bound"))
    if found is None:
        return pieces.NONE
    more = "" if off is None else f"<small>\N{PLUS-MINUS SIGN} {pieces.bound(off.middle)}</small>"
    return pieces.over_runs(found) + more
