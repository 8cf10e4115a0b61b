"""All clients at once by torch.func.vmap: the way of small problems, where a call costs more than
its arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedminimax.engine.debug import Debug
from fedminimax.engine.trees import tree_map
from fedminimax.engine.work import Result, Work, at_step, begin, finish, step
from fedminimax.types import Clock, Draw


def _differing(*names: str) -> Any:
    """vmap's in_dims for a clock in which these fields differ between clients."""
    return Clock(*(0 if name in names else None for name in Clock._fields))  # type: ignore[arg-type]


_CLOCK = _differing("steps", "client")
MOST_NUMBERS = 4_000_000  # of a cohort's rows, gathered at once


class Vectorised:
    name = "vectorised"

    def __init__(self, threads: int | None = None):
        # Small operations lose more to waiting for a second core than they gain, above all on a
        # machine with other work; "auto" tries both.
        self.threads = threads or 1

    def run(self, work: Work) -> Result:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return run_stacked(work)
        except Exception:
            # vmap cannot say which client failed. If the clients fail alone too, the debug executor
            # names the place.
            Debug().run(work)
            raise
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        pass


def run_stacked(work: Work) -> Result:
    """A whole phase of the cohort; all that depends on the method is a function of tensors."""
    steps = torch.from_numpy(work.steps)
    clock = work.clock._replace(steps=steps.to(torch.float64), client=torch.from_numpy(work.cohort))
    unequal = bool((steps != steps[0]).any())
    state, last = work.kept, work.most_steps
    # Entering vmap costs as much as a small step: as many steps as may be are taken inside.
    for first in range(0, max(last, 1), together(work)):
        numbers = range(first, min(first + together(work), last))
        draws = tuple(work.draws.stacked(number, work.problem.depth) for number in numbers)

        def part(
            state: Any, draws: tuple[Draw, ...], clock: Clock, numbers: range = numbers
        ) -> Any:
            client = begin(work, state, clock) if numbers.start == 0 else state
            for number, draw in zip(numbers, draws, strict=True):
                new = step(work, client, draw, at_step(clock, number))
                client = _only_where(number < clock.steps, new, client) if unequal else new
            ends = numbers.stop == last
            return finish(work, client, at_step(clock, clock.steps.long())) if ends else client

        state = vmap(part, in_dims=(0, 0, _CLOCK))(state, draws, clock)
    return state


def together(work: Work) -> int:
    """How many steps' rows may lie in memory at once."""
    return max(1, MOST_NUMBERS // max(work.draws.numbers_per_step, 1))


def _only_where(active: Tensor, new: Any, old: Any) -> Any:
    """A client that has taken all its steps stays as it was."""
    return tree_map(lambda n, o: torch.where(active, n, o), new, old)
