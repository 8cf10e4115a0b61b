"""The only loop: a round is its phases, a phase is broadcast, receive, local steps, send, mean,
aggregate."""

# torch gives `from_numpy` no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.batches import Draws, Sampler, all_rows, rows_used
from fedminimax.data.clients import Clients
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.backends.local import Local
from fedminimax.engine.job import (
    MESSAGES,
    ClientError,
    Executor,
    InitialState,
    PhaseJob,
    PhaseResult,
    initial_state,
    keeping,
    kept_type,
    phase_key,
    stack,
)
from fedminimax.engine.state.store import ClientStore
from fedminimax.messages.drift import Drift
from fedminimax.messages.stage import Kept, Messages, MessageState
from fedminimax.problems.private import Oracle
from fedminimax.random import distinct, key, words
from fedminimax.types import Algorithm, Clock, Cost, NonFiniteError, Phase, Problem

FIRST = "first state"
MOST_DRAWS = 1000  # of a cohort, until enough of its clients can be reached


@dataclass(frozen=True)
class Federation:
    """Who takes part, in what, by which method: all that does not change during a run."""

    problem: Problem
    algorithm: Algorithm
    clients: Clients
    weights: Tensor
    seed: int
    cohort: int
    sampler: Sampler
    first_sampler: Sampler | None  # of the batches that init_client needs
    backend: Backend = field(default_factory=Local)
    messages: Messages = field(default_factory=Messages)
    # by kind of phase
    initial_states: dict[Hashable, InitialState] = field(
        default_factory=dict[Hashable, InitialState]
    )
    oracle: Oracle | None = None  # with privacy for rows: how steps ask for them
    # Releases of a step by kind of phase, and of a client's first state under FIRST.
    limits: Mapping[Hashable, tuple[int, ...]] = field(
        default_factory=dict[Hashable, tuple[int, ...]]
    )

    @staticmethod
    def of(
        problem: Problem,
        algorithm: Algorithm,
        clients: Clients,
        weights: Tensor,
        seed: int,
        cohort: int,
        backend: Backend | None = None,
        messages: Messages | None = None,
    ) -> Federation:
        """The federation of a prepared problem, with the method as these clients need it."""
        algorithm = algorithm.for_clients(len(clients)).for_problem(problem)
        first_sampler, times = None, algorithm.init_batches
        if times:
            first_sampler = Sampler(clients, problem.depth, seed, "first", times)
        return Federation(
            problem=problem,
            algorithm=algorithm,
            clients=clients,
            weights=weights,
            seed=seed,
            cohort=cohort,
            sampler=Sampler(clients, problem.depth, seed),
            first_sampler=first_sampler,
            backend=backend or Local(),
            messages=messages or Messages(),
        )

    @cached_property
    def everyone(self) -> np.ndarray:
        return np.arange(len(self.clients))

    @cached_property
    def complete(self) -> bool:
        """Do all clients take part in every round, as far as phases say nothing else?"""
        own = overrides(self.algorithm, "draw_cohort")
        return not own and self.cohort == len(self.clients)

    @property
    def present(self) -> np.ndarray:
        """All clients that can be reached."""
        return self.backend.present(self.everyone)

    def draw_cohort(self, server: Any, round: int, phase: int) -> np.ndarray:
        """The clients of a phase. They are drawn anew while too few of them can be reached:
        otherwise one client that is away could stop the run."""
        if self.complete:
            return self.present
        cohort = self._draw(server, round, phase)
        for again in range(1, MOST_DRAWS):
            if self.backend.enough(cohort):
                break
            # With the number of a round that no run will ever have.
            cohort = self._draw(server, round + again * 2**32, phase)
        return self.backend.present(cohort)

    def planned_cohort(self, round: int, phase: int) -> np.ndarray:
        """The clients of a phase if all of them can be reached, of a method whose server does not
        choose them: anybody can compute it."""
        drawn = 0
        for number, own in enumerate(self.algorithm.phases(round)[: phase + 1]):
            drawn = number if own.cohort == "redraw" else -1 if own.cohort == "all" else drawn
        return self.everyone if self.complete or drawn < 0 else self._draw(None, round, drawn)

    def _draw(self, server: Any, round: int, phase: int) -> np.ndarray:
        drawing = key(self.seed, "cohort", round, phase)
        uniform = words(drawing, np.arange(self.cohort)) / 2**32
        own = self.algorithm.draw_cohort(server, phase, uniform)
        return distinct(drawing, self.cohort, len(self.clients)) if own is None else own

    def clock(
        self, round: int, number: int, phase: Phase, cohort: np.ndarray, iteration: int
    ) -> tuple[Clock, np.ndarray]:
        """The time, and how many steps each client of the cohort takes."""
        steps = self._steps(round, phase, cohort)
        clock = Clock.at(
            self.clients.device,
            round=round,
            phase=number,
            iteration=iteration,
            stage=self.algorithm.stage(round),
            steps=int(steps.max()),
            replies=len(cohort),
            clients=len(self.clients),
            share=self._share(phase, cohort),
        )
        return clock, steps

    def _steps(self, round: int, phase: Phase, cohort: np.ndarray) -> np.ndarray:
        if phase.steps is not None:
            return np.full(len(cohort), phase.steps, dtype=np.int64)
        own = self.algorithm.steps
        if self._same_steps:
            return np.full(len(cohort), own(round, 0), dtype=np.int64)
        return np.array([own(round, k) for k in cohort.tolist()], dtype=np.int64)

    @cached_property
    def _same_steps(self) -> bool:
        """Is the number of steps the same for all clients and rounds?"""
        return not overrides(self.algorithm, "steps")

    def clocks(self, first: Clock, count: int, drawn: int) -> Clock:
        """The times of so many rounds of one phase that begin with the first, stacked."""
        ahead, begun = torch.arange(count, device=first.round.device), int(first.round)
        stages = first.stage.expand(count)
        if overrides(self.algorithm, "stage"):
            numbers = [self.algorithm.stage(begun + i) for i in range(count)]
            stages = torch.tensor(numbers, dtype=first.stage.dtype, device=ahead.device)
        same = Clock(*(number.expand(count) for number in first))
        rounds, iterations = first.round + ahead, first.iteration + drawn * ahead
        return same._replace(round=rounds, iteration=iterations, stage=stages)

    def alike(self, begun: int, most: int, phase: Phase, steps: np.ndarray) -> int:
        """Of so many rounds from that one on, how many have this phase and no other, with these
        steps of all clients, before one that has not?"""
        own = self.algorithm
        same_phases = not overrides(own, "phases", "phase")
        same_steps = self._same_steps or phase.steps is not None
        if same_phases and same_steps:
            return most
        for round in range(begun, begun + most):
            if not same_phases and own.phases(round) != (phase,):
                return round - begun
            if not same_steps and not np.array_equal(
                self._steps(round, phase, self.everyone), steps
            ):
                return round - begun
        return most

    def _share(self, phase: Phase, cohort: np.ndarray) -> float:
        if phase.cohort == "auxiliary":
            return 0.0
        if len(cohort) == len(self.clients):
            return 1.0  # not the sum of rounded weights
        return float(self.weights[torch.from_numpy(cohort)].sum())

    def shares(self, phase: Phase, cohort: np.ndarray) -> Tensor:
        """The clients' weights in the mean of a phase, which sum to one."""
        if cohort is self.everyone and phase.weights == "run":
            return self._all_shares
        if phase.weights == "uniform" or phase.cohort == "auxiliary":
            weights = torch.ones(len(cohort), dtype=self.weights.dtype)
        else:
            weights = self.weights[torch.from_numpy(cohort)]
        return weights / weights.sum()

    @cached_property
    def _all_shares(self) -> Tensor:
        return self.weights / self.weights.sum()

    def initial_state(self, job: PhaseJob) -> InitialState:
        """What is kept at first for the messages of a phase; of each kind, found once."""
        key = phase_key(job)
        if key not in self.initial_states:
            self.initial_states[key] = self.backend.initial_state(job)
        return self.initial_states[key]

    def draws(self, phase: Phase, cohort: np.ndarray, iteration: int, steps: int) -> Draws:
        size = self.clients.batch_size
        # In a process without clients in the phase there is nothing to draw.
        if phase.data == "whole" or size is None or not len(cohort):
            return all_rows(self.clients, cohort)
        if not self.backend.has_rows:  # they are only counted
            used = rows_used(self.clients, cohort, size)
            return Draws(self.clients.train, cohort, None, used)
        return self.sampler.draw(cohort, iteration, steps)


class State(NamedTuple):
    """Where a run stands at the start of a round; with the client store, all that a checkpoint
    needs."""

    round: int
    iteration: int
    server: Any
    cost: Cost
    held: Mapping[str, MessageState] = {}  # what the server keeps, for each kind of messages


@torch.no_grad()  # or a parameter in a user's loss would keep the history of the whole run
def play_round(
    federation: Federation,
    state: State,
    store: ClientStore,
    executor: Executor,
) -> State:
    """One round. Client states go to the store, everything else is returned."""
    algorithm, backend, server = federation.algorithm, federation.backend, state.server
    spent = Cost()
    phases, held = algorithm.phases(state.round), dict(state.held)
    cohort = federation.draw_cohort(server, state.round, 0)
    iteration, drawn = state.iteration, 0
    kept: Any = None
    for number, phase in enumerate(phases):
        if phase.cohort == "redraw":
            cohort, kept = federation.draw_cohort(server, state.round, number), None
        elif phase.cohort == "all":
            cohort, kept = federation.present, None
        elif phase.cohort == "auxiliary":
            cohort, kept = np.array([federation.clients.auxiliary]), None
        if phase.draw == "fresh":
            iteration, drawn = iteration + drawn, 0
        clock, steps = federation.clock(state.round, number, phase, cohort, iteration)
        own = backend.own(cohort)
        mine, most = cohort[own], int(steps.max())
        spent += init_new_clients(federation, store, mine, phase, server, clock)
        if kept is None:
            kept = store.load(mine) if len(mine) else kept_type(algorithm.keep)()
        last = number == len(phases) - 1
        leave = kept_type(algorithm.keep if last else algorithm.keep + algorithm.carry)
        with executor.part("data"):
            draws = federation.draws(phase, mine, iteration, most)
        job = PhaseJob(
            problem=federation.problem,
            phase=phase,
            server=server,
            kept=kept,
            leave=leave,
            draws=draws,
            clock=clock,
            cohort=mine,
            steps=steps[own],
            weights=federation.shares(phase, cohort)[own],
        )
        job = with_messages(federation, guard(federation, job), held, store)
        done = backend.exchange(job, executor)
        if done.bad:
            raise NonFiniteError(backend.why_not_finite(job, done.bad))
        server, kept = done.server, keeping(leave, done.kept)
        if job.kind:
            held[job.kind] = done.held
        if len(mine):
            store.save(mine, keeping(kept_type(algorithm.keep), kept))
            save_message_state(store, job, done)
        if phase.data == "minibatch":
            drawn = max(drawn, most)
        spent += phase_cost(job, done)
    return State(
        round=state.round + 1,
        iteration=iteration + drawn,
        server=server,
        cost=state.cost + backend.end_round(federation, spent),
        held=held,
    )


def play_with_drift(
    federation: Federation, state: State, store: ClientStore, executor: Executor
) -> tuple[State, dict[str, float]]:
    """A round, and what `Drift` finds in it: drift_x, drift_y and the bytes that it adds."""
    drift = Drift(federation.algorithm.point(state.server))
    messages = federation.messages.then(drift)
    before = {
        kind: own._replace(stages=(*own.stages, drift.init_server(None)))
        for kind, own in state.held.items()
    }
    state = play_round(
        replace(federation, messages=messages, initial_states={}),
        state._replace(held=before),
        store,
        executor.eager,
    )
    found = [own.stages[-1] for own in state.held.values()]
    held = {kind: own._replace(stages=own.stages[:-1]) for kind, own in state.held.items()}
    apart = {n: max(float(getattr(f, n)) for f in found) for n in ("drift_x", "drift_y")}
    return state._replace(held=held), {**apart, "bytes": sum(float(f.bytes) for f in found)}


def guard(federation: Federation, job: PhaseJob) -> PhaseJob:
    """The phase, with the oracle of the run, which releases as much as was counted."""
    if federation.oracle is None:
        return job
    return replace(job, oracle=oracle_for(federation, phase_key(job)))


def oracle_for(federation: Federation, kind: Hashable) -> Oracle | None:
    """The oracle of the run, limited to what was counted for phases of that kind."""
    oracle = federation.oracle
    limited = oracle is not None and federation.limits
    return oracle.with_limit(federation.limits[kind]) if oracle and limited else oracle


def with_messages(
    federation: Federation, job: PhaseJob, held: Mapping[str, MessageState], store: ClientStore
) -> PhaseJob:
    """The phase, with the stages of its messages, and what clients and the server keep for them."""
    messages = federation.messages
    # The auxiliary rows are at the server: nothing travels.
    if messages == Messages() or job.phase.cohort == "auxiliary":
        return job
    job = replace(job, messages=messages)
    kind, kept, first = federation.initial_state(job)
    job = replace(job, held=held.get(kind, first), kind=kind)
    if not messages.keeps or store.stages is None or not len(job.cohort):
        return job
    own = store.stage(kind)
    new = own.missing(job.cohort)
    if len(new):
        kept = initial_state(job).kept if kept is None else kept
        own.save(new, stack([kept_type((MESSAGES,))(kept)] * len(new)))
    return with_message_state(job, own.load(job.cohort).messages)


def with_message_state(job: PhaseJob, messages: Kept) -> PhaseJob:
    """The phase, with what clients keep for the stages of their messages, stacked."""
    kind = kept_type((*job.kept._fields, MESSAGES))
    # Unchecked: `leave` is a class of kept_type.
    leave = kept_type((*job.leave._fields, MESSAGES))  # type: ignore[attr-defined]
    return replace(job, kept=kind(*job.kept, messages), leave=leave)


def save_message_state(store: ClientStore, job: PhaseJob, done: PhaseResult) -> None:
    """Stores what the clients of a phase keep for its message stages."""
    if store.stages is not None and MESSAGES in done.kept._fields:
        own = kept_type((MESSAGES,))(done.kept.messages)
        store.stages[job.kind].save(job.cohort, own)


@torch.no_grad()
def play_rounds(
    federation: Federation, state: State, store: ClientStore, executor: Executor, most: int
) -> State:
    """A round, or several of at most `most` where the executor can play them at once. How many are
    played together changes no number."""
    return _play_several(federation, state, store, executor, most) or play_round(
        federation, state, store, executor
    )


def _play_several(
    federation: Federation, state: State, store: ClientStore, executor: Executor, most: int
) -> State | None:
    """The next rounds of one kind, if there are several and the executor can play them at once."""
    shared = federation.backend.size > 1
    if most < 2 or shared or not executor.repeatable or not federation.complete:
        return None
    algorithm, cohort = federation.algorithm, federation.everyone
    phase, *others = algorithm.phases(state.round)
    if others or phase.cohort == "auxiliary" or len(store.missing(cohort)):
        return None
    clock, steps = federation.clock(state.round, 0, phase, cohort, state.iteration)
    each = int(steps.max())
    if not 0 < each <= executor.repeatable:
        return None
    count = 1 + federation.alike(state.round + 1, most - 1, phase, steps)
    if count == 1:
        return None
    drawn = each if phase.data == "minibatch" else 0
    clocks = federation.clocks(clock, count, drawn)
    with executor.part("data"):
        draws = federation.draws(phase, cohort, state.iteration, each * count)
    leave = kept_type(algorithm.keep)
    job = PhaseJob(
        problem=federation.problem,
        phase=phase,
        server=state.server,
        kept=store.load(cohort),
        leave=leave,
        draws=draws,
        clock=clock,
        cohort=cohort,
        steps=steps,
        weights=federation.shares(phase, cohort),
    )
    job = with_messages(federation, guard(federation, job), state.held, store)
    done = executor.repeat(job, clocks)
    if done is None:
        return None
    store.save(cohort, keeping(leave, done.kept))
    save_message_state(store, job, done)
    return State(
        round=state.round + count,
        iteration=state.iteration + count * drawn,
        server=done.server,
        cost=state.cost + Cost(*(count * spent for spent in phase_cost(job, done))),
        held={**state.held, job.kind: done.held} if job.kind else state.held,
    )


def overrides(algorithm: Algorithm, *names: str) -> bool:
    """Has the method hooks of its own of these names?"""
    return any(
        getattr(getattr(algorithm, name), "__func__", None) is not getattr(Algorithm, name)
        for name in names
    )


def init_new_clients(
    federation: Federation,
    store: ClientStore,
    cohort: np.ndarray,
    phase: Phase,
    server: Any,
    clock: Clock,
) -> Cost:
    """Gives clients met for the first time the state that they keep."""
    new = store.missing(cohort)
    if not len(new):
        return Cost()
    algorithm, problem = federation.algorithm, federation.problem
    batches, down = algorithm.init_batches, phase.broadcast(server, clock)
    sampler = federation.first_sampler
    draws = None if sampler is None else sampler.draw(new, 0, 1)
    made: list[Any] = []
    rows = 0
    oracle = oracle_for(federation, FIRST)
    for position, client in enumerate(new.tolist()):
        draw = None if draws is None else draws.client(position, 0, problem.depth)
        own = problem
        if oracle is not None:
            when = clock._replace(client=torch.full_like(clock.client, client))
            own = oracle.private(problem, when, begins=True)
        rows += 0 if draws is None else int(draws.sizes[position])
        try:
            client_state = algorithm.init_client(own, down, draw)
            made.append(keeping(kept_type(algorithm.keep), client_state))
        except Exception as error:
            where = f"round {int(clock.round)}, client {client}, first state"
            raise ClientError(f"{where}: {error}") from error
    store.save(new, stack(made))
    sweep = problem.sweep_gradients
    return Cost(gradients=len(new) * batches * sweep, rows=rows * sweep)


def phase_cost(job: PhaseJob, done: PhaseResult) -> Cost:
    """What a phase has cost: gradients and rows at all its clients, bytes, and exchanges."""
    gradients = job.phase.gradients * job.problem.sweep_gradients
    rows = int(job.steps @ job.draws.sizes) * gradients
    exchanges = int(done.bytes_up + done.bytes_down > 0)
    steps = int(job.steps.sum())
    return Cost(
        gradients=steps * gradients,
        rows=rows,
        bytes_up=done.bytes_up,
        bytes_down=done.bytes_down,
        exchanges=exchanges,
    )
