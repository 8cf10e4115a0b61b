"""The only loop: a round is its phases, a phase is broadcast, receive, local steps, send, mean,
aggregate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.batches import Draws, Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.debug import find_non_finite
from fedminimax.engine.store import Store
from fedminimax.engine.work import Executor, Work, bad_field, bytes_of, mean
from fedminimax.random import distinct, key
from fedminimax.types import Algorithm, Clock, Cost, Phase, Problem


class NonFiniteError(ArithmeticError):
    """The run met a NaN or an infinity; the message is the run's outcome."""


@dataclass(frozen=True)
class Federation:
    """Who takes part, in what, by which method: all that does not change during a run."""

    problem: Problem
    algorithm: Algorithm
    clients: Clients
    weights: Tensor
    sampler: Sampler
    first: Sampler | None  # the batches that init_client needs
    seed: int
    cohort: int

    @staticmethod
    def of(
        problem: Problem,
        algorithm: Algorithm,
        clients: Clients,
        weights: Tensor,
        seed: int,
        cohort: int,
    ):
        first = None
        if algorithm.init_batches:
            first = Sampler(clients, problem.depth, seed, "first", algorithm.init_batches)
        sampler = Sampler(clients, problem.depth, seed)
        return Federation(problem, algorithm, clients, weights, sampler, first, seed, cohort)

    def draw_cohort(self, round: int, phase: int) -> np.ndarray:
        if self.cohort == len(self.clients):
            return np.arange(len(self.clients))
        return distinct(key(self.seed, "cohort", round, phase), self.cohort, len(self.clients))


class State(NamedTuple):
    """Where a run stands at the start of a round; with the client store, all that a checkpoint
    needs."""

    round: int
    iteration: int
    server: Any
    cost: Cost


def play_round(federation: Federation, state: State, store: Store, executor: Executor) -> State:
    """One round. Client states go to the store, everything else is returned."""
    algorithm, server, cost = federation.algorithm, state.server, state.cost
    iteration, drawn = state.iteration, 0
    cohort = federation.draw_cohort(state.round, 0)
    for number, phase in enumerate(algorithm.phases(state.round)):
        if phase.cohort == "redraw":
            cohort = federation.draw_cohort(state.round, number)
        elif phase.cohort == "all":
            cohort = np.arange(len(federation.clients))
        if phase.draw == "fresh":
            iteration += drawn
        work = prepare_work(
            federation, store, server, cohort, phase, number, state.round, iteration
        )
        result = executor.run(work)
        average = mean(result.up, federation.weights[torch.from_numpy(cohort)])
        new = phase.aggregate(federation.problem, server, average, work.clock)
        if bad := bad_field(average) or bad_field(new):
            where = (
                find_non_finite(work) or f"non-finite {bad} at round {state.round}, at the server"
            )
            raise NonFiniteError(f"{where}: lower the learning rate, or look at that client's data")
        store.save(cohort, result.kept)
        server, drawn = new, work.most_steps
        cost += phase_cost(work, phase, result.up)
    return State(state.round + 1, iteration + drawn, server, cost)


def prepare_work(
    federation: Federation,
    store: Store,
    server: Any,
    cohort: np.ndarray,
    phase: Phase,
    number: int,
    round: int,
    iteration: int,
) -> Work:
    algorithm = federation.algorithm
    counted = [
        algorithm.steps(round, k) if phase.steps is None else phase.steps for k in cohort.tolist()
    ]
    steps = np.array(counted, dtype=np.int64)
    clock = Clock.at(
        round=round,
        phase=number,
        iteration=iteration,
        stage=algorithm.stage(round),
        steps=int(steps.max()),
        replies=len(cohort),
        clients=len(federation.clients),
    )
    down = phase.broadcast(server, clock)
    if phase.data == "whole":
        draws = federation.sampler.whole(cohort)
    else:
        draws = federation.sampler.draw(cohort, iteration, int(steps.max()))
    kept = store.load(cohort, lambda new: first_states(federation, down, new))
    return Work(federation.problem, phase, algorithm.keep, down, kept, draws, clock, cohort, steps)


def first_states(federation: Federation, down: Any, new: np.ndarray) -> tuple[Tensor, ...]:
    """What clients keep that are met for the first time."""
    algorithm, problem = federation.algorithm, federation.problem
    if federation.first is None:
        client = algorithm.init_client(problem, down, None)
        return tuple(
            getattr(client, f).expand(len(new), *getattr(client, f).shape) for f in algorithm.keep
        )
    draws: Draws = federation.first.draw(new, 0, 1)
    made = [
        algorithm.init_client(problem, down, draws.client(p, 0, problem.depth))
        for p in range(len(new))
    ]
    return tuple(torch.stack([getattr(client, f) for client in made]) for f in algorithm.keep)


def phase_cost(work: Work, phase: Phase, up: Any) -> Cost:
    replies = len(work.cohort)
    rows = sum(int(s) * work.draws.rows_used(p) for p, s in enumerate(work.steps)) * phase.gradients
    bytes_up, bytes_down = bytes_of(up), bytes_of(work.down) * replies
    exchanges = int(bytes_up + bytes_down > 0)
    return Cost(int(work.steps.sum()) * phase.gradients, rows, bytes_up, bytes_down, exchanges)
