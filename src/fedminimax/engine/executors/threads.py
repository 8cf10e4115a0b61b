"""A client per Python thread, one intra-op thread each: the way of networks whose single step fills
a core."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from fedminimax.blocks.parted import Parted, copy_into
from fedminimax.blocks.trees import flat, rebuild, tree_map
from fedminimax.engine.device import usable_cores
from fedminimax.engine.executors.debug import run_in_parts
from fedminimax.engine.job import ClientResult, Executor, PhaseJob


class Threads(Executor):
    name = "threads"

    def __init__(self, threads: int | None = None):
        self.threads = threads or usable_cores()
        # Each worker computes on one core; two cores are filled by two clients, without a barrier
        # per operation.
        self._pool = ThreadPoolExecutor(self.threads, "client", initializer=_begin)

    def run(self, job: PhaseJob) -> ClientResult:
        count = len(job.cohort)
        # Fewer clients than cores share them.
        cores = max(1, self.threads // max(count, 1))

        stacked = Stacked(count, flat(job.kept))

        def client(position: int) -> ClientResult:
            torch.set_num_threads(cores)
            done = run_in_parts(job, position)
            stacked.put(position, flat(done))
            return tree_map(lambda _: torch.empty(0), done)  # its form

        forms = list(self._pool.map(client, range(count)))
        return rebuild(forms[0], stacked.stack())

    def close(self) -> None:
        self._pool.shutdown()


class Stacked:
    """Lists of tensors as one list, of tensors with a row for each. A client puts its own rows
    while others compute: large vectors take long to copy. So nothing is copied that need not be:
    what stands twice in a list, because it is sent and kept, is copied once, and what is a
    client's row of a tensor from before, which it has not changed, not at all."""

    def __init__(self, count: int, before: Sequence[Tensor] = ()):
        self._before = before
        self._rows: dict[int, Tensor] = {}
        self._found: list[list[Tensor]] = [[] for _ in range(count)]  # where each row is
        self._lock = Lock()

    def put(self, position: int, tensors: list[Tensor]) -> None:
        found: dict[int, Tensor] = {}
        for held in self._before:
            own = held[position]
            found |= {id(v): held for v in tensors if _same(v, own)}
        for place, tensor in enumerate(tensors):
            if id(tensor) not in found:
                found[id(tensor)] = rows = self._of(place, tensor)
                copy_into(rows[position], tensor)
        self._found[position] = [found[id(v)] for v in tensors]

    def stack(self) -> list[Tensor]:
        return [self._stack(place) for place in range(len(self._found[0]))]

    def _stack(self, place: int) -> Tensor:
        first, *others = found = [rows[place] for rows in self._found]
        if all(held is first for held in others):
            return first
        rows = self._of(place, first[0])
        for position, held in enumerate(found):
            if held is not rows:
                rows[position].copy_(held[position])
        return rows

    def _of(self, place: int, like: Tensor) -> Tensor:
        with self._lock:
            if place not in self._rows:
                shape = len(self._found), *like.shape
                self._rows[place] = torch.empty(shape, dtype=like.dtype, device=like.device)
            return self._rows[place]


def _same(one: Tensor, other: Tensor) -> bool:
    new = isinstance(one, Parted) or one.numel() == 0
    return not new and one.dtype == other.dtype and one.is_set_to(other)


def _begin() -> None:
    """What torch keeps per thread."""
    torch.set_grad_enabled(False)
