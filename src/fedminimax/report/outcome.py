"""What came of the runs of a report: a title in words, the few numbers that matter, a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedminimax.report import curves, pieces
from fedminimax.report.curves import Asks
from fedminimax.report.roc import Asked, Interval
from fedminimax.report.runs import Group, Told, differing, kept, last, metric, shares
from fedminimax.report.tables import bytes_text

BEST = ' <span class="badge good">best on validation rows</span>'
RARE = 0.2  # the share of positives up to which precision is told before AUC
OBJECTIVES = {
    "auc": "AUC",
    "compositional_auc": "AUC",
    "maml": "meta-learning",
    "wgan": "Wasserstein GAN",
    "pl_pl": "PL-PL game",
    "image_gan": "image GAN",
}


def title(groups: Sequence[Group]) -> str:
    """The label, the data, how many sites, and the objective: in words."""
    runs = [group.first for group in groups]
    return f"{pieces.joined(map(subject, runs))}: {pieces.joined(map(objective, runs))}"


def subject(run: Told) -> str:
    """What a run is about: its label in its data, and how many sites."""
    label = run.experiment.data.options.get("label")
    what = f"{label} in {place(run)}" if label else place(run)
    return f"{what}, {run.clients} sites" if run.clients > 1 else what


def place(run: Told) -> str:
    """The name of the data: of a user's own, that of the file or folder."""
    data = run.experiment.data
    own = data.options.get("path", "")
    return Path(own).stem if own and data.name in ("folder", "pooled") else data.name


def objective(run: Told) -> str:
    name = run.experiment.problem.name
    return OBJECTIVES.get(name, name.replace("_", " "))


def rare(asks: Asks) -> bool:
    """Whether positives are so rare that precision tells more than the AUC."""
    told = [found for found in asks.values() if isinstance(found, Asked)]
    return bool(told) and all(positive_share(found) <= RARE for found in told)


def positive_share(found: Asked) -> float:
    """Of the rows that a report judges by."""
    return found.positives / found.total


def section(groups: Sequence[Group], asks: Asks) -> str:
    """Tiles of the best group, or the only one, and a line for each."""
    best = by_validation(groups)
    monitors = list(dict.fromkeys(group.first.monitor for group in groups))
    if "auc" in monitors:
        monitors.append("auprc")
    columns = [
        (split, name)
        for name in monitors
        for split in ("test", "validation", "train")
        if any(metric(split, name)(run.kept) is not None for g in groups for run in g.runs)
    ]
    rows = []
    for group in groups:
        cells = [pieces.named(group) + (BEST if group is best and len(groups) > 1 else "")]
        cells += [_outcomes(group)]
        cells += [pieces.over_runs(kept(group, metric(split, name))) for split, name in columns]
        cells += [pieces.over_runs(last(group, lambda record: record["round"]), pieces.count)]
        cells += [pieces.over_runs(kept(group, lambda record: record["round"]), pieces.count)]
        rows.append(cells)
    headings = ["Run", "Outcome", *(f"{curves.words(n)}, {s}" for s, n in columns)]
    table = pieces.table([*headings, "Rounds", "Model of round"], rows, text=2)
    if any(len(group.runs) > 1 for group in groups):
        table += "<p>Median over seeds, and the range below it.</p>"
    shown = groups[0] if len(groups) == 1 else best
    if shown is None:
        return table
    name = f"<p>{pieces.named(shown)}{BEST}</p>" if len(groups) > 1 else ""
    return f"{name}{_tiles(shown, asks.get(shown.number), rare(asks))}{table}"


def by_validation(groups: Sequence[Group]) -> Group | None:
    """The best, if all runs have the same validation rows and have ended; test rows decide
    nothing."""
    if any(key.startswith(("data.", "split.")) for key in differing(groups)):
        return None
    name = groups[0].first.monitor
    values = [kept(group, metric("validation", name)) for group in groups]
    if any(group.first.monitor != name for group in groups) or None in values:
        return None
    if any(not run.finished for group in groups for run in group.runs):
        return None
    sign = -1 if groups[0].first.larger_is_better else 1
    known = [(value.middle, group) for value, group in zip(values, groups, strict=True) if value]
    return min(known, key=lambda pair: sign * pair[0])[1]


def _tiles(group: Group, asked: Asked | str | None, rare: bool) -> str:
    """The few numbers that matter, of one group."""
    name, split = group.first.monitor, group.shown_split()
    value = kept(group, metric(split, name))
    found = asked if isinstance(asked, Asked) else None
    tiles = [
        (f"{curves.words(name)}, {split}", pieces.number_or_dash(value), _interval(group, split))
    ]
    area = _precision(group, found, split)
    tiles[0 if rare else 1 : 0 if rare else 1] = area
    own = shares(group, split)
    # A run that is judged by its worst site has just told it.
    if own and own.worst is not None and not name.startswith("worst"):
        number = pieces.number_or_dash(own.values[own.worst])
        more = "; ".join(filter(None, [f"at {own.worst}", _site_interval(group, found, own.worst)]))
        tiles.append((f"Worst {own.word}, {own.measure}", number, escape(more)))
    if found is not None:
        share = f"of {found.total:,} {curves.ROWS[split]}"
        tiles.append(("Positive", f"{positive_share(found):.1%}", share))
    total = last(group, curves.sent)
    tiles.append(
        ("Sent in training", bytes_text(total.middle) if total else pieces.NONE, "up and down")
    )
    items = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{number}<small>{more}</small></dd></div>"
        for what, number, more in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _precision(group: Group, found: Asked | None, split: str) -> list[tuple[str, str, str]]:
    value = kept(group, metric(split, "auprc"))
    if value is None:
        return []
    more = ""
    if found is not None:
        interval = found.seen.auprc_interval if found.seen and len(group.runs) == 1 else None
        told = f"{interval_text(interval)}; " if interval else ""
        more = f"{told}{positive_share(found):.3f} by chance"
    return [(f"AUPRC, {split}", pieces.number_or_dash(value), more)]


def _site_interval(group: Group, found: Asked | None, site: str) -> str:
    own = found.seen.intervals.get(site) if found and found.seen and len(group.runs) == 1 else None
    return interval_text(own)


def interval_text(interval: Interval) -> str:
    return f"95 % interval {interval[0]:.3f} to {interval[1]:.3f}" if interval else ""


def _interval(group: Group, split: str) -> str:
    """Of one run the 95 % interval of its AUC, of several their range."""
    found = kept(group, metric(split, group.first.monitor))
    if found and found.count > 1:
        low, high = pieces.value_text(found.low), pieces.value_text(found.high)
        return f"{low} to {high} over {found.count} runs"
    if group.first.monitor != "auc":
        return ""
    return interval_text(group.first.kept[split].get("auc_interval"))


def _outcomes(group: Group) -> str:
    counts: dict[str, int] = {}
    for run in group.runs:
        counts[run.outcome] = counts.get(run.outcome, 0) + 1
    return "<br>".join(
        escape(text) + (f" ({count} of {len(group.runs)} runs)" if len(counts) > 1 else "")
        for text, count in counts.items()
    )
