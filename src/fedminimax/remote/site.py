"""A site answers: bytes come in, bytes go out, and what it will not do it refuses in a sentence."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedminimax import __version__
from fedminimax.config import CHOICES, ConfigError, Experiment, Table, messages_text
from fedminimax.data.clients import Clients
from fedminimax.engine.round import Federation
from fedminimax.engine.session import check_masked
from fedminimax.engine.settings import Settings
from fedminimax.engine.state.checkpoint import CheckpointError, read, write
from fedminimax.engine.state.lock import BusyError, locked
from fedminimax.experiment import SPLITS, batches
from fedminimax.problems.check_levels import check_levels
from fedminimax.problems.network_problem import NetworkProblem
from fedminimax.remote.audit import AuditError, AuditLog
from fedminimax.remote.ledger import Ledger
from fedminimax.remote.masking import SiteMasks, check_members, masks_of, offered
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
from fedminimax.remote.setup import (
    Setup,
    absent_clients,
    digest_of_experiment,
    prepared,
    problem_of,
    received_experiment,
)
from fedminimax.remote.site_file import SiteFile, register
from fedminimax.remote.wire import Message, busy, quoted
from fedminimax.remote.worker import WAIT, SiteError, Worker
from fedminimax.types import Problem

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
SETUP = "setup.safetensors"


def refusal(reason: str, run: Any = None, site: str | None = None) -> bytes:
    about = {"kind": "refusal", "run": run, "site": site, "reason": reason}
    return Message(about, {}).to_bytes()


def _digest(content: bytes) -> str:
    return hashlib.blake2s(content, digest_size=16).hexdigest()


def received(content: bytes) -> Message:
    try:
        return Message.from_bytes(content)
    except CheckpointError as error:
        raise SiteError(str(error)) from error


def _hidden(
    masks: SiteMasks | None, message: Message, answers: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Sums over a site's rows as they travel."""
    return answers if masks is None else masks.answer(message.asked(), answers, 1.0)


class Site:
    """One site, for as many runs as it is asked to take part in."""

    def __init__(self, file: SiteFile, log: Callable[[str], None] | None = None):
        register(file.allow)
        self.file = file
        self.log = log or (lambda text: print(text, file=sys.stderr, flush=True))
        self.audit = AuditLog(file.folder)
        self._held = holding(file.name, file.folder, file.data)
        self._workers: dict[str, Worker] = {}
        self._settings: dict[str, Settings] = {}
        self._rows: dict[str, Rows] = {}
        self._lock = threading.Lock()

    @staticmethod
    def open(folder: Path) -> Site:
        return Site(SiteFile.read(folder))

    def handle(self, content: bytes) -> bytes:
        """The reply to a message, whatever it is: nothing is raised. Each call is in the audit log
        before its reply is sent; if it cannot be, nothing is sent but a refusal."""
        call: dict[str, Any] = {"run": None, "digest": _digest(content), "received": len(content)}
        reply, why = self._answered(content, call)
        try:
            told = {"bytes": len(reply), "answered": why is None, "why": why}
            self.audit.append({**call, **told})
        except (AuditError, BusyError) as error:
            self.log(str(error))
            reason = "its audit log cannot be written or relied on, so it sends nothing"
            return refusal(f"{reason}: its own log says more", call["run"], self.file.name)
        return reply

    def _answered(self, content: bytes, call: dict[str, Any]) -> tuple[bytes, str | None]:
        """The reply, and why it is none. `call` is told what the call is about."""
        run: Any = None
        try:
            if len(content) > self.file.limits.megabytes * 1_000_000:
                raise SiteError(
                    f"site {self.file.name!r} takes messages of at most "
                    f"{self.file.limits.megabytes} MB, and this has {len(content)} bytes"
                )
            message = received(content)
            run = message.about.get("run")
            for name in ("run", "kind", "question", "split", "round", "phase"):
                value = message.about.get(name)
                call[name] = value if type(value) is int else value and quoted(value)[:80]
            return self._reply(message, call).to_bytes(), None
        except BusyError as error:
            self.log(f"not done: {error}")
            return busy(run, self.file.name), str(error)
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
        return refusal(reason, run, self.file.name), quoted(reason)

    def _check_budget(self, run: str, kind: str, question: Any, most: int) -> None:
        """Refuses a call of a kind that was answered often enough in this run."""
        limits = self.file.limits
        known = self.audit.runs()
        if run not in known and len(known) >= limits.runs:
            raise SiteError(
                f"site {self.file.name!r} has taken part in {len(known)} runs, and takes part in "
                f"at most {limits.runs} (runs in [limits] of its site file)"
            )
        asked = question if isinstance(question, str) else None
        if self.audit.answered(run, kind, asked) >= most:
            raise SiteError(
                f"site {self.file.name!r} has answered {quoted(asked or kind)!r} of the run "
                f"{run!r} {most} times, and no more often (questions in [limits] of its site file)"
            )

    def _check_worker_budget(self, run: str, message: Message) -> Worker:
        """The worker of a run, if the run's budget is not spent: phases for each round three times,
        and `questions` of one name for each evaluation."""
        worker, kind = self._worker(run), message.about["kind"]
        settings = self._settings[run]
        if kind == "phase":
            phases = len(worker.federation.algorithm.phases(0))
            self._check_budget(run, kind, None, 3 * (settings.rounds + 10) * phases)
        else:
            evaluations = settings.rounds // settings.evaluate_every + 5
            most = self.file.limits.questions * evaluations
            self._check_budget(run, kind, message.about.get("question"), most)
        return worker

    def _reply(self, message: Message, call: dict[str, Any]) -> Message:
        about = message.about
        kind, run = about.get("kind"), about.get("run")
        if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
            raise SiteError(f"{run!r} is not the name of a run")
        told = {"kind": kind, "run": run, "site": self.file.name}
        if kind == "ping":
            return Message(told, {})
        if kind == "phase":
            self._check_round(about["round"])
            worker = self._check_worker_budget(run, message)
            call["rows"] = worker.rows("train")
            return worker.phase(message)
        if kind == "ask" and "setup" not in about:
            worker = self._check_worker_budget(run, message)
            call["rows"] = worker.rows(about.get("split"))
            return worker.answer(message)
        if kind != "begin":  # which tells nothing, and comes again with every start of the server
            most = self.file.limits.questions
            self._check_budget(run, str(kind), about.get("question"), most)
        experiment = self._experiment(about["setup"])
        if kind == "look":
            limits = {"version": __version__, "least_per_bin": self.file.limits.least_per_bin}
            return Message({**told, **limits, "outline": self._held.outline()}, {})
        if kind == "keys":
            offer = offered(self.file, self._folder(run), run, about["setup"])
            return Message({**told, "offer": offer}, {})
        masks = self._masks(run, about["setup"], experiment)
        found = self._split(about["setup"], experiment)
        call["rows"] = found.sizes.get(about.get("split", "train"))
        if kind in ("moments", "counts") and experiment.privacy.by_record:
            raise SiteError(
                "sums over training rows have no noise: give the public ranges of the columns, "
                "[split] ranges, and no bins"
            )
        if kind == "moments":
            centre = message.vectors["centre"].numpy() if message.vectors else None
            limits = self.file.limits
            own = told_moments(found, centre, limits.least_rows, limits.least_per_bin)
            return Message(told, _hidden(masks, message, {"moments": torch.from_numpy(own)}))
        self._check_least(about["setup"])
        if kind == "counts":
            edges, sizes = (message.vectors[name].numpy() for name in ("edges", "sizes"))
            own = told_counts(found, edges, sizes, about["setup"]["least_per_bin"])
            return Message(told, _hidden(masks, message, {"counts": torch.from_numpy(own)}))
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
            made = self._made(run, about["setup"], experiment, problem, clients, masks)
            return made.answer(message)
        if kind == "begin":
            self._begin(run, Setup(about["setup"], message.vectors), digest_of(found))
            return Message(told, {})
        raise SiteError(f"{kind!r} is no call that site {self.file.name!r} knows")

    def _experiment(self, setup: Table) -> Experiment:
        data = self.file.data
        known = {**data, "name": data.get("name", "folder")}
        experiment = received_experiment(setup["experiment"], known)
        found = digest_of_experiment(setup["experiment"])
        if self.file.agreed and found not in self.file.agreed.values():
            raise SiteError(
                f"the digest of the experiment is {found}, which site {self.file.name!r} has not "
                "agreed to ([agreed] in its site file)"
            )
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

    def _check_batch(self, size: int | None) -> None:
        """A mean over a batch of a row or two is a row."""
        least = self.file.limits.fewest_in_batch
        if size and size < least:
            raise SiteError(
                f"site {self.file.name!r} takes part in batches of at least {least} rows, and "
                f"batch_size is {size} (least_batch in [limits] of its site file)"
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
            self._check_batch(experiment.run.batch_size)
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
        self,
        run: str,
        setup: Table,
        experiment: Experiment,
        problem: Problem,
        clients: Clients,
        masks: SiteMasks | None,
    ) -> Worker:
        number, everyone = self._number(setup), absent_clients(experiment, setup)
        for split, shards in clients.splits.items():
            own, rows = int(shards.sizes[number]), everyone.splits[split].sizes[number]
            if rows != own:
                raise SiteError(
                    f"site {self.file.name!r} has {own} {split} rows, and the server tells all of "
                    f"{rows}: it would have another weight than its rows give it"
                )
        federation = Federation.of(
            problem=problem,
            algorithm=experiment.make("method"),
            clients=clients,
            weights=everyone.weight_vector(everyone.weights or problem.client_weights),
            seed=experiment.run.seed,
            cohort=experiment.run.cohort_of(len(clients)),
            messages=experiment.messages,
        )
        return Worker(
            run=run,
            name=self.file.name,
            number=number,
            federation=federation,
            folder=self._folder(run),
            private=self._private(experiment, setup),
            masks=masks,
        )

    def _masks(
        self, run: str, setup: Table, experiment: Experiment, bound: str = ""
    ) -> SiteMasks | None:
        """Those of a masked run; what masks cannot hide is refused, whatever the server says."""
        if not experiment.messages.masked:
            return None
        check_members(self.file, setup)
        sites = experiment.run.cohort_of(len(setup["names"]))
        problem = CHOICES["problem"][experiment.problem.name]
        try:
            check_masked(experiment.messages, problem, experiment.make("method"), sites)
        except ValueError as error:
            raise SiteError(str(error)) from error
        return masks_of(self.file, self._folder(run), run, setup, bound)

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
                masks = self._masks(run, setup.about, experiment, setup.message.digest())
                made = self._made(run, setup.about, experiment, problem, clients, masks)
                self._workers = {run: made}
                self._settings = {run: experiment.run}
            return self._workers[run]
