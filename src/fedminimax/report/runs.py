"""The runs of a report: read from their folders, and grouped where they differ only in seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedminimax.config import CHOICES, Experiment
from fedminimax.engine.state.checkpoint import CheckpointError, read
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import PREPARATION, experiment_of

Record = dict[str, Any]
SPLITS = ("validation", "test", "train")
COSTS = {"round", "gradients", "rows", "bytes_up", "bytes_down", "exchanges", "seconds"}
COSTS |= {"evaluation_bytes"}  # which every record has
# What says how a run was carried out, not what was computed.
SILENT = ("executor", "checkpoint_every", "store")
MOST = 1e300  # a number beyond it, of a run that diverged, is none
# The settings that tell groups apart are looked for in this order.
SECTIONS = ("problem", "data", "split", "model", "method", "run", "messages", "privacy")


@dataclass(frozen=True)
class Told:
    """A run as its folder tells it; it need not have finished."""

    folder: Path
    experiment: Experiment
    settings: dict[str, str]  # "method.lr" -> "0.1", all of them
    config: str  # config.toml
    environment: dict[str, Any]
    history: list[Record]
    outcome: str
    finished: bool
    clients: int  # 0: not known
    kept_round: int | None = None  # of the model that a finished run returns

    @property
    def last(self) -> Record:
        return self.history[-1]

    @property
    def kept(self) -> Record:
        """The record of the model that the run returns: that of the best round by validation rows,
        where there are any."""
        return next((r for r in self.history if r["round"] == self.kept_round), self.last)

    @property
    def monitor(self) -> str:
        return CHOICES["problem"][self.experiment.problem.name].monitor

    @property
    def larger_is_better(self) -> bool:
        return CHOICES["problem"][self.experiment.problem.name].larger_is_better

    @property
    def seeds(self) -> dict[str, str]:
        return {key: text for key, text in self.settings.items() if _is_seed(key)}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds; `number` is the group's place in the report."""

    number: int
    label: str
    runs: tuple[Told, ...]

    @property
    def first(self) -> Told:
        return self.runs[0]

    def shown_split(self) -> str:
        """The rows of which details are told."""
        return next(split for split in ("test", "validation", "train") if split in self.first.last)

    def middle_run(self, split: str) -> Told:
        """The finished run whose metric is the median of the group, or next to it."""
        value = metric(split, self.first.monitor)
        known = [(value(run.kept), run) for run in self.runs if run.finished]
        known = [(found, run) for found, run in known if found is not None]
        if not known:
            return self.first
        return sorted(known, key=lambda pair: pair[0])[(len(known) - 1) // 2][1]


class Spread(NamedTuple):
    """A number over the runs of a group."""

    middle: float
    low: float
    high: float
    count: int  # type: ignore[reportIncompatibleMethodOverride]  # nobody searches in this tuple


def told(folder: Path) -> Told:
    """The run in a folder, or a sentence why there is none."""
    experiment, place = experiment_of(folder), RunFolder(folder)
    history = place.read_history(whole=place.final.exists())
    if not history:
        raise CheckpointError(f"there is no record in {folder}/history.jsonl")
    for number, record in enumerate(history, start=1):
        if not isinstance(record, dict) or not record.keys() >= COSTS or not record.keys() & SPLITS:
            raise CheckpointError(f"line {number} of {folder}/history.jsonl is no record of a run")
    finished, round = place.final.exists(), None
    if finished:
        about = read(place.final)[1]
        outcome, (round, _) = about["outcome"], about["best"] or (None, None)
    else:
        done = history[-1]["round"]
        outcome = f"not finished: the last record is of round {done} of {experiment.run.rounds}"
    environment = place.read_json("environment.json", missing={})
    text = place.read_toml_text("config.toml").strip()
    supplied = place.read_json(PREPARATION, missing={}).get("supplied", {})
    about = (environment, history, outcome, finished, supplied.get("sites", 0), round)
    return Told(folder, experiment, _settings(text), text, *about)


def _settings(config: str) -> dict[str, str]:
    """ "method.lr" -> "0.1", as the file has it: it was written with one setting on a line."""
    settings, section = {}, ""
    for line in config.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            key, _, value = line.partition(" = ")
            settings[f"{section}.{key}"] = value
    return settings


def runs_in(folders: Iterable[Path], left_out: Callable[[str], None]) -> list[Told]:
    """The runs in these folders and below them; `left_out` is told of folders without any."""
    runs: dict[Path, Told] = {}
    for folder in folders:
        below = sorted(path.parent for path in folder.rglob("history.jsonl"))
        for place in below or [folder]:
            try:
                runs.setdefault(place.resolve(), told(place))
            except CheckpointError as error:
                left_out(str(error))
            except (OSError, ValueError) as error:
                left_out(f"{place}: {error}")
    if not runs:
        raise ValueError("none of these is the folder of a run")
    return list(runs.values())


def grouped(runs: Sequence[Told]) -> list[Group]:
    """In the order given, each group with a label that tells it from the others."""
    groups: dict[tuple, list[Told]] = {}
    for run in runs:
        key = {k: v for k, v in run.settings.items() if not _is_seed(k) and not _is_silent(k)}
        groups.setdefault(tuple(sorted(key.items())), []).append(run)
    members = list(groups.values())
    labels = _labels([own[0].settings for own in members])
    return [
        Group(number, label, tuple(own))
        for number, (label, own) in enumerate(zip(labels, members, strict=True))
    ]


def differing(groups: Sequence[Group]) -> list[str]:
    """The settings in which groups differ, seeds left out."""
    tables = [group.first.settings for group in groups]
    keys = sorted({key for table in tables for key in table}, key=_place)
    keys = [key for key in keys if not _is_seed(key) and not _is_silent(key)]
    return [key for key in keys if len({table.get(key) for table in tables}) > 1]


def _labels(tables: list[dict[str, str]]) -> list[str]:
    """The method, and as few other settings as tell the groups apart."""
    parts = [[_bare(table["method.name"])] for table in tables]
    keys = sorted({key for table in tables for key in table}, key=_place)
    for key in keys:
        if key == "method.name" or _is_seed(key) or _is_silent(key):
            continue
        alike: dict[tuple, set] = {}
        for part, table in zip(parts, tables, strict=True):
            alike.setdefault(tuple(part), set()).add(table.get(key))
        for part, table in zip(parts, tables, strict=True):
            if len(alike.get(tuple(part), ())) > 1:
                value = table.get(key)
                name = key.removesuffix(".name").rpartition(".")[2]
                part.append(f"{name} not set" if value is None else f"{name} {_bare(value)}")
    return [", ".join(part) for part in parts]


def _place(key: str) -> tuple:
    section, _, name = key.partition(".")
    return SECTIONS.index(section), name != "name", name


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _is_silent(key: str) -> bool:
    return key.rpartition(".")[2] in SILENT


def _bare(text: str) -> str:
    return text.strip('"')


# Numbers of the records.


def metric(part: str, name: str) -> Callable[[Record], float | None]:
    """Reads a number such as validation auc from a record; None where there is none."""

    def value(record: Record) -> float | None:
        found = record.get(part, {}).get(name)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        return float(found) if abs(found) < MOST else None

    return value


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def by_round(
    group: Group, x: Callable[[Record], float | None], y: Callable[[Record], float | None]
) -> list[tuple[float, Spread]]:
    """At each round that runs of the group were evaluated at: the median of x, and the spread of
    y over those that had both."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for run in group.runs:
        for record in run.history:
            at, value = x(record), y(record)
            if at is not None and value is not None:
                rows.setdefault(record["round"], []).append((at, value))
    points = []
    for round in sorted(rows):
        over = spread(value for _, value in rows[round])
        assert over is not None
        points.append((statistics.median(at for at, _ in rows[round]), over))
    return points


def last(group: Group, value: Callable[[Record], float | None]) -> Spread | None:
    """Of the last records."""
    return spread(value(run.last) for run in group.runs)


def kept(group: Group, value: Callable[[Record], float | None]) -> Spread | None:
    """Of the records of the models that the runs return."""
    return spread(value(run.kept) for run in group.runs)


def numbers(group: Group, part: str) -> list[str]:
    """The names of the numbers in a part of the records, in the order they stand there."""
    names: dict[str, None] = {}
    for run in group.runs:
        for record in run.history:
            names |= {n: None for n in record.get(part, {}) if metric(part, n)(record) is not None}
    return list(names)


class Shares(NamedTuple):
    """A measure for each site, or class, of the models that runs return."""

    word: str  # "site" or "class"
    measure: str  # what it is
    values: dict[str, Spread | None]
    small: frozenset[str]  # too few rows to be judged, in some run
    worst: str | None  # the lowest median of those that are judged


def shares(group: Group, split: str) -> Shares | None:
    """How the sites, or classes, of a group fare on a split; None if the problem does not say."""
    records = [run.kept[split] for run in group.runs if split in run.kept]
    for word, measure, key in (
        ("site", "AUC", "sites"),
        ("site", "accuracy", "site_accuracies"),
        ("class", "accuracy", "class_accuracies"),
    ):
        if not any(key in record for record in records):
            continue
        names = {name: None for record in records for name in record.get(key, {})}
        values = {n: spread(record.get(key, {}).get(n) for record in records) for n in names}
        small = frozenset(n for record in records for n in record.get("sites_too_small", ()))
        judged = {n: v.middle for n, v in values.items() if v is not None and n not in small}
        worst = min(judged, key=judged.__getitem__) if judged else None
        return Shares(word, measure, values, small, worst)
    return None
