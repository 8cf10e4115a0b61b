"""Stages: runs of rounds after which a method starts again from what it has found."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

# Every client of a cohort is asked in every round.
remembered = lru_cache(maxsize=1024)


class Stage(NamedTuple):
    number: int
    last_round: int  # the stage ends with this round


@remembered
def stage_of(round: int, stage_rounds: int, growth: float = 1.0) -> Stage:
    """The stage that a round belongs to, when stage s has stage_rounds * growth^s rounds (rounded).

    >>> [stage_of(r, 2, growth=2.0).number for r in range(8)]
    [0, 0, 1, 1, 1, 1, 2, 2]
    """
    number, length = 0, float(stage_rounds)
    end = max(1, round_half_up(length))
    while round >= end:
        number += 1
        length *= growth
        end += max(1, round_half_up(length))
    return Stage(number, end - 1)


@remembered
def grow(value: int, growth: float, stage: int) -> int:
    """value * growth^stage, rounded, at least 1."""
    return max(1, round_half_up(value * growth**stage))


def check_growth(stage_growth: float, local_steps_growth: float) -> None:
    """Factors by which stages and rounds grow are above 0."""
    given = {"stage_growth": stage_growth, "local_steps_growth": local_steps_growth}
    for name, factor in given.items():
        if not factor > 0:
            raise ValueError(f"{name} is {factor!r}; give a factor above 0 (1: no growth)")


def round_half_up(number: float) -> int:
    """The nearest whole number; of two equally near, the larger."""
    return int(number + 0.5)
