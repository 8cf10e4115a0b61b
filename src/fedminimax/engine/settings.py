"""How a run goes: one object from a TOML file, or from the call of `simulate`, to the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedminimax.data.clients import Clients
from fedminimax.engine.profile import Profile
from fedminimax.engine.state import disk_store
from fedminimax.metrics.optimality import check_names
from fedminimax.random import distinct, key

ExecutorName = Literal["auto", "debug", "threads", "vectorised", "compiled"]


@dataclass(frozen=True)
class Settings:
    """How the run goes.

    batch_size 0 means all rows of a client. weights "size", the default of all problems here,
    counts a client by its training rows; "uniform" counts each alike, as most papers do.
    sampled_positives is the share of positives in class-balanced batches. store is where clients'
    states are between rounds. evaluate_clients is how many clients evaluations ask; all, when not
    given. engine "distributed" spreads the clients over the processes that torchrun starts.
    precision is that in which networks are trained, if not that of the vectors, which is dtype.
    start is the folder of a finished run, with whose network this one begins. monitor is the
    measure of validation rows that chooses the best round; the problem's own, when not given.

    Batches, weights and start are settings of an experiment: in Python, `Clients` and the argument
    `start` of `simulate` say them.
    """

    rounds: int = 100
    seed: int = 0
    batch_size: int = 32
    sampling: Literal["epoch", "iid", "balanced"] = "epoch"
    sampled_positives: float = 0.5
    weights: Literal["uniform", "size"] | None = None
    cohort: int | None = None
    allow_partial: bool = False
    engine: Literal["simulator", "distributed"] = "simulator"
    executor: ExecutorName = "auto"
    dtype: Literal["float32", "float64"] | None = "float32"  # None: the problem's own
    store: Literal["memory", "disk"] = "memory"
    device: Literal["cpu", "cuda", "mps"] = "cpu"
    precision: Literal["bfloat16"] | None = None
    evaluate_every: int = 10
    checkpoint_every: int | None = None
    stop_early: int | None = None
    target: float | None = None
    measures: tuple[str, ...] = ()
    evaluate_clients: int | None = None
    start: str = ""
    monitor: Literal["auc", "auprc", "worst_site_auc"] | None = None

    def cohort_of(self, clients: int) -> int:
        """How many of so many clients take part in a round."""
        return clients if self.cohort is None else self.cohort

    @property
    def save_every(self) -> int:
        """Rounds between checkpoints: as often as evaluations, unless it is said otherwise."""
        return self.checkpoint_every or self.evaluate_every


@dataclass(frozen=True)
class Callbacks:
    """What a run calls while it is at work; `simulate` says when."""

    on_record: Callable[[dict[str, Any]], None] | None = None
    on_round: Callable[[int], None] | None = None
    interrupted: Callable[[], bool] | None = None
    profile: Profile | None = None


def check_settings(settings: Settings, clients: Clients) -> None:
    """Refuses settings with which no run of these clients can begin."""
    for name in ("rounds", "evaluate_every", "checkpoint_every", "stop_early", "cohort"):
        number = getattr(settings, name)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is {number!r}; give a whole number of at least 1")
    if settings.cohort_of(len(clients)) > len(clients):
        raise ValueError(
            f"{settings.cohort} clients per round were asked for, but there are {len(clients)}: "
            "lower cohort"
        )
    asked: Any = settings.evaluate_clients  # whatever type a user gave it
    if asked is not None and not (isinstance(asked, int) and 1 <= asked <= len(clients)):
        raise ValueError(
            f"evaluate_clients is {asked!r}; give a whole number from 1 to {len(clients)}, the "
            "number of clients, or leave it out"
        )
    _check_stopping(settings, clients)
    check_names(settings.measures)
    disk_store.check_kind(settings.store)


def _check_stopping(settings: Settings, clients: Clients) -> None:
    target, stop_early = settings.target, settings.stop_early
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


def evaluated_clients(settings: Settings, clients: int) -> np.ndarray | None:
    """The numbers of the clients that evaluations ask, drawn by the seed; None: all."""
    count = settings.evaluate_clients
    return None if count is None else distinct(key(settings.seed, "evaluation"), count, clients)
