"""What the runs of a report sent and how long they took, as a section of its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedminimax.report import charts, curves, pieces
from fedminimax.report.runs import Group, Told, last, spread
from fedminimax.report.tables import bytes_text, privacy_text


def section(groups: Sequence[Group]) -> str:
    headings = ["Run", "Exchanges", "Up", "Down", "Per client and round"]
    headings += ["Gradients", "Rows"]
    rows = []
    for group in groups:
        rows.append(
            [
                pieces.named(group),
                pieces.over_runs(last(group, lambda record: record["exchanges"]), pieces.count),
                pieces.over_runs(last(group, lambda record: record["bytes_up"]), bytes_text),
                pieces.over_runs(last(group, lambda record: record["bytes_down"]), bytes_text),
                pieces.over_runs(spread(map(_each_round, group.runs)), bytes_text),
                pieces.over_runs(last(group, lambda record: record["gradients"]), pieces.count),
                pieces.over_runs(last(group, lambda record: record["rows"]), pieces.count),
            ]
        )
    times = [_times(group) for group in groups]
    chart = curves.pace(groups)
    drawn = "" if chart is None else f'<div class="pair">{charts.html(chart)}</div>'
    pace = f'<div class="linked">{pieces.legend(groups)}{drawn}</div>' if drawn else ""
    traffic = [[b or 0.0 for b in _traffic(group)] for group in groups]
    asked = [[over.middle if (over := spread(map(_evaluations, g.runs))) else 0.0] for g in groups]
    apart = _bars(groups, asked, ("evaluations",), bytes_text)
    labels = ("up", "down")
    spans = ("set-up and first evaluation", "until the second evaluation", "after it")
    return (
        f"<h3>What training sent</h3>{_bars(groups, traffic, labels, bytes_text)}"
        f"{pieces.table(headings, rows)}"
        "<p>Gradients are of mini-batches, over all clients.</p>"
        f"<h3>What evaluations sent besides</h3>{apart}"
        "<p>On a scale of their own: they teach the model nothing, and run.evaluate_every says how "
        "often they are.</p>"
        f"{_privacy(groups)}"
        f"<h3>Where the time went</h3>{_bars(groups, times, spans, pieces.seconds_text)}"
        "<p>Until the second evaluation the executor is also chosen, and perhaps compiled. Medians "
        "over runs.</p>"
        f"{pace}"
    )


def _privacy(groups: Sequence[Group]) -> str:
    """What runs with privacy have spent of it."""
    rows = [
        [pieces.named(group), privacy_text(max(spent, key=lambda own: own["epsilon"]))]
        for group in groups
        if (spent := [run.last["privacy"] for run in group.runs if "privacy" in run.last])
    ]
    if not rows:
        return ""
    note = (
        "<p>Of training rows: one is replaced by an empty one. The noise of a simulation follows "
        "from its seed, so the promise is that of a run between sites.</p>"
    )
    return f"<h3>Privacy</h3>{pieces.table(['Run', 'Spent, at most'], rows)}{note}"


def _each_round(run: Told) -> float | None:
    """Up and down, for each client that takes part."""
    rounds, clients = run.last["round"], run.experiment.run.cohort or run.clients
    return curves.sent(run.last) / rounds / clients if rounds and clients else None


def _evaluations(run: Told) -> float:
    return sum(record["evaluation_bytes"] for record in run.history)


def _traffic(group: Group) -> list[float | None]:
    found = (
        last(group, lambda record: record["bytes_up"]),
        last(group, lambda record: record["bytes_down"]),
    )
    return [over.middle if over else None for over in found]


def _times(group: Group) -> list[float]:
    """Until the first record, from there to the second, and after it: medians over runs."""
    parts = []
    for run in group.runs:
        at = [record["seconds"] for record in run.history]
        second = at[1] if len(at) > 1 else at[0]
        parts.append((at[0], second - at[0], at[-1] - second))
    middles = (spread(part) for part in zip(*parts, strict=True))
    return [over.middle if over else 0.0 for over in middles]


def _bars(
    groups: Sequence[Group],
    values: list[list[float]],
    labels: Sequence[str],
    text: Callable[[float], str],
) -> str:
    """A bar for each group, on one scale, in as many parts as there are labels."""
    most = max(map(sum, values)) or 1.0
    keys = "".join(f'<span><i class="p{n}"></i>{label}</span>' for n, label in enumerate(labels))
    rows = []
    for group, parts in zip(groups, values, strict=True):
        parted = "".join(
            f'<i class="p{n}" style="width:{100 * part / most:.2f}%" '
            f'title="{labels[n]}: {text(part)}"></i>'
            for n, part in enumerate(parts)
        )
        told = ", ".join(f"{label} {text(part)}" for label, part in zip(labels, parts, strict=True))
        rows.append(
            f'<div class="bar"><span class="who">{pieces.named(group)}</span>'
            f'<span class="track" role="img" aria-label="{told}">{parted}</span>'
            f'<span class="sum">{text(sum(parts))}</span></div>'
        )
    return f'<div class="bars"><p class="bar-keys">{keys}</p>{"".join(rows)}</div>'
