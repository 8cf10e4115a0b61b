"""`simulate`: a whole run in this process, from set-up to result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedminimax.data.clients import Clients
from fedminimax.engine import disk_store
from fedminimax.engine.crew import Crew
from fedminimax.engine.device import device_of
from fedminimax.engine.folder import RunFolder
from fedminimax.engine.lock import alone
from fedminimax.engine.profile import Profile
from fedminimax.engine.round import Federation, State
from fedminimax.engine.trainer import Best, Plan, Trainer
from fedminimax.messages.stage import Messages, Reducer, Stage
from fedminimax.metrics.optimality import DRIFT, check_names
from fedminimax.problems._levels import check_levels
from fedminimax.problems.network import in_precision
from fedminimax.random import distinct, key
from fedminimax.types import Algorithm, Point, Problem


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

    def module(self, best: bool = False) -> nn.Module:
        """The trained module, with the batch-norm statistics of its weights, in evaluation mode;
        that of the best validation round, or of the last."""
        if not best:
            return self.problem.module(self.point, self.moments)
        if self.best is None:
            raise ValueError("this run had no validation rows, so no round was its best")
        return self.problem.module(self.best.point, self.best.moments)


def simulate(
    problem: Problem,
    algorithm: Algorithm,
    clients: Clients,
    rounds: int,
    seed: int = 0,
    cohort: int | None = None,
    executor: str = "auto",
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    precision: torch.dtype | None = None,
    evaluate_every: int = 10,
    stop_early: int | None = None,
    target: float | None = None,
    folder: str | os.PathLike | None = None,
    start: Point | Tensor | nn.Module | None = None,
    allow_partial: bool = False,
    checkpoint_every: int | None = None,
    measures: Sequence[str] = (),
    store: str = "memory",
    messages: Messages | Sequence[Stage | Reducer] | None = None,
    evaluate_clients: int | None = None,
    resume: bool = False,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    on_round: Callable[[int], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    profile: Profile | None = None,
    crew: Crew | None = None,
) -> Run:
    """Runs `algorithm` on `problem` across `clients` for `rounds` rounds.

    - cohort: clients per round, drawn anew in each; None: all.
    - executor: "auto", "debug", "threads", "vectorised" or "compiled": how clients are mapped, not
      what is computed.
    - device: "cpu", "cuda" or "mps": where all of it is computed; None: on the CPU.
    - precision: torch.bfloat16 computes the network's forward and backward pass of training in that
      precision, while all vectors stay as they are.
    - evaluate_every: rounds between evaluations, on the validation and test rows, or on the
      training rows if there are neither.
    - stop_early: end after so many evaluations without a better monitored metric on validation
      rows.
    - target: end when the monitored metric is this good, on validation rows, or on training rows if
      there are neither validation nor test rows.
    - folder: where to write environment, history, checkpoints and result; with `resume`, where to
      go on from.
    - start: a warm start: a point, the vector x, or a module with the weights to start from.
    - allow_partial: let a method that is defined for all clients run with some.
    - checkpoint_every: rounds between checkpoints; None: as often as evaluations.
    - measures: optimality measures (metrics/optimality.py) to log with each evaluation, computed on
      all training rows.
    - store: where clients' states are between rounds, "memory" or "disk": in the folder of the run,
      or in a temporary one; for many clients, of which only a cohort is in memory at a time.
    - messages: what happens to replies on their way: stages such as Clip(1.0), and last at most one
      reducer such as Median() in place of the weighted mean (fedminimax.messages).
    - evaluate_clients: how many clients evaluations ask, drawn once by the seed; None: all. Their
      weights add up to one. What the problem learns before the first round it asks all clients.
    - on_record: called with each record. on_round: called with the number of rounds played, after
      each round, or after several that were played at once.
    - interrupted: asked after each round, or after several; once it is true, a checkpoint is
      written to the folder and Interrupted, a KeyboardInterrupt, raised.
    - profile: told where the time goes.
    - crew: the processes that share the work, as `joined()` of engine/distributed.py gives them;
      None: this one alone.
    """
    _check_kinds(problem, algorithm, clients)
    cohort = len(clients) if cohort is None else cohort
    check_numbers(rounds, evaluate_every, checkpoint_every, stop_early, target, cohort, clients)
    asked = asked_clients(evaluate_clients, len(clients), seed)
    check_names(measures)
    disk_store.check_kind(store)
    check_match(problem, algorithm, cohort < len(clients) and not allow_partial)
    messages = Messages.of(messages)
    check_messages(messages, measures, store)
    if algorithm.auxiliary and clients.auxiliary is None:
        raise ValueError(
            f"{type(algorithm).__name__} needs rows at the server: give Clients(auxiliary=...), or "
            "split.auxiliary in an experiment"
        )
    crew = crew or Crew()
    if store == "disk" and crew.size > 1:
        raise ValueError(
            f'store = "disk" is for one process, and this run has {crew.size}: use "memory", in '
            "which each process has the states of its own clients"
        )
    point = start_point(problem, start, dtype)
    dtype = point.x.dtype
    where = crew.device(device_of(device, dtype))
    problem = in_precision(problem, precision, dtype)
    point, clients = Point(*(v.to(where) for v in point)), clients.to(dtype, where)
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    ask = crew.ask(problem, clients, "train", weights)
    problem = problem.prepare(ask)
    check_levels(problem, point, clients.train.batch(0))
    federation = Federation.of(problem, algorithm, clients, weights, seed, cohort, crew, messages)
    # It goes over all rows: only for a run that may be gone on with, or that is shared.
    known = folder is not None or crew.size > 1
    digest = identity(federation, point) if known else ""
    crew.check_alike(digest)
    place = crew.folder(folder) if folder is not None else None
    if place is not None and not resume:
        place.create()
    elif place is not None and not place.path.exists():
        raise ValueError(f"there is no folder {place.path} to resume from: leave resume out")
    every = checkpoint_every or evaluate_every
    looks = (evaluate_every, every, stop_early, target, tuple(measures), asked)
    stops = None if interrupted is None else lambda: crew.any(interrupted())
    plan = Plan(rounds, *looks, on_record, on_round, stops, profile)
    server = federation.algorithm.init_server(problem, point)
    state = State(0, 0, server, ask.cost)
    keep, count = federation.algorithm.keep, len(clients.train.sizes)
    with alone(place.path, 0.0) if place is not None and crew.leads else nullcontext():
        kept = disk_store.make(store, keep, count, None if place is None else place.clients)
        with closing(kept):
            trainer = Trainer(federation, plan, place, digest, kept)
            with closing(trainer.begin(state, executor, resume)):
                trainer.train()
        moments = problem.moments(trainer.point, trainer.ask("train"))
        trainer.save_final(moments)
    done = (trainer.history, trainer.outcome, trainer.state.round, trainer.best)
    return Run(problem, trainer.point, *done, moments, place)


def _check_kinds(problem: Any, algorithm: Any, clients: Any) -> None:
    given = {"problem": (problem, Problem), "algorithm": (algorithm, Algorithm)}
    given["clients"] = (clients, Clients)
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} is a {type(value).__name__}; give a {kind.__name__}")


def check_numbers(
    rounds: int,
    evaluate_every: int,
    checkpoint_every: int | None,
    stop_early: int | None,
    target: float | None,
    cohort: int,
    clients: Clients,
) -> None:
    numbers = {
        "rounds": rounds,
        "evaluate_every": evaluate_every,
        "checkpoint_every": checkpoint_every,
        "stop_early": stop_early,
        "cohort": cohort,
    }
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is {number!r}; give a whole number of at least 1")
    if cohort > len(clients):
        raise ValueError(
            f"{cohort} clients per round were asked for, but there are {len(clients)}: lower cohort"
        )
    if target is not None and not math.isfinite(target):
        raise ValueError(f"target is {target!r}; give a finite number")
    # Training rows may tell that a target is reached, where nothing else is kept aside.
    waits = stop_early is not None or (target is not None and "test" in clients.splits)
    if waits and "validation" not in clients.splits:
        name = "target" if stop_early is None else "stop_early"
        raise ValueError(
            f"{name} needs validation rows, because test rows never decide anything: give "
            f"validation=..., or leave {name} out"
        )


def check_messages(messages: Messages, measures: Sequence[str], store: str) -> None:
    if DRIFT in measures and not messages.reducer.linear:
        raise ValueError(
            f"the measure {DRIFT!r} needs means of what clients send, and "
            f"{type(messages.reducer).__name__} takes none: leave one of the two out"
        )
    if store == "disk" and messages.keeps:
        raise ValueError(
            'store = "disk" has no place for what clients keep for the stages of their messages: '
            'use "memory"'
        )


def asked_clients(count: int | None, clients: int, seed: int) -> np.ndarray | None:
    """The numbers of the clients that evaluations ask; None: all."""
    if count is None:
        return None
    if not isinstance(count, int) or not 1 <= count <= clients:
        raise ValueError(
            f"evaluate_clients is {count!r}; give a whole number from 1 to {clients}, the number "
            "of clients, or leave it out"
        )
    return distinct(key(seed, "evaluation"), count, clients)


def check_match(problem: Problem, algorithm: Algorithm, partial: bool) -> None:
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


def start_point(problem: Problem, start: Any, dtype: torch.dtype | None) -> Point:
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
    dtype = dtype or usual.x.dtype
    return Point(*(v.detach().to(dtype) for v in given))


def identity(federation: Federation, start: Point) -> str:
    """A digest of all that decides the numbers of a run, but not of how long it is."""
    algorithm, clients = federation.algorithm, federation.clients
    settings = {
        "algorithm": [type(algorithm).__name__, repr(dataclasses.astuple(algorithm))],
        "problem": [type(federation.problem).__name__, _settings(federation.problem)],
        "seed": federation.seed,
        "cohort": federation.cohort,
        "messages": repr(federation.messages),
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
    found = {}
    for name, value in sorted(vars(problem).items()):
        values = value if isinstance(value, tuple) else (value,)
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
