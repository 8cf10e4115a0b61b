"""A run as it goes: a bar on a terminal, a line per evaluation elsewhere, and perhaps the sites."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedminimax.config import CHOICES, Experiment
from fedminimax.data.clients import Clients
from fedminimax.report.tables import number_text

NO_SITES = "this problem is not evaluated site by site, so --sites has nothing to show"


class RunProgress:
    """What is shown while a run trains; with `clients`, also a line for each of them."""

    def __init__(self, quiet: bool, clients: Clients | None = None):
        self.bar: Progress | None = None
        self.live: Live | None = None
        self.quiet, self.clients = quiet, clients
        self.started = time.perf_counter()
        self.callbacks = {} if quiet else {"on_record": self.on_record, "on_round": self.on_round}

    @contextmanager
    def begun(self, experiment: Experiment) -> Iterator[None]:
        self.metric = CHOICES["problem"][experiment.problem.name].monitor
        self.rounds = experiment.run.rounds
        if not self.quiet and sys.stdout.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[metric]}"))
            self.bar = Progress(TextColumn("round"), *columns, TimeRemainingColumn())
            self.task = self.bar.add_task("", total=self.rounds, metric="")
            if self.clients is not None:
                self.live = Live(self.bar)
        # The bar hides the cursor: whatever happens, it comes back.
        with self.live or self.bar or nullcontext():
            yield

    def on_round(self, round: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=round)

    def on_record(self, record: dict[str, Any]) -> None:
        split = next(s for s in ("validation", "test", "train") if s in record)
        text = f"{split} {self.metric} {number_text(record[split].get(self.metric))}"
        lines = [] if self.clients is None else site_lines(record[split], self.clients, split)
        if self.bar is not None:
            self.bar.update(self.task, completed=record["round"], metric=text)
            if self.live is not None:
                self.live.update(Group(self.bar, *map(Text, lines)))
            return
        spent = time.perf_counter() - self.started
        print(f"round {record['round']}/{self.rounds}  {text}  {spent:.1f} s", flush=True)
        # Where lines stay, once is enough to say that there is nothing.
        for line in lines if lines != [NO_SITES] or record["round"] == 0 else []:
            print(f"  {line}", flush=True)


def site_lines(found: Mapping[str, Any], clients: Clients, split: str) -> list[str]:
    """For each site its rows and its metric, as the evaluation has them already."""
    values = found.get("sites") or found.get("site_accuracies")
    if values is None:
        return [NO_SITES]
    marks = {name: "too few rows of a class to judge" for name in found.get("sites_too_small", [])}
    marks |= {name: "one class" for name in found.get("one_class_sites", [])}
    marks |= {found.get("worst_site"): "worst"}
    wide = max(map(len, clients.names))
    sizes = clients.splits[split].sizes[: len(clients)]
    return [
        f"{name:{wide}} {size:6d} {split} rows {number_text(values.get(name)):>7}  "
        f"{marks.get(name, '')}".rstrip()
        for name, size in zip(clients.names, sizes, strict=True)
    ]
