"""The engine's side of a row: a simulated run past its first rounds."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.table import CannotMeasureError, milliseconds, sentence
from fedminimax.data.clients import Clients
from fedminimax.engine.device import usable_cores
from fedminimax.engine.executors.choose import make
from fedminimax.engine.executors.compiled.inductor import missing_compiler
from fedminimax.engine.profile import Profile, no_timing
from fedminimax.engine.round import Federation, State, play_rounds
from fedminimax.engine.state.store import Store
from fedminimax.models.tabular import MLP
from fedminimax.types import Algorithm, Cost, Problem

FIRST_ROUNDS = 2  # of other kinds than those that follow, in some methods
LONG = 1_000_000  # rounds that "auto" is told of: a run that is worth compiling
CORES = usable_cores()


class Steady:
    """A run; each call plays its next rounds, one unless said, and tells the seconds of a round."""

    def __init__(
        self,
        problem: Problem,
        method: Algorithm,
        clients: Clients,
        executor: str,
        threads: int | None = None,
        cohort: int | None = None,
        first: str = "threads",  # the executor of the first rounds
        rounds: int = 1,
    ):
        weights = clients.weight_vector(problem.client_weights)
        cohort = len(clients) if cohort is None else cohort
        self.federation = Federation.of(problem, method, clients, weights, 0, cohort)
        assert self.federation.sampler is not None  # the rows are here
        self.sampler, algorithm = self.federation.sampler, self.federation.algorithm
        self.store = Store(algorithm.keep)
        point = problem.start()
        dtype = clients.train.columns[0].dtype
        point = point._replace(x=point.x.to(dtype), y=point.y.to(dtype))
        self.state = State(0, 0, algorithm.init_server(problem, point), Cost())
        self.part, self.rounds, self.executor = no_timing, 1, make(first)
        opening = self.executor
        for _ in range(FIRST_ROUNDS):
            self()
        opening.close()
        if executor == "compiled" and (lack := missing_compiler()) is not None:
            raise CannotMeasureError(f"not compiled: {lack}")
        self.executor, self.rounds = make(executor, threads, LONG), rounds
        self.executor.part = lambda name: self.part(name)  # also of what "auto" will choose
        if executor == "compiled":
            self._compile()

    def _compile(self) -> None:
        """The next rounds; where a run would go on without machine code, this one does not."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "a phase cannot be compiled")
            try:
                self()
            except UserWarning as told:
                reason = sentence(told.__context__ or told)
                raise CannotMeasureError(f"not compiled: {reason}") from told

    def __call__(self) -> float:
        begun = time.perf_counter()
        self.play(self.rounds)
        # What is drawn ahead in a thread must not run into the turn of the other side. These rounds
        # found as much drawn as they leave behind, so that the wait is theirs; it is none where
        # drawing takes less time than playing.
        with self.part("data"):
            self.sampler.settle()
        return (time.perf_counter() - begun) / self.rounds

    def play(self, rounds: int) -> None:
        end = self.state.round + rounds
        while (left := end - self.state.round) > 0:
            common = (self.federation, self.state, self.store, self.executor)
            self.state = play_rounds(*common, left)

    def cohort(self) -> np.ndarray:
        """The clients of the next round."""
        return self.federation.draw_cohort(self.state.server, self.state.round, 0)

    def index(self, rounds: int = 1) -> Tensor:
        """The row numbers of the next rounds, for the clients of the next one: (steps, levels,
        clients, batch)."""
        steps = self.federation.algorithm.local_steps  # type: ignore
        draws = self.sampler.draw(self.cohort(), self.state.iteration, rounds * steps)
        return draws.source.index

    def parts(self, seconds: float = 1.0) -> str:
        """Where the time of a round goes, in a sentence."""
        profile, begun = Profile(), self.state.round
        self.part = profile.part
        end = time.perf_counter() + seconds
        while self.state.round == begun or time.perf_counter() < end:
            self()
        self.part = no_timing
        rounds, found = self.state.round - begun, profile.parts()
        told = ", ".join(f"{name} {milliseconds(s / rounds)}" for name, (_, s) in found.items())
        return f"a round ({self.executor.name}, {self.executor.threads} threads) is {told}"


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """64-32-1 with ReLU, the same at every call."""
    return seeded(lambda: MLP((32,), "relu").build((64,)).to(dtype))


def seeded(build: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def labelled(sizes: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    """Rows of noise, one in ten of them positive."""

    def drawn() -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(n, *shape, dtype=dtype), _labels(n, dtype)) for n in sizes]

    return seeded(drawn)


def _labels(count: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(count) % 10 == 0).to(dtype)
