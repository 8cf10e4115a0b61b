"""A client per Python thread, one intra-op thread each: the way of networks whose single step fills
a core."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from fedminimax.engine.debug import run_client
from fedminimax.engine.trees import flat, rebuilt, tree_map
from fedminimax.engine.work import Executor, Result, Work


class Threads(Executor):
    name = "threads"

    def __init__(self, threads: int | None = None):
        self.threads = threads or os.cpu_count() or 1
        # Each worker computes on one core; two cores are filled by two clients, without a barrier
        # per operation.
        self._pool = ThreadPoolExecutor(self.threads, "client", initializer=_begin)

    def run(self, work: Work) -> Result:
        count = len(work.cohort)
        # Fewer clients than cores share them.
        cores = max(1, self.threads // max(count, 1))

        stacked = Stacked(count)

        def client(position: int) -> Result:
            torch.set_num_threads(cores)
            done = run_client(work, position)
            stacked.put(position, flat(done))
            return tree_map(lambda v: v.new_empty(0), done)  # its form

        forms = list(self._pool.map(client, range(count)))
        return rebuilt(forms[0], stacked.whole())

    def close(self) -> None:
        self._pool.shutdown()


class Stacked:
    """Lists of tensors as one list, of tensors with a row for each. A client puts its own rows
    while others compute: large vectors take long to copy. What stands twice in a list, because it
    is sent and kept, is copied once."""

    def __init__(self, count: int):
        self._rows: dict[int, Tensor] = {}
        self._places: list[list[int]] = [[] for _ in range(count)]
        self._lock = Lock()

    def put(self, position: int, tensors: list[Tensor]) -> None:
        first: dict[int, int] = {}
        places = [first.setdefault(id(v), place) for place, v in enumerate(tensors)]
        for place in first.values():
            self._of(place, tensors[place])[position].copy_(tensors[place])
        self._places[position] = places

    def whole(self) -> list[Tensor]:
        usual = self._places[0]
        if all(places == usual for places in self._places):
            return [self._rows[place] for place in usual]
        for position, places in enumerate(self._places):
            for place, first in enumerate(places):
                if place != first:
                    own = self._rows[first][position]
                    self._of(place, own)[position].copy_(own)
        return [self._rows[place] for place in range(len(usual))]

    def _of(self, place: int, like: Tensor) -> Tensor:
        with self._lock:
            if place not in self._rows:
                self._rows[place] = like.new_empty((len(self._places), *like.shape))
            return self._rows[place]


def _begin() -> None:
    """What torch keeps per thread."""
    torch.set_grad_enabled(False)
