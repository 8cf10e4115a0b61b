"""A method's rates as inputs of a graph, so that runs which differ in rates only share it."""

from __future__ import annotations

import copy
from dataclasses import fields

import torch
from torch import Tensor

from fedminimax.blocks.trees import flat
from fedminimax.engine.job import PhaseJob
from fedminimax.types import Algorithm, Phase

HOOKS = ("broadcast", "receive", "local_step", "send", "aggregate")


def rates_of(job: PhaseJob) -> tuple[Tensor, ...]:
    """The numbers of a method that are not whole: rates, weights, radii. They have the precision of
    the run, so that a number of the method's state keeps its own."""
    owner = owner_of(job.phase)
    dtype = next((v.dtype for v in flat(job.server) if v.is_floating_point()), torch.float64)
    numbers = () if owner is None else numbers_of(owner)
    return tuple(torch.tensor(value, dtype=dtype) for _, value in numbers)


def with_rates(phase: Phase, rates: tuple[Tensor, ...]) -> Phase:
    """The same phase, of a method whose numbers are these tensors."""
    if not rates:
        return phase
    owner = owner_of(phase)
    assert owner is not None
    same = copy.copy(owner)
    for (name, _), rate in zip(numbers_of(owner), rates, strict=True):
        object.__setattr__(same, name, rate)
    return phase._replace(**{n: getattr(phase, n).__func__.__get__(same) for n in HOOKS})


def owner_of(phase: Phase) -> Algorithm | None:
    """The one method that all hooks are bound to, if there is one."""
    first, *others = (getattr(getattr(phase, name), "__self__", None) for name in HOOKS)
    return first if isinstance(first, Algorithm) and all(o is first for o in others) else None


def numbers_of(algorithm: Algorithm) -> list[tuple[str, float]]:
    """The settings of a method that are numbers, by name, without those of 0."""
    values = ((field.name, getattr(algorithm, field.name)) for field in fields(algorithm))
    # A method may leave out what has a rate of 0.
    return [(name, value) for name, value in values if isinstance(value, float) and value]
