"""All clients at once by torch.func.vmap: the way of small problems, where a call costs more than
its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedminimax.blocks.trees import flat, rebuild, tree_map
from fedminimax.engine.device import threads
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.job import ClientResult, Executor, PhaseJob, at_step, begin, finish, step
from fedminimax.types import Clock, Draw

MOST_NUMBERS = 4_000_000  # of a cohort's rows, gathered at once


class Vectorised(Executor):
    name = "vectorised"

    def __init__(self, threads: int | None = None):
        # Small operations lose more to waiting for a second core than they gain, above all on a
        # machine with other work; "auto" tries both.
        self.threads = threads or 1

    def run(self, job: PhaseJob) -> ClientResult:
        with threads(self.threads):
            try:
                return self._run(job)
            except Exception:
                # vmap cannot say which client failed. If they fail one by one too, the debug
                # executor names the place.
                Debug().run(job)
                raise

    def _run(self, job: PhaseJob) -> ClientResult:
        steps, cohort = job.to_device(job.steps), job.to_device(job.cohort)
        together = max(1, MOST_NUMBERS // max(job.draws.numbers_per_step, 1))
        state = job.kept
        for span in spans(job.most_steps, together):
            numbers = range(span.first, span.first + span.count)
            draws = tuple(job.draws.stack(number, job.problem.depth) for number in numbers)
            state = walk(job, state, draws, span, span.first, steps, cohort)
        return state


class Span(NamedTuple):
    """Consecutive local steps of a phase."""

    first: int
    count: int  # type: ignore[reportIncompatibleMethodOverride]  # nobody searches in this tuple
    opens: bool  # does the phase begin with it?
    closes: bool  # and end?
    of_all: bool = True  # are all clients in it, or a group?


def spans(steps: int, most: int) -> Iterator[Span]:
    """The steps of a phase in parts of equal length, of at most `most` steps each.

    >>> [(span.first, span.count) for span in spans(10, 4)]
    [(0, 4), (4, 4), (8, 2)]
    """
    length = max(1, math.ceil(steps / max(1, math.ceil(steps / most))))
    for first in range(0, max(steps, 1), length):
        count = min(length, steps - first)
        yield Span(first, count, first == 0, first + count == steps)


def walk(
    job: PhaseJob,
    state: Any,
    draws: tuple[Draw, ...],
    span: Span,
    first: int | Tensor,
    steps: Tensor,
    cohort: Tensor,
) -> Any:
    """All clients through a span: from what they kept, if it opens the phase, to their replies, if
    it closes it. All that depends on the method is a function of tensors."""

    def part(state: Any, draws: tuple[Draw, ...], clock: Clock) -> Any:
        client = begin(job, state, clock) if span.opens else state
        # Entering vmap costs as much as a small step: all steps are taken inside.
        for number, draw in enumerate(draws):
            new = step(job, client, draw, at_step(clock, first + number))
            client = _only_where(first + number < clock.steps, new, client) if job.unequal else new
        return finish(job, client, at_step(clock, clock.steps.long())) if span.closes else client

    given, form = (state, draws), None

    def flattened(steps: Tensor, cohort: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What vmap sees: it takes long over anything but tensors in a row."""
        nonlocal form
        clock = job.clock._replace(steps=steps, client=cohort)
        own, batches = rebuild(given, list(tensors))
        form = part(own, batches, clock)
        return tuple(flat(form))

    found = vmap(flattened)(steps.to(job.clock.steps.dtype), cohort, *flat(given))
    return rebuild(form, list(found))


def _only_where(active: Tensor, new: Any, old: Any) -> Any:
    """A client that has taken all its steps stays as it was."""
    return tree_map(lambda n, o: torch.where(active, n, o), new, old)
