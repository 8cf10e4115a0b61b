"""How good the models of runs are on the rows that judge them, as sections of a report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedminimax.report import charts, curves, pieces
from fedminimax.report.curves import Asks
from fedminimax.report.judged import Rule, wilson
from fedminimax.report.roc import Asked, asked
from fedminimax.report.runs import Group


def ask_all(groups: Sequence[Group]) -> dict[int, Asked | str]:
    """One run of each group tells of its rows again: the median one."""
    found: dict[int, Asked | str] = {}
    for group in groups:
        split = group.shown_split()
        run = group.middle_run(split)
        if "auc" not in run.kept[split]:
            continue
        found[group.number] = asked(run.folder, split) if run.finished else run.outcome
    return found


def precision(groups: Sequence[Group], asks: Asks) -> str:
    """Precision against recall, and the AUPRC of each group."""
    chart = curves.precision_recall(groups, asks)
    if chart is None:
        return ""
    shown = _told(groups, asks)
    rows = []
    for group in shown:
        found = asks[group.number]
        assert isinstance(found, Asked)
        interval = pieces.pair(found.seen.auprc_interval if found.seen else None)
        told = f"{found.auprc:.4f} ± {pieces.bound(found.auprc_bound)}"
        rows.append([pieces.named(group), told, interval])
    note = (
        "<p>Precision is the share of true positives among the rows above a threshold, recall the "
        "share of positives that are above it. The dotted line is what chance gives: the share of "
        "positives. ± and the band are what counts in bins leave open; the interval is Boyd's, on "
        "the logit scale.</p>"
    )
    table = pieces.table(["Run", "Federated AUPRC", "95 % interval"], rows) + note
    body = f'<div class="beside">{charts.html(chart)}<div>{table}</div></div>'
    return f'<div class="linked">{pieces.legend(shown)}{body}</div>'


def roc(groups: Sequence[Group], asks: Asks) -> str:
    """The ROC curve with the bound of its federated counts."""
    chart = curves.roc(groups, asks)
    missing = [
        f"<p>{pieces.named(group)}: no curve, because {escape(str(asks[group.number]))}.</p>"
        for group in groups
        if isinstance(asks.get(group.number), str)
    ]
    if chart is None:
        return "".join(missing)
    shown, rows = _told(groups, asks), []
    for group in shown:
        found = asks[group.number]
        assert isinstance(found, Asked)
        record = group.middle_run(found.split).kept[found.split]
        negatives, positives = (sum(each) for each in zip(*found.rows.values(), strict=True))
        rows.append(
            [
                pieces.named(group),
                f"{found.auc:.4f} ± {pieces.bound(found.bound)}",
                pieces.pair(record.get("auc_interval")),
                f"{positives:,}",
                f"{negatives:,}",
            ]
        )
    table = pieces.table(["Run", "Federated AUC", "95 % interval", "Positives", "Negatives"], rows)
    several = any(len(group.runs) > 1 for group in groups)
    which = " Of several seeds it is that of the median run." if several else ""
    withheld = max((a.withheld for a in asks.values() if isinstance(a, Asked)), default=0)
    less = f" Sites that withhold a class for want of rows: {withheld}." if withheld else ""
    note = (
        "<p>From the clients' counts of scores in bins, by the model that the run returns. The "
        "curve of the scores themselves lies within the band: nowhere else can it be, given the "
        "counts. ± is the largest error that this leaves in the AUC; the interval is what other "
        f"patients, or rows, would change.{which}{less}</p>"
    )
    body = f'<div class="beside">{charts.html(chart)}<div>{table}{note}</div></div>'
    return f'<div class="linked">{pieces.legend(shown)}{body}</div>' + "".join(missing)


def probabilities(groups: Sequence[Group], asks: Asks) -> str:
    """Whether probabilities come true, and the operating points."""
    chart = curves.calibration(groups, asks)
    if chart is None:
        return ""
    numbers = {line.number for line in chart.series}
    shown = [group for group in groups if group.number in numbers]
    tables = "".join(_rules(group, asks[group.number], len(shown) > 1) for group in shown)
    note = (
        "<p>Probabilities are by Platt's map of the validation rows; on the dotted line they come "
        "true. Each point is a tenth of the range of probabilities, with the 95 % interval of the "
        "share that was positive. Few rows make it long.</p>"
    )
    body = f'<div class="beside">{charts.html(chart)}<div>{note}</div></div>'
    return f'<div class="linked">{pieces.legend(shown)}{body}</div>{tables}'


def _rules(group: Group, found: Asked | str, several: bool) -> str:
    assert isinstance(found, Asked)
    assert found.seen is not None
    rows = [[_rule_name(rule), *_rule_cells(rule)] for rule in found.seen.rules]
    headings = ["Positive above", "Probability", "Positives found", "False alarms", "Precision"]
    which = f"{pieces.named(group)}: " if several else ""
    title = f"<h3>{which}Operating points, on {curves.ROWS[found.split]}</h3>"
    return (
        f"{title}{pieces.table([*headings, 'Flagged'], rows)}<p>Chosen on validation rows, told on "
        f"{curves.ROWS[found.split]}, so a rate need not be reached again. "
        "<code>fedminimax predict --at sensitivity=0.9</code> uses one.</p>"
    )


def _rule_name(rule: Rule) -> str:
    return f"{rule.wanted} {rule.value:g}"


def _rule_cells(rule: Rule) -> list[str]:
    above = rule.found + rule.alarms
    precise = pieces.NONE if not above else _share(rule.found, above)
    return [
        f"{rule.probability:.3f}",
        _share(rule.found, rule.positives),
        _share(rule.alarms, rule.negatives),
        precise,
        f"{above:,}",
    ]


def _share(count: int, of: int) -> str:
    low, high = wilson(count, of)
    return f"{count / of:.1%}<small>{low:.1%} to {high:.1%}</small>"


def _told(groups: Sequence[Group], asks: Asks) -> list[Group]:
    return [group for group in groups if isinstance(asks.get(group.number), Asked)]
