"""Sites elsewhere as the backend of a run: the clients' part of a phase is a call to each site.

The server has no rows. What a site's reply must look like, it learns from a client of its own with
rows of zeros.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.trees import form_of, leaves, rebuild
from fedminimax.config import ConfigError
from fedminimax.data.batches import rows_used
from fedminimax.data.clients import Clients
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.executors.debug import Debug, run_client
from fedminimax.engine.job import (
    ClientResult,
    Executor,
    InitialState,
    PhaseJob,
    Reduced,
    at_the_server,
    initial_state,
    keeping,
    reduce_replies,
    stack,
)
from fedminimax.engine.query import CountedQuery
from fedminimax.engine.round import Federation, init_new_clients, with_message_state
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.state.store import Store
from fedminimax.engine.trainer import succeeded
from fedminimax.messages.secure.fixed_point import added_answers, answer_of, words_like
from fedminimax.messages.secure.masked import Masked
from fedminimax.messages.stage import Messages
from fedminimax.remote.calls import Check, LeftOutError, Outliers, Sites
from fedminimax.remote.wire import DIGEST, Message, as_json, in_order, numbered
from fedminimax.types import Batch, Clock, Cost, Problem

T = TypeVar("T")
Columns = Sequence[tuple[Sequence[int], str]]  # the shape of a row and its type, of each column


def zero_rows(columns: Columns, batch_size: int | None) -> Clients:
    """A client with two rows of zeros: `columns` are the shape of a row and the type of each."""
    rows = [torch.zeros(2, *shape, dtype=getattr(torch, dtype)) for shape, dtype in columns]
    return Clients([rows], batch_size)


class ReplyTemplate:
    """A client with two rows of zeros at the server: what it computes has the form of what a site
    sends, and is used for nothing else."""

    def __init__(self, federation: Federation):
        self.federation = federation
        self._number = np.array([0])
        self._found: dict[Any, ClientResult] = {}
        self._kept: Any = None
        self.first: InitialState | None = None

    @staticmethod
    def of(federation: Federation, columns: Columns) -> ReplyTemplate:
        single = zero_rows(columns, federation.clients.batch_size)
        like = Federation.of(
            problem=federation.problem,
            algorithm=federation.algorithm,
            clients=single.among(federation.clients.names, 0),
            weights=federation.weights,
            seed=federation.seed,
            cohort=len(federation.clients),
        )
        return ReplyTemplate(like)

    def up(self, job: PhaseJob) -> Any:
        """What a site sends in this phase."""
        first = int(job.clock.phase) == 0 or job.phase.cohort != "same"
        hooks = [getattr(job.phase, n) for n in ("receive", "local_step", "send")]
        names = [getattr(hook, "__qualname__", repr(hook)) for hook in hooks]
        shapes = [(name, *vector.shape) for name, vector in leaves(job.down)]
        key = (int(job.clock.phase), *names, *shapes, first)
        if key not in self._found:
            self._found[key] = self._computed(job, first)
        found = self._found[key]
        self._kept = found.kept
        return found.up

    def first_of(self, job: PhaseJob) -> InitialState:
        """What is kept at first for the messages of this phase."""
        self._found.clear()
        self.up(job)
        assert self.first is not None
        return self.first

    def _computed(self, job: PhaseJob, first: bool) -> ClientResult:
        federation, kept = self.federation, None if first else stack([self._kept])
        if first:
            store = Store(federation.algorithm.keep)
            init_new_clients(federation, store, self._number, job.phase, job.server, job.clock)
            kept = store.load(self._number)
        steps = np.minimum(job.steps[:1], 1)
        draws = federation.draws(job.phase, self._number, 0, 1)
        single = replace(job, kept=kept, draws=draws, cohort=self._number, steps=steps)
        if job.messages != Messages():
            self.first = initial_state(single)
            single = with_message_state(single, stack([self.first.kept]))
        up, left = run_client(single, 0)
        return ClientResult(up, keeping(job.leave, left))


class SiteBackend(Backend):
    """Carries the clients of a run at sites, of which some may be away."""

    has_rows = False

    def __init__(
        self,
        sites: Sites,
        columns: Columns,
        prepared: Callable[[], tuple[Problem, Cost]],
        set_up: Message,
        asked_rows: bool = False,
        masked: bool = False,
    ):
        """`columns` are those of the sites' rows. `prepared` gives the problem as the sites have
        set it up, and what that cost; `set_up` is the message by which each site learns it.
        `masked`: sites answer under masks."""
        self.sites, self.columns, self.masked = sites, columns, masked
        self._prepared, self._set_up, self.asked_rows = prepared, set_up, asked_rows
        self._template: ReplyTemplate | None = None
        self.influence: dict[str, dict[str, float]] = {}  # of the last phase

    def executor(self, name: str, threads: int | None, rounds: int) -> Executor:
        return Debug()  # the one of the sites

    def query(
        self,
        problem: Problem,
        clients: Clients,
        split: str,
        weights: Tensor,
        numbers: np.ndarray | None = None,
    ) -> SiteQuery:
        batch = zero_rows(self.columns, clients.batch_size).train.batch(0)
        return SiteQuery(self.sites, problem, batch, clients, split, weights, masked=self.masked)

    def prepare(
        self, problem: Problem, clients: Clients, weights: Tensor, masked: bool = False
    ) -> tuple[Problem, Cost]:
        return self._prepared()

    def some_rows(self, clients: Clients) -> tuple[Tensor, ...]:
        return zero_rows(self.columns, None).train.columns

    def lock(self, folder: RunFolder) -> Any:
        return nullcontext()  # held by the process that serves the run, also during the set-up

    def store(
        self,
        kind: str,
        fields: tuple[str, ...],
        clients: int,
        folder: RunFolder | None,
        stages: bool,
    ) -> Store:
        empty = Store(())  # what sites keep is with them
        empty.stages = None
        return empty

    def begin(self, federation: Federation, round: int) -> None:
        """Every site gets the set-up; later, one that is away has had it before."""
        self._template = ReplyTemplate.of(federation, self.columns)
        self.sites.begin_round(round)
        try:
            self.sites.exchange(self.sites.roster.present, self._set_up, {}, needed=round == 0)
        except LeftOutError as gone:
            self.sites.leave_out(gone.reasons)

    def begin_round(self, round: int) -> None:
        self.sites.begin_round(round)

    def present(self, cohort: np.ndarray) -> np.ndarray:
        return self.sites.only_present(cohort)

    def enough(self, cohort: np.ndarray) -> bool:
        return self.sites.enough(cohort)

    @property
    def template(self) -> ReplyTemplate:
        assert self._template is not None, "the run has not begun"
        return self._template

    def map(self, job: PhaseJob, executor: Executor) -> ClientResult:
        expected = self.template.up(job)
        encoded = job.messages.encode(expected, job.clock)
        named, ups, lengths = dict(leaves(encoded)), {}, {}
        sites = self.sites
        factor = sites.faults.norm_bound

        def check(name: str, reply: Message) -> str | None:
            if wrong := _without_digest(reply):
                return wrong
            found = rebuild(encoded, [reply.vectors[n] for n in named])
            if wrong := job.messages.check(found, expected):
                return wrong
            ups[name] = job.messages.decode(found, expected, job.clock)
            lengths[name] = length(dict(leaves(ups[name])))
            return None

        def outliers(names: Sequence[str]) -> dict[str, str]:
            bound = factor * statistics.median(lengths[name] for name in names)
            return {
                name: f"its length is {lengths[name]:.4g}, more than {factor:g} times the median "
                "of this round (--norm-factor)"
                for name in names
                if 0 < bound < lengths[name]
            }

        if self.masked:
            return ClientResult(up=self._mean(job, expected), kept=job.leave())
        # Where each site sends entries of its own, lengths do not compare.
        compared = outliers if factor and self.template.federation.algorithm.robust else None
        self._exchange(job, named, check, compared)
        names = [sites.names[k] for k in job.cohort.tolist()]
        sent = [ups[name] for name in names]
        self.influence = influence(names, sent, job)
        return ClientResult(up=stack(sent), kept=job.leave())

    def _exchange(
        self,
        job: PhaseJob,
        named: dict[str, Tensor],
        check: Check,
        outliers: Outliers | None = None,
    ) -> list[str]:
        """Calls the cohort, whose replies the check gets; returns their names."""
        sites, round, number = self.sites, int(job.clock.round), int(job.clock.phase)
        about = {
            "kind": "phase",
            "round": round,
            "phase": number,
            "clock": numbers(job.clock),
            "form": form_of(job.down),
        }
        names = [sites.names[k] for k in sorted(set(job.cohort.tolist()))]
        message = Message(about, dict(leaves(job.down)))
        replies = sites.exchange(names, message, named, check, outliers=outliers)
        for name in names:
            sites.roster.accepted[name] = [round, number, replies[name].about["digest"]]
        return names

    def _mean(self, job: PhaseJob, expected: Any) -> Any:
        """The mean of replies of which nobody but the sites sees one."""
        reducer = job.messages.reducer
        assert isinstance(reducer, Masked)
        like = job.messages.encode(expected, job.clock)
        words = {n: torch.zeros(v.shape, dtype=reducer.travels(v)) for n, v in leaves(like)}
        replies: dict[str, dict[str, Tensor]] = {}

        def check(name: str, reply: Message) -> str | None:
            replies[name] = reply.vectors
            return _without_digest(reply)

        names = self._exchange(job, words, check)
        total = [reduce(operator.add, (replies[name][field] for name in names)) for field in words]
        mean = reducer.finish(rebuild(like, total), like)
        return job.messages.decode(mean, expected, job.clock)

    def reduce(self, job: PhaseJob, found: ClientResult) -> Reduced:
        # What arrived from masked sites is their mean already.
        return Reduced(found.up, job.held) if self.masked else reduce_replies(job, found)

    def initial_state(self, job: PhaseJob) -> InitialState:
        return self.template.first_of(job)

    def why_not_finite(self, job: PhaseJob, bad: str) -> str:
        return (
            f"non-finite {bad} at {at_the_server(job.clock)}, from replies that were finite: "
            "lower the learning rates, the server's too if it has one"
        )

    def complete(self, action: Callable[[], T]) -> T:
        """Without the sites that were lost in the middle of it, until it is done."""
        while True:
            try:
                return action()
            except LeftOutError as gone:
                self.sites.leave_out(gone.reasons)

    def end_round(self, federation: Federation, cost: Cost) -> Cost:
        """With that of the estimates that sites made in their first round."""
        new = self.sites.roster.end_round()
        batches, sweep = federation.algorithm.init_batches, federation.problem.sweep_gradients
        if not batches or not federation.algorithm.keep:
            return cost
        clients = federation.clients
        cohort = np.array([clients.names.index(name) for name in new], dtype=np.int64)
        sizes = clients.train.sizes[cohort]
        if clients.batch_size is not None:
            sizes = rows_used(clients, cohort, batches * clients.batch_size)
        return cost + Cost(gradients=len(new) * batches * sweep, rows=int(sizes.sum()) * sweep)

    def notes(self) -> dict[str, Any]:
        return {"influence": self.influence} if self.influence else {}

    def checkpoint(self) -> dict[str, Any]:
        return {"sites": as_json(self.sites.roster.to_json())}

    def restore(self, about: dict[str, Any]) -> None:
        self.sites.roster.restore(about["sites"])

    def answers_after(self, outcome: str) -> bool:
        return succeeded(outcome)


def _without_digest(reply: Message) -> str | None:
    good = DIGEST.fullmatch(str(reply.about.get("digest")))
    return None if good else "it has no digest"


def influence(names: Sequence[str], sent: Sequence[Any], job: PhaseJob) -> dict[str, Any]:
    """How each site's update moved the mean: its norm, its cosine with the mean, its weight."""
    down = dict(leaves(job.down))

    def update(up: Any) -> Tensor:
        parts = [
            (vector - down[name] if name in down and down[name].shape == vector.shape else vector)
            for name, vector in leaves(up)
        ]
        return torch.cat([part.double().flatten() for part in parts])

    updates = torch.stack([update(up) for up in sent])
    weights = job.weights.double() / job.weights.double().sum()
    mean, norms = weights @ updates, updates.norm(dim=1)
    cosines = updates @ mean / (norms * mean.norm()).clamp_min(1e-300)
    return {
        name: {"norm": float(norm), "cosine": float(cosine), "weight": float(weight)}
        for name, norm, cosine, weight in zip(names, norms, cosines, weights, strict=True)
    }


def length(vectors: dict[str, Tensor]) -> float:
    """The Euclidean norm of all vectors together."""
    return sum(float(v.double().square().sum()) for v in vectors.values()) ** 0.5


def numbers(clock: Clock) -> dict[str, Any]:
    """A clock as JSON; `Clock.at` makes it again, bit by bit."""
    return {name: value.item() for name, value in clock._asdict().items()}


class SiteQuery(CountedQuery):
    """Questions to the sites that are there."""

    sees_rows = False

    def __init__(
        self,
        sites: Sites,
        problem: Problem,
        batch: Batch,
        clients: Clients,
        split: str,
        weights: Tensor,
        about: dict[str, Any] | None = None,
        needed: bool = False,
        masked: bool = False,
    ):
        """The answer of `batch` has the form of a site's. `about` is told with each question;
        `needed`: no policy can do without any site's answer; `masked`: sites answer under masks."""
        there = sites.only_present(np.arange(len(sites.names))).tolist()
        sizes: dict[str, Sequence[int]] = {
            s: shards.sizes[there].tolist() for s, shards in clients.splits.items()
        }
        weights = weights[there] / weights[there].sum() if sites.roster.away else weights
        super().__init__(clients.elsewhere(sites.roster.present, sizes), split, weights)
        self.sites, self.problem, self.batch, self.needed = sites, problem, batch, needed
        self.masked, self.tells_each = masked, not masked
        self.rows = dict(zip(self.names, self.shards.sizes.tolist(), strict=True))
        self.about = {"kind": "ask", "split": split, **(about or {})}

    def answers(self, question: str, vectors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        if self.masked:
            raise ConfigError(
                f"{type(self.problem).__name__} asks each site for its own answer to the question "
                f"{question!r}, which a masked run does not tell: use another problem, or leave "
                'reduce = "masked" out'
            )
        expected = self._expected(question, vectors)
        wrong = self.problem.checks.get(question, lambda reply, rows: None)

        def check(name: str, reply: Message) -> str | None:
            return wrong(in_order(reply.vectors), self.rows[name])

        message = Message({**self.about, "question": question}, numbered(vectors))
        replies = self.sites.exchange(self.names, message, expected, check, self.needed)
        return [in_order(replies[name].vectors) for name in self.names]

    def summed_words(
        self, question: str, vectors: tuple[Tensor, ...], weighted: bool
    ) -> tuple[Tensor, ...]:
        """The sites multiply by their weights, and send words under masks."""
        like = self._expected(question, vectors)
        form = {name: words_like(vector) for name, vector in like.items()}
        about = {**self.about, "question": question, "how": "mean" if weighted else "sum"}

        def asked(question: str, vectors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
            message = Message(about, numbered(vectors))
            replies = self.sites.exchange(self.names, message, form, None, self.needed)
            return [in_order(replies[name].vectors) for name in self.names]

        parts = zip(*self._replies(question, vectors, answers=asked), strict=True)
        totals = [reduce(added_answers, own) for own in parts]
        found = zip(totals, like.values(), strict=True)
        return tuple(answer_of(words, vector, weighted) for words, vector in found)

    def _expected(self, question: str, vectors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """An answer of the form that a site's has."""
        with torch.no_grad():
            return numbered(self.problem.answer(question, vectors, self.batch))
