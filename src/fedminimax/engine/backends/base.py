"""What a run needs from whoever carries its clients. There are three: this process (local.py), the
processes that torchrun started (torchrun.py), and sites elsewhere (remote/backend.py).

The loop, the trainer and the session exist once and know only this class. What is trivial in one
process has its answer here; a backend replaces what is different for it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.clients import Clients
from fedminimax.engine.executors.debug import find_non_finite
from fedminimax.engine.job import (
    ClientResult,
    Executor,
    InitialState,
    PhaseJob,
    PhaseResult,
    Reduced,
    at_the_server,
    initial_state,
    reduce_replies,
    run_phase,
)
from fedminimax.engine.query import CountedQuery
from fedminimax.engine.state import disk_store
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.state.lock import locked
from fedminimax.engine.state.store import ClientStore
from fedminimax.types import Cost, Problem

if TYPE_CHECKING:
    from fedminimax.engine.round import Federation

T = TypeVar("T")


class RunEndedError(RuntimeError):
    """A backend cannot go on with a run; the sentence becomes the outcome of the run."""


class Backend(ABC):
    """Carries the clients of a run."""

    rank, size = 0, 1  # the number of this process, and how many processes share the run
    has_rows = True  # are the rows of the clients in this process?
    asked_rows = False  # elsewhere: were training rows asked before round 0?

    # ------------------------------------------------------------- processes

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def owns(self, client: int) -> bool:
        """Whether this process computes the client's part and keeps its state."""
        return True

    def own(self, cohort: np.ndarray) -> slice | np.ndarray:
        """The positions in the cohort of the clients that this process owns."""
        return slice(None)

    def device(self, chosen: torch.device) -> torch.device:
        """The device of the chosen kind that this process uses."""
        return chosen

    def any(self, answer: bool) -> bool:
        """Whether the answer is yes in any process."""
        return answer

    def check_alike(self, identity: str) -> None:  # noqa: B027
        """Raises an error if the processes do not run the same experiment."""

    # ---------------------------------------------------------------- set-up

    @abstractmethod
    def executor(self, name: str, threads: int | None, rounds: int) -> Executor:
        """The executor of this name, for a run of so many rounds."""

    @abstractmethod
    def query(
        self,
        problem: Problem,
        clients: Clients,
        split: str,
        weights: Tensor,
        numbers: np.ndarray | None = None,
    ) -> CountedQuery:
        """Questions about one split to the clients of these numbers, or to all."""

    def prepare(
        self, problem: Problem, clients: Clients, weights: Tensor, masked: bool = False
    ) -> tuple[Problem, Cost]:
        """The problem with what it learns from the clients before round 0, and what that cost;
        `masked`: answers are added up as whole numbers."""
        query = self.query(problem, clients, "train", weights)
        query.masked = masked
        return problem.prepare(query), query.cost

    def some_rows(self, clients: Clients) -> tuple[Tensor, ...]:
        """Columns of the form that training rows have."""
        return clients.train.columns

    def folder(self, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of the run, as this process may use it."""
        return RunFolder(path)

    def lock(self, folder: RunFolder) -> AbstractContextManager[Any]:
        """Keeps other processes out of the folder while the run is at work in it."""
        return locked(folder.path, 0.0) if self.leads else nullcontext()

    def store(
        self,
        kind: str,
        fields: tuple[str, ...],
        clients: int,
        folder: RunFolder | None,
        stages: bool,
    ) -> ClientStore:
        """The store for these fields of each client's state, and for what its message stages keep
        if `stages` says so."""
        place = None if folder is None else folder.clients
        return disk_store.make(kind, fields, clients, place, stages)

    def begin(self, federation: Federation, round: int) -> None:  # noqa: B027
        """Called once, before the first round that this process plays."""

    # ---------------------------------------------------------------- rounds

    def begin_round(self, round: int) -> None:  # noqa: B027
        """Called before each round."""

    def present(self, cohort: np.ndarray) -> np.ndarray:
        """The clients of the cohort that can be reached."""
        return cohort

    def enough(self, cohort: np.ndarray) -> bool:
        """Whether a round can be played with those of the cohort that can be reached."""
        return True

    def map(self, job: PhaseJob, executor: Executor) -> ClientResult:
        """The clients' part of a phase, for the clients that this process owns."""
        return executor.run(job)

    def reduce(self, job: PhaseJob, found: ClientResult) -> Reduced:
        """One reply from the replies of all clients of the phase."""
        return reduce_replies(job, found)

    def exchange(self, job: PhaseJob, executor: Executor) -> PhaseResult:
        """A whole phase: the clients' part, the reduction, and the server's step."""
        return run_phase(job, partial(self.map, executor=executor), self.reduce, executor.part)

    def initial_state(self, job: PhaseJob) -> InitialState:
        """What clients and server keep at first for the messages of a phase."""
        return initial_state(job)

    def why_not_finite(self, job: PhaseJob, bad: str) -> str:
        """A sentence that says where the first number of a phase was not finite. `bad` is the
        field in which it was noticed."""
        where = self.first_sentence(find_non_finite(job))
        if where is not None:
            return f"{where}: lower the learning rate, or look at that client's data"
        return (
            f"non-finite {bad} at {at_the_server(job.clock)}, after steps that were finite at "
            "every client: lower the learning rates, the server's too if it has one"
        )

    def first_sentence(self, sentence: str | None) -> str | None:
        """The sentence of the first process that has one."""
        return sentence

    def end_round(self, federation: Federation, cost: Cost) -> Cost:
        """Called when a round is complete; returns its cost at all clients, from the cost that
        this process has counted."""
        return cost

    def complete(self, action: Callable[[], T]) -> T:
        """Calls a function that needs the clients, again if some of them were lost during it."""
        return action()

    # ----------------------------------------------------------- checkpoints

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a checkpoint; in the leading process with those of all processes."""
        return tensors

    def checkpoint(self) -> dict[str, Any]:
        """What a checkpoint says of the backend, as JSON."""
        return {}

    def restore(self, about: dict[str, Any]) -> None:  # noqa: B027
        """Takes back what `checkpoint` returned; `about` is all that a checkpoint says."""

    def notes(self) -> dict[str, Any]:
        """What a record says of the clients of the last round."""
        return {}

    def answers_after(self, outcome: str) -> bool:
        """Whether clients can still be asked when a run has ended with this outcome."""
        return True
