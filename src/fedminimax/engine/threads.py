"""A client per Python thread, one intra-op thread each: the way of networks whose single step fills
a core."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from fedminimax.engine.debug import run_client
from fedminimax.engine.work import Executor, Result, Work, stack


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

        def client(position: int) -> Result:
            torch.set_num_threads(cores)
            return run_client(work, position)

        return stack(list(self._pool.map(client, range(count))))

    def close(self) -> None:
        self._pool.shutdown()


def _begin() -> None:
    """What torch keeps per thread."""
    torch.set_grad_enabled(False)
