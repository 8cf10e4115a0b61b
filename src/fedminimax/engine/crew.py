"""The processes that carry a run: here, this one alone; engine/distributed.py has several."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.clients import Clients
from fedminimax.engine import executors
from fedminimax.engine.ask import SimulatedAsk
from fedminimax.engine.folder import RunFolder
from fedminimax.engine.work import Executor
from fedminimax.types import Cost, Problem


class Crew:
    """One process, whose clients are all of them.

    >>> crew = Crew()
    >>> crew.leads, crew.size, np.array([3, 5])[crew.own(np.array([3, 5]))].tolist()
    (True, 1, [3, 5])
    """

    rank, size = 0, 1

    @property
    def leads(self) -> bool:
        """Does this process write and print?"""
        return self.rank == 0

    def owns(self, client: int) -> bool:
        """Is the client, and what it keeps, this process's?"""
        return True

    def own(self, cohort: np.ndarray) -> slice | np.ndarray:
        """Where in the cohort this process's clients are."""
        return slice(None)

    def device(self, chosen: torch.device) -> torch.device:
        """The one of such devices that is this process's."""
        return chosen

    def executor(self, name: str, threads: int | None, rounds: int) -> Executor:
        return executors.make(name, threads, rounds)

    def ask(
        self,
        problem: Problem,
        clients: Clients,
        split: str,
        weights: Tensor,
        numbers: np.ndarray | None = None,
    ) -> SimulatedAsk:
        """Questions to the clients of these numbers, or to all."""
        return SimulatedAsk(problem, clients, split, weights, numbers)

    def folder(self, path: str | os.PathLike) -> RunFolder:
        return RunFolder(path)

    def total(self, cost: Cost) -> Cost:
        """The cost, with the gradients and rows of all processes."""
        return cost

    def gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, for the process that leads with those of all clients."""
        return tensors

    def first(self, sentence: str | None) -> str | None:
        """What the first process says that has anything to say."""
        return sentence

    def any(self, answer: bool) -> bool:
        """Is it so at any process?"""
        return answer

    def check_alike(self, identity: str) -> None:
        """Refuses a run whose processes are not of one experiment."""
