"""The benchmark's records as a page: tables, average ranks, differences, an ablation, and costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedminimax.config import Table
from fedminimax.engine.state.checkpoint import write_bytes
from fedminimax.metrics.paired import Difference, paired_difference
from fedminimax.report.benchmark import Contents
from fedminimax.report.ranks import diagram, ranks
from fedminimax.report.tables import bytes_text

AUTO, FEDAVG = "auto", "FedAvg"
PLAIN = "FedAvg, numbers not encoded"
RIVALS = (PLAIN, "pooled logistic regression", "pooled gradient boosting")
ABLATION = {
    "as it is": (AUTO, "auc"),
    "without the choice: FedAvg on cross-entropy": (FEDAVG, "auc"),
    "and without the encoding": (PLAIN, "auc"),
    "and without hidden layers": ("FedAvg, linear", "auc"),
    "and without the best round": (FEDAVG, "last_auc"),
}
MEASURES = {"auc": "AUC", "auprc": "AUPRC", "worst_site_auc": "AUC of the worst site"}


def write_page(found: dict[str, Table], contents: Contents, budget: str, output: Path) -> Path:
    """Writes benchmark.md with its diagram benchmark.svg."""
    name, page = "benchmark", output / "benchmark.md"
    output.mkdir(parents=True, exist_ok=True)
    known = {s: r for s, r in found.items() if not r["kept_out"]}
    kept = {s: r for s, r in found.items() if r["kept_out"]}
    rows = [row.name for row in contents.rows]
    parts = [_head(contents, budget, found)]
    if known:
        parts += [_table(title, key, known, rows) for key, title in MEASURES.items()]
    ranked = [row for row in rows if all(_values(r, row, "auc") for r in found.values())]
    if len(found) > 1 and len(ranked) > 1:
        average = ranks({row: [_mean(r, row, "auc") for r in found.values()] for row in ranked})
        picture = diagram(average, "Average ranks by test AUC")
        write_bytes(output / f"{name}.svg", picture.encode())
        parts.append(
            f"## Average ranks\n\nBy the mean test AUC of each row that runs on all "
            f"{average.sets} sets, 1 the best. Rows that a bar joins are not told apart at 5 % "
            "(Nemenyi).\n\n"
            f"![Average ranks and the critical difference]({name}.svg)"
        )
    if known:
        parts += [_set_by_set(known), _differences(known, rows), _ablation(known)]
        parts.append(_costs(known, rows))
    if kept:
        parts.append(
            "## Kept out\n\nNothing was decided with these sets in sight; they are reported once."
        )
        parts += [_table(title, key, kept, rows, 3) for key, title in MEASURES.items()]
        parts += [_set_by_set(kept, 3), _differences(kept, rows, 3)]
    write_bytes(page, ("\n\n".join(part for part in parts if part) + "\n").encode())
    return page


def _head(contents: Contents, budget: str, found: dict[str, Table]) -> str:
    about = contents.budget
    lines = [
        "# Benchmark: tables with rare positives",
        f"Made by `fedminimax benchmark --budget {budget} -o docs/results`, which goes on where it "
        f"stopped. {about.splits} splits, {about.rounds} rounds of 8 local steps with batches of "
        f"64, sets of the UCI repository with at most {about.rows:,} rows; 60 % of each site's "
        "rows are trained on, 20 % choose the best round (and recipe), 20 % are tested. "
        + (
            "Each method's rate was tuned on the first split of each set."
            if about.tuned
            else "Rates are the defaults: nothing was tuned."
        ),
    ]
    if budget == "quick":
        lines.append(
            "**This is the quick budget.** It shows the order of things; three splits tell few "
            "differences from chance. The full one (`--budget full`: 5 splits, 10,000 rows, tuned "
            "rates, two more shares of positives, more methods, and images: Fashion-MNIST to "
            "decide by and MNIST kept out) is begun, and gone on with, by the same "
            "command; it is meant for 10 hours of two cores, and has not been run."
        )
    lines.append(
        "The sets that are kept out were chosen before anything ran. No recipe, rate or rule was "
        "decided with them in sight; `--kept-out` runs them."
    )
    if any(len(_splits(found.get(s.name, {"units": {}}))) < about.splits for s in contents.sets):
        lines.append(
            f"**Not finished:** the last column says how many of the {about.splits} splits have "
            "been run, of which all that follows is. One split gives no interval."
        )
    table = ["| set | sites | rows | positive | splits |", "|---|---|---|---|---|"]
    for each in contents.sets:
        name = each.name + " (kept out)" * each.kept_out
        if each.name not in found:
            table.append(f"| {name} | | | | not run |")
            continue
        told, done = found[each.name]["rows"], len(_splits(found[each.name]))
        share = f"{told['positive_share']:.1%}"
        table.append(f"| {name} | {told['sites']} | {told['rows']:,} | {share} | {done} |")
    return "\n\n".join([*lines, "\n".join(table)])


def _splits(record: Table) -> set[str]:
    return {name.rpartition("/")[2] for name in record["units"]}


def _values(record: Table, row: str, key: str) -> list[float]:
    """Of each split, in their order."""
    found = [unit for name, unit in record["units"].items() if name.rpartition("/")[0] == row]
    return [unit[key] for unit in found if unit.get(key) is not None]


def _mean(record: Table, row: str, key: str) -> float:
    return statistics.fmean(_values(record, row, key))


def _table(
    title: str, key: str, found: dict[str, Table], rows: Sequence[str], level: int = 2
) -> str:
    lines = [f"{'#' * level} {title}", "", f"| | {' | '.join(found)} | mean |"]
    lines.append(f"|---{'|---' * (len(found) + 1)}|")
    best = {
        s: max((_mean(r, row, key) for row in rows if _values(r, row, key)), default=0.0)
        for s, r in found.items()
    }
    for row in rows:
        cells, means = [], []
        for name, record in found.items():
            own = _values(record, row, key)
            if not own:
                cells.append("-")
                continue
            means.append(statistics.fmean(own))
            text = f"{means[-1]:.3f}"
            cells.append(f"**{text}**" if text == f"{best[name]:.3f}" else text)
        mean = f"{statistics.fmean(means):.3f}" if len(means) == len(found) else "-"
        lines.append(f"| {row} | {' | '.join(cells)} | {mean} |")
    return "\n".join(lines)


def _paired(record: Table, other: str, key: str, among: int = 1) -> Difference | None:
    ours, theirs = _values(record, AUTO, key), _values(record, other, key)
    return paired_difference(ours, theirs, among) if ours and len(ours) == len(theirs) else None


def _differences(found: dict[str, Table], rows: Sequence[str], level: int = 2) -> str:
    lines = [
        f"{'#' * level} auto less each other",
        "",
        "Mean difference over splits and sets, with Student's 95 % interval over sets, and on how "
        "many sets auto wins, ties or loses: a tie is an interval over a set's splits with 0 in "
        "it.",
        "",
        "| less | AUC | AUPRC | AUC: win / tie / loss |",
        "|---|---|---|---|",
    ]
    for other in (row for row in rows if row != AUTO):
        cells = []
        for key in ("auc", "auprc"):
            pairs = [(_mean(r, AUTO, key), _mean(r, other, key)) for r in found.values()
                     if _values(r, AUTO, key) and _values(r, other, key)]  # fmt: skip
            cells.append(_interval(pairs))
        pairs = [_paired(r, other, "auc") for r in found.values()]
        each = [(d.low, d.high) for d in pairs if d and d.low is not None and d.high is not None]
        wins, losses = sum(low > 0 for low, _ in each), sum(high < 0 for _, high in each)
        told = f"{wins} / {len(each) - wins - losses} / {losses}" if each else "-"
        lines.append(f"| {other} | {' | '.join(cells)} | {told} |")
    return "\n".join(lines)


def _set_by_set(found: dict[str, Table], level: int = 2) -> str:
    """Where the default is behind a rival, and whether that is more than chance."""
    lines = [
        f"{'#' * level} Set by set",
        "",
        "Test AUC of auto less that of each rival, with Student's interval over splits. All "
        f"{len(found)} intervals of a column hold at once with 95 % (Bonferroni).",
        "",
        f"| | {' | '.join(RIVALS)} |",
        f"|---{'|---' * len(RIVALS)}|",
    ]
    for name, record in found.items():
        each = [_paired(record, other, "auc", len(found)) for other in RIVALS]
        lines.append(f"| {name} | {' | '.join(map(_told, each))} |")
    return "\n".join(lines)


def _told(found: Difference | None) -> str:
    if found is None:
        return "-"
    between = "" if found.low is None else f" ({found.low:+.3f} to {found.high:+.3f})"
    return f"{found.mean:+.3f}{between}"


def _interval(pairs: list[tuple[float, float]]) -> str:
    if not pairs:
        return "-"
    return _told(paired_difference([a for a, _ in pairs], [b for _, b in pairs]))


def _ablation(found: dict[str, Table]) -> str:
    lines = [
        "## What each part gives",
        "",
        "Test AUC, mean over splits; each line but the first is FedAvg on cross-entropy with one "
        "part of the default switched off.",
        "",
        f"| | {' | '.join(found)} | mean |",
        f"|---{'|---' * (len(found) + 1)}|",
    ]
    for title, (row, key) in ABLATION.items():
        if not all(_values(record, row, key) for record in found.values()):
            continue
        means = [_mean(record, row, key) for record in found.values()]
        cells = [f"{mean:.3f}" for mean in (*means, statistics.fmean(means))]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _costs(found: dict[str, Table], rows: Sequence[str]) -> str:
    lines = [
        "## Costs",
        "",
        "Means over sets and splits: gradients, bytes between sites and server with those of "
        "evaluations, and seconds on the machine that ran it.",
        "",
        "| | gradients | times FedAvg's | bytes | seconds |",
        "|---|---|---|---|---|",
    ]

    def mean(row: str, key: str) -> float | None:
        own: list[Any] = [v for r in found.values() for v in _values(r, row, key)]
        return statistics.fmean(own) if own else None

    one = mean(FEDAVG, "gradients")
    for row in rows:
        gradients, sent, seconds = (mean(row, key) for key in ("gradients", "bytes", "seconds"))
        cells = [
            "-" if gradients is None else f"{gradients:,.0f}",
            "-" if gradients is None or one is None else f"{gradients / one:.2f}",
            "-" if sent is None else bytes_text(round(sent)),
            "-" if seconds is None else f"{seconds:.1f}",
        ]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    chosen = [u["chosen"] for r in found.values() for n, u in sorted(r["units"].items())
              if n.startswith(f"{AUTO}/") and "chosen" in u]  # fmt: skip
    counts = ", ".join(f"{name} {chosen.count(name)}" for name in sorted(set(chosen)))
    return "\n".join([*lines, "", f"Chosen by auto, and how often: {counts}."])
