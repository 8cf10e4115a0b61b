"""A site's part in a run: the phases it is asked for, each computed once, and its states on disk.

A call may be lost, come twice, or be carried out after the server has given it up. So a state is
stored under (round, phase, digest of the call) together with the reply, and a call names the state
that it starts from: the last that the server accepted from this site. What came after that one is
thereby undone. On disk are the state that the server accepted, the new one, in a round of several
phases that of the round's beginning, where a server that was killed starts again, and that of the
round before, where one starts again whose last checkpoint is damaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.trees import build_tree, form_of, leaves
from fedminimax.engine.executors.debug import run_client
from fedminimax.engine.job import PhaseJob, keeping, kept_type, stack
from fedminimax.engine.round import Federation, guard, init_new_clients, with_message_state
from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.lock import locked
from fedminimax.engine.state.store import Store
from fedminimax.messages.secure.masked import Masked
from fedminimax.remote.masking import SiteMasks
from fedminimax.remote.private import SitePrivacy
from fedminimax.remote.wire import DIGEST, Message, in_order, key_of, numbered
from fedminimax.types import Clock, Phase

WAIT = 30.0  # seconds for another process of this site to be done with a call of the same run

# Answers to these hold a number for every row. They stay where the rows are.
OF_ROWS = ("scores",)


class SiteError(ValueError):
    """What a site does not do, in a sentence that the server may read."""


class Key(NamedTuple):
    """Of a state: after which phase it was, and a digest of the call that made it."""

    round: int
    phase: int
    digest: str

    @property
    def file(self) -> str:
        return f"state-{self.round:07d}-{self.phase:02d}-{self.digest}.safetensors"

    def __str__(self) -> str:
        return f"round {self.round}, phase {self.phase}"


class State(NamedTuple):
    key: Key
    call: list[int]  # the server's number of the call that made it
    kept: Any  # the fields that the method keeps or carries
    stages: dict[str, Any]  # what is kept for each kind of message
    reply: Message


class States:
    """The states of one run, in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, key: Key) -> bool:
        return (self.folder / key.file).exists()

    def read(self, key: Key) -> State:
        tensors, about = checkpoint.read(self.folder / key.file)
        parts: dict[str, dict[str, Tensor]] = {"kept": {}, "reply": {}, "stages": {}}
        for name, tensor in tensors.items():
            owner, _, rest = name.partition(".")
            parts[owner][rest] = tensor
        kept = build_tree(about["kept"], parts["kept"])
        reply = Message(about["reply"], parts["reply"])
        stages = {
            kind: build_tree(form, parts["stages"], kind) for kind, form in about["stages"].items()
        }
        return State(Key(*about["key"]), about["call"], kept, stages, reply)

    def write(self, state: State, keep: list[Key]) -> None:
        """Of the others stay those to keep, and of those before the first of them the last round's:
        the server may have to go back to the checkpoint before its last one."""
        tensors = {f"reply.{name}": vector for name, vector in state.reply.vectors.items()}
        tensors |= {f"kept.{name}": vector for name, vector in leaves(state.kept)}
        for kind, own in state.stages.items():
            tensors |= leaves(own, f"stages.{kind}")
        about = {
            "stages": {kind: form_of(own) for kind, own in state.stages.items()},
            "key": list(state.key),
            "call": state.call,
            "kept": form_of(state.kept),
            "reply": state.reply.about,
        }
        checkpoint.write(self.folder / state.key.file, tensors, about)
        named = {key.file for key in (*keep, state.key)}
        files = {file: _round_of(file) for file in self.folder.glob("state-*.safetensors")}
        first = min((key.round for key in keep), default=0)
        last = max((round for round in files.values() if round < first), default=None)
        for file, round in files.items():
            if file.name not in named and round != last:
                file.unlink(missing_ok=True)
        for file in self.folder.glob(".state-*.partial"):  # of a process that was killed
            file.unlink(missing_ok=True)

    def last_call(self) -> list[int]:
        """The latest call that left a state."""
        files = self.folder.glob("state-*.safetensors")
        calls = [checkpoint.read_about(file)["call"] for file in files]
        return max(calls, default=[0, 0])


class Worker:
    """A site at work in one run. `federation` has the rows of this site alone, at its number."""

    def __init__(
        self,
        run: str,
        name: str,
        number: int,
        federation: Federation,
        folder: Path,
        private: SitePrivacy | None = None,
        masks: SiteMasks | None = None,
    ):
        """masks: of a masked run."""
        self.run, self.name, self.number = run, name, number
        self.federation, self.private, self.masks = federation, private, masks
        self.states = States(folder)

    def phase(self, message: Message) -> Message:
        """The site's part of a phase; asked again, the same reply, unless it is wanted anew."""
        # An engine may carry out a call that was given up beside the one that replaced it, in
        # another thread, or in a process that was left over. Whose turn it is, the disk says.
        with locked(self.states.folder, WAIT):
            about = message.about
            self._check_turn(about["call"])
            start = _key(key_of(about["accepted"], self.number))
            complete = _key(key_of(about["complete"], self.number))
            asked = message.asked()
            told = {"asked": asked, "start": None if start is None else list(start)}
            key = Key(about["round"], about["phase"], Message(told, {}).digest())
            if self.masks is not None:
                self.masks.begin(key.round, key.phase, key.digest)
            if self.states.has(key) and self.name not in about["again"]:
                state = self.states.read(key)._replace(call=about["call"])
            else:
                state = self._computed(message, key, start, asked)
            self.states.write(state, [k for k in (start, complete) if k is not None])
            return state.reply

    def answer(self, message: Message) -> Message:
        """The answer to a question about all rows of a split."""
        question, split = message.about["question"], message.about["split"]
        if question in OF_ROWS:
            raise SiteError(
                f"the question {question!r} is for a number of every row: rows and their scores "
                f"do not leave site {self.name!r}"
            )
        batch = self.federation.clients.splits[split].batch(self.number)
        with torch.no_grad():
            found = self.federation.problem.answer(question, in_order(message.vectors), batch)
        if self.private is not None and split == "train":
            rows = len(batch.weight)
            found = self.private.answer(question, found, rows, self.run, message.asked())
        answers = numbered(found)
        if self.masks is not None:
            answers = self.masks.answer(message.asked(), answers, self._weight_in(message))
        return Message(self._about("ask") | {"question": question}, answers)

    def _weight_in(self, message: Message) -> float:
        """This site's weight in the sum of answers that is asked for."""
        how = message.about.get("how")
        if how not in ("mean", "sum"):
            raise SiteError(
                f"the question {message.about['question']!r} is for the answer of site "
                f"{self.name!r} alone: in a masked run it takes part in means and sums of all"
            )
        return float(self.federation.weights[self.number]) if how == "mean" else 1.0

    def rows(self, split: Any) -> int | None:
        """How many rows of a split a call can touch."""
        held = self.federation.clients.splits.get(split)
        return None if held is None else int(held.sizes[self.number])

    def _about(self, kind: str) -> dict[str, Any]:
        return {"kind": kind, "run": self.run, "site": self.name}

    def _check_turn(self, call: list[int]) -> None:
        last = self.states.last_call()
        if call < last:
            raise SiteError(
                f"call {call} comes after call {last}, which replaced it: it is not carried out "
                f"at site {self.name!r}"
            )

    def _computed(self, message: Message, key: Key, start: Key | None, asked: str) -> State:
        about, federation = message.about, self.federation
        algorithm, cohort = federation.algorithm, np.array([self.number])
        phases = algorithm.phases(key.round)
        clock = Clock.at(**about["clock"])
        down = self._down(phases[key.phase], message, clock)
        if (key.round, key.phase) == (0, 0):
            self._check_first(phases[0], down, clock)
        phase = phases[key.phase]._replace(broadcast=lambda server, clock: down)
        before = self._start(start)
        store = Store(algorithm.keep)
        if before is not None:
            kept = keeping(kept_type(algorithm.keep), before.kept)
            store = Store(algorithm.keep, {self.number: kept})
        iteration = int(about["clock"]["iteration"])
        _, steps = federation.clock(key.round, key.phase, phase, cohort, iteration)
        if self.private is not None:
            begun, new = (iteration, int(steps.max())), len(store.missing(cohort)) > 0
            federation = self.private.charged(
                federation, self.number, self.run, key, phases[key.phase], begun, new
            )
        init_new_clients(federation, store, cohort, phase, None, clock)
        kept = store.load(cohort)
        if key.phase > 0 and phase.cohort == "same":
            # The phase before left more than what outlives a round.
            assert before is not None
            kept = stack([before.kept])
        last = key.phase == len(phases) - 1
        leave = kept_type(algorithm.keep if last else algorithm.keep + algorithm.carry)
        draws = federation.draws(phase, cohort, iteration, int(steps.max()))
        job = PhaseJob(
            problem=federation.problem,
            phase=phase,
            server=None,
            kept=kept,
            leave=leave,
            draws=draws,
            clock=clock,
            cohort=cohort,
            steps=steps,
            weights=torch.ones(1, dtype=torch.float64),
            messages=federation.messages,
        )
        job = guard(federation, job)
        stages = {} if before is None else dict(before.stages)
        first = federation.initial_state(job) if federation.messages.keeps else None
        if first is not None:
            job = with_message_state(job, stack([stages.get(first.kind, first.kept)]))
        up, left = run_client(job, 0)
        if first is not None:
            stages[first.kind] = left.messages
        told = self._about("phase") | key._asdict()
        sent = dict(leaves(federation.messages.encode(up, clock)))
        if self.masks is not None:
            sent = self._hidden(sent, asked, key, phase)
        reply = Message(told, sent)
        return State(key, about["call"], keeping(leave, left), stages, reply)

    def _hidden(
        self, sent: dict[str, Tensor], asked: str, key: Key, phase: Phase
    ) -> dict[str, Tensor]:
        """The fields of a reply, times this site's weight, under masks. Whose replies are added up,
        the site finds out by itself."""
        federation, reducer = self.federation, self.federation.messages.reducer
        assert self.masks is not None
        assert isinstance(reducer, Masked)
        cohort = federation.planned_cohort(key.round, key.phase)
        shares = dict(zip(cohort.tolist(), federation.shares(phase, cohort).tolist(), strict=True))
        own = shares.get(self.number, 0.0)
        at = (key.round, key.phase)
        return self.masks.reply(at, asked, cohort.tolist(), sent, own, reducer)

    def _down(self, phase: Phase, message: Message, clock: Clock) -> Any:
        """What the server has broadcast, as the type that the method has for it. What is in it is
        told by the message: a server may have more to say later than at first."""
        problem, algorithm = self.federation.problem, self.federation.algorithm
        like = phase.broadcast(algorithm.init_server(problem, problem.start()), clock)
        down = build_tree(message.about["form"], message.vectors)
        if down._fields != like._fields:
            raise SiteError(
                f"the call of round {int(clock.round)}, phase {int(clock.phase)}, holds "
                f"{', '.join(down._fields)}, and not {', '.join(like._fields)}"
            )
        return type(like)(*down)

    def _check_first(self, phase: Phase, down: Any, clock: Clock) -> None:
        """A run begins with the model's own first weights, which a site knows too."""
        problem, algorithm = self.federation.problem, self.federation.algorithm
        told = dict(leaves(down))
        dtype = next((v.dtype for v in told.values() if v.is_floating_point()), None)
        start = problem.start()
        start = type(start)(*(vector.to(dtype) for vector in start))
        own = dict(leaves(phase.broadcast(algorithm.init_server(problem, start), clock)))
        for name, vector in own.items():
            if name in told and not torch.equal(told[name], vector.to(told[name].dtype)):
                raise SiteError(
                    f"the call of round 0 holds {name} that is not that of the model's own first "
                    f"weights: site {self.name!r} begins a run with those alone"
                )

    def _start(self, key: Key | None) -> State | None:
        if key is None:
            return None
        if not self.states.has(key):
            raise SiteError(
                f"site {self.name!r} no longer has its state after {key}, from which the server "
                "wants it to go on: put back its folder from a copy, or begin a new run"
            )
        return self.states.read(key)


def _round_of(file: Path) -> int:
    return int(file.name.split("-")[1])


def _key(given: Any) -> Key | None:
    """A key from a message; what is none could name another file."""
    if given is None:
        return None
    round, phase, digest = given
    if not (type(round) is type(phase) is int and DIGEST.fullmatch(str(digest))):
        raise SiteError(f"{given!r} is not the key of a state")
    return Key(round, phase, digest)
