"""The only loop: a round is its phases, a phase is broadcast, receive, local steps, send, mean,
aggregate."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.batches import Draws, Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.crew import Crew
from fedminimax.engine.debug import find_non_finite
from fedminimax.engine.store import ClientStore, Store
from fedminimax.engine.work import (
    MESSAGES,
    ClientError,
    Exchanged,
    Executor,
    First,
    Work,
    first_states,
    keeping,
    kept_type,
    phase_key,
    stack,
)
from fedminimax.messages.drift import Drift
from fedminimax.messages.stage import Held, Messages
from fedminimax.random import distinct, key, words
from fedminimax.types import Algorithm, Clock, Cost, NonFiniteError, Phase, Problem


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
    crew: Crew
    messages: Messages = field(default_factory=Messages)
    met: dict[Hashable, First] = field(default_factory=dict)  # by kind of phase

    @staticmethod
    def of(
        problem: Problem,
        algorithm: Algorithm,
        clients: Clients,
        weights: Tensor,
        seed: int,
        cohort: int,
        crew: Crew | None = None,
        messages: Messages | None = None,
    ):
        algorithm = algorithm.for_clients(len(clients)).for_problem(problem)
        first = None
        if algorithm.init_batches:
            first = Sampler(clients, problem.depth, seed, "first", algorithm.init_batches)
        sampler = Sampler(clients, problem.depth, seed)
        drawing = (sampler, first, seed, cohort, crew or Crew(), messages or Messages())
        return Federation(problem, algorithm, clients, weights, *drawing)

    @cached_property
    def everyone(self) -> np.ndarray:
        return np.arange(len(self.clients))

    @cached_property
    def complete(self) -> bool:
        """Do all clients take part in every round, as far as phases say nothing else?"""
        own = _overrides(self.algorithm, "draw_cohort")
        return not own and self.cohort == len(self.clients)

    def draw_cohort(self, server: Any, round: int, phase: int) -> np.ndarray:
        if self.complete:
            return self.everyone
        drawing = key(self.seed, "cohort", round, phase)
        uniform = words(drawing, np.arange(self.cohort)) / 2**32
        own = self.algorithm.draw_cohort(server, phase, uniform)
        if own is not None:
            return own
        return distinct(drawing, self.cohort, len(self.clients))

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
        return not _overrides(self.algorithm, "steps")

    def clocks(self, first: Clock, count: int, drawn: int) -> Clock:
        """The times of so many rounds of one phase that begin with the first, stacked."""
        ahead, begun = torch.arange(count, device=first.round.device), int(first.round)
        stages = first.stage.expand(count)
        if _overrides(self.algorithm, "stage"):
            numbers = [self.algorithm.stage(begun + i) for i in range(count)]
            stages = torch.tensor(numbers, dtype=first.stage.dtype, device=ahead.device)
        same = Clock(*(number.expand(count) for number in first))
        rounds, iterations = first.round + ahead, first.iteration + drawn * ahead
        return same._replace(round=rounds, iteration=iterations, stage=stages)

    def alike(self, begun: int, most: int, phase: Phase, steps: np.ndarray) -> int:
        """Of so many rounds from that one on, how many have this phase and no other, with these
        steps of all clients, before one that has not?"""
        own = self.algorithm
        same_phases = not _overrides(own, "phases", "phase")
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

    def first_kept(self, work: Work, found: Callable[[Work], First] = first_states) -> First:
        """What is kept at first for the messages of a phase; of each kind, found once."""
        key = phase_key(work)
        if key not in self.met:
            self.met[key] = found(work)
        return self.met[key]

    def draws(self, phase: Phase, cohort: np.ndarray, iteration: int, steps: int) -> Draws:
        # In a process without clients in the phase there is nothing to draw.
        if phase.data == "whole" or not len(cohort):
            return self.sampler.whole(cohort)
        return self.sampler.draw(cohort, iteration, steps)


class State(NamedTuple):
    """Where a run stands at the start of a round; with the client store, all that a checkpoint
    needs."""

    round: int
    iteration: int
    server: Any
    cost: Cost
    held: Mapping[str, Held] = {}  # what the server keeps, for each kind of messages


@torch.no_grad()  # or a parameter in a user's loss would keep the history of the whole run
def play_round(
    federation: Federation,
    state: State,
    store: ClientStore,
    executor: Executor,
) -> State:
    """One round. Client states go to the store, everything else is returned."""
    algorithm, crew, server, spent = federation.algorithm, federation.crew, state.server, Cost()
    phases, held = algorithm.phases(state.round), dict(state.held)
    cohort = federation.draw_cohort(server, state.round, 0)
    iteration, drawn = state.iteration, 0
    kept: Any = None
    for number, phase in enumerate(phases):
        if phase.cohort == "redraw":
            cohort, kept = federation.draw_cohort(server, state.round, number), None
        elif phase.cohort == "all":
            cohort, kept = federation.everyone, None
        elif phase.cohort == "auxiliary":
            cohort, kept = np.array([federation.clients.auxiliary]), None
        if phase.draw == "fresh":
            iteration, drawn = iteration + drawn, 0
        clock, steps = federation.clock(state.round, number, phase, cohort, iteration)
        own = crew.own(cohort)
        mine, most = cohort[own], int(steps.max())
        spent += meet(federation, store, mine, phase, server, clock)
        if kept is None:
            kept = store.load(mine) if len(mine) else kept_type(algorithm.keep)()
        last = number == len(phases) - 1
        leave = kept_type(algorithm.keep if last else algorithm.keep + algorithm.carry)
        with executor.part("data"):
            draws = federation.draws(phase, mine, iteration, most)
        shares = federation.shares(phase, cohort)
        about = (federation.problem, phase, server, kept, leave, draws, clock)
        work = Work(*about, mine, steps[own], shares[own])
        work = with_messages(federation, work, held, store, executor)
        done = executor.exchange(work)
        if done.bad:
            raise NonFiniteError(_not_finite(work, done.bad, crew))
        server, kept = done.server, keeping(leave, done.kept)
        if work.kind:
            held[work.kind] = done.held
        if len(mine):
            store.save(mine, keeping(kept_type(algorithm.keep), kept))
            save_stages(store, work, done)
        if phase.data == "minibatch":
            drawn = max(drawn, most)
        spent += phase_cost(work, done)
    cost = state.cost + crew.total(spent)
    return State(state.round + 1, iteration + drawn, server, cost, held)


def play_watched(
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
        replace(federation, messages=messages, met={}),
        state._replace(held=before),
        store,
        executor.eager,
    )
    found = [own.stages[-1] for own in state.held.values()]
    held = {kind: own._replace(stages=own.stages[:-1]) for kind, own in state.held.items()}
    apart = {n: max(float(getattr(f, n)) for f in found) for n in ("drift_x", "drift_y")}
    return state._replace(held=held), {**apart, "bytes": sum(float(f.bytes) for f in found)}


def with_messages(
    federation: Federation,
    work: Work,
    held: Mapping[str, Held],
    store: ClientStore,
    executor: Executor,
) -> Work:
    """The phase, with the stages of its messages, and what clients and the server keep for them."""
    messages = federation.messages
    # The auxiliary rows are at the server: nothing travels.
    if messages == Messages() or work.phase.cohort == "auxiliary":
        return work
    work = replace(work, messages=messages)
    kind, kept, first = federation.first_kept(work, executor.first)
    work = replace(work, held=held.get(kind, first), kind=kind)
    if not messages.keeps or store.stages is None or not len(work.cohort):
        return work
    own = store.stages.setdefault(kind, Store((MESSAGES,)))
    new = own.missing(work.cohort)
    if len(new):
        kept = first_states(work).kept if kept is None else kept
        own.save(new, stack([kept_type((MESSAGES,))(kept)] * len(new)))
    return with_kept(work, own.load(work.cohort).messages)


def with_kept(work: Work, messages: tuple) -> Work:
    """The phase, with what clients keep for the stages of their messages, stacked."""
    kind = kept_type((*work.kept._fields, MESSAGES))
    leave = kept_type((*work.leave._fields, MESSAGES))  # type: ignore[attr-defined]
    return replace(work, kept=kind(*work.kept, messages), leave=leave)


def save_stages(store: ClientStore, work: Work, done: Exchanged) -> None:
    if store.stages is not None and MESSAGES in done.kept._fields:
        own = kept_type((MESSAGES,))(done.kept.messages)
        store.stages[work.kind].save(work.cohort, own)


@torch.no_grad()
def play_rounds(
    federation: Federation, state: State, store: ClientStore, executor: Executor, most: int
) -> State:
    """A round, or several of at most `most` where the executor can play them at once. How many are
    played together changes no number."""
    return _repeated(federation, state, store, executor, most) or play_round(
        federation, state, store, executor
    )


def _repeated(
    federation: Federation, state: State, store: ClientStore, executor: Executor, most: int
) -> State | None:
    """The next rounds of one kind, if there are several and the executor can play them at once."""
    if most < 2 or not executor.repeatable or not federation.complete or federation.crew.size > 1:
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
    about = (federation.problem, phase, state.server, store.load(cohort), leave, draws, clock)
    work = Work(*about, cohort, steps, federation.shares(phase, cohort))
    work = with_messages(federation, work, state.held, store, executor)
    done = executor.repeat(work, clocks)
    if done is None:
        return None
    store.save(cohort, keeping(leave, done.kept))
    save_stages(store, work, done)
    cost = state.cost + Cost(*(count * spent for spent in phase_cost(work, done)))
    ahead = state.round + count, state.iteration + count * drawn
    held = {**state.held, work.kind: done.held} if work.kind else state.held
    return State(*ahead, done.server, cost, held)


def _overrides(algorithm: Algorithm, *names: str) -> bool:
    """Has the method hooks of its own of these names?"""
    return any(
        getattr(getattr(algorithm, name), "__func__", None) is not getattr(Algorithm, name)
        for name in names
    )


def _not_finite(work: Work, bad: str, crew: Crew) -> str:
    where = crew.first(find_non_finite(work))
    if where is not None:
        return f"{where}: lower the learning rate, or look at that client's data"
    return (
        f"non-finite {bad} at {at_the_server(work.clock)}, after steps that were finite at every "
        "client: lower the learning rates, the server's too if it has one"
    )


def meet(
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
    draws = federation.first.draw(new, 0, 1) if federation.first is not None else None
    made, rows = [], 0
    for position, client in enumerate(new.tolist()):
        draw = None if draws is None else draws.client(position, 0, problem.depth)
        rows += 0 if draws is None else int(draws.sizes[position])
        try:
            client_state = algorithm.init_client(problem, down, draw)
            made.append(keeping(kept_type(algorithm.keep), client_state))
        except Exception as error:
            where = f"round {int(clock.round)}, client {client}, first state"
            raise ClientError(f"{where}: {error}") from error
    store.save(new, stack(made))
    sweep = problem.sweep_gradients
    return Cost(gradients=len(new) * batches * sweep, rows=rows * sweep)


def at_the_server(clock: Clock) -> str:
    return f"round {int(clock.round)}, phase {int(clock.phase)}, at the server"


def phase_cost(work: Work, done: Exchanged) -> Cost:
    gradients = work.phase.gradients * work.problem.sweep_gradients
    rows = int(work.steps @ work.draws.sizes) * gradients
    exchanges = int(done.bytes_up + done.bytes_down > 0)
    steps = int(work.steps.sum())
    return Cost(steps * gradients, rows, done.bytes_up, done.bytes_down, exchanges)
