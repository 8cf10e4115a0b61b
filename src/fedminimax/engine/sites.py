"""The loop of a run whose clients are sites elsewhere: the rounds of the simulator, in which the
clients' part of a phase is a call."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.trees import form_of, leaves, rebuilt
from fedminimax.data.batches import Draws, Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.ask import Asking
from fedminimax.engine.call import LeftOutError, SiteFailedError, Sites
from fedminimax.engine.debug import run_client
from fedminimax.engine.folder import RunFolder
from fedminimax.engine.round import Federation, at_the_server, meet, with_kept
from fedminimax.engine.store import Store
from fedminimax.engine.trainer import Plan, Trainer
from fedminimax.engine.wire import DIGEST, Message, as_json, in_order, numbered
from fedminimax.engine.work import (
    Exchanged,
    Executor,
    First,
    Result,
    Work,
    first_states,
    keeping,
    stack,
)
from fedminimax.messages.stage import Messages
from fedminimax.types import Batch, Clock, Cost, NonFiniteError, Problem

T = TypeVar("T")
MOST_DRAWS = 1000  # of a cohort, until enough of it are there


def zero_rows(columns: Sequence[tuple[Sequence[int], str]], batch_size: int | None) -> Clients:
    """A client with two rows of zeros: `columns` are the shape of a row and the type of each."""
    rows = [torch.zeros(2, *shape, dtype=getattr(torch, dtype)) for shape, dtype in columns]
    return Clients([rows], batch_size)


class Shadow:
    """A client with two rows of zeros at the server: what it computes has the form of what a site
    sends, and is used for nothing else."""

    def __init__(self, federation: Federation):
        self.federation = federation
        self._number = np.array([0])
        self._found: dict[Any, Result] = {}
        self._kept: Any = None
        self.first: First | None = None

    @staticmethod
    def of(federation: Federation, columns: Sequence[tuple[Sequence[int], str]]) -> Shadow:
        count, seed = len(federation.clients), federation.seed
        alone = zero_rows(columns, federation.clients.batch_size)
        alone = alone.among(federation.clients.names, 0)
        like = Federation.of(
            federation.problem, federation.algorithm, alone, federation.weights, seed, count
        )
        return Shadow(like)

    def up(self, work: Work) -> Any:
        """What a site sends in this phase."""
        first = int(work.clock.phase) == 0 or work.phase.cohort != "same"
        hooks = [getattr(work.phase, n) for n in ("receive", "local_step", "send")]
        names = [getattr(hook, "__qualname__", repr(hook)) for hook in hooks]
        shapes = [(name, *vector.shape) for name, vector in leaves(work.down)]
        key = (int(work.clock.phase), *names, *shapes, first)
        if key not in self._found:
            self._found[key] = self._computed(work, first)
        found = self._found[key]
        self._kept = found.kept
        return found.up

    def first_of(self, work: Work) -> First:
        """What is kept at first for the messages of this phase."""
        self._found.clear()
        self.up(work)
        assert self.first is not None
        return self.first

    @property
    def batch(self) -> Batch:
        return self.federation.clients.train.batch(0)

    def _computed(self, work: Work, first: bool) -> Result:
        federation, kept = self.federation, None if first else stack([self._kept])
        if first:
            store = Store(federation.algorithm.keep)
            meet(federation, store, self._number, work.phase, work.server, work.clock)
            kept = store.load(self._number)
        steps = np.minimum(work.steps[:1], 1)
        draws = federation.draws(work.phase, self._number, 0, 1)
        alone = replace(work, kept=kept, draws=draws, cohort=self._number, steps=steps)
        if work.messages != Messages():
            self.first = first_states(alone)
            alone = with_kept(alone, stack([self.first.kept]))
        up, left = run_client(alone, 0)
        return Result(up, keeping(work.leave, left))


class Remote(Executor):
    """The clients' part of a phase is done at the sites."""

    name = "sites"

    def __init__(self, sites: Sites, shadow: Shadow):
        self.sites, self.shadow = sites, shadow

    def run(self, work: Work) -> Result:
        sites, number = self.sites, int(work.clock.phase)
        expected = self.shadow.up(work)
        named, lengths = dict(leaves(expected)), {}
        bound = sites.faults.norm_factor * sites.roster.norms.get(str(number), 0.0)

        def check(name: str, reply: Message) -> str | None:
            if not DIGEST.fullmatch(str(reply.about.get("digest"))):
                return "it has no digest"
            lengths[name] = length(reply.vectors)
            if bound and lengths[name] > bound:
                return (
                    f"its length is {lengths[name]:.4g}, more than {sites.faults.norm_factor:g} "
                    "times the median of the round before"
                )
            return None

        about = {
            "kind": "phase",
            "round": int(work.clock.round),
            "phase": number,
            "clock": numbers(work.clock),
            "form": form_of(work.down),
        }
        asked = sorted(set(work.cohort.tolist()))
        names = [sites.names[k] for k in asked]
        replies = sites.exchange(names, Message(about, dict(leaves(work.down))), named, check)
        ups = {}
        for k, name in zip(asked, names, strict=True):
            reply = replies[name]
            sites.roster.accepted[name] = [about["round"], number, reply.about["digest"]]
            ups[k] = rebuilt(expected, [reply.vectors[n] for n in named])
        sites.roster.found_norms[str(number)] = statistics.median(lengths[name] for name in names)
        return Result(stack([ups[k] for k in work.cohort.tolist()]), work.leave())

    def first(self, work: Work) -> First:
        return self.shadow.first_of(work)

    def exchange(self, work: Work) -> Exchanged:
        done = super().exchange(work)
        if done.bad:
            raise NonFiniteError(
                f"non-finite {done.bad} at {at_the_server(work.clock)}, from replies that were "
                "finite: lower the learning rates, the server's too if it has one"
            )
        return done


def length(vectors: dict[str, Tensor]) -> float:
    return sum(float(v.double().square().sum()) for v in vectors.values()) ** 0.5


def numbers(clock: Clock) -> dict[str, Any]:
    """A clock as JSON; `Clock.at` makes it again, bit by bit."""
    return {name: value.item() for name, value in clock._asdict().items()}


class Counted(Sampler):
    """Of rows that are at the sites it is known only how many they are."""

    def __init__(self, clients: Clients):
        self.clients, self.size = clients, clients.batch_size

    def draw(self, cohort: np.ndarray, iteration: int, steps: int) -> Draws:
        if self.size is None:
            return self.whole(cohort)
        return Draws(self.clients.train, cohort, None, self.used(cohort, self.size))


@dataclass(frozen=True)
class SiteFederation(Federation):
    """A federation of sites, of which some may be away."""

    sites: Sites = field(kw_only=True)

    @property
    def everyone(self) -> np.ndarray:  # type: ignore[override]
        return self.sites.only_present(np.arange(len(self.clients)))

    def draw_cohort(self, server: Any, round: int, phase: int) -> np.ndarray:
        """Drawn anew while too few of those drawn are there: who is away would stop the run."""
        cohort = super().draw_cohort(server, round, phase)
        for again in range(1, MOST_DRAWS):
            if self.complete or self.sites.enough(cohort):
                break
            # By the number of a round that there will never be.
            cohort = super().draw_cohort(server, round + again * 2**32, phase)
        return self.sites.only_present(cohort)


class SiteAsk(Asking):
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


class SiteTrainer(Trainer):
    """The rounds of a run at sites."""

    def __init__(
        self,
        federation: SiteFederation,
        plan: Plan,
        folder: RunFolder | None,
        identity: str,
        shadow: Shadow,
    ):
        # What sites keep is with them.
        super().__init__(federation, plan, folder, identity, Store(()))
        self.store.stages = None
        self.sites, self.shadow = federation.sites, shadow

    def train(self) -> None:
        try:
            super().train()
        except SiteFailedError as why:
            self.outcome = str(why)

    def ask(self, split: str) -> SiteAsk:
        federation, batch = self.federation, self.shadow.batch
        common = (federation.clients, split, federation.weights)
        return SiteAsk(self.sites, federation.problem, batch, *common)

    def _make_executor(self, name: str, threads: int | None, rounds: int) -> Executor:
        return Remote(self.sites, self.shadow)

    def despite_losses(self, work: Callable[[], T]) -> T:
        """Done again, without the sites that were lost in the middle of it, until it is done."""
        while True:
            try:
                return work()
            except LeftOutError as gone:
                self.sites.leave_out(gone.reasons)

    def _play(self) -> None:
        self.sites.begin_round(self.state.round)
        self.despite_losses(super()._play)
        met = self.sites.roster.end_round()
        self.state = self.state._replace(cost=self.state.cost + self._first_cost(met))

    def _first_cost(self, met: list[str]) -> Cost:
        """Of the estimates that sites made when they were met."""
        federation = self.federation
        batches, sweep = federation.algorithm.init_batches, federation.problem.sweep_gradients
        if not batches or not federation.algorithm.keep:
            return Cost()
        clients = federation.clients
        cohort = np.array([clients.names.index(name) for name in met], dtype=np.int64)
        sizes = clients.train.sizes[cohort]
        if clients.batch_size is not None:
            sizes = federation.sampler.used(cohort, batches * clients.batch_size)
        return Cost(gradients=len(met) * batches * sweep, rows=int(sizes.sum()) * sweep)

    def _evaluate(self) -> None:
        self.despite_losses(super()._evaluate)

    def _about(self) -> dict[str, Any]:
        return super()._about() | {"sites": as_json(self.sites.roster.to_json())}

    def _restore(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        super()._restore(tensors, about)
        self.sites.roster.restore(about["sites"])
