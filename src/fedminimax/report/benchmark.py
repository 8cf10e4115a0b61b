"""`fedminimax benchmark`: the default, the main methods and scikit-learn on tables with rare
positives.

A unit of work is a row on one split of one set. Each is written to
records/benchmark/BUDGET/SET.json when it is done, and what has a record is not run again, so the
benchmark goes on where it stopped. All sets come to a split before the next begins.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from fedminimax.config import ConfigError, Experiment, Table, changed, options_for
from fedminimax.data.arrays import reading_of
from fedminimax.data.folder import Reading
from fedminimax.data.prepare import split_sites
from fedminimax.data.sites import DataError
from fedminimax.engine.session import Run
from fedminimax.engine.state.checkpoint import write_bytes
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import Read, assemble, read_tables, run_experiment
from fedminimax.report import baselines
from fedminimax.tuning.auto import SEARCH, is_auto, run_auto

CONTENTS = "contents.toml"
MEASURES = ("auc", "auprc", "worst_site_auc")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Budget:
    """How much is run."""

    splits: int
    rounds: int
    evaluate_every: int
    rows: int
    tuned: bool
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """A line of the tables: the default with changes, or a model of scikit-learn."""

    name: str
    changes: tuple[str, ...] = ()
    grid: tuple[str, ...] = ()
    baseline: str = ""  # or "alone" or "pooled"
    model: str = ""
    budgets: tuple[str, ...] = ("quick", "full")


@dataclass(frozen=True)
class Set:
    """A set of data; `kept_out`: nothing was decided with it in sight."""

    name: str
    data: Table = field(default_factory=dict)
    kept_out: bool = False
    budgets: tuple[str, ...] = ("quick", "full")
    share: float | None = None

    @property
    def file(self) -> str:
        return self.name.lower().replace(" ", "_").replace("%", "percent") + ".json"


class Contents(NamedTuple):
    """What one budget runs."""

    budget: Budget
    sets: list[Set]
    rows: list[Row]


def read_contents(folder: Path, name: str) -> Contents:
    """The sets and rows of a budget, from contents.toml."""
    file = folder / CONTENTS
    if not file.is_file():
        raise ConfigError(f"there is no file {file}: give the folder of the benchmark")
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    budget = Budget(**options_for(Budget, table["budget"][name], f"[budget.{name}]"))
    rows = [Row(**options_for(Row, row, "[[row]]")) for row in table["row"]]
    sets = []
    for each in table["set"]:
        data = dict(each["data"])
        rest = {k: v for k, v in each.items() if k != "data"}
        if data["name"] == "uci":
            data["rows"] = budget.rows
        whole = Set(data=data, **options_for(Set, rest, "[[set]]"))
        sets += [whole]
        for share in budget.shares:
            named = f"{whole.name}, {share:.0%} positive"
            sets.append(Set(named, data, whole.kept_out, whole.budgets, share))
    chosen = [row for row in rows if name in row.budgets]
    return Contents(budget, [each for each in sets if name in each.budgets], chosen)


def run_split(each: Set, contents: Contents, split: int, output: Path, tell: Tell) -> None:
    """Runs what has no record yet of a split of a set that can be read."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        for text in _filled(each, contents, split, recorded(each, output), output / each.file):
            tell(f"{each.name}: {text}")
    except DataError as error:
        tell(f"{each.name}: left out: {error}")


def read_records(contents: Contents, output: Path) -> dict[str, Table]:
    """What has been run, by set: the splits to which every row has come."""
    found = {each.name: recorded(each, output) for each in contents.sets}
    for record in found.values():
        units = record["units"]
        record["units"] = {
            f"{row.name}/{split}": units[f"{row.name}/{split}"]
            for split in range(contents.budget.splits)
            if all(f"{row.name}/{split}" in units for row in contents.rows)
            for row in contents.rows
        }
    return {name: record for name, record in found.items() if record["units"]}


def recorded(each: Set, output: Path) -> Table:
    """What has been run on a set."""
    file = output / each.file
    fresh = {"set": each.name, "kept_out": each.kept_out, "rows": {}, "rates": {}, "units": {}}
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else fresh


def _filled(each: Set, contents: Contents, split: int, record: Table, file: Path) -> Iterator[str]:
    budget, reading = contents.budget, None
    for row in contents.rows:
        if f"{row.name}/{split}" in record["units"]:
            continue
        if reading is None:
            reading = read_set(asked(each, row, budget, split).make("data"))
            if _too_common(each, reading):
                return
            record["rows"] = _described(reading)
        begun = time.perf_counter()
        try:
            if budget.tuned and row.grid and row.name not in record["rates"]:
                record["rates"][row.name] = _best_rate(each, row, budget, reading)
            rate = record["rates"].get(row.name)
            measured = _measured(each, row, budget, split, reading, rate)
            measured["seconds"] = round(time.perf_counter() - begun, 1)
            told = f"test AUC {measured['auc']:.4f}"
        except ValueError as error:  # a row that the set's sites do not allow
            measured, told = {"refused": str(error)}, str(error)
        record["units"][f"{row.name}/{split}"] = measured
        write_bytes(file, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
        yield f"split {split}, {row.name}: {told}"


def asked(each: Set, row: Row, budget: Budget, split: int, rate: str | None = None) -> Experiment:
    """The default on a split of a set, with the changes of a row."""
    table: Table = {
        "data": each.data,
        "split": {"bins": 16, "seed": split},
        "model": {"name": "mlp"},
        "problem": {"name": "auto"},
        "run": {
            "rounds": budget.rounds,
            "evaluate_every": budget.evaluate_every,
            "seed": split,
            "batch_size": 64,
            "weights": "size",
            "executor": "vectorised",
        },
    }
    if each.share is not None:
        table["split"]["positive_share"] = each.share
    return Experiment.from_table(changed(table, [*row.changes, *([rate] if rate else [])]))


def read_set(data: Any) -> Reading:
    """The rows of a set; of images the training ones, with a column for each pixel."""
    if not hasattr(data, "client_rows"):
        return data.read()
    pairs = [(x.flatten(1).double().numpy(), y.numpy()) for x, y in data.client_rows()]
    features, labels = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    whose = np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])
    return reading_of(features, labels, (0, 1), whose, None)


def _measured(
    each: Set, row: Row, budget: Budget, split: int, reading: Reading, rate: str | None
) -> Table:
    experiment = asked(each, row, budget, split, rate)
    if row.baseline:
        parts = split_sites(reading.sites, experiment.split)
        train = [(site.features, site.labels) for site in parts["train"]]
        test = {site.name: (site.features, site.labels) for site in parts["test"]}
        way, make = getattr(baselines, row.baseline), getattr(baselines, row.model)
        found = way(make, train, test)
        return {name: found[name] for name in MEASURES}
    run, more = _run(experiment, reading)
    last = run.history[-1]
    return {
        **{name: run.kept["test"][name] for name in MEASURES},
        "round": run.kept["round"],
        "last_auc": last["test"]["auc"],
        "gradients": last["gradients"],
        "bytes": sum(r["evaluation_bytes"] for r in run.history) + _sent(last),
        **more,
    }


def _run(experiment: Experiment, reading: Reading) -> tuple[Run, Table]:
    """The run, and for a search what it chose and all that it cost."""

    def read(which: Experiment) -> Read:
        return read_tables(reading, which.split)

    if not is_auto(experiment):
        made = assemble(experiment, read(experiment), experiment.make("method"))
        return run_experiment(experiment, built=made), {}
    with TemporaryDirectory() as place:
        run, _, _, record = run_auto(experiment, Path(place) / "run", reader=read)
        trials = {t["recipe"]: _trial(t, Path(place) / "run") for t in record["trials"]}
    told = ("chosen", "within_chance", "gradients", "bytes", "runs")
    return run, {**{name: record[name] for name in told}, "trials": trials}


def _trial(trial: Table, folder: Path) -> Table:
    """How far a recipe came, and what its best round by validation rows gives on test rows."""
    history = RunFolder(folder / SEARCH / trial["recipe"]).read_history()
    best = next((r for r in history if r["round"] == trial["round"]), history[-1])
    return {"rounds": trial["rounds"], "validation": trial["value"], "auc": best["test"]["auc"]}


def _sent(record: Table) -> int:
    return record["bytes_up"] + record["bytes_down"]


def _best_rate(each: Set, row: Row, budget: Budget, reading: Reading) -> str:
    """The value of the grid with the best round by validation rows, on the first split."""

    def judged(rate: str) -> float:
        run, _ = _run(asked(each, row, budget, 0, rate), reading)
        return -np.inf if run.best is None else run.best.value

    return max(row.grid, key=judged)


def _too_common(each: Set, reading: Reading) -> bool:
    """A share that the set does not reach is none to thin it to."""
    positives = sum(int(site.labels.sum()) for site in reading.sites)
    return each.share is not None and positives / sum(map(len, reading.sites)) <= each.share


def _described(reading: Reading) -> Table:
    labels = np.concatenate([site.labels for site in reading.sites])
    return {
        "sites": len(reading.sites),
        "rows": len(labels),
        "positive_share": round(float(labels.mean()), 4),
    }
