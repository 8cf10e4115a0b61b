"""The engine's side of a row: a simulated run past its first rounds."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from fedminimax.bench.table import CannotMeasureError
from fedminimax.data.clients import Clients
from fedminimax.engine.compiled import missing_compiler
from fedminimax.engine.executors import make
from fedminimax.engine.round import Federation, State, play_rounds
from fedminimax.engine.store import Store
from fedminimax.engine.work import Executor
from fedminimax.models.tabular import MLP
from fedminimax.types import Algorithm, Cost, Problem

FIRST_ROUNDS = 2  # of other kinds than those that follow, in some methods
LONG = 1_000_000  # rounds that "auto" is told of: a run that is worth compiling
CORES = os.cpu_count() or 1


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
        algorithm = self.federation.algorithm
        self.store = Store(algorithm.keep)
        point = problem.start()
        dtype = clients.train.columns[0].dtype
        point = point._replace(x=point.x.to(dtype), y=point.y.to(dtype))
        self.state = State(0, 0, algorithm.init_server(problem, point), Cost())
        self.rounds, self.executor = 1, make(first)
        opening = self.executor
        for _ in range(FIRST_ROUNDS):
            self()
        opening.close()
        self.executor = compiling(threads) if executor == "compiled" else _made(executor, threads)
        self.rounds = rounds

    def __call__(self) -> float:
        begun, end = time.perf_counter(), self.state.round + self.rounds
        while (left := end - self.state.round) > 0:
            common = (self.federation, self.state, self.store, self.executor)
            self.state = play_rounds(*common, left)
        return (time.perf_counter() - begun) / self.rounds


def _made(executor: str, threads: int | None) -> Executor:
    return make(executor, threads, LONG)


def compiling(threads: int | None = None) -> Executor:
    lack = missing_compiler()
    if lack is not None:
        raise CannotMeasureError(lack)
    return make("compiled", threads)


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
