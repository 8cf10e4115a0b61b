"""`simulate`: a whole run in this process, from set-up to result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedminimax.data.clients import Clients
from fedminimax.engine import checkpoint, executors
from fedminimax.engine.ask import SimulatedAsk
from fedminimax.engine.checkpoint import CheckpointError
from fedminimax.engine.folder import RunFolder, environment
from fedminimax.engine.round import Federation, NonFiniteError, State, play_round, prepare_work
from fedminimax.engine.store import Store
from fedminimax.engine.work import Executor
from fedminimax.types import Algorithm, Cost, Point, Problem

FINISHED = "finished"


class Best(NamedTuple):
    """The evaluation with the best monitored metric on validation rows."""

    round: int
    value: float
    point: Point


@dataclass
class Run:
    """What `simulate` returns."""

    problem: Problem
    point: Point
    history: list[dict[str, Any]]
    outcome: str
    rounds: int  # completed
    best: Best | None = None
    moments: Tensor | None = None
    folder: RunFolder | None = None
    setup: dict[str, Any] = field(default_factory=dict)

    def module(self) -> nn.Module:
        """The trained module, with the batch-norm statistics of its weights, in evaluation mode."""
        network = getattr(self.problem, "network", None)
        if network is None:
            raise ValueError(
                f"{type(self.problem).__name__} has no torch module; its solution is run.point"
            )
        # type: ignore[attr-defined]
        return network.module(self.problem.network_weights(self.point.x), self.moments)


def simulate(
    problem: Problem,
    algorithm: Algorithm,
    clients: Clients,
    rounds: int,
    seed: int = 0,
    cohort: int | None = None,
    executor: str = "auto",
    dtype: torch.dtype | None = None,
    device: Any = None,
    evaluate_every: int = 10,
    stop_early: int | None = None,
    folder: str | os.PathLike | None = None,
    start: Point | Tensor | nn.Module | None = None,
    allow_partial: bool = False,
    checkpoint_every: int | None = None,
    resume: bool = False,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    on_round: Callable[[int], None] | None = None,
) -> Run:
    """Runs `algorithm` on `problem` across `clients` for `rounds` rounds.

    cohort            clients per round, drawn anew in each; None: all
    executor          "auto", "debug", "threads" or "vectorised": how clients are mapped, not what
    is computed evaluate_every    rounds between evaluations on the validation and test rows (on the
    training rows if there are none) stop_early        end after this many evaluations without a
    better monitored metric on validation rows start             a warm start: a point, the vector
    x, or a module with the weights to start from folder            where to write config, history,
    checkpoints and result; with `resume`, where to go on from checkpoint_every  rounds between
    checkpoints; None: as often as evaluations
    """
    rounds, cohort = _check(
        problem, algorithm, clients, rounds, cohort, allow_partial, evaluate_every, stop_early
    )
    begun = time.perf_counter()
    point = _start(problem, start, dtype, device)
    clients = clients.to(point.x.dtype, device)
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    ask = SimulatedAsk(problem, clients, "train", weights)
    problem = problem.prepare(ask)
    federation = Federation.of(problem, algorithm, clients, weights, seed, cohort)
    place = RunFolder(folder) if folder is not None else None
    saved = place.last_checkpoint() if place is not None and resume else None
    if place is not None and not resume:
        place.create()
    trainer = _Trainer(
        federation,
        rounds,
        evaluate_every,
        stop_early,
        checkpoint_every or evaluate_every,
        place,
        begun,
        on_record,
        on_round,
    )
    identity = _identity(federation, point)
    state = State(0, 0, algorithm.init_server(problem, point), ask.cost)
    trainer.begin(state, identity, saved, executor)
    try:
        return trainer.train()
    finally:
        trainer.executor.close()


class _Trainer:
    """The rounds of one run, with what happens between them: evaluations, records, checkpoints,
    stopping."""

    def __init__(
        self,
        federation: Federation,
        rounds: int,
        evaluate_every: int,
        stop_early: int | None,
        checkpoint_every: int,
        folder: RunFolder | None,
        begun: float,
        on_record: Callable | None,
        on_round: Callable | None,
    ):
        self.federation, self.rounds, self.folder = federation, rounds, folder
        self.evaluate_every, self.checkpoint_every, self.stop_early = (
            evaluate_every,
            checkpoint_every,
            stop_early,
        )
        self.on_record, self.on_round, self.begun = on_record, on_round, begun
        splits = federation.clients.splits
        self.evaluated = [s for s in ("validation", "test") if s in splits] or ["train"]
        self.history: list[dict[str, Any]] = []
        self.best: Best | None = None
        self.waited = 0
        self.executor: Executor

    def begin(self, state: State, identity: str, saved: tuple | None, executor: str) -> None:
        self.state, self.identity = state, identity
        self.store = Store(self.federation.algorithm.keep)
        chosen: dict[str, Any] = {}
        if self.folder is not None and (self.folder.path / "environment.json").exists():
            chosen = self.folder.read_json("environment.json")
        if saved is not None:
            self._restore(*saved)
        elif self.folder is not None:
            self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
            self.folder.cut_history(-1)
        if chosen:
            torch.set_num_threads(chosen["threads"])
        name = chosen.get("executor") or (executor if executor != "auto" else self._fastest())
        self.executor = executors.make(name, torch.get_num_threads())
        if self.folder is not None and not chosen:
            about = {"executor": name, "threads": torch.get_num_threads()}
            self.folder.write_json("environment.json", environment() | about)

    def train(self) -> Run:
        outcome = FINISHED
        if self.state.round == 0 and not self.history:
            self._evaluate()
        while self.state.round < self.rounds and outcome == FINISHED:
            try:
                self.state = play_round(self.federation, self.state, self.store, self.executor)
            except NonFiniteError as found:
                outcome = str(found)
                break
            if self.on_round:
                self.on_round(self.state.round)
            last = self.state.round == self.rounds
            if self.state.round % self.evaluate_every == 0 or last:
                outcome = self._evaluate()
            if self.state.round % self.checkpoint_every == 0 or last or outcome != FINISHED:
                self._checkpoint()
        return self._finish(outcome)

    @property
    def point(self) -> Point:
        return self.federation.algorithm.point(self.state.server)

    def _fastest(self) -> str:
        federation, state = self.federation, self.state
        phase = federation.algorithm.phases(0)[0]
        cohort = federation.draw_cohort(0, 0)
        scratch = Store(federation.algorithm.keep)
        return executors.fastest(
            prepare_work(federation, scratch, state.server, cohort, phase, 0, 0, 0)
        )

    def _evaluate(self) -> str:
        """A record of where the run stands; the outcome if it is to stop."""
        cost = self.state.cost
        record: dict[str, Any] = {"round": self.state.round, **cost._asdict()}
        record["seconds"] = round(time.perf_counter() - self.begun, 3)
        asked = Cost()
        for split in self.evaluated:
            ask = SimulatedAsk(
                self.federation.problem, self.federation.clients, split, self.federation.weights
            )
            record[split] = self.federation.problem.evaluate(self.point, ask)
            asked += ask.cost
        record["evaluation_bytes"] = asked.bytes_up + asked.bytes_down
        self.history.append(record)
        if self.folder is not None:
            self.folder.append(record)
        if self.on_record:
            self.on_record(record)
        return self._compare(record.get("validation", {}))

    def _compare(self, validation: dict[str, Any]) -> str:
        problem = self.federation.problem
        value = validation.get(problem.monitor)
        if value is None:
            return FINISHED
        better = self.best is None or (
            value > self.best.value if problem.larger_is_better else value < self.best.value
        )
        if better:
            self.best, self.waited = Best(self.state.round, value, self.point), 0
            return FINISHED
        self.waited += 1
        if self.stop_early is not None and self.waited >= self.stop_early:
            return (
                f"stopped early at round {self.state.round}: no better validation "
                f"{problem.monitor} in {self.waited} "
                # type: ignore[union-attr]
                f"evaluations; the best was {self.best.value:.4f} at round {self.best.round}"
            )
        return FINISHED

    def _tensors(self) -> dict[str, Tensor]:
        server = self.state.server
        tensors = {
            f"server.{name}": value for name, value in zip(server._fields, server, strict=True)
        }
        for client, kept in self.store.states.items():
            tensors |= {
                f"client.{client}.{name}": v
                for name, v in zip(self.store.fields, kept, strict=True)
            }
        if self.best is not None:
            tensors |= {"best.x": self.best.point.x, "best.y": self.best.point.y}
        return tensors

    def _checkpoint(self) -> None:
        if self.folder is None:
            return
        about = {
            "identity": self.identity,
            "round": self.state.round,
            "iteration": self.state.iteration,
            "cost": list(self.state.cost),
            "waited": self.waited,
            "best": None if self.best is None else [self.best.round, self.best.value],
            "seconds": time.perf_counter() - self.begun,
        }
        self.folder.save_checkpoint(self.state.round, self._tensors(), about)

    def _restore(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        assert self.folder is not None
        if about["identity"] != self.identity:
            raise CheckpointError(
                f"the checkpoints in {self.folder.path} are of another experiment (other data, "
                "problem, method or seed): "
                "resume with the settings of that run, or give another folder"
            )
        kind = type(self.state.server)
        server = kind(*(tensors[f"server.{name}"] for name in kind._fields))
        self.state = State(about["round"], about["iteration"], server, Cost(*about["cost"]))
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("client."):
                _, client, field_name = name.split(".")
                states.setdefault(int(client), {})[field_name] = value
        fields = self.store.fields
        self.store = Store(
            fields, {k: tuple(kept[f] for f in fields) for k, kept in states.items()}
        )
        if about["best"] is not None:
            self.best = Best(*about["best"], Point(tensors["best.x"], tensors["best.y"]))
        self.waited = about["waited"]
        self.begun = time.perf_counter() - about["seconds"]
        self.history = self.folder.cut_history(self.state.round)

    def _finish(self, outcome: str) -> Run:
        federation, problem = self.federation, self.federation.problem
        moments = None
        if getattr(problem, "network", None) is not None:
            ask = SimulatedAsk(problem, federation.clients, "train", federation.weights)
            moments = problem.batch_norm_moments(self.point.x, ask)  # type: ignore[attr-defined]
        run = Run(
            problem,
            self.point,
            self.history,
            outcome,
            self.state.round,
            self.best,
            moments,
            self.folder,
        )
        if self.folder is not None:
            tensors = dict(zip(("x", "y"), run.point, strict=True))
            if moments is not None:
                tensors["moments"] = moments
            if self.best is not None:
                tensors |= {"best.x": self.best.point.x, "best.y": self.best.point.y}
            about = {
                "format": 1,
                "identity": self.identity,
                "round": run.rounds,
                "outcome": outcome,
                "best": None if self.best is None else [self.best.round, self.best.value],
            }
            checkpoint.write(self.folder.final, tensors, about)
        return run


def _check(
    problem, algorithm, clients, rounds, cohort, allow_partial, evaluate_every, stop_early
) -> tuple[int, int]:
    name, kind = type(algorithm).__name__, type(problem).__name__
    for label, number in (("rounds", rounds), ("evaluate_every", evaluate_every)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{label} is {number!r}; give a whole number of at least 1")
    cohort = len(clients) if cohort is None else cohort
    if not 1 <= cohort <= len(clients):
        raise ValueError(f"{cohort} clients per round were asked for, but there are {len(clients)}")
    if cohort < len(clients) and not (algorithm.partial or allow_partial):
        raise ValueError(
            f"{name} is defined for rounds in which all clients take part, but {cohort} of "
            f"{len(clients)} were asked for: "
            "leave cohort out, or pass allow_partial = true to try it all the same"
        )
    if algorithm.levels is not None and problem.depth != algorithm.levels:
        raise ValueError(
            f"{name} solves problems of depth {algorithm.levels}; {kind} has depth {problem.depth}"
        )
    if not algorithm.maximises and problem.start().y.numel():
        raise ValueError(
            f"{name} only minimises, but {kind} also has a maximising player: use a minimax method"
        )
    if stop_early is not None and "validation" not in clients.splits:
        raise ValueError(
            "stop_early needs validation rows (the test rows never decide anything): give "
            "validation=..."
        )
    return rounds, cohort


def _start(problem: Problem, start: Any, dtype: torch.dtype | None, device: Any) -> Point:
    usual = problem.start()
    if isinstance(start, nn.Module):
        network = getattr(problem, "network", None)
        vector = torch.cat([p.detach().reshape(-1) for p in start.parameters()])
        if network is None or vector.numel() != network.length:
            raise ValueError(
                f"the module to start from has {vector.numel()} weights; the problem's network "
                "has others"
            )
        start = torch.cat([vector.to(usual.x), usual.x[network.length :]])
    if isinstance(start, Tensor):
        start = Point(start, usual.y)
    given = usual if start is None else start
    for label, vector, expected in zip(("x", "y"), given, usual, strict=True):
        if vector.shape != expected.shape:
            raise ValueError(
                f"the start has {label} of length {vector.numel()}; {type(problem).__name__} "
                f"needs {expected.numel()}"
            )
        if not bool(torch.isfinite(vector).all()):
            raise ValueError(f"the start has a NaN or an infinity in {label}")
    dtype = dtype or usual.x.dtype
    return Point(*(v.detach().to(dtype=dtype, device=device) for v in given))


def _identity(federation: Federation, start: Point) -> str:
    """A digest of all that decides the numbers of a run, but not of how long it is."""
    algorithm, clients = federation.algorithm, federation.clients
    settings = {
        "algorithm": [type(algorithm).__name__, repr(dataclasses.astuple(algorithm))],
        "problem": type(federation.problem).__name__,
        "seed": federation.seed,
        "cohort": federation.cohort,
        "batches": [clients.batch_size, clients.sampling, clients.positive_share],
        "weights": federation.weights.tolist(),
    }
    digest = hashlib.blake2s(json.dumps(settings, sort_keys=True).encode())
    for tensor in (*start, *clients.train.columns):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
