"""The clients of a run in this process."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedminimax.data.clients import Clients
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.executors import choose
from fedminimax.engine.job import Executor, PhaseJob, PhaseResult
from fedminimax.engine.query import LocalQuery
from fedminimax.types import Problem


class Local(Backend):
    """One process, which owns all clients.

    >>> backend = Local()
    >>> backend.leads, backend.size, np.array([3, 5])[backend.own(np.array([3, 5]))].tolist()
    (True, 1, [3, 5])
    """

    def executor(self, name: str, threads: int | None, rounds: int) -> Executor:
        return choose.make(name, threads, rounds)

    def query(
        self,
        problem: Problem,
        clients: Clients,
        split: str,
        weights: Tensor,
        numbers: np.ndarray | None = None,
    ) -> LocalQuery:
        return LocalQuery(problem, clients, split, weights, numbers)

    def exchange(self, job: PhaseJob, executor: Executor) -> PhaseResult:
        # A compiled executor has the reduction and the server's step in its graph.
        return executor.exchange(job)
