"""A site answers: bytes come in, bytes go out, and what it will not do it refuses in a sentence."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedminimax import __version__
from fedminimax.config import ConfigError, Experiment, Table, messages_text
from fedminimax.data.clients import Clients
from fedminimax.engine.round import Federation
from fedminimax.engine.state.checkpoint import CheckpointError, read, write
from fedminimax.engine.state.lock import BusyError, locked
from fedminimax.experiment import SPLITS, batches
from fedminimax.problems.check_levels import check_levels
from fedminimax.problems.network_problem import NetworkProblem
from fedminimax.remote.ledger import Ledger
from fedminimax.remote.private import SitePrivacy, check_promise
from fedminimax.remote.rows import (
    Rows,
    digest_of,
    holding,
    scaled_rows,
    split_rows,
    told_counts,
    told_moments,
)
from fedminimax.remote.setup import Setup, prepared, problem_of, received_experiment
from fedminimax.remote.site_file import SiteFile, register
from fedminimax.remote.wire import Message, busy, quoted
from fedminimax.remote.worker import WAIT, SiteError, Worker
from fedminimax.types import Problem

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
SETUP = "setup.safetensors"


def refusal(reason: str, run: Any = None, site: str | None = None) -> bytes:
    about = {"kind": "refusal", "run": run, "site": site, "reason": reason}
    return Message(about, {}).to_bytes()


def received(content: bytes) -> Message:
    try:
        return Message.from_bytes(content)
    except CheckpointError as error:
        raise SiteError(str(error)) from error


class Site:
    """One site, for as many runs as it is asked to take part in."""

    def __init__(self, file: SiteFile, log: Callable[[str], None] | None = None):
        register(file.allow)
        self.file = file
        self.log = log or (lambda text: print(text, file=sys.stderr, flush=True))
        self._held = holding(file.name, file.folder, file.data)
        self._workers: dict[str, Worker] = {}
        self._rows: dict[str, Rows] = {}
        self._lock = threading.Lock()

    @staticmethod
    def open(folder: Path) -> Site:
        return Site(SiteFile.read(folder))

    def handle(self, content: bytes) -> bytes:
        """The reply to a message, whatever it is: nothing is raised."""
        run: Any = None
        try:
            message = received(content)
            run = message.about.get("run")
            return self._reply(message).to_bytes()
        except BusyError as error:
            self.log(f"not done: {error}")
            return busy(run, self.file.name)
        except (SiteError, ConfigError) as error:
            reason = str(error)
            self.log(f"refused: {reason}")
        except Exception as error:
            # The sentence may quote rows or name paths; it stays here.
            said = isinstance(error, CheckpointError)
            self.log(f"refused: {error}" if said else traceback.format_exc())
            reason = (
                f"{type(error).__name__}, of which the log of site {self.file.name!r} says more"
            )
        return refusal(reason, run, self.file.name)

    def _reply(self, message: Message) -> Message:
        about = message.about
        kind, run = about.get("kind"), about.get("run")
        if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
            raise SiteError(f"{run!r} is not the name of a run")
        told = {"kind": kind, "run": run, "site": self.file.name}
        if kind == "ping":
            return Message(told, {})
        if kind == "phase":
            self._check_round(about["round"])
            return self._worker(run).phase(message)
        if kind == "ask" and "setup" not in about:
            return self._worker(run).answer(message)
        experiment = self._experiment(about["setup"])
        if kind == "look":
            limits = {"version": __version__, "least_per_bin": self.file.limits.least_per_bin}
            return Message({**told, **limits, "outline": self._held.outline()}, {})
        found = self._split(about["setup"], experiment)
        if kind in ("moments", "counts") and experiment.privacy.by_record:
            raise SiteError(
                "sums over training rows have no noise: give the public ranges of the columns, "
                "[split] ranges, and no bins"
            )
        if kind == "moments":
            centre = message.vectors["centre"].numpy() if message.vectors else None
            own = told_moments(found, centre, self.file.limits.least_rows)
            return Message(told, {"moments": torch.from_numpy(own)})
        self._check_least(about["setup"])
        if kind == "counts":
            edges, sizes = (message.vectors[name].numpy() for name in ("edges", "sizes"))
            own = told_counts(found, edges, sizes, about["setup"]["least_per_bin"])
            return Message(told, {"counts": torch.from_numpy(own)})
        problem = problem_of(experiment, about["setup"], self.file.limits.least_per_bin)
        clients = self._clients(about["setup"], experiment, found, problem)
        if kind == "sizes":
            number = self._number(about["setup"])
            sizes = {split: int(s.sizes[number]) for split, s in clients.splits.items()}
            columns = [
                (list(c.shape[1:]), str(c.dtype).removeprefix("torch."))
                for c in clients.train.columns
            ]
            return Message({**told, "sizes": sizes, "columns": columns}, {})
        if kind == "ask":
            return self._made(run, about["setup"], experiment, problem, clients).answer(message)
        if kind == "begin":
            self._begin(run, Setup(about["setup"], message.vectors), digest_of(found))
            return Message(told, {})
        raise SiteError(f"{kind!r} is no call that site {self.file.name!r} knows")

    def _experiment(self, setup: Table) -> Experiment:
        data = self.file.data
        known = {**data, "name": data.get("name", "folder")}
        experiment = received_experiment(setup["experiment"], known)
        self._check_round(experiment.run.rounds - 1)
        check_promise(experiment, self.file.limits.epsilon)
        asked = self.file.messages
        if asked is not None and experiment.messages != asked:
            raise SiteError(
                f"site {self.file.name!r} sends its messages as its site file says "
                f"({messages_text(asked)}), and the experiment says "
                f"{messages_text(experiment.messages)}: agree on one [messages]"
            )
        return experiment

    def _check_round(self, round: Any) -> None:
        if type(round) is not int or round >= self.file.limits.rounds:
            raise SiteError(
                f"site {self.file.name!r} takes part in at most {self.file.limits.rounds} rounds "
                f"of a run, so not in round {round} (rounds in [limits] of its site file)"
            )

    def _check_rows(self, found: Rows) -> None:
        """A mean of a row or two is a row, whatever was asked for."""
        least = self.file.limits.least_rows
        for split, count in found.sizes.items():
            if 0 < count < least:
                raise SiteError(
                    f"site {self.file.name!r} tells of at least {least} rows together, and has "
                    f"{count} {split} rows (least_rows in [limits] of its site file): set [split] "
                    f"{split} higher{'' if split == 'train' else ', or to 0'}"
                )

    def _check_version(self, run: str, setup: Table) -> None:
        theirs = setup.get("version")
        if theirs != __version__:
            raise SiteError(
                f"the run {run!r} was begun with fedminimax {quoted(theirs)}, and site "
                f"{self.file.name!r} has {__version__}: install the version of the run, or begin a "
                "new one"
            )

    def _check_least(self, setup: Table) -> None:
        told = setup["least_per_bin"]
        # Not everything that JSON can hold is a number that compares.
        if type(told) is not int or told < self.file.limits.least_per_bin:
            raise SiteError(
                f"site {self.file.name!r} counts at least {self.file.limits.least_per_bin} rows "
                f"per bin of a histogram, and not {told}"
            )

    def _number(self, setup: Table) -> int:
        if self.file.name not in setup["names"]:
            raise SiteError(
                f"site {self.file.name!r} is not among those of the run: {setup['names']}"
            )
        return setup["names"].index(self.file.name)

    def _split(self, setup: Table, experiment: Experiment) -> Rows:
        """The rows by use; the next message is about the same."""
        shared = {name: setup.get(name) for name in ("experiment", "names", "schema")}
        key = Message(shared, {}).digest()
        if key not in self._rows:
            found = split_rows(self._held, experiment, setup, self._number(setup))
            self._check_rows(found)
            self._rows = {key: found}
        return self._rows[key]

    def _clients(
        self, setup: Table, experiment: Experiment, found: Rows, problem: Problem
    ) -> Clients:
        number, parts = self._number(setup), scaled_rows(found, setup)
        for split, rows in parts.items():
            if isinstance(problem, NetworkProblem):
                # What a problem adds to rows may depend on the number of their client.
                nobody = [tuple(column[:0] for column in rows)] * number
                parts[split] = problem.rows_from([*nobody, rows], SPLITS.index(split))[number]
        splits = {split: [rows] for split, rows in parts.items()}
        own = Clients(**splits, names=[self.file.name], **batches(experiment))
        return own.to(getattr(torch, str(experiment.run.dtype))).among(setup["names"], number)

    def _made(
        self, run: str, setup: Table, experiment: Experiment, problem: Problem, clients: Clients
    ) -> Worker:
        federation = Federation.of(
            problem=problem,
            algorithm=experiment.make("method"),
            clients=clients,
            weights=torch.ones(len(clients), dtype=torch.float64),
            seed=experiment.run.seed,
            cohort=len(clients),
            messages=experiment.messages,
        )
        return Worker(
            run=run,
            name=self.file.name,
            number=self._number(setup),
            federation=federation,
            folder=self._folder(run),
            private=self._private(experiment, setup),
        )

    def _private(self, experiment: Experiment, setup: Table) -> SitePrivacy | None:
        if not experiment.privacy.by_record:
            return None
        data, asked = self.file.data, bool(setup.get("record", True))
        named = str(data.get("path") or data.get("name"))
        ledger, limit = Ledger(self.file.folder), self.file.limits.spendable
        return SitePrivacy(experiment, named, ledger, limit, asked)

    def _folder(self, run: str) -> Path:
        return self.file.folder / "runs" / run

    def _begin(self, run: str, setup: Setup, rows: str) -> None:
        """`rows` is their digest, which stays here."""
        self._check_version(run, setup.about)
        folder = self._folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, WAIT):
            if not (folder / SETUP).exists():
                write(folder / SETUP, setup.answers, {"setup": setup.about, "rows": rows})
            answers, about = read(folder / SETUP)
        if Setup(about["setup"], answers).message.digest() != setup.message.digest():
            raise SiteError(
                f"site {self.file.name!r} has taken part in another run called {run!r}: give this "
                "one another name"
            )
        self._worker(run)

    def _worker(self, run: str) -> Worker:
        """What this site is in a run; from its disk, if it was started again since."""
        with self._lock:
            if run not in self._workers:
                file = self._folder(run) / SETUP
                if not file.exists():
                    raise SiteError(f"site {self.file.name!r} has not begun the run {run!r}")
                answers, about = read(file)
                setup = Setup(about["setup"], answers)
                self._check_version(run, setup.about)
                experiment = self._experiment(setup.about)
                self._check_least(setup.about)
                found = self._split(setup.about, experiment)
                if digest_of(found) != about["rows"]:
                    raise SiteError(
                        f"the rows of site {self.file.name!r} are not those with which it began "
                        f"the run {run!r}: put them back, or begin a new run"
                    )
                problem = prepared(experiment, setup, self.file.limits.least_per_bin)
                clients = self._clients(setup.about, experiment, found, problem)
                batch = clients.train.batch(self._number(setup.about))
                dtype = getattr(torch, str(experiment.run.dtype))
                start = problem.start()
                check_levels(problem, type(start)(*(v.to(dtype) for v in start)), batch)
                # One run at a time: another's rows need not stay in memory.
                made = self._made(run, setup.about, experiment, problem, clients)
                self._workers = {run: made}
            return self._workers[run]
