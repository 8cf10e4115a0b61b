"""What happens between rounds: evaluations, records, checkpoints, and the reasons to stop."""

from __future__ import annotations

import math
import time
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.trees import build_tree, form_of, leaves, nest
from fedminimax.engine.backends.base import RunEndedError
from fedminimax.engine.device import chance
from fedminimax.engine.job import MESSAGES, Executor, kept_type
from fedminimax.engine.privacy import SPENT, Budget
from fedminimax.engine.profile import no_timing
from fedminimax.engine.query import CountedQuery
from fedminimax.engine.round import Federation, State, play_rounds, play_with_drift
from fedminimax.engine.settings import Callbacks, Settings, evaluated_clients
from fedminimax.engine.state.checkpoint import CheckpointError
from fedminimax.engine.state.disk_store import DiskStore
from fedminimax.engine.state.folder import RunFolder, environment
from fedminimax.engine.state.store import ClientStore
from fedminimax.messages.stage import MessageState
from fedminimax.metrics.optimality import DRIFT, measure
from fedminimax.types import Cost, NonFiniteError, Point

MOST_SECONDS = 0.2  # in which nobody can interrupt a run or sees how far it is
FINISHED = "finished"
STOPPED, REACHED = "stopped early", "reached"


def succeeded(outcome: str) -> bool:
    """Did a run end as it was meant to?"""
    return outcome == FINISHED or outcome.startswith((STOPPED, REACHED, SPENT))


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop, between two rounds; its folder has a checkpoint of the last."""

    def __init__(self, round: int):
        super().__init__(f"interrupted after round {round}")
        self.round = round


class Best(NamedTuple):
    """The evaluation with the best monitored metric on validation rows."""

    round: int
    value: float
    point: Point
    moments: Tensor | None = None


class Trainer:
    """The rounds of one run."""

    def __init__(
        self,
        federation: Federation,
        settings: Settings,
        callbacks: Callbacks,
        folder: RunFolder | None,
        identity: str,
        store: ClientStore,
        budget: Budget | None = None,
    ):
        self.budget = budget
        self.rounds = settings.rounds if budget is None else budget.rounds
        self.federation, self.settings, self.callbacks = federation, settings, callbacks
        self.backend, self.folder = federation.backend, folder
        self.identity, self.store = identity, store
        self.begun = time.perf_counter()
        splits = federation.clients.splits
        self.evaluated = [s for s in ("validation", "test") if s in splits] or ["train"]
        self.asked = evaluated_clients(settings, len(federation.clients))
        self.history: list[dict[str, Any]] = []
        self.best: Best | None = None
        self.drift: dict[str, float] | None = None  # found in the round just played
        self.waited = 0  # evaluations since the best one
        self._together = 1  # rounds at once, at most
        self.outcome = FINISHED
        self.part = no_timing if callbacks.profile is None else callbacks.profile.part

    @property
    def point(self) -> Point:
        return self.federation.algorithm.point(self.state.server)

    def query(self, split: str) -> CountedQuery:
        """Questions about a split to the clients that evaluations ask."""
        federation = self.federation
        clients, weights = federation.clients, federation.weights
        query = self.backend.query(federation.problem, clients, split, weights, self.asked)
        query.masked = federation.messages.masked
        return query

    def moments(self) -> Tensor | None:
        """The batch-norm moments of the server's point."""
        problem = self.federation.problem
        return self.backend.complete(lambda: problem.moments(self.point, self.query("train")))

    def begin(self, state: State, resume: bool) -> Executor:
        """From the given state, or from the last checkpoint of the folder."""
        self.state = state
        chosen: dict[str, Any] = {}
        saved = None
        if self.folder is not None and resume:
            chosen = self.folder.read_json("environment.json", missing={})
            # Without an executor the run was stopped before its first round ended.
            chosen = chosen if "executor" in chosen else {}
            saved = self.folder.last_checkpoint()
        if saved is not None:
            self._restore(*saved)
        else:
            self.store.restore(state.round, {})
        if self.folder is not None and resume:
            seen = (self.state.round, saved[1]["records"]) if saved is not None else (-1, 0)
            self.history = self.folder.cut_history(*seen)
        self.backend.begin(self.federation, self.state.round)
        left = self.settings.rounds - self.state.round
        name, threads = chosen.get("executor", self.settings.executor), chosen.get("threads")
        self.executor = self.backend.executor(name, threads, left)
        self.executor.part = self.part
        self.recorded = bool(chosen) or self.folder is None
        if self.folder is not None and not chosen:
            self.folder.write_json("environment.json", environment())
        return self.executor

    def train(self) -> None:
        """Plays the rounds that are left; `outcome` then says how the run ended."""
        try:
            self._train()
        except RunEndedError as why:
            self.outcome = str(why)

    def _train(self) -> None:
        if not self.history:
            self._evaluate()
        device = self.federation.clients.device
        before = chance(device)
        while self.state.round < self.rounds and self.outcome == FINISHED:
            try:
                self._play()
            except NonFiniteError as found:
                self.outcome = str(found)
                return
            if not all(map(torch.equal, before, chance(device))):
                raise ValueError(
                    "the problem or the method drew torch's own random numbers, which no seed of "
                    "the run decides: remove dropout and the like from its functions"
                )
            self._record_executor()
            self._after_round(self.state.round)

    def _after_round(self, done: int) -> None:
        """What is due after so many rounds: an evaluation, a checkpoint, an interruption."""
        if self.budget is not None and done == self.rounds < self.settings.rounds:
            self.outcome = self.budget.over()
        if self.callbacks.on_round:
            self.callbacks.on_round(done)
        if self._is_evaluated(done):
            try:
                self._evaluate()
            except NonFiniteError as found:
                self.outcome = f"no evaluation was possible at round {done}: {found}"
        stops = done == self.rounds or self.outcome != FINISHED
        interrupted = self.callbacks.interrupted
        leaves_off = not stops and interrupted is not None and self.backend.any(interrupted())
        due = done % self.settings.save_every == 0 or stops or leaves_off
        if self.folder is not None and due:
            with self.part("checkpoint"):
                self._save_checkpoint(self.folder)
        if leaves_off:
            raise Interrupted(done)

    def _is_evaluated(self, done: int) -> bool:
        return done % self.settings.evaluate_every == 0 or done == self.rounds

    def _play(self) -> None:
        """A round, or several that can be played at once."""
        self.backend.begin_round(self.state.round)
        self.backend.complete(self._play_once)

    def _play_once(self) -> None:
        """The last round before an evaluation is watched, if its drift is to be logged."""
        watched = DRIFT in self.settings.measures
        common = (self.federation, self.state, self.store, self.executor)
        if not watched or not self._is_evaluated(self.state.round + 1):
            begun, before, self.drift = time.perf_counter(), self.state.round, None
            self.state = play_rounds(*common, min(self._together, self._until_due() - watched))
            self._pace(self.state.round - before, time.perf_counter() - begun)
            return
        self.state, self.drift = play_with_drift(*common)

    def _pace(self, played: int, seconds: float) -> None:
        """As many rounds at once as can be, and as nobody has to wait for."""
        if seconds > MOST_SECONDS:
            self._together = max(1, played // 2)
        elif played == self._together:
            self._together *= 2
        elif played == 1:
            self._together = 2  # they are not played together, or hardly

    def _until_due(self) -> int:
        """Rounds until there is something to do beside them."""
        settings, done = self.settings, self.state.round
        every = [settings.evaluate_every] + [settings.save_every] * (self.folder is not None)
        return min(self.rounds - done, *(each - done % each for each in every))

    def save_final(self, moments: Tensor | None) -> None:
        """The result, and nothing that differs between two runs that computed the same."""
        if self.folder is None:
            return
        tensors = {"x": self.point.x, "y": self.point.y, **self._best_tensors()}
        if moments is not None:
            tensors["moments"] = moments
        about = {
            "identity": self.identity,
            "round": self.state.round,
            "outcome": self.outcome,
            "best": None if self.best is None else [self.best.round, self.best.value],
        }
        self.folder.save_final(tensors, about)

    def _record_executor(self) -> None:
        """After the first round, when "auto" has chosen, and before the first checkpoint."""
        if not self.recorded and self.folder is not None:
            about = {"executor": self.executor.name, "threads": self.executor.threads}
            self.folder.write_json("environment.json", environment() | about)
            self.recorded = True

    def _evaluate(self) -> None:
        """Makes a record of where the run stands; it may end the run."""
        with self.part("evaluation"):
            record, moments = self.backend.complete(self._make_record)
            self.history.append(record)
            if self.folder is not None:
                self.folder.append(record)
            if self.callbacks.on_record:
                self.callbacks.on_record(record)
            monitor = self.federation.problem.monitor
            self._compare(record.get("validation", {}).get(monitor), moments)
            judged = "validation" if "validation" in record else "train"
            self._aim(record.get(judged, {}).get(monitor))

    def _make_record(self) -> tuple[dict[str, Any], Tensor | None]:
        """The record of an evaluation, and the batch-norm moments of the point."""
        problem, measures = self.federation.problem, self.settings.measures
        record: dict[str, Any] = {"round": self.state.round, **self.state.cost._asdict()}
        query = self.query("train")
        moments = problem.moments(self.point, query)
        asked = query.cost
        for split in self.evaluated:
            query = self.query(split)
            record[split] = problem.evaluate(self.point, query, moments)
            asked += query.cost
        if variables := problem.variables(self.point, query):
            record["variables"] = variables
        if measures:
            query = self.query("train")
            record["optimality"] = measure(measures, problem, self.point, query)
            asked += query.cost
        if self.budget is not None:
            record["privacy"] = self.budget.spent(self.state.round)
        if self.drift is not None:
            drift = dict(self.drift)
            asked += Cost(bytes_up=int(drift.pop("bytes")))
            record["optimality"] |= drift
        record |= self.backend.notes()
        record["evaluation_bytes"] = asked.bytes_up + asked.bytes_down
        record["evaluation_gradients"] = asked.gradients
        record["evaluation_rows"] = asked.rows
        record["seconds"] = round(time.perf_counter() - self.begun, 3)
        return record, moments

    def _compare(self, value: float | None, moments: Tensor | None) -> None:
        """With the best so far, on validation rows."""
        problem = self.federation.problem
        if value is None and self.settings.stop_early is not None:
            raise ValueError(
                f"stop_early waits for a better {problem.monitor}, but the validation rows have "
                "none (one class only?): give others, or leave stop_early out"
            )
        if value is None or not math.isfinite(value):
            return
        sign = 1 if problem.larger_is_better else -1
        if self.best is None or sign * value > sign * self.best.value:
            self.best, self.waited = Best(self.state.round, value, self.point, moments), 0
            return
        self.waited += 1
        if self.settings.stop_early is not None and self.waited >= self.settings.stop_early:
            self.outcome = (
                f"{STOPPED} at round {self.state.round}: no better validation "
                f"{problem.monitor} in {self.waited} evaluations; the best was "
                f"{self.best.value:.4f} at round {self.best.round}"
            )

    def _aim(self, value: float | None) -> None:
        """At the target, on validation rows or, where there are no others, on training rows."""
        target, problem = self.settings.target, self.federation.problem
        if target is None or value is None or not math.isfinite(value):
            return
        if value >= target if problem.larger_is_better else value <= target:
            self.outcome = (
                f"{REACHED} the target of {target:g} at round {self.state.round}: "
                f"{problem.monitor} {value:.4g}"
            )

    def _save_checkpoint(self, folder: RunFolder) -> None:
        tensors, elsewhere = self.store.checkpoint()
        tensors = self.backend.gather(tensors) | dict(leaves(self.state.server, "server"))
        for kind, own in self.state.held.items():
            tensors |= leaves(own, f"held.{kind}")
        about = self._about() | ({} if elsewhere is None else {"clients": elsewhere})
        about["held"] = {kind: form_of(own) for kind, own in self.state.held.items()}
        about["stages"] = self.store.stage_forms
        folder.save_checkpoint(self.state.round, tensors | self._best_tensors(), about)
        self.store.checkpointed(self.state.round)

    def _best_tensors(self) -> dict[str, Tensor]:
        if self.best is None:
            return {}
        tensors = {"best.x": self.best.point.x, "best.y": self.best.point.y}
        if self.best.moments is not None:
            tensors["best.moments"] = self.best.moments
        return tensors

    def _about(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "round": self.state.round,
            "iteration": self.state.iteration,
            "cost": list(self.state.cost),
            "waited": self.waited,
            "records": len(self.history),
            "best": None if self.best is None else [self.best.round, self.best.value],
            "outcome": self.outcome,
            "seconds": time.perf_counter() - self.begun,
            **self.backend.checkpoint(),
        }

    def _restore(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        if about["identity"] != self.identity:
            assert self.folder is not None
            raise CheckpointError(
                f"the checkpoints in {self.folder.path} are of another experiment (other data, "
                "problem, method or seed): resume with the settings of that run, or give another "
                "folder"
            )
        device = self.federation.clients.device
        tensors = {name: value.to(device) for name, value in tensors.items()}
        parts: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            owner, _, rest = name.partition(".")
            if owner == "client":
                number, _, rest = rest.partition(".")
                owner = f"client {number}"
            parts.setdefault(owner, {})[rest] = value
        # A field that is a tuple without entries is not in a checkpoint.
        server = self.state.server._replace(**nest(parts.pop("server")))
        held = {
            kind: MessageState(*build_tree(form, parts.get("held", {}), kind))
            for kind, form in about["held"].items()
        }
        cost = Cost(*about["cost"])
        self.state = State(
            round=about["round"],
            iteration=about["iteration"],
            server=server,
            cost=cost,
            held=held,
        )
        kind = kept_type(self.store.fields)
        kept: dict[int, Any] = {}
        stages: dict[int, dict[str, Tensor]] = {}
        for owner, fields in parts.items():
            number = owner.removeprefix("client ")
            if number == owner or not self.backend.owns(int(number)):
                continue
            own = {n: v for n, v in fields.items() if not n.startswith(f"{MESSAGES}.")}
            if own:
                kept[int(number)] = kind(**nest(own))
            stages[int(number)] = {
                n.removeprefix(f"{MESSAGES}."): v for n, v in fields.items() if n not in own
            }
        self._restore_clients(kept, about.get("clients"))
        self.store.restore_stages(self.state.round, about["stages"], stages)
        self.best = best_of(tensors, about)
        self.waited, self.outcome = about["waited"], about["outcome"]
        self.begun = time.perf_counter() - about["seconds"]
        self.backend.restore(about)

    def _restore_clients(self, kept: dict[int, Any], elsewhere: dict[str, Any] | None) -> None:
        """The states that a checkpoint holds, or those in the files that it refers to; whichever
        store they come from, this run's has them then."""
        if elsewhere is None:
            self.store.restore(self.state.round, kept)
        elif self.backend.size > 1:
            raise CheckpointError(
                "the states of the clients are in files, which one process reads: go on in one "
                'process with store = "memory", and share the run after its next checkpoint'
            )
        elif isinstance(self.store, DiskStore):
            self.store.roll_back(self.state.round, elsewhere)
        else:
            assert self.folder is not None
            count = len(self.federation.clients.train.sizes)
            with closing(DiskStore(self.store.fields, count, self.folder.clients)) as files:
                files.roll_back(self.state.round, elsewhere)
                self.store.restore(self.state.round, files.states)
                for name, own in (files.stages or {}).items():
                    self.store.stage(name).restore(self.state.round, own.states)


def best_of(tensors: dict[str, Tensor], about: dict[str, Any]) -> Best | None:
    """The best evaluation, as a checkpoint or a result has it."""
    if about["best"] is None:
        return None
    round, value = about["best"]
    point = Point(tensors["best.x"], tensors["best.y"])
    return Best(round, value, point, tensors.get("best.moments"))
