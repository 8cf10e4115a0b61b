"""A client per Python thread, one intra-op thread each: the way of networks whose single step fills
a core."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch

from fedminimax.engine.debug import run_client
from fedminimax.engine.trees import tree_map
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

        stacked: Any = None
        first = Lock()

        def client(position: int) -> None:
            nonlocal stacked
            torch.set_num_threads(cores)
            done = run_client(work, position)
            with first:
                if stacked is None:
                    stacked = tree_map(lambda v: v.new_empty((count, *v.shape)), done)
            # Each client its own rows, while others compute: large vectors take long to copy.
            tree_map(lambda rows, v: rows[position].copy_(v), stacked, done)

        for _ in self._pool.map(client, range(count)):
            pass
        return stacked

    def close(self) -> None:
        self._pool.shutdown()


def _begin() -> None:
    """What torch keeps per thread."""
    torch.set_grad_enabled(False)
