"""Privacy for rows in a run: what is refused, how releases are counted before the run, and what it
has spent after so many rounds.

The account is a function of the number of rounds: each client is counted as if it took part in
every round, with the most steps that any takes. So it needs no state, and a run that is gone on
with, or whose rounds are played several at once, has the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.backends.local import Local
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.job import ClientResult, PhaseJob, kind_of_phase, phase_key
from fedminimax.engine.query import CountedQuery
from fedminimax.engine.round import FIRST, Federation, State, play_round
from fedminimax.engine.settings import Settings
from fedminimax.engine.state.store import Store
from fedminimax.messages.stage import Messages
from fedminimax.metrics.optimality import DRIFT
from fedminimax.privacy.accountant import epsilon_of, mu2_of
from fedminimax.privacy.noise import Noise, Without
from fedminimax.privacy.settings import Privacy
from fedminimax.problems.private import Oracle, Private
from fedminimax.random import key
from fedminimax.types import Algorithm, Clock, Cost, Point, Problem

SPENT = "the privacy budget is spent"
FOR_QUESTIONS = 0.05  # of the budget, if training rows are asked before round 0
SHARES = ("positive_share",)  # questions whose answers are means of marks, and may have noise


def check_record_level(
    problem: Problem, algorithm: Algorithm, clients: Clients, settings: Settings
) -> None:
    """Refuses what would tell of training rows without noise, or what nothing counts."""
    kind, name = type(problem).__name__, type(algorithm).__name__
    check_rows(problem)
    network = getattr(problem, "network", None)
    if algorithm.auxiliary:
        raise _refusal(f"{name} has training rows at the server, which sees them: simulate it")
    if clients.sampling != "epoch" and clients.batch_size is not None:
        raise _refusal(
            f'sampling "{clients.sampling}" may use a row in several batches of a pass, which is '
            'not counted: use sampling "epoch", or batch_size 0 for all rows'
        )
    if "validation" in clients.splits:
        raise _refusal(
            "validation rows choose a round, and what they choose tells of them: set validation to "
            "0, and stop after the planned rounds"
        )
    if "test" not in clients.splits:
        raise _refusal("without test rows a run is evaluated on training rows: give test rows")
    if asked := [measure for measure in settings.measures if measure != DRIFT]:
        raise _refusal(f"the measure {asked[0]!r} is computed on training rows: leave it out")
    if settings.executor == "compiled":
        raise _refusal('the executor "compiled" has no gradients row by row: use "auto"')
    if getattr(problem, "evaluated", "x") == "stepped":
        raise _refusal(f"{kind} with evaluated stepped asks training rows: use x")
    assert network is None or not network.has_norms


def check_rows(problem: Problem) -> None:
    """Refuses problems whose rows cannot be told apart."""
    kind, network = type(problem).__name__, getattr(problem, "network", None)
    if not problem.by_rows:
        raise _refusal(
            f"{kind} does not say that it is a mean over rows of which each is computed from its "
            "own row (by_rows): use auc, compositional_auc or cross_entropy, or a problem of your "
            "own that says so"
        )
    if network is not None and network.has_norms:
        raise _refusal(
            "batch normalisation makes the loss of a row depend on the others: use a model without "
            "it, such as group normalisation or none"
        )


def _refusal(reason: str) -> ValueError:
    return ValueError(f'[privacy] level "record": {reason}')


@dataclass(frozen=True)
class Counted:
    """How often a run of so many rounds releases something about a row.

    made: releases of each level on the batch of each iteration (levels, iterations). whole: on all
    rows, up to each round. ends: how many iterations there are up to each round. limits: releases
    of a step in each kind of phase, and of a client's first state, level by level.
    """

    made: np.ndarray
    whole: np.ndarray
    ends: np.ndarray
    limits: Mapping[Hashable, tuple[int, ...]]

    def of_row(self, rounds: int, passes: int) -> int:
        """Releases that a row has a part in, at most, if it is in one of so many batches of a
        pass: those of one pass are of different rows, so the one that is used most counts."""
        levels, until = len(self.made), int(self.ends[rounds])
        filled = np.zeros((levels, -(-max(until, 1) // passes) * passes), dtype=np.int64)
        filled[:, :until] = self.made[:, :until]
        most = filled.reshape(levels, -1, passes).max(axis=2).sum()
        return int(most + self.whole[rounds])


@dataclass(frozen=True)
class _Watching(Oracle):
    """Counts releases and adds no noise."""

    given: list[tuple[bool, Private]] = field(default_factory=list[tuple[bool, Private]])

    def private(self, problem: Problem, clock: Clock, begins: bool = False) -> Private:
        found = super().private(problem, clock, begins)
        self.given.append((begins, found))
        return found

    def most(self, begins: bool, levels: int) -> tuple[int, ...]:
        own = [p.releases for b, p in self.given if b == begins] or [[0] * levels]
        return tuple(max(releases) for releases in zip(*own, strict=True))


class _Counting(Debug):
    """Takes one step of each phase, and notes what it releases."""

    def __init__(self, watching: _Watching, levels: int):
        self.watching, self.levels = watching, levels
        self.limits: dict[Hashable, tuple[int, ...]] = {}
        self.first = (0,) * levels

    def run(self, job: PhaseJob) -> ClientResult:
        begun = self.watching.most(True, self.levels)
        self.first = tuple(map(max, self.first, begun))
        self.watching.given.clear()
        found = super().run(job.limit(1))
        self.limits[phase_key(job)] = self.watching.most(False, self.levels)
        self.watching.given.clear()
        return found


class _OneClient(Local):
    """The clients of a run, of which the first one alone can be reached."""

    def present(self, cohort: np.ndarray) -> np.ndarray:
        return np.zeros(1, dtype=np.int64)


def count_releases(
    federation: Federation, rounds: int, columns: Sequence[Tensor] | None = None
) -> Counted:
    """Plays one step of each kind of phase on rows of zeros, and counts what it releases.

    Arguments:
        federation: what is to be run.
        rounds: how many rounds are planned.
        columns: two rows, of the form that rows have; None: that of the federation's own.
    """
    columns = columns or [torch.zeros_like(c[:1]) for c in federation.clients.train.columns]
    rows = [torch.zeros_like(torch.cat([c[:1], c[:1]])) for c in columns]
    clients, problem = federation.clients, federation.problem
    watching = _Watching(row_clip=1.0, source=Without())
    two = Clients([rows], clients.batch_size).among(clients.names, 0)
    times = federation.algorithm.init_batches
    dry = replace(
        federation,
        clients=two,
        sampler=Sampler(two, problem.depth, federation.seed),
        first_sampler=Sampler(two, problem.depth, 0, "first", times) if times else None,
        backend=_OneClient(),
        messages=Messages(),
        initial_states={},
        oracle=watching,
    )
    executor, store = _Counting(watching, problem.depth), Store(dry.algorithm.keep)
    dtype = next((c.dtype for c in rows if c.is_floating_point()), torch.get_default_dtype())
    start = Point(*(v.to(dtype) for v in problem.start()))
    server = dry.algorithm.init_server(problem, start)
    state = State(round=0, iteration=0, server=server, cost=Cost())
    made: list[np.ndarray] = []
    whole, ends = [0], [0]
    for round in range(rounds):
        state = _counted_round(federation, dry, state._replace(round=round), store, executor)
        all_rows = sum(executor.first) if round == 0 else 0
        begun = drawn = 0
        batches: dict[int, np.ndarray] = {}
        for number, phase in enumerate(federation.algorithm.phases(round)):
            each = executor.limits[kind_of_phase(number, phase)]
            _, own = federation.clock(round, number, phase, federation.everyone, 0)
            steps = int(own.max())
            if phase.draw == "fresh":
                begun, drawn = begun + drawn, 0
            if phase.data == "whole":
                all_rows += steps * sum(each)
                continue
            drawn = max(drawn, steps)
            for step in range(begun, begun + steps):
                batches[step] = batches.get(step, 0) + np.array(each)
        nothing = np.zeros(problem.depth, dtype=np.int64)
        made += [batches.get(step, nothing) for step in range(begun + drawn)]
        whole.append(whole[-1] + all_rows)
        ends.append(ends[-1] + begun + drawn)
    stacked = np.array(made, dtype=np.int64).reshape(-1, problem.depth).T
    limits = {**executor.limits, FIRST: executor.first}
    return Counted(stacked, np.array(whole), np.array(ends), limits)


def _counted_round(
    federation: Federation, dry: Federation, state: State, store: Store, executor: _Counting
) -> State:
    """Played, if there is a kind of phase in it that was not seen before."""
    phases = federation.algorithm.phases(state.round)
    if all(kind_of_phase(number, phase) in executor.limits for number, phase in enumerate(phases)):
        return state
    return play_round(dry, state, store, executor)


@dataclass(frozen=True)
class Budget:
    """What a run may spend, and the noise by which it keeps to it."""

    privacy: Privacy
    counted: Counted
    passes: tuple[int, ...]  # batches in a pass, of clients that differ in it
    noise: tuple[float, ...]  # the multiplier of each of these
    asked: bool  # were training rows asked before round 0?
    rounds: int  # that it is good for, of those planned

    @staticmethod
    def of(
        privacy: Privacy, counted: Counted, clients: Clients, planned: int, asked: bool
    ) -> Budget:
        """The budget of a run of so many rounds."""
        passes = tuple(np.unique(passes_of(clients)).tolist())
        total = mu2_of(privacy.epsilon, privacy.delta)
        left = total * (1 - FOR_QUESTIONS) if asked else total
        most = [counted.of_row(planned, own) for own in passes]
        if privacy.noise is None:
            noise = tuple(max(releases, 1) ** 0.5 / left**0.5 for releases in most)
            return Budget(privacy, counted, passes, noise, asked, planned)
        noise, allowed = (privacy.noise,) * len(passes), left * privacy.noise**2 * (1 + 1e-9)

        def over(rounds: int) -> bool:
            return max(counted.of_row(rounds, own) for own in passes) > allowed

        rounds = bisect_left(range(planned + 1), True, key=over) - 1
        if rounds < 1:
            raise _refusal(
                f"one round with noise {privacy.noise:g} spends more than epsilon "
                f"{privacy.epsilon:g}: give more noise, or leave noise out"
            )
        return Budget(privacy, counted, passes, noise, asked, rounds)

    def private(self, federation: Federation, source: Noise) -> Federation:
        """The federation with the oracle by which its steps ask for rows."""
        privacy = self.privacy
        oracle = Oracle(
            row_clip=privacy.row_clip,
            dual_scale=privacy.dual_scale,
            noise=self.noise_of(federation.clients),
            source=source,
        )
        return replace(federation, oracle=oracle, limits=self.counted.limits)

    def noise_of(self, clients: Clients) -> float | tuple[float, ...]:
        """The multiplier of each client, or of all."""
        if len(set(self.noise)) == 1:
            return self.noise[0]
        known = dict(zip(self.passes, self.noise, strict=True))
        return tuple(known[own] for own in passes_of(clients).tolist())

    def mu2(self, rounds: int) -> float:
        """What has been spent after so many rounds, at the client that has spent most."""
        spent = [
            self.counted.of_row(rounds, own) / noise**2
            for own, noise in zip(self.passes, self.noise, strict=True)
        ]
        asked = FOR_QUESTIONS * mu2_of(self.privacy.epsilon, self.privacy.delta)
        return max(spent) + (asked if self.asked else 0.0)

    def over(self) -> str:
        """The outcome of a run that its budget ends."""
        limit, delta = self.privacy.epsilon, self.privacy.delta
        spent, next = (epsilon_of(self.mu2(self.rounds + more), delta) for more in (0, 1))
        return (
            f"{SPENT} after round {self.rounds}: epsilon {spent:.4g} at delta {delta:g}, and one "
            f"more round would spend {next:.4g} of {limit:g}; the model is that of this round"
        )

    def spent(self, rounds: int) -> dict[str, float]:
        """For the record of a run."""
        epsilon = epsilon_of(self.mu2(rounds), self.privacy.delta)
        return {"epsilon": epsilon, "delta": self.privacy.delta}


def passes_of(clients: Clients) -> np.ndarray:
    """How many batches of different rows each client has in a pass."""
    sizes = clients.train.sizes
    if clients.batch_size is None:
        return np.ones_like(sizes)
    return np.maximum(sizes // clients.batch_size, 1)


class NoisyQuery:
    """Questions about training rows before round 0: shares are told with noise, nothing else."""

    sees_rows = False
    tells_each = False

    def __init__(self, ask: CountedQuery, privacy: Privacy, source: Noise):
        self.names, self.weights = ask.names, ask.weights
        self.sampled_positive_share = ask.sampled_positive_share
        self.asked = False
        self._ask, self._privacy, self._source = ask, privacy, source

    @property
    def cost(self) -> Cost:
        return self._ask.cost

    def each(self, question: str, *vectors: Tensor) -> list[tuple[Tensor, ...]]:
        check_question(question)
        self.asked = True
        replies = zip(self._ask.each(question, *vectors), self._ask.numbers, strict=True)
        sizes = self._ask.shards.sizes
        return [
            noisy_answer(question, found, int(sizes[k]), k, self._privacy, self._source)
            for found, k in replies
        ]

    def mean(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        replies = self.each(question, *vectors)
        return tuple(
            torch.stack([w.to(v) * v for w, v in zip(self.weights, field, strict=True)]).sum(0)
            for field in zip(*replies, strict=True)
        )

    def sum(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        replies = self.each(question, *vectors)
        return tuple(torch.stack(field).sum(0) for field in zip(*replies, strict=True))


def check_question(question: str) -> None:
    """Refuses questions about training rows whose answers have no noise."""
    if question not in SHARES:
        raise _refusal(
            f"the question {question!r} about training rows has no answer with noise: use a "
            "problem that does not ask it"
        )


def noisy_answer(
    question: str,
    found: tuple[Tensor, ...],
    rows: int,
    client: int,
    privacy: Privacy,
    source: Noise,
) -> tuple[Tensor, ...]:
    """A client's shares with noise: a row moves each by at most 1 / rows."""
    spread = (FOR_QUESTIONS * mu2_of(privacy.epsilon, privacy.delta)) ** -0.5 / rows
    normal = source.at(Clock.at(client=client), True)
    call = key(0, f"question {question}")
    return tuple((v + spread * normal(call, v)).clamp(0, 1) for v in found)
