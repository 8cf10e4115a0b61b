"""A run from set-up to result, whoever carries its clients: the session owns the run's folder, its
lock, and the assembly of all that the trainer needs."""

# torch gives `split` no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedminimax.data.clients import Clients
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.backends.local import Local
from fedminimax.engine.device import device_of
from fedminimax.engine.privacy import Budget, NoisyQuery, check_record_level, count_releases
from fedminimax.engine.round import Federation, State, overrides
from fedminimax.engine.settings import Callbacks, Settings, check_settings
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.state.lock import BusyError
from fedminimax.engine.trainer import Best, Trainer
from fedminimax.messages.secure.masked import LEAST_CLIENTS
from fedminimax.messages.stage import Messages, Stage
from fedminimax.metrics.optimality import DRIFT
from fedminimax.privacy.noise import Seeded
from fedminimax.privacy.settings import Privacy
from fedminimax.problems.check_levels import check_levels
from fedminimax.problems.network import in_precision
from fedminimax.types import Algorithm, Cost, Point, Problem


@dataclass(frozen=True)
class Run:
    """What `simulate` returns."""

    problem: Problem  # prepared: with what the clients told about themselves
    point: Point  # the server's last
    history: list[dict[str, Any]]  # one record per evaluation
    outcome: str  # "finished", or the sentence that says why not
    rounds: int  # completed
    best: Best | None = None  # by validation rows, if there are any
    moments: Tensor | None = None  # batch-norm moments that belong to the point
    folder: RunFolder | None = None

    def module(self, best: bool | None = None) -> nn.Module:
        """The trained module, with the batch-norm statistics of its weights, in evaluation mode;
        that of the best round by validation rows, or of the last. None: the best if there is one.
        """
        if best is False or (best is None and self.best is None):
            return self.problem.module(self.point, self.moments)
        if self.best is None:
            raise ValueError("this run had no validation rows, so no round was its best")
        return self.problem.module(self.best.point, self.best.moments)

    @property
    def kept(self) -> dict[str, Any]:
        """The record of the round whose module `module()` returns."""
        round = self.rounds if self.best is None else self.best.round
        return next((r for r in self.history if r["round"] == round), self.history[-1])


@dataclass(frozen=True)
class Session:
    """One run: what is to be computed, with which settings, and who carries the clients.

    - start: where to begin: a point, the vector x, or a module; None: where the problem says.
    - folder: where the run is written; with `resume`, where it is gone on with.
    - documents: texts that a new folder holds from its beginning, by the name of the file.
    """

    problem: Problem
    algorithm: Algorithm
    clients: Clients
    settings: Settings
    messages: Messages = field(default_factory=Messages)
    privacy: Privacy = field(default_factory=Privacy)
    start: Any = None
    folder: str | os.PathLike[str] | None = None
    resume: bool = False
    documents: Mapping[str, str] = field(default_factory=dict[str, str])
    backend: Backend = field(default_factory=Local)
    callbacks: Callbacks = field(default_factory=Callbacks)

    def run(self) -> Run:
        """Plays the rounds that are left, and returns the result."""
        self._check()
        federation, state, digest, budget = self._assemble()
        with self._open_folder() as place:
            keep, count = federation.algorithm.keep, len(self.clients)
            stages = federation.messages.keeps
            store = self.backend.store(self.settings.store, keep, count, place, stages)
            with closing(store):
                trainer = Trainer(
                    federation, self.settings, self.callbacks, place, digest, store, budget
                )
                with closing(trainer.begin(state, self.resume)):
                    trainer.train()
            moments = None
            if self.backend.answers_after(trainer.outcome):
                moments = trainer.moments()
                trainer.save_final(moments)
        return Run(
            problem=federation.problem,
            point=trainer.point,
            history=trainer.history,
            outcome=trainer.outcome,
            rounds=trainer.state.round,
            best=trainer.best,
            moments=moments,
            folder=place,
        )

    def _check(self) -> None:
        """Refuses what cannot be run, before anything is computed or written."""
        settings, clients, algorithm = self.settings, self.clients, self.algorithm
        for name, kind in (("problem", Problem), ("algorithm", Algorithm), ("clients", Clients)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(f"{name} is a {type(value).__name__}; give a {kind.__name__}")
        check_settings(settings, clients)
        cohort = settings.cohort_of(len(clients))
        partial = cohort < len(clients)
        check_match(self.problem, algorithm, partial and not settings.allow_partial)
        check_messages(self.messages, algorithm, partial, settings.measures)
        if self.messages.masked:
            check_masked(self.messages, type(self.problem), algorithm, cohort)
        if self.privacy.by_record:
            check_record_level(self.problem, algorithm, clients, settings)
        if algorithm.auxiliary and clients.auxiliary is None:
            raise ValueError(
                f"{type(algorithm).__name__} needs rows at the server: give "
                "Clients(auxiliary=...), or split.auxiliary in an experiment"
            )
        if settings.store == "disk" and self.backend.size > 1:
            raise ValueError(
                f'store = "disk" is for one process, and this run has {self.backend.size}: use '
                '"memory", in which each process has the states of its own clients'
            )

    def _assemble(self) -> tuple[Federation, State, str, Budget | None]:
        """The federation, its state before round 0, the digest of the run, and its budget."""
        settings, backend = self.settings, self.backend
        point = start_point(self.problem, self.start, settings.dtype)
        dtype = point.x.dtype
        where = backend.device(device_of(settings.device, dtype))
        problem = in_precision(self.problem, _dtype(settings.precision), dtype)
        point = Point(*(v.to(where) for v in point))
        clients = self.clients.to(dtype, where)
        weights = clients.weight_vector(clients.weights or problem.client_weights)
        problem, cost, asked = self._prepared(problem, clients, weights)
        if backend.has_rows:
            check_levels(problem, point, clients.train.batch(0))
        federation = Federation.of(
            problem=problem,
            algorithm=self.algorithm,
            clients=clients,
            weights=weights,
            seed=settings.seed,
            cohort=settings.cohort_of(len(clients)),
            backend=backend,
            messages=self.messages,
        )
        federation, budget = self._private(federation, asked)
        # It goes over all rows: only for a run that may be gone on with, or that is shared.
        known = self.folder is not None or backend.size > 1
        digest = identity(federation, point) if known else ""
        backend.check_alike(digest)
        server = federation.algorithm.init_server(problem, point)
        state = State(round=0, iteration=0, server=server, cost=cost)
        return federation, state, digest, budget

    def _prepared(
        self, problem: Problem, clients: Clients, weights: Tensor
    ) -> tuple[Problem, Cost, bool]:
        """The problem with what it learns before round 0, what that cost, and whether training rows
        were asked."""
        backend = self.backend
        if not self.privacy.by_record or not backend.has_rows:
            told = backend.prepare(problem, clients, weights, self.messages.masked)
            return *told, backend.asked_rows
        asking = backend.query(problem, clients, "train", weights)
        query = NoisyQuery(asking, self.privacy, Seeded(self.settings.seed))
        return problem.prepare(query), query.cost, query.asked

    def _private(self, federation: Federation, asked: bool) -> tuple[Federation, Budget | None]:
        """The federation with the oracle by which rows are asked, and the budget of the run."""
        privacy, planned = self.privacy, self.settings.rounds
        if not privacy.by_record:
            return federation, None
        clients = federation.clients
        counted = count_releases(federation, planned, self.backend.some_rows(clients))
        budget = Budget.of(privacy, counted, clients, planned, asked)
        if not self.backend.has_rows:
            return federation, budget  # the sites add their own noise
        source = Seeded(self.settings.seed)
        return budget.private(federation, source), budget

    @contextmanager
    def _open_folder(self) -> Generator[RunFolder | None, None, None]:
        """The folder of the run, locked. Settings that turn out to be of no use leave none."""
        if self.folder is None:
            yield None
            return
        place = self.backend.folder(self.folder)
        fresh = not place.path.exists()
        if not self.resume:
            place.create()
        elif fresh:
            raise ValueError(f"there is no folder {place.path} to resume from: leave resume out")
        try:
            with self.backend.lock(place):
                if not self.resume:
                    for name, text in self.documents.items():
                        place.write_text(name, text)
                yield place
        except ValueError as error:
            # What another process has in the folder stays.
            unused = fresh and self.backend.leads and not place.history.exists()
            if unused and not isinstance(error, BusyError):
                shutil.rmtree(place.path)
            raise


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def check_match(problem: Problem, algorithm: Algorithm, partial: bool) -> None:
    """Refuses a method that is not for this problem, or for rounds with some clients only."""
    name, kind = type(algorithm).__name__, type(problem).__name__
    if partial and not algorithm.partial:
        raise ValueError(
            f"{name} is defined for rounds in which all clients take part: leave cohort out, or "
            "pass allow_partial = true to try it all the same"
        )
    if algorithm.levels is not None and problem.depth != algorithm.levels:
        raise ValueError(
            f"{name} solves problems of depth {algorithm.levels}, but {kind} has depth "
            f"{problem.depth}: use a method for compositions"
        )
    if algorithm.maximises and not problem.maximised:
        raise ValueError(
            f"{name} maximises over y, but the y of {kind} is no player: use a method that only "
            "minimises, or one that sets it"
        )
    if not algorithm.maximises and problem.maximised and problem.start().y.numel():
        raise ValueError(
            f"{name} only minimises, but {kind} also has a maximising player: use a minimax method"
        )


def check_messages(
    messages: Messages, algorithm: Algorithm, partial: bool, measures: Sequence[str] = ()
) -> None:
    """Refuses stages and reducers that do not fit the run.

    Arguments:
        messages: the stages and the reducer.
        algorithm: the method.
        partial: whether some clients may be away.
        measures: the names of what the run measures.
    """
    name, reducer = type(algorithm).__name__, type(messages.reducer).__name__
    if not messages.reducer.linear and not algorithm.robust:
        raise ValueError(
            f"{name} needs the mean of what clients send, and {reducer} is another: each client "
            "sends a vector in which only its own entry is not zero. Leave the reducer out"
        )
    if messages.everyone:
        stage = next(type(stage).__name__ for stage in messages.stages if stage.everyone)
        if not messages.reducer.linear:
            raise ValueError(
                f"{stage} sends changes of updates, which {reducer} cannot compare between "
                "clients: leave one of the two out"
            )
        if partial or overrides(algorithm, "draw_cohort"):
            raise ValueError(
                f"{stage} needs all clients in every phase, since the server adds up the changes "
                f"that they send: leave {stage} out, or let all clients take part"
                + ("" if partial else f" (with another method: {name} draws its cohorts itself)")
            )
    if DRIFT in measures and not messages.reducer.linear:
        raise ValueError(
            f"the measure {DRIFT!r} needs means of what clients send, and {reducer} takes none: "
            "leave one of the two out"
        )


def check_masked(
    messages: Messages, problem: type[Problem], algorithm: Algorithm, cohort: int
) -> None:
    """Refuses what masked sums cannot hide, or cannot compute.

    Arguments:
        messages: the stages and the reducer.
        problem: the class of the problem.
        algorithm: the method.
        cohort: how many clients take part in a round.
    """
    name = type(algorithm).__name__
    if not algorithm.robust:
        raise ValueError(
            f"each client of {name} sends a vector in which only its own entry is not zero, so "
            "that a masked sum would tell what each of them has sent: use another method, or leave "
            'reduce = "masked" out'
        )
    if problem.own_entries:
        raise ValueError(
            f"in {problem.__name__} each client has entries of its own, so that a masked sum would "
            'tell the loss of each: use another problem, or leave reduce = "masked" out'
        )
    if cohort < LEAST_CLIENTS:
        raise ValueError(
            f"{cohort} clients take part in a round, and a masked sum needs at least "
            f"{LEAST_CLIENTS}: of two, each could tell what the other has sent. Let more take "
            'part, or leave reduce = "masked" out'
        )
    for stage in messages.stages:
        if type(stage).encode is not Stage.encode and not stage.adds:
            raise ValueError(
                f"what {type(stage).__name__} sends cannot be added up before it is opened, and "
                'masked messages are opened as a sum: use compress = "random", leave '
                f'{type(stage).__name__} out, or leave reduce = "masked" out'
            )


def start_point(problem: Problem, start: Any, dtype: str | None) -> Point:
    """Where a run begins, in the precision of this name; None: in that of the problem."""
    usual = problem.start()
    if isinstance(start, nn.Module):
        start = problem.start_from(start)
    if isinstance(start, Tensor):
        start = Point(start, usual.y)
    given = usual if start is None else start
    for label, vector, expected in zip(("x", "y"), given, usual, strict=True):
        if vector.shape != expected.shape:
            raise ValueError(
                f"the start has {label} of length {vector.numel()}; {type(problem).__name__} needs "
                f"{expected.numel()}"
            )
        if not bool(torch.isfinite(vector).all()):
            raise ValueError(f"the start has a NaN or an infinity in {label}: give finite numbers")
    precision = _dtype(dtype) or usual.x.dtype
    return Point(*(v.detach().to(precision) for v in given))


def identity(federation: Federation, start: Point) -> str:
    """A digest of all that decides the numbers of a run, but not of how long it is."""
    algorithm, clients = federation.algorithm, federation.clients
    settings = {
        "algorithm": [type(algorithm).__name__, repr(dataclasses.astuple(algorithm))],
        "problem": [type(federation.problem).__name__, _settings(federation.problem)],
        "seed": federation.seed,
        "cohort": federation.cohort,
        "messages": repr(federation.messages),
        **({} if federation.oracle is None else {"privacy": repr(federation.oracle)}),
        "batches": [clients.batch_size, clients.sampling, clients.positive_share],
    }
    digest = hashlib.blake2s(json.dumps(settings, sort_keys=True).encode())
    # Which rows are whose: clients may share columns, and each has a range of them.
    digest.update(clients.train.sizes.tobytes() + clients.train.starts.tobytes())
    for tensor in (*start, federation.weights, *clients.train.columns):
        # In parts: a column may be larger than the memory.
        for part in tensor.detach().split(max(1, _MANY * len(tensor) // max(1, tensor.numel()))):
            digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _settings(problem: Problem) -> dict[str, str]:
    """The problem's public attributes that are plain values or functions, and its module's text."""
    found: dict[str, str] = {}
    for name, value in sorted(vars(problem).items()):
        values: list[Any] = [*value] if isinstance(value, tuple) else [value]
        if not name.startswith("_") and all(isinstance(v, _PLAIN) or callable(v) for v in values):
            found[name] = repr([_code(v) if callable(v) else v for v in values])
    network = getattr(problem, "network", None)
    return found if network is None else {**found, "module": network.text}


_MANY = 100_000
_PLAIN = (int, float, str, bool, type(None))


def _code(function: Any) -> str:
    """What a function does, as far as can be told: its name and instructions, not its address."""
    code = getattr(function, "__code__", None)
    return f"{getattr(function, '__qualname__', '')} {code.co_code.hex() if code else ''}"
