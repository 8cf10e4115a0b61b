"""Sites elsewhere as the backend of a run: the clients' part of a phase is a call to each site.

The server has no rows. What a site's reply must look like, it learns from a client of its own with
rows of zeros.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.trees import form_of, leaves, rebuilt
from fedminimax.data.batches import rows_used
from fedminimax.data.clients import Clients
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.executors.debug import Debug, run_client
from fedminimax.engine.job import (
    ClientResult,
    Executor,
    InitialState,
    PhaseJob,
    at_the_server,
    initial_state,
    keeping,
    stack,
)
from fedminimax.engine.query import CountedQuery
from fedminimax.engine.round import Federation, init_new_clients, with_message_state
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.state.store import Store
from fedminimax.engine.trainer import succeeded
from fedminimax.messages.stage import Messages
from fedminimax.remote.calls import LeftOutError, Sites
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
    ):
        """`columns` are those of the sites' rows. `prepared` gives the problem as the sites have
        set it up, and what that cost; `set_up` is the message by which each site learns it."""
        self.sites, self.columns = sites, columns
        self._prepared, self._set_up, self.asked_rows = prepared, set_up, asked_rows
        self._template: ReplyTemplate | None = None

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
        return SiteQuery(self.sites, problem, batch, clients, split, weights)

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
        sites, number = self.sites, int(job.clock.phase)
        bound = sites.faults.norm_factor * sites.roster.norms.get(str(number), 0.0)

        def check(name: str, reply: Message) -> str | None:
            if not DIGEST.fullmatch(str(reply.about.get("digest"))):
                return "it has no digest"
            found = rebuilt(encoded, [reply.vectors[n] for n in named])
            if wrong := job.messages.check(found, expected):
                return wrong
            ups[name] = job.messages.decode(found, expected, job.clock)
            lengths[name] = length(dict(leaves(ups[name])))
            if bound and lengths[name] > bound:
                return (
                    f"its length is {lengths[name]:.4g}, more than {sites.faults.norm_factor:g} "
                    "times the median of the round before"
                )
            return None

        about = {
            "kind": "phase",
            "round": int(job.clock.round),
            "phase": number,
            "clock": numbers(job.clock),
            "form": form_of(job.down),
        }
        asked = sorted(set(job.cohort.tolist()))
        names = [sites.names[k] for k in asked]
        replies = sites.exchange(names, Message(about, dict(leaves(job.down))), named, check)
        for name in names:
            digest = replies[name].about["digest"]
            sites.roster.accepted[name] = [about["round"], number, digest]
        sites.roster.found_norms[str(number)] = statistics.median(lengths[name] for name in names)
        sent = [ups[sites.names[k]] for k in job.cohort.tolist()]
        return ClientResult(up=stack(sent), kept=job.leave())

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

    def checkpoint(self) -> dict[str, Any]:
        return {"sites": as_json(self.sites.roster.to_json())}

    def restore(self, about: dict[str, Any]) -> None:
        self.sites.roster.restore(about["sites"])

    def answers_after(self, outcome: str) -> bool:
        return succeeded(outcome)


def length(vectors: dict[str, Tensor]) -> float:
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
    ):
        """The answer of `batch` has the form of a site's. `about` is told with each question;
        `needed`: no policy can do without any site's answer."""
        there = sites.only_present(np.arange(len(sites.names))).tolist()
        sizes: dict[str, Sequence[int]] = {
            s: shards.sizes[there].tolist() for s, shards in clients.splits.items()
        }
        weights = weights[there] / weights[there].sum() if sites.roster.away else weights
        super().__init__(clients.elsewhere(sites.roster.present, sizes), split, weights)
        self.sites, self.problem, self.batch, self.needed = sites, problem, batch, needed
        self.rows = dict(zip(self.names, self.shards.sizes.tolist(), strict=True))
        self.about = {"kind": "ask", "split": split, **(about or {})}

    def answers(self, question: str, vectors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        with torch.no_grad():
            expected = numbered(self.problem.answer(question, vectors, self.batch))
        wrong = self.problem.checks.get(question, lambda reply, rows: None)

        def check(name: str, reply: Message) -> str | None:
            return wrong(in_order(reply.vectors), self.rows[name])

        message = Message({**self.about, "question": question}, numbered(vectors))
        replies = self.sites.exchange(self.names, message, expected, check, self.needed)
        return [in_order(replies[name].vectors) for name in self.names]
