"""`fedminimax reproduce`: the papers' tables and figures, run, written down and judged.

The runs of an entry lie in FOLDER/ENTRY/BUDGET, one folder each; what is finished there is read,
what was interrupted goes on. Where pages are written to a folder of their own, so are records of
finished runs, in records/ENTRY/BUDGET: what has one is not run again. An entry's page, table (CSV)
and figure (SVG) are called like it, with the budget behind its name if that is not the full one.
Quick runs show that an entry works; they judge no claim. report/summaries.py makes the pages of
the papers.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedminimax.engine.job import ClientError
from fedminimax.report import records
from fedminimax.report.claims import NOT_RUN, UNREACHED, Claim, Row, Verdict, judge, rows_of
from fedminimax.report.comparison import Comparison, Job, Line
from fedminimax.report.comparison_runs import compared
from fedminimax.report.comparison_table import markdown, naming, tuning
from fedminimax.report.figures import draw
from fedminimax.report.papers import BudgetName, Entry, Paper
from fedminimax.report.tables import number_text

BUDGETS: tuple[BudgetName, ...] = get_args(BudgetName)
JUDGING: tuple[BudgetName, ...] = ("full", "half")  # the budgets, the best first


@dataclass(frozen=True)
class Order:
    """What was asked for."""

    budget: BudgetName = "full"
    seeds: int | None = None
    begin: bool = True  # else only what is finished is written down
    folder: Path = Path("runs/reproduce")
    output: Path = Path("runs/reproduce")
    workers: int = 1

    def runs(self, entry: Entry) -> Path:
        return self.folder / self._place(entry)

    def records(self, entry: Entry) -> Path | None:
        """None where nothing is kept: a quick run shows that the code of today works."""
        if self.budget not in JUDGING or self.output.resolve() == self.folder.resolve():
            return None
        return self.output / "records" / self._place(entry)

    def _place(self, entry: Entry) -> Path:
        return Path(entry.about.runs or entry.name) / self.budget

    def command(self, entry: Entry) -> str:
        words = ["fedminimax reproduce", entry.name]
        words += [] if self.budget == "full" else ["--budget", self.budget]
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        return " ".join(words)


class Reproduced(NamedTuple):
    """An entry that has been run."""

    comparison: Comparison
    lines: list[Line]

    @property
    def rows(self) -> list[Row]:
        return rows_of(self.comparison.plan, self.lines)


def reproduce(
    chosen: Sequence[Entry], order: Order, tell: Callable[[str], None]
) -> Iterator[tuple[str, bool]]:
    """Runs the entries one after another and writes them down; says of each that could be begun
    whether it ended well."""
    for entry in chosen:
        lack = entry.lacks() if order.begin else None  # what is finished needs no data
        if lack is not None:
            tell(f"{entry.name}: {UNREACHED}: {lack}")
            continue
        try:
            done = run(entry, order)
            if not done.lines:
                tell(f"{entry.name}: {NOT_RUN}")
                continue
            write(entry, done, order)
            faults = list(shortfalls(entry, done, order))
        except (ValueError, ClientError, OSError) as error:
            tell(f"{entry.name}: broke: {error}")
            yield entry.name, False
            continue
        for fault in faults:
            tell(f"{entry.name}: broke: {fault}")
        if not faults and order.begin:
            tell(f"{entry.name}: ran to its end")
        if order.budget in JUDGING:
            for claim, verdict in judged(entry, done.rows, done.comparison.plan.larger):
                tell(f"{entry.name}: {verdict.text}: {claim.says} ({verdict.measured})")
        yield entry.name, not faults


def run(entry: Entry, order: Order) -> Reproduced:
    comparison = Comparison(entry.path, table=entry.table(order.budget, order.seeds))
    how = {"folder": order.runs(entry), "kept": order.records(entry), "workers": order.workers}
    return Reproduced(comparison, compared(comparison, **how, begin=order.begin))


def shortfalls(entry: Entry, done: Reproduced, order: Order) -> Iterator[str]:
    """What keeps the runs from what their budget demands: that methods improve their metric."""
    plan, budget = done.comparison.plan, entry.budget(order.budget)
    if budget.improves is None:
        return
    yield from cut_short(done)
    runs = [(line.label, history) for line in done.lines for history in line.histories]
    for label, history in runs:
        least = budget.improvement(label)
        first, last = plan.value(history[0]), plan.value(history[-1])
        if least is None:
            continue
        if first is None or last is None:
            yield f"{label} has no {plan.metric} to improve"
        elif (gain := last - first if plan.larger else first - last) < least:
            yield f"{label} improved its {plan.metric} by {gain:.3g}, less than {least:g}"


def cut_short(done: Reproduced) -> Iterator[str]:
    """The runs that ended before their last round, as those do that diverge."""
    for line in done.lines:
        asked = done.comparison.experiment(Job(line.varied, line.label, line.chosen, 0)).run.rounds
        for history in line.histories:
            if (reached := history[-1]["round"]) < asked:
                yield f"a run of {line.label} was last measured after round {reached} of {asked}"


def judged(entry: Entry, rows: Sequence[Row], larger: bool) -> Iterator[tuple[Claim, Verdict]]:
    """Each claim of an entry, and the verdict on it."""
    for claim in entry.claims:
        yield claim, judge(claim, rows, larger) or Verdict(NOT_RUN, "some lines are missing")


# What is written.


def write(entry: Entry, done: Reproduced, order: Order) -> None:
    """The page of an entry, its table as CSV, and its figure as SVG."""
    order.output.mkdir(parents=True, exist_ok=True)
    page, table, figure = (
        order.output / (page_name(entry, order.budget) + suffix)
        for suffix in (".md", ".csv", ".svg")
    )
    draw(done.comparison, done.lines, figure)
    page.write_text(page_text(entry, done, order, figure.name), encoding="utf-8")
    table.write_text(csv_text(done), encoding="utf-8", newline="")


def page_name(entry: Entry, budget: BudgetName) -> str:
    return entry.page if budget == "full" else f"{entry.page}_{budget}"


def page_text(entry: Entry, done: Reproduced, order: Order, figure: str) -> str:
    made = f"Made by `{order.command(entry)}`, {circumstances(done, entry, order)}"
    table = markdown(entry.path, *done, figure=figure, made=made)
    text = [f"# {entry.about.title}", "", table]
    if entry.about.reported:
        text += [*reported(entry, done), ""]
    text += [f"- {sentence}." for sentence in cut_short(done)]
    if any(line.trials for line in done.lines):
        plan = done.comparison.plan
        length = "" if plan.tuning_rounds is None else f" of {plan.tuning_rounds} rounds"
        text += [f"Settings were chosen by runs{length} on seeds of their own, which ended at:"]
        text += ["", *tuning(done.comparison, done.lines), ""]
    if order.budget in JUDGING:
        for claim, verdict in judged(entry, done.rows, done.comparison.plan.larger):
            text.append(f"- **{verdict.text}**: {claim.says} Measured: {verdict.measured}.")
    return "\n".join(text).rstrip() + "\n"


def circumstances(done: Reproduced, entry: Entry, order: Order) -> str:
    """Of which commit the runs are, how many, and how long they took."""
    plan, comparison = done.comparison.plan, done.comparison
    asked = plan.repeats * len(comparison.methods) * len(list(comparison.variations()))
    ends = [history[-1] for line in done.lines for history in line.histories]
    seconds = sum(end["seconds"] for end in ends)
    kept = order.records(entry)
    if kept is None:
        files = order.runs(entry).glob("*/environment.json")
        known = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    else:
        known = [records.read(path).environment for path in kept.glob(f"*{records.SUFFIX}")]
    commits = sorted({about["commit"] or "unknown" for about in known})
    count = f"{len(ends)} runs" if len(ends) == asked else f"{len(ends)} of {asked} runs finished"
    return f"commit {', '.join(commits)}; {count}, {_duration(seconds)} in all"


def reported(entry: Entry, done: Reproduced) -> Iterator[str]:
    """The paper's numbers beside ours."""
    plan = done.comparison.plan
    told = naming(done.lines)
    yield "| " + " | ".join([*told, "method", f"the paper's {plan.metric}", "ours"]) + " |"
    yield "|---" * (len(told) + 3) + "|"
    for place, varied in enumerate(done.comparison.variations()):
        for row in rows_of(plan, [line for line in done.lines if line.varied == varied]):
            numbers = entry.about.reported.get(row.method, ())
            paper = number_text(numbers[place]) if place < len(numbers) else "-"
            cells = [*(row.varied[key] for key in told), row.method, paper, str(row.last)]
            yield "| " + " | ".join(cells) + " |"


def csv_text(done: Reproduced) -> str:
    """A line for each run."""
    out, plan = io.StringIO(), done.comparison.plan
    changes = [dict((*line.varied, *line.chosen)) for line in done.lines]
    keys = list(dict.fromkeys(key for change in changes for key in change))
    costs = ("gradients", "bytes_up", "bytes_down", "exchanges", "seconds")
    table = csv.writer(out, lineterminator="\n")
    reached = [] if plan.target is None else ["rounds_to_target"]
    table.writerow([*keys, "method", "seed", "rounds", plan.metric, *reached, *costs])
    for line, change in zip(done.lines, changes, strict=True):
        for seed, history, rounds in zip(line.seeds, line.histories, line.rounds, strict=True):
            last = history[-1]
            value = [] if plan.target is None else [rounds]
            cells = [*(change.get(key, "") for key in keys), line.label, seed, last["round"]]
            table.writerow([*cells, plan.final(history), *value, *(last[cost] for cost in costs)])
    return out.getvalue()


def contents_table(papers: Sequence[Paper], entries: dict[str, Entry]) -> Table:
    """Every table and figure of the papers: the entries that regenerate it, or the reason."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("paper", "table or figure", "entries", "remark"):
        table.add_column(heading, overflow="fold")
    for name, item in [(paper.name, item) for paper in papers for item in paper.items]:
        absent = [entry for entry in item.entries if entries[entry].lacks() is not None]
        remarks = [f"the data of {', '.join(absent)} are not here"] if absent else []
        remarks += [item.reason] if item.reason else []
        shown_as = ", ".join(item.entries) or (UNREACHED if item.measures else "nothing to run")
        table.add_row(name, item.what, shown_as, "; ".join(remarks))
    return table


def _duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
