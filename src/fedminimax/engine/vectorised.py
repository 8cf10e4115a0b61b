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
from fedminimax.types import Clock


def _differing(*names: str) -> Any:
    """vmap's in_dims for a clock in which these fields differ between clients."""
    return Clock(*(0 if name in names else None for name in Clock._fields))  # type: ignore[arg-type]


_CLOCK = _differing("steps", "client")
_LAST_CLOCK = _differing("steps", "client", "step", "iteration")


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
    started = vmap(lambda kept, clock: begin(work, kept, clock), in_dims=(0, _CLOCK))
    moved = vmap(lambda client, draw, clock: step(work, client, draw, clock), (0, 0, _CLOCK))
    ended = vmap(lambda client, clock: finish(work, client, clock), in_dims=(0, _LAST_CLOCK))
    client = started(work.kept, clock)
    unequal = bool((steps != steps[0]).any())
    for number in range(work.most_steps):
        draw = work.draws.stacked(number, work.problem.depth)
        new = moved(client, draw, at_step(clock, number))
        client = _only_where(number < steps, new, client) if unequal else new
    return ended(client, at_step(clock, steps))


def _only_where(active: Tensor, new: Any, old: Any) -> Any:
    """A client that has taken all its steps stays as it was."""

    def choose(n: Tensor, o: Tensor) -> Tensor:
        return torch.where(active.reshape(-1, *([1] * (n.dim() - 1))), n, o)

    return tree_map(choose, new, old)
