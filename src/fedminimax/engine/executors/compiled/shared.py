"""Graphs and machine code that runs of one process share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import fields
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedminimax.blocks.schedules import Schedule
from fedminimax.blocks.trees import flat
from fedminimax.engine.executors.compiled import graphs
from fedminimax.engine.executors.compiled.graphs import Compiler, Inputs, ServerInputs, Traced
from fedminimax.engine.executors.compiled.rates import HOOKS, numbers_of, owner_of, rates_of
from fedminimax.engine.executors.vectorised import Span
from fedminimax.engine.job import PhaseJob, hook_key

_TRACED: dict[tuple, Traced] = {}
_MADE: dict[tuple, Callable] = {}
MOST_HELD = 100  # graphs of either kind, in a process


def _remember(held: dict, key: tuple, value: Any) -> None:
    if len(held) >= MOST_HELD:
        del held[next(iter(held))]
    held[key] = value


def code_of(module: GraphModule, given: list[Tensor], compiler: Compiler) -> Callable:
    """What the compiler makes of a graph; of equal graphs, once in a process."""
    digest = hashlib.blake2s(module.code.encode())
    digest.update(repr([(v.shape, v.stride(), v.dtype) for v in given]).encode())
    held = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for name, value in sorted(held.items()):  # what the problem and the method hold
        digest.update(f"{name} {_plain(value)}".encode())
    key = (digest.hexdigest(), compiler, torch.get_num_threads())
    if key not in _MADE:
        _remember(_MADE, key, compiler(module, given))
    return _MADE[key]


def graph_of(
    job: PhaseJob, span: Span, inputs: Inputs | ServerInputs, examine: Callable[[], Any]
) -> Traced:
    """The span's graph, perhaps as another run in this process has traced it. `examine` is to say
    what is wrong with the clients' own work, if there is something."""
    rates = rates_of(job)
    for given in (rates, ()):
        key = _key_of(job, span, flat(inputs), bool(given))
        if key is not None and key in _TRACED:
            return _TRACED[key]._replace(rates=given)
    try:
        found = graphs.trace(job, span, inputs._replace(rates=rates))
    except Exception:
        # A rate that decides which way the method goes must stay a number.
        examine()
        found = graphs.trace(job, span, inputs)
    key = _key_of(job, span, flat(inputs), bool(found.rates))
    if key is not None:
        _remember(_TRACED, key, found)
    return found


class _NotPlainError(Exception):
    pass


def _key_of(job: PhaseJob, span: Span, given: list[Tensor], lifted: bool) -> tuple | None:
    """Equal for spans of different runs that trace alike; None where that cannot be told: a problem
    may hold functions or a network."""
    owner = owner_of(job.phase)
    # What a class of the user's depends on beside its attributes may change in a process.
    parts = (job.problem, owner, *job.messages.stages)
    ours = all(type(v).__module__.startswith("fedminimax.") for v in parts)
    if owner is None or not ours:
        return None
    try:
        problem = tuple((name, _plain(value)) for name, value in sorted(vars(job.problem).items()))
        numbers = dict(numbers_of(owner)) if lifted else {}
        values = [(field.name, getattr(owner, field.name)) for field in fields(owner)]
        method = tuple((name, "" if name in numbers else _plain(v)) for name, v in values)
    except _NotPlainError:
        return None
    hooks = tuple(getattr(job.phase, name).__func__ for name in HOOKS)
    shapes = tuple((v.shape, v.dtype) for v in given)
    kinds = (type(job.problem), type(owner), type(job.server), type(job.kept))
    about = (job.leave, span[1:], job.unequal, job.messages)
    return (kinds, problem, method, lifted, hooks, about, shapes)


def _plain(value: Any) -> Hashable:
    """The value, or what stands for it, if it is nothing but data."""
    if isinstance(value, Tensor):
        content = hashlib.blake2s(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
        return str(value.dtype), tuple(value.shape), content
    if isinstance(value, Schedule):
        return type(value), *(_plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple | list):
        return type(value), *map(_plain, value)
    if isinstance(value, str | int | float | NoneType):
        return type(value), value
    raise _NotPlainError


def kind_of(job: PhaseJob, span: Span, given: list[Tensor]) -> tuple:
    """Equal for spans of which one graph can serve both."""
    hooks = tuple(hook_key(getattr(job.phase, name)) for name in HOOKS)
    shapes = tuple((v.shape, v.dtype) for v in given)
    about = (job.leave, span[1:], job.unequal, job.messages)
    return id(job.problem), hooks, about, shapes
