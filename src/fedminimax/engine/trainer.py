"""What happens between rounds: evaluations, records, checkpoints, and the reasons to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.trees import built, form_of, grown, leaves
from fedminimax.engine.ask import Asking
from fedminimax.engine.checkpoint import CheckpointError
from fedminimax.engine.device import chance
from fedminimax.engine.disk_store import DiskStore
from fedminimax.engine.folder import RunFolder, environment
from fedminimax.engine.profile import Profile, untimed
from fedminimax.engine.round import Federation, State, play_rounds, play_watched
from fedminimax.engine.store import ClientStore
from fedminimax.engine.work import MESSAGES, Executor, kept_type
from fedminimax.messages.stage import Held
from fedminimax.metrics.optimality import DRIFT, measure
from fedminimax.types import Cost, NonFiniteError, Point

MOST_SECONDS = 0.2  # in which nobody can interrupt a run or sees how far it is
FINISHED = "finished"
STOPPED, REACHED = "stopped early", "reached"


def succeeded(outcome: str) -> bool:
    """Did a run end as it was meant to?"""
    return outcome == FINISHED or outcome.startswith((STOPPED, REACHED))


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop, between two rounds; its folder has a checkpoint of the last."""

    def __init__(self, round: int):
        super().__init__(f"interrupted after round {round}")
        self.round = round


@dataclass(frozen=True)
class Plan:
    """How long a run is, and how often it is looked at."""

    rounds: int
    evaluate_every: int
    checkpoint_every: int
    stop_early: int | None = None
    target: float | None = None
    measures: tuple[str, ...] = ()
    asked: np.ndarray | None = None  # the clients that evaluations ask; None: all
    on_record: Callable[[dict[str, Any]], None] | None = None
    on_round: Callable[[int], None] | None = None
    interrupted: Callable[[], bool] | None = None  # asked after each call
    profile: Profile | None = None


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
        plan: Plan,
        folder: RunFolder | None,
        identity: str,
        store: ClientStore,
    ):
        self.federation, self.plan, self.folder = federation, plan, folder
        self.identity, self.store = identity, store
        self.begun = time.perf_counter()
        splits = federation.clients.splits
        self.evaluated = [s for s in ("validation", "test") if s in splits] or ["train"]
        self.history: list[dict[str, Any]] = []
        self.best: Best | None = None
        self.drift: dict[str, float] | None = None  # found in the round just played
        self.waited = 0  # evaluations since the best one
        self._together = 1  # rounds at once, at most
        self.outcome = FINISHED
        self.part = untimed if plan.profile is None else plan.profile.part

    @property
    def point(self) -> Point:
        return self.federation.algorithm.point(self.state.server)

    def ask(self, split: str) -> Asking:
        """Questions to the clients that evaluations ask."""
        federation = self.federation
        clients, weights = federation.clients, federation.weights
        return federation.crew.ask(federation.problem, clients, split, weights, self.plan.asked)

    def begin(self, state: State, executor: str, resume: bool) -> Executor:
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
            self.history = self.folder.cut_history(self.state.round if saved else -1)
        left = self.plan.rounds - self.state.round
        name, threads = chosen.get("executor", executor), chosen.get("threads", None)
        self.executor = self._make_executor(name, threads, left)
        self.executor.part = self.part
        self.recorded = bool(chosen) or self.folder is None
        if self.folder is not None and not chosen:
            self.folder.write_json("environment.json", environment())
        return self.executor

    def _make_executor(self, name: str, threads: int | None, rounds: int) -> Executor:
        return self.federation.crew.executor(name, threads, rounds)

    def train(self) -> None:
        plan = self.plan
        if not self.history:
            with self.part("evaluation"):
                self._evaluate()
        device = self.federation.clients.device
        before = chance(device)
        while self.state.round < plan.rounds and self.outcome == FINISHED:
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
            done = self.state.round
            if plan.on_round:
                plan.on_round(done)
            if self._evaluates(done):
                try:
                    with self.part("evaluation"):
                        self._evaluate()
                except NonFiniteError as found:
                    self.outcome = f"no evaluation was possible at round {done}: {found}"
            stops = done == plan.rounds or self.outcome != FINISHED
            leaves_off = not stops and plan.interrupted is not None and plan.interrupted()
            due = done % plan.checkpoint_every == 0 or stops or leaves_off
            if self.folder is not None and due:
                with self.part("checkpoint"):
                    self._save_checkpoint(self.folder)
            if leaves_off:
                raise Interrupted(done)

    def _evaluates(self, done: int) -> bool:
        return done % self.plan.evaluate_every == 0 or done == self.plan.rounds

    def _play(self) -> None:
        """A round, or several that can be played at once; the last one before an evaluation is
        watched, if its drift is to be logged."""
        watched = DRIFT in self.plan.measures
        common = (self.federation, self.state, self.store, self.executor)
        if not watched or not self._evaluates(self.state.round + 1):
            begun, before, self.drift = time.perf_counter(), self.state.round, None
            self.state = play_rounds(*common, min(self._together, self._until_due() - watched))
            self._pace(self.state.round - before, time.perf_counter() - begun)
            return
        self.state, self.drift = play_watched(*common)

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
        plan, done = self.plan, self.state.round
        every = [plan.evaluate_every] + [plan.checkpoint_every] * (self.folder is not None)
        return min(plan.rounds - done, *(each - done % each for each in every))

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
        """A record of where the run stands; it may end the run."""
        problem = self.federation.problem
        record: dict[str, Any] = {"round": self.state.round, **self.state.cost._asdict()}
        ask = self.ask("train")
        moments = problem.moments(self.point, ask)
        asked = ask.cost
        for split in self.evaluated:
            ask = self.ask(split)
            record[split] = problem.evaluate(self.point, ask, moments)
            asked += ask.cost
        if variables := problem.variables(self.point, ask):
            record["variables"] = variables
        if self.plan.measures:
            ask = self.ask("train")
            record["optimality"] = measure(self.plan.measures, problem, self.point, ask)
            asked += ask.cost
        if self.drift is not None:
            asked += Cost(bytes_up=int(self.drift.pop("bytes")))
            record["optimality"] |= self.drift
        record["evaluation_bytes"] = asked.bytes_up + asked.bytes_down
        record["evaluation_gradients"] = asked.gradients
        record["evaluation_rows"] = asked.rows
        record["seconds"] = round(time.perf_counter() - self.begun, 3)
        self.history.append(record)
        if self.folder is not None:
            self.folder.append(record)
        if self.plan.on_record:
            self.plan.on_record(record)
        self._compare(record.get("validation", {}).get(problem.monitor), moments)
        judged = "validation" if "validation" in record else "train"
        self._aim(record.get(judged, {}).get(problem.monitor))

    def _compare(self, value: float | None, moments: Tensor | None) -> None:
        """With the best so far, on validation rows."""
        problem = self.federation.problem
        if value is None and self.plan.stop_early is not None:
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
        if self.plan.stop_early is not None and self.waited >= self.plan.stop_early:
            self.outcome = (
                f"{STOPPED} at round {self.state.round}: no better validation "
                f"{problem.monitor} in {self.waited} evaluations; the best was "
                f"{self.best.value:.4f} at round {self.best.round}"
            )

    def _aim(self, value: float | None) -> None:
        """At the target, on validation rows or, where there are no others, on training rows."""
        target, problem = self.plan.target, self.federation.problem
        if target is None or value is None or not math.isfinite(value):
            return
        if value >= target if problem.larger_is_better else value <= target:
            self.outcome = (
                f"{REACHED} the target of {target:g} at round {self.state.round}: "
                f"{problem.monitor} {value:.4g}"
            )

    def _save_checkpoint(self, folder: RunFolder) -> None:
        tensors, elsewhere = self.store.checkpoint()
        tensors = self.federation.crew.gathered(tensors) | dict(leaves(self.state.server, "server"))
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
            "best": None if self.best is None else [self.best.round, self.best.value],
            "outcome": self.outcome,
            "seconds": time.perf_counter() - self.begun,
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
        server = self.state.server._replace(**grown(parts.pop("server")))
        held = {
            kind: Held(*built(form, parts.get("held", {}), kind))
            for kind, form in about["held"].items()
        }
        cost = Cost(*about["cost"])
        self.state = State(about["round"], about["iteration"], server, cost, held)
        kind, kept, stages = kept_type(self.store.fields), {}, {}
        for owner, fields in parts.items():
            number = owner.removeprefix("client ")
            if number == owner or not self.federation.crew.owns(int(number)):
                continue
            own = {n: v for n, v in fields.items() if not n.startswith(f"{MESSAGES}.")}
            if own:
                kept[int(number)] = kind(**grown(own))
            stages[int(number)] = {
                n.removeprefix(f"{MESSAGES}."): v for n, v in fields.items() if n not in own
            }
        self._restore_clients(kept, about.get("clients"))
        self.store.restore_stages(about["stages"], stages)
        self.best = best_of(tensors, about)
        self.waited, self.outcome = about["waited"], about["outcome"]
        self.begun = time.perf_counter() - about["seconds"]

    def _restore_clients(self, kept: dict[int, Any], elsewhere: dict[str, Any] | None) -> None:
        """The states that a checkpoint holds, or those in the files that it refers to; whichever
        store they come from, this run's has them then."""
        if elsewhere is None:
            self.store.restore(self.state.round, kept)
        elif self.federation.crew.size > 1:
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


def best_of(tensors: dict[str, Tensor], about: dict[str, Any]) -> Best | None:
    """The best evaluation, as a checkpoint or a result has it."""
    if about["best"] is None:
        return None
    round, value = about["best"]
    point = Point(tensors["best.x"], tensors["best.y"])
    return Best(round, value, point, tensors.get("best.moments"))
