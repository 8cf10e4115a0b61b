"""From an experiment to a run, and from a run's folder back to its model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fedminimax.config import Experiment, read_toml, write_toml
from fedminimax.data.clients import Clients
from fedminimax.data.prepare import Prepared, prepare
from fedminimax.data.sites import Schema
from fedminimax.data.statistics import Standardiser
from fedminimax.engine import checkpoint
from fedminimax.engine.checkpoint import CheckpointError, write_bytes
from fedminimax.engine.folder import RunFolder
from fedminimax.engine.simulate import Run, simulate
from fedminimax.engine.trainer import best_of
from fedminimax.random import key
from fedminimax.types import Algorithm, Point, Problem

PREPARATION = "preparation.json"


class Built(NamedTuple):
    """The objects that an experiment describes."""

    problem: Problem
    algorithm: Algorithm
    clients: Clients
    about: dict[str, Any]  # what a later call needs to treat new rows alike
    notes: list[str]


def build(experiment: Experiment) -> Built:
    data = experiment.make("data")
    notes: list[str] = []
    if hasattr(data, "client_rows"):
        about: dict[str, Any] = {"supplied": {"dimension": data.dimension}}
        clients = Clients(data.client_rows(), **_batches(experiment))
    else:
        prepared = prepare(data.read(), experiment.split)
        notes = prepared.notes
        about = {"supplied": {"features": len(prepared.standardiser.columns)}, **prepared.about()}
        clients = clients_of(prepared, experiment)
    problem = make_problem(experiment, about["supplied"])
    return Built(problem, experiment.make("method"), clients, about, notes)


def clients_of(prepared: Prepared, experiment: Experiment) -> Clients:
    rows = prepared.rows
    return Clients(
        rows["train"],
        validation=rows.get("validation"),
        test=rows.get("test"),
        names=prepared.names,
        **_batches(experiment),
    )


def make_problem(experiment: Experiment, supplied: dict[str, int]) -> Problem:
    if "features" not in supplied:
        return experiment.make("problem", **supplied)
    return experiment.make("problem", module=make_module(experiment, supplied["features"]))


def make_module(experiment: Experiment, features: int) -> nn.Module:
    """The model with its first weights, which depend on the run's seed and on nothing else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(experiment.run.seed, "model"))
        return experiment.make("model").build(features)


def run_experiment(
    experiment: Experiment,
    folder: str | os.PathLike | None = None,
    resume: bool = False,
    built: Built | None = None,
    **callbacks: Any,
) -> Run:
    """Runs an experiment; with a folder, everything about the run is written there."""
    built = built or build(experiment)
    settings = experiment.run
    place = RunFolder(folder) if folder is not None and not resume else None
    fresh = place is not None and not place.path.exists()
    if place is not None:
        place.create()
        write_bytes(place.path / "config.toml", write_toml(settled(experiment)).encode())
        place.write_json(PREPARATION, built.about)
    try:
        return simulate(
            built.problem,
            built.algorithm,
            built.clients,
            rounds=settings.rounds,
            seed=settings.seed,
            cohort=settings.cohort,
            executor=settings.executor,
            dtype=getattr(torch, settings.dtype),
            evaluate_every=settings.evaluate_every,
            stop_early=settings.stop_early,
            folder=folder,
            allow_partial=settings.allow_partial,
            checkpoint_every=settings.checkpoint_every,
            measures=settings.measures,
            resume=resume,
            **callbacks,
        )
    except ValueError:
        # Settings that no run can begin with leave no folder behind.
        if place is not None and fresh and not place.history.exists():
            shutil.rmtree(place.path)
        raise


def settled(experiment: Experiment) -> dict[str, Any]:
    """The settings, with the path of a user's data as any working directory would find it."""
    table = experiment.to_table()
    if "path" in table["data"]:
        table["data"]["path"] = str(Path(table["data"]["path"]).expanduser().resolve())
    return table


def experiment_of(folder: str | os.PathLike) -> Experiment:
    """The experiment that a run folder records."""
    path = Path(folder) / "config.toml"
    if not path.exists():
        raise CheckpointError(
            f"there is no config.toml in {folder}: it is not the folder of a run, or of one made "
            "from Python; then call simulate(..., folder=..., resume=True) with the same "
            "arguments, or load(folder, problem)"
        )
    return Experiment.from_table(read_toml(path))


def resume(folder: str | os.PathLike, **callbacks: Any) -> Run:
    """Goes on with an interrupted run from its last checkpoint, or from the start without one."""
    return run_experiment(experiment_of(folder), folder, resume=True, **callbacks)


def load(folder: str | os.PathLike, problem: Problem | None = None) -> Run:
    """A finished run: its point, its history, and its module; the training data is not needed.

    A run made from Python has no configuration: give its problem.
    """
    place = RunFolder(folder)
    if problem is None:
        experiment = experiment_of(folder)
        problem = make_problem(experiment, place.read_json(PREPARATION)["supplied"])
    tensors, about = checkpoint.read(place.final)
    point, best = Point(tensors["x"], tensors["y"]), best_of(tensors, about)
    done = (place.read_history(), about["outcome"], about["round"], best)
    return Run(problem, point, *done, tensors.get("moments"), place)


def preparation(folder: str | os.PathLike) -> tuple[Schema, Standardiser]:
    """How the rows of a run were read and scaled."""
    about = RunFolder(folder).read_json(PREPARATION)
    if "schema" not in about:
        raise CheckpointError(f"the run in {folder} was not trained on tables: it scores no rows")
    return Schema.from_json(about["schema"]), Standardiser.from_json(about["standardiser"])


def scores(run: Run, features: torch.Tensor, best: bool = False) -> torch.Tensor:
    """The score of each row, between 0 and 1: good for ranking; it is not a probability."""
    module = run.module(best)
    with torch.no_grad():
        # In double precision, so that large outputs do not tie at 1.
        return torch.sigmoid(module(features.to(run.point.x.dtype)).reshape(-1).double())


def _batches(experiment: Experiment) -> dict[str, Any]:
    run = experiment.run
    return {
        "batch_size": run.batch_size or None,
        "weights": run.weights,
        "sampling": run.sampling,
        "positive_share": run.sampled_positives,
    }
