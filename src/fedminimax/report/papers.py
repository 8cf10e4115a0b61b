"""The papers' tables and figures as files: what each shows, how it is run, and what it should show.

`contents.toml` names every table and figure of the papers, with the entries that regenerate it or
the reason why none does; `queue.toml` what is still to be run. Every other file is an entry: a
comparison (report/comparison.py) and

    [paper]             title = "..."           what is compared, in a few words
                        length = "..."          how long its runs are, beside the paper's
                        page = "..."            of the results, if not called like the file
                        runs = "..."            the entry whose runs these are, if not its own
                        extends = "../x.toml"   a comparison to begin with; sections here go before
                        drop = ["vary"]         sections of it that are left out
    [paper.reported]    LABEL = [0.98]          the paper's number for each variation
    [budget.quick]      rounds = 0.1            the share of the rounds; schedules shrink too
                        seeds = 1
                        improves = 0.1          how much every method must improve its metric, or
                        improves = {LABEL = 1}  each its own
                        drop = ["grid"]         sections that are left out
    [budget.quick.change.SECTION]               keys that replace those of the comparison
    [[claims]]          what the paper says, and the rule that judges it (report/claims.py)
    [[questions]]       what we ask beside it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedminimax.config import ConfigError, options_for, read_toml, suggest
from fedminimax.data import DATASETS
from fedminimax.data.sites import DataError
from fedminimax.data.sources import find
from fedminimax.report.claims import Claim
from fedminimax.report.comparison import Table, merged

CONTENTS, QUEUE = "contents.toml", "queue.toml"
OWN = ("paper", "budget", "claims", "questions")
LENGTHS = ("rounds", "stage_rounds", "tuning_rounds", "at")

BudgetName = Literal["quick", "half", "full"]


@dataclass(frozen=True)
class About:
    """The section [paper] of an entry."""

    title: str
    length: str = ""
    page: str = ""
    runs: str = ""
    extends: str = ""
    drop: tuple[str, ...] = ()
    reported: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """How much of an entry is run, and what its runs must achieve."""

    rounds: float = 1.0
    seeds: int | None = None
    improves: Any = None
    drop: tuple[str, ...] = ()
    change: Any = field(default_factory=dict)

    def improvement(self, label: str) -> float | None:
        """How much a method must improve its metric."""
        return self.improves.get(label) if isinstance(self.improves, dict) else self.improves


@dataclass(frozen=True)
class Entry:
    """A file that regenerates a table or a figure."""

    name: str
    path: Path
    about: About
    comparison: Table
    budgets: Mapping[str, Budget]
    claims: tuple[Claim, ...]

    @property
    def page(self) -> str:
        return self.about.page or self.name

    def budget(self, name: BudgetName) -> Budget:
        return self.budgets.get(name, Budget(rounds=0.5) if name == "half" else Budget())

    def table(self, name: BudgetName, seeds: int | None = None) -> Table:
        """The comparison at a budget."""
        budget = self.budget(name)
        table = merged(
            shortened(without(self.comparison, budget.drop), budget.rounds), budget.change
        )
        repeats = seeds or budget.seeds
        return table if repeats is None else merged(table, {"compare": {"repeats": repeats}})

    def lacks(self) -> str | None:
        """The sentence about the first data set that is not here."""
        sources = (getattr(DATASETS.get(n), "source", None) for n in data_names(self.comparison))
        for source in (source for source in sources if source is not None):
            try:
                for file in source.files:
                    find(source, [copy.name for copy in file.copies])
            except DataError as error:
                return str(error)
        return None


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper: what regenerates it, or the reason why nothing does; whether it
    shows anything that was measured; and the claim, if any, that therefore cannot be judged."""

    what: str
    entries: tuple[str, ...] = ()
    reason: str = ""
    measures: bool = True
    claim: str = ""


@dataclass(frozen=True)
class Waiting:
    """An item of the queue: an entry, and how much of it is run."""

    name: str
    budget: BudgetName = "full"
    seeds: int | None = None


class Paper(NamedTuple):
    name: str
    title: str
    summary: str  # what was found, in three sentences
    items: tuple[Item, ...]


def read_entry(path: Path) -> Entry:
    table = read_toml(path)
    where = f"{path}: [paper]"
    about = About(**options_for(About, _section(table, "paper", path), where))
    comparison = {name: part for name, part in table.items() if name not in OWN}
    if about.extends:
        base = read_toml(path.parent / about.extends)
        base = {name: part for name, part in base.items() if name not in OWN}
        comparison = merged(without(base, about.drop), comparison)
    budgets = {}
    for name, given in table.get("budget", {}).items():
        if name not in ("quick", "half", "full"):
            raise ConfigError(f"{path}: there is no budget {name!r}; known: quick, half, full")
        budgets[name] = Budget(**options_for(Budget, given, f"{path}: [budget.{name}]"))
    claims = tuple(
        Claim.of(given, f"{path}: [[{section}]]", section == "questions")
        for section in ("claims", "questions")
        for given in table.get(section, [])
    )
    return Entry(path.stem, path, about, comparison, budgets, claims)


def read_entries(folder: Path) -> dict[str, Entry]:
    """The entries of a folder, by name."""
    if not (folder / CONTENTS).exists():
        raise ConfigError(
            f"there is no {folder / CONTENTS}: go to the folder of the project, or say with "
            "--entries where the papers' experiments are"
        )
    files = sorted(path for path in folder.glob("*.toml") if path.name not in (CONTENTS, QUEUE))
    return {path.stem: read_entry(path) for path in files}


def read_contents(folder: Path, entries: Mapping[str, Entry]) -> list[Paper]:
    """Every table and figure of the papers, in their order."""
    papers = []
    for name, given in read_toml(folder / CONTENTS).items():
        items = []
        for item in given["items"]:
            items.append(Item(**options_for(Item, item, f"{folder / CONTENTS}: [{name}]")))
            for entry in items[-1].entries:
                if entry not in entries:
                    raise ConfigError(
                        f"{folder / CONTENTS} names the entry {entry!r}; {suggest(entry, entries)}"
                    )
        papers.append(Paper(name, given["title"], given["summary"], tuple(items)))
    return papers


def read_queue(folder: Path, entries: Mapping[str, Entry]) -> list[Waiting]:
    """What is still to be run, in its order."""
    where = folder / QUEUE
    given = read_toml(where).get("items", [])
    items = [Waiting(**options_for(Waiting, item, f"{where}: items")) for item in given]
    for item in items:
        if item.name not in entries:
            raise ConfigError(
                f"{where} names the entry {item.name!r}; {suggest(item.name, entries)}"
            )
    return items


def without(table: Table, sections: tuple[str, ...]) -> Table:
    """Without these sections, also below [methods.LABEL]."""
    kept = {name: part for name, part in table.items() if name not in sections}
    if "methods" in kept:
        kept["methods"] = {
            label: {key: value for key, value in method.items() if key not in sections}
            for label, method in kept["methods"].items()
        }
    return kept


def shortened(value: Any, factor: float, key: str = "") -> Any:
    """The table with every length in rounds or iterations times the factor, rounded up."""
    if isinstance(value, dict):
        return {name: shortened(part, factor, name) for name, part in value.items()}
    names = [name.strip().rpartition(".")[2] for name in key.split(",")]
    if isinstance(value, list) and len(names) > 1:
        # Keys that change together: a list of values for all of them.
        return [
            [
                _scaled(part, factor) if name in LENGTHS else part
                for name, part in zip(names, row, strict=True)
            ]
            for row in value
        ]
    if names[0] not in LENGTHS:
        return value
    return (
        [_scaled(part, factor) for part in value]
        if isinstance(value, list)
        else _scaled(value, factor)
    )


def _scaled(length: int, factor: float) -> int:
    return max(1, math.ceil(length * factor))


def data_names(table: Table) -> list[str]:
    """The data sets that a comparison reads."""
    own = [method.get("data", {}) for method in table.get("methods", {}).values()]
    found = [part["name"] for part in (table.get("data", {}), *own) if "name" in part]
    return list(dict.fromkeys([*found, *table.get("vary", {}).get("data.name", [])]))


def _section(table: Table, name: str, path: Path) -> Table:
    if not isinstance(table.get(name), dict):
        raise ConfigError(f"{path} has no section [{name}]: add one, with a title")
    return table[name]
