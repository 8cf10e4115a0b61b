"""Rates that change during a run. Every rate of a method may be a number or a schedule.

A schedule is computed from the clock in tensor operations, so that a compiled round need not
compile again when its value changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedminimax.types import Clock

Unit = Literal["round", "iteration", "stage"]
_TINY = 5e-324  # the least number above 0


@dataclass(frozen=True)
class Schedule(ABC):
    """A number that depends on the clock. A subclass adds options and defines `__call__`."""

    value: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in fields(self):
            given = getattr(self, field.name)
            if field.name == "unit":
                if given not in get_args(Unit):
                    known = ", ".join(get_args(Unit))
                    raise ValueError(f"schedule {name}: unit is {given!r}; give one of {known}")
                continue
            least = 0 if field.name in ("value", "at", "power") else _TINY
            for number in given if field.name == "at" else (given,):
                if not isinstance(number, int | float) or not least <= number < float("inf"):
                    wanted = "of at least 0" if least == 0 else "above 0"
                    raise ValueError(
                        f"schedule {name}: {field.name} is {number!r}; give a finite number "
                        + wanted
                    )

    @abstractmethod
    def __call__(self, clock: Clock) -> Tensor:
        """The value at that time, a 0-d tensor."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The same value throughout the run."""

    def __call__(self, clock: Clock) -> Tensor:
        return torch.full_like(clock.round, self.value, dtype=clock.steps.dtype)


@dataclass(frozen=True)
class StepDecay(Schedule):
    """value / factor^n, n the number of marks in `at` that have been reached.

    Arguments:
        value: the rate at the start.
        factor: what it is divided by at each mark.
        at: the marks.
        unit: what marks count: "round", "iteration" or "stage".

    >>> from fedminimax.types import Clock
    >>> halved = StepDecay(0.4, factor=2, at=(10, 20))
    >>> [round(float(halved(Clock.at(round=r))), 3) for r in (0, 10, 25)]
    [0.4, 0.2, 0.1]
    """

    factor: float = 10.0
    at: tuple[int, ...] = ()
    unit: Unit = "round"

    def __call__(self, clock: Clock) -> Tensor:
        now = getattr(clock, self.unit)
        passed = sum(
            ((now >= mark).to(clock.steps.dtype) for mark in self.at),
            torch.zeros_like(now, dtype=clock.steps.dtype),
        )
        return self.value * self.factor ** (-passed)


@dataclass(frozen=True)
class Stagewise(Schedule):
    """value / factor^stage, the rule of the stage-wise methods (factor 3 in CODA)."""

    factor: float = 3.0

    def __call__(self, clock: Clock) -> Tensor:
        return self.value * self.factor ** (-clock.stage.to(clock.steps.dtype))


@dataclass(frozen=True)
class InverseRoot(Schedule):
    """value / (shift + t)^power, with t the number of rounds, iterations or stages (`unit`)."""

    shift: float = 1.0
    power: float = 0.5
    unit: Unit = "iteration"

    def __call__(self, clock: Clock) -> Tensor:
        now = getattr(clock, self.unit).to(clock.steps.dtype)
        return self.value * (self.shift + now) ** (-self.power)


Rate = float | Schedule

SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "step_decay": StepDecay,
    "stagewise": Stagewise,
    "inverse_root": InverseRoot,
}


def at(rate: Rate, clock: Clock) -> Tensor | float:
    """Reads a rate at the time of `clock`.

    Returns the number itself, or what the schedule says then, as a 0-d tensor.
    """
    return rate(clock) if isinstance(rate, Schedule) else rate
