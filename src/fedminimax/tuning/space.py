"""What is searched: a range for each of some options, from a method's own rates or from texts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedminimax.blocks.schedules import Schedule
from fedminimax.config import CHOICES, ConfigError, Experiment, suggest

AROUND = 10.0  # a step size is searched from a tenth of the given one to ten times it
SECTIONS = ("method", "problem", "model", "run")  # others would change the rows that judge
_RANGE = re.compile(r"\s*([\w.]+)\s*=\s*(\S+?)\.\.(\S+)(\s+log)?\s*")


@dataclass(frozen=True)
class Range:
    """The values of one option that may be tried; of a schedule, its `value`."""

    key: str  # such as method.lr
    low: float
    high: float
    log: bool = True
    whole: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.key} = {self.low:g}..{self.high:g}{' log' if self.log else ''}"


def rates(experiment: Experiment) -> list[Range]:
    """A range around each step size of the method, and up to 1 for each averaging rate.

    A rate of 0 is switched off, and stays so.
    """
    found = []
    for field in dataclasses.fields(CHOICES["method"][experiment.method.name]):
        key, is_lr = f"method.{field.name}", field.name.endswith("lr")
        if not is_lr and not field.name.endswith("_rate"):
            continue
        value = given_value(experiment, key)
        if value > 0:
            # Some methods multiply a rate by lr before it weighs anything: those may be above 1.
            high = value * AROUND if is_lr else max(1.0, value)
            found.append(Range(key, value / AROUND, high))
    if not found:
        raise ConfigError(
            f"{experiment.method.name} has no rate above 0 to search: say what to search, such as "
            '--search "method.local_steps=1..16"'
        )
    return found


def ranges(texts: Sequence[str], experiment: Experiment) -> list[Range]:
    """What texts such as "method.lr=0.001..1 log" say."""
    found = [_range(text, experiment) for text in texts]
    keys = [one.key for one in found]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{key} is searched twice: give one range for it")
    return found


def _range(text: str, experiment: Experiment) -> Range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f'{text!r} is no range; write it as "method.lr=0.001..1 log"')
    key, log = match[1], match[4] is not None
    table = experiment.to_table()
    known = [f"{s}.{k}" for s in SECTIONS for k, v in table.get(s, {}).items() if _number(v)]
    known.remove("run.seed")
    if len(owners := [name for name in known if name.endswith(f".{key}")]) == 1:
        key = owners[0]  # as in a change of `run`, the section may be left out
    if key not in known:
        raise ConfigError(
            f"{key} is no number of [{'], ['.join(SECTIONS)}] that can be searched; "
            + suggest(key, known)
        )
    try:
        low, high = float(match[2]), float(match[3])
    except ValueError:
        raise ConfigError(f"{text!r} has an end that is no number; write 0.001..1") from None
    section, _, name = key.partition(".")
    whole = isinstance(table[section][name], int)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{text!r} has no numbers in between: give a smaller and a larger one")
    if log and low <= 0:
        raise ConfigError(f"{text!r} begins at {low:g}: a log scale begins above 0")
    if whole and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"{text!r} has an end that {key} cannot be: give whole numbers")
    return Range(key, low, high, log, whole)


def _number(value: Any) -> bool:
    return isinstance(value, int | float | Schedule) and not isinstance(value, bool)


def given_value(experiment: Experiment, key: str) -> float:
    """The option as the experiment has it; of a schedule, its `value`."""
    section, _, name = key.partition(".")
    value = experiment.to_table()[section][name]
    return value.value if isinstance(value, Schedule) else value


def with_values(experiment: Experiment, values: Mapping[str, float]) -> Experiment:
    """The experiment with other values of some options."""
    table = experiment.to_table()
    for key, value in values.items():
        section, _, name = key.partition(".")
        old = table[section][name]
        new = dataclasses.replace(old, value=value) if isinstance(old, Schedule) else value
        table[section][name] = new
    return Experiment.from_table(table)
