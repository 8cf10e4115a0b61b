"""Several methods on one problem, from one file: tuned alike, repeated, and set side by side.

Beside the sections of an experiment, such a file has

    [methods.LABEL]     a method (name and options) for each line of the table
    [compare]           below = 1e-3      count the rounds until the metric is below (or above) this
                        settles = true    and stays there
                        tuning_rounds = 100     of the runs that only tune; else as many as all
                        repeats = 5       seeds 0 .. 4; methods are tuned on seed 5
                        tuning_repeats = 3      or on seeds 5 .. 7, by the (upper) median of each
                        tuning_metric = "..."   by another metric than the table's, of which more
                                          is better (or less) as of that one
                        seeds = ["run.seed", "data.seed"]      what they are the seeds of
                        metric = "..."    if not the problem's own; "sites.york" is a site's
                        fit = "data.clients"      the power of this key by which rounds grow
                        figure = "last" or "curves"      drawn beside the table
                        at = "gradients", "rounds" or "bytes"      rank methods at equal cost
    [grid]              "method.lr" = [0.1, 0.01]    tuned per method, on seeds of their own
    [tuning.SECTION]    keys that replace the file's in runs that only tune, such as
                        [tuning.data] validation = 0.1
    [vary]              "problem.tau" = [1, 10]      a table of lines for each value

Keys that change together are joined: "method.primal_lr, method.dual_lr" = [[0.1, 0.1], [1, 1]]. A
varied key of [method] that a method has not leaves it as it is. A grid may also hold keys of
[problem], and "method.lr.value", a schedule's first rate. A method may have a grid of its own,
[methods.LABEL.grid], and sections of its own, such as
[methods.LABEL.problem] or [methods.LABEL.run], whose keys go before the common ones. With
start = "OTHER" it begins with the network of the other method's run on the same seed; what that
cost is not counted again.

report/comparison_runs.py runs what the file describes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fedminimax.config import (
    CHOICES,
    FIXED,
    ConfigError,
    Experiment,
    changed,
    options_of,
    read_toml,
    suggest,
)
from fedminimax.engine.trainer import succeeded

Table = dict[str, Any]
Change = tuple[tuple[str, Any], ...]  # such as (("method.lr", 0.1),)
Spending = Literal["gradients", "rounds", "bytes"]
OWN = ("methods", "compare", "grid", "vary", "tuning")


@dataclass(frozen=True)
class Plan:
    """How the runs of a comparison are judged."""

    metric: str
    larger: bool
    target: float | None = None
    repeats: int = 1
    seeds: tuple[str, ...] = ("run.seed",)
    settles: bool = False
    tuning_rounds: int | None = None
    tuning_repeats: int = 1
    tuning_metric: str | None = None
    fit: str | None = None
    figure: Literal["last", "curves"] | None = None
    at: Spending | None = None

    def reached(self, history: list[dict[str, Any]]) -> float:
        """The first evaluated round at which the metric is good enough, or from which on it is;
        infinity if there is none."""
        good = [self.good(record) for record in history]
        if self.settles:
            good = [all(good[i:]) for i in range(len(good))]
        return history[good.index(True)]["round"] if True in good else math.inf

    def good(self, record: dict[str, Any]) -> bool:
        value = self.value(record)
        if value is None or self.target is None:
            return False
        return value >= self.target if self.larger else value <= self.target

    def split(self, record: dict[str, Any]) -> str:
        """The rows by which a run is judged."""
        return next(s for s in ("validation", "train", "test") if s in record)

    def value(self, record: dict[str, Any]) -> float | None:
        value = measures(record[self.split(record)]).get(self.metric)
        return value if value is not None and math.isfinite(value) else None

    def final(self, history: list[dict[str, Any]]) -> float | None:
        """The last value on the test rows, where there are any."""
        last = history[-1]
        return self.value({"test": last["test"]} if "test" in last else last)

    def for_tuning(self) -> Plan:
        """How runs that only tune are judged."""
        if self.tuning_metric is None:
            return self
        return replace(self, metric=self.tuning_metric, target=None)

    def badness(self, history: list[dict[str, Any]], outcome: str) -> tuple[float, float]:
        """Smaller is better: rounds to the target first, then the last value."""
        last = self.value(history[-1]) if succeeded(outcome) else None
        if last is None:
            return math.inf, math.inf
        return self.reached(history), -last if self.larger else last


def measures(found: dict[str, Any]) -> dict[str, Any]:
    """What was measured, with the measures of single sites as sites.NAME."""
    return {**found, **{f"sites.{name}": value for name, value in found.get("sites", {}).items()}}


class Job(NamedTuple):
    """One run of a comparison."""

    varied: Change
    label: str
    chosen: Change
    seed: int
    rounds: int | None = None  # if not as many as the file says


class Line(NamedTuple):
    """One line of the table: a method, with what was chosen for it, over all seeds."""

    varied: Change
    label: str
    chosen: Change
    rounds: list[float]
    histories: list[list[dict[str, Any]]]
    outcomes: Sequence[str] = ()
    seeds: Sequence[int] = ()
    # What was tried for it, and where the runs that only tuned ended; None if one broke down.
    trials: Sequence[tuple[Change, list[float | None]]] = ()


class Comparison:
    """The experiments that a file describes."""

    def __init__(self, path: Path, at: str | None = None, table: dict[str, Any] | None = None):
        """What the file says, or a table that stands for it; `at` goes before the file's own."""
        table = read_toml(path) if table is None else table
        _check_sections(table)
        if not table.get("methods"):
            raise ConfigError(f"{path} has no [methods.LABEL]: add one for each method to compare")
        self.base = {name: part for name, part in table.items() if name not in OWN}
        sections = ("grid", *CHOICES, *FIXED, "messages")
        self.methods: dict[str, Any] = {}
        self.own: dict[str, dict[str, Any]] = {}  # sections that a method changes
        self.starts: dict[str, str] = {}  # whose run a method begins with
        for label, method in table["methods"].items():
            _check_method(label, method, sections)
            self.own[label] = {name: method[name] for name in sections[1:] if name in method}
            self.methods[label] = {k: v for k, v in method.items() if k not in (*sections, "start")}
            if "start" in method:
                self.starts[label] = method["start"]
        common = _lists("grid", table.get("grid", {}))
        self._check_grid("grid", common, list(self.methods))
        self.grids: dict[str, dict[str, list]] = {}
        for label, method in table["methods"].items():
            where = f"methods.{label}.grid"
            self.grids[label] = _lists(where, method["grid"]) if "grid" in method else common
            self._check_grid(where, method.get("grid", {}), [label])
        self.vary: dict[str, list] = _lists("vary", table.get("vary", {}))
        self._check_vary()
        self._check_starts()
        self.seeds: tuple[str, ...] = ("run.seed",)
        asked = {} if at is None else {"at": at}
        self.plan = self._plan(table.get("compare", {}) | asked)
        self.seeds = self.plan.seeds
        self._check_experiments()
        rest = {name: part for name, part in table.items() if name != "tuning"}
        # The same comparison with the settings of runs that only tune.
        self.trials = (
            Comparison(path, at, merged(rest, table["tuning"])) if "tuning" in table else self
        )

    def _check_grid(self, where: str, grid: dict[str, list], labels: list[str]) -> None:
        """A key that no method has would tune nothing."""
        known = [name for label in labels for name in self._options(label)]
        for key in grid:
            names = _names(key)
            if not any(set(names) <= set(self._options(label)) for label in labels):
                wrong = next((name for name in names if name not in known), key)
                raise ConfigError(
                    f"[{where}] tunes {key!r}, which none of {', '.join(labels)} has; "
                    + suggest(wrong, known)
                )

    def _check_vary(self) -> None:
        """A key that no method has would change nothing."""
        known = [name for label in self.methods for name in self._options(label)]
        for name in (name for key in self.vary for name in _names(key)):
            if name.startswith("method.") and name not in known:
                raise ConfigError(
                    f"[vary] changes {name!r}, which no method has; {suggest(name, known)}"
                )

    def _check_starts(self) -> None:
        labels = list(self.methods)
        for label, other in self.starts.items():
            before = labels[: labels.index(label)]
            if other not in before:
                raise ConfigError(
                    f"[methods.{label}] start is {other!r}, which is no method above it; "
                    + suggest(str(other), before)
                )
            if len(self.candidates(other)) > 1:
                raise ConfigError(
                    f"[methods.{label}] start is {other!r}, which is tuned, so that it has several "
                    f"runs: leave [methods.{other}.grid] empty, and give it its rates"
                )

    def _check_experiments(self) -> None:
        """A mistake in any of the runs is told before the first."""
        for varied, label in itertools.product(self.variations(), self.methods):
            for chosen in self.candidates(label):
                try:
                    self.experiment(Job(varied, label, chosen, 0))
                except ConfigError as error:
                    raise ConfigError(f"with [methods.{label}]: {error}") from None

    def _plan(self, given: dict[str, Any]) -> Plan:
        known = ("metric", "below", "above", "repeats", "seeds", "settles", "tuning_rounds")
        known += ("tuning_repeats", "tuning_metric", "fit", "figure", "at")
        for key in given:
            if key not in known:
                raise ConfigError(f"[compare] has no key {key!r}; {suggest(key, known)}")
        figure = given.get("figure")
        if figure not in (None, "last", "curves"):
            raise ConfigError(f'[compare] figure is {figure!r}; give "last" or "curves"')
        at = given.get("at")
        if at is not None and at not in get_args(Spending):
            raise ConfigError(f"[compare] at is {at!r}; {suggest(str(at), get_args(Spending))}")
        for key in ("repeats", "tuning_rounds", "tuning_repeats"):
            number = given.get(key, 1)
            if type(number) is not int or number < 1:
                raise ConfigError(
                    f"[compare] {key} is {number!r}; give a whole number of at least 1"
                )
        for key in ("below", "above"):
            number = given.get(key, 0.0)
            if type(number) not in (int, float) or not math.isfinite(number):
                raise ConfigError(f"[compare] {key} is {number!r}; give a number")
        if "below" in given and "above" in given:
            raise ConfigError("[compare] has both below and above; leave out one of them")
        seeds = given.get("seeds", ["run.seed"])
        if not isinstance(seeds, list) or not seeds or not all(map(_is_key, seeds)):
            raise ConfigError(
                f"[compare] seeds is {seeds!r}; give a list of keys, such as "
                '["run.seed", "data.seed"]'
            )
        varied, fit = self.varied(), given.get("fit")
        if fit is not None and fit not in varied:
            raise ConfigError(
                f"[compare] fit is {fit!r}, which [vary] does not change; "
                + (suggest(str(fit), varied) if varied else "add it there")
            )
        first = self.experiment(Job(next(self.variations()), next(iter(self.methods)), (), 0))
        problem = CHOICES["problem"][first.problem.name]
        metric = given.get("metric", problem.monitor)
        larger = "above" in given or ("below" not in given and problem.larger_is_better)
        target, repeats = given.get("above", given.get("below")), given.get("repeats", 1)
        tuned_by = given.get("tuning_metric")
        tuning = (given.get("tuning_rounds"), given.get("tuning_repeats", 1), tuned_by)
        settles = given.get("settles", False)
        judged = (metric, larger, target, repeats, tuple(seeds), settles)
        return Plan(*judged, *tuning, fit, figure, at)

    def experiment(self, job: Job) -> Experiment:
        table = {**self.base, "method": self.methods[job.label]}
        for section, keys in self.own[job.label].items():
            named = "name" in keys  # another class: the common options mean nothing to it
            table[section] = keys if named else {**table.get(section, {}), **keys}
        known = self._options(job.label)
        varied = [c for c in job.varied if not c[0].startswith("method.") or c[0] in known]
        seeds = [(name, job.seed) for name in self.seeds]
        length = [] if job.rounds is None else [("run.rounds", job.rounds)]
        for name, value in (*varied, *job.chosen, *seeds, *length):
            table = _replaced(table, name.split("."), value)
        return Experiment.from_table(changed(table, []))

    def start(self, job: Job) -> Job | None:
        """The run that a job begins with."""
        other = self.starts.get(job.label)
        if other is None:
            return None
        (rates,) = self.candidates(other)
        return Job(job.varied, other, rates, job.seed)

    def variations(self) -> Iterator[Change]:
        yield from _choices(self.vary)

    def candidates(self, label: str) -> list[Change]:
        """All points of the grid, over the options that this method has."""
        known = self._options(label)
        own = {k: v for k, v in self.grids[label].items() if set(_names(k)) <= set(known)}
        return list(_choices(own))

    def _options(self, label: str) -> list[str]:
        """The keys of a method, of its schedules, and of its problem."""
        method = self.methods[label]
        kind = CHOICES["method"][method["name"]]
        found = [f"method.{field.name}" for field in fields(kind)]
        found += [f"method.{key}.value" for key, given in method.items() if isinstance(given, dict)]
        posed = {**self.base.get("problem", {}), **self.own[label].get("problem", {})}.get("name")
        if posed in CHOICES["problem"]:  # else the first experiment says what is wrong
            keys = options_of(CHOICES["problem"][posed], "problem")
            found += [f"problem.{key}" for key in keys]
        return found

    def varied(self) -> list[str]:
        """The options that a table has lines for each value of."""
        return [name for key in self.vary for name in _names(key)]

    def tuned(self) -> list[str]:
        """The options that any method was tuned by."""
        keys = [key for grid in self.grids.values() for key in grid]
        return list(dict.fromkeys(name for key in keys for name in _names(key)))


def merged(table: Table, change: Table) -> Table:
    """The table with the keys of another, section by section."""
    both = dict(table)
    for key, value in change.items():
        there = both.get(key)
        both[key] = (
            merged(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
        )
    return both


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _replaced(table: Table, keys: Sequence[str], value: Any) -> Table:
    """The table with another value at the end of these keys."""
    first, *rest = keys
    return {**table, first: _replaced(table.get(first, {}), rest, value) if rest else value}


def _names(key: str) -> list[str]:
    return [name.strip() for name in key.split(",")]


def _check_sections(table: dict[str, Any]) -> None:
    known = [*(name for name in (*CHOICES, *FIXED, "messages") if name != "method"), *OWN]
    for name, part in table.items():
        if name not in known:
            raise ConfigError(f"unknown section [{name}]; {suggest(name, known)}")
        if not isinstance(part, dict):
            raise ConfigError(f"{name} = {part!r} is no section; write [{name}], and keys below it")


def _check_method(label: str, method: Any, sections: Sequence[str]) -> None:
    if not isinstance(method, dict):
        raise ConfigError(
            f"methods.{label} is {method!r}; write [methods.{label}], and below it a name and "
            "options"
        )
    names = CHOICES["method"]
    if "name" not in method:
        raise ConfigError(
            f'[methods.{label}] has no name; add name = "...", one of: {", ".join(names)}'
        )
    if str(method["name"]) not in names:
        given = method["name"]
        raise ConfigError(f"[methods.{label}] name is {given!r}; {suggest(str(given), names)}")
    for section in sections:
        if not isinstance(method.get(section, {}), dict):
            raise ConfigError(
                f"[methods.{label}] {section} is {method[section]!r}; give a table of its keys"
            )


def _lists(where: str, lists: dict[str, Any]) -> dict[str, list]:
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"[{where}] {key!r} is {values!r}; give a list of values")
    return lists


def _is_key(name: Any) -> bool:
    section, dot, key = name.partition(".") if isinstance(name, str) else ("", "", "")
    return bool(dot and key) and section in (*CHOICES, *FIXED, "messages")


def _choices(lists: dict[str, list]) -> Iterator[Change]:
    for values in itertools.product(*lists.values()):
        pairs: list[tuple[str, Any]] = []
        for key, value in zip(lists, values, strict=True):
            names = _names(key)
            together = [value] if len(names) == 1 else value
            if not isinstance(together, list) or len(together) != len(names):
                raise ConfigError(f"{key!r} has the value {value!r}; give {len(names)} numbers")
            pairs += zip(names, together, strict=True)
        yield tuple(pairs)
