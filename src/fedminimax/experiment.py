"""From an experiment to a run, and from a run's folder back to its model."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedminimax.config import CHOICES, ConfigError, Experiment, write_toml
from fedminimax.data.clients import Clients
from fedminimax.data.folder import Reading
from fedminimax.data.prepare import Inputs, Split, auxiliary, inputs_of, prepare
from fedminimax.data.sites import Schema, named
from fedminimax.data.statistics import Total, plain_total
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.backends.local import Local
from fedminimax.engine.session import Run, Session
from fedminimax.engine.settings import Callbacks
from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.checkpoint import CheckpointError
from fedminimax.engine.state.folder import RunFolder, json_text
from fedminimax.engine.trainer import best_of
from fedminimax.messages.secure.fixed_point import answer_total
from fedminimax.models.gan import Players
from fedminimax.problems.binary import BinaryProblem
from fedminimax.problems.network_problem import NetworkProblem
from fedminimax.random import key
from fedminimax.types import Algorithm, Point, Problem

PREPARATION = "preparation.json"
SPLITS = ("train", "validation", "test")
UNMASKED = (
    'reduce is "masked": the sums of this simulation are those of a masked run between sites, but '
    "nothing is masked here"
)
FACTS = ("dimension", "shape", "classes", "labels")  # what data that make their own clients may say


class Built(NamedTuple):
    """The objects that an experiment describes."""

    problem: Problem
    algorithm: Algorithm
    clients: Clients
    about: dict[str, Any]  # what a later call needs to treat new rows alike
    notes: list[str]


class Read(NamedTuple):
    """What the data of an experiment give: rows per split and client, and facts about them."""

    rows: dict[str, Any]
    supplied: dict[str, Any]  # to the problem and its model
    about: dict[str, Any]
    names: tuple[str, ...] | None
    notes: list[str]


def build(experiment: Experiment) -> Built:
    return assemble(experiment, read(experiment), experiment.make("method"))


def assemble(experiment: Experiment, found: Read, algorithm: Algorithm) -> Built:
    """The objects of an experiment whose data are at hand."""
    supplied = {**found.supplied, "sites": len(found.rows["train"])}
    problem = make_problem(experiment, supplied)
    rows = found.rows
    if isinstance(problem, NetworkProblem):
        rows = {s: problem.rows_from(r, SPLITS.index(s)) for s, r in rows.items()}
    own = auxiliary(rows["train"], experiment.split.auxiliary)
    clients = Clients(**rows, names=found.names, auxiliary=own, **batches(experiment))
    about = {"supplied": supplied, **found.about}
    notes = [*found.notes, *([UNMASKED] if experiment.messages.masked else [])]
    return Built(problem, algorithm, clients, about, notes)


def read(experiment: Experiment) -> Read:
    """Tables are split, imputed and scaled; data that make their own clients are taken as they
    are: `client_rows()`, perhaps `validation_rows()`, `test_rows()` and `notes`, and the facts that
    they have."""
    data = experiment.make("data")
    if hasattr(data, "client_rows"):
        check_split(experiment, data)
        rows = {"train": data.client_rows()}
        for split in ("validation", "test"):
            held = getattr(data, f"{split}_rows", lambda: None)()
            if held is not None:
                rows[split] = held
        facts = {name: getattr(data, name) for name in FACTS if hasattr(data, name)}
        return Read(rows, facts, {}, None, list(getattr(data, "notes", [])))
    check_scaling(experiment)
    least = experiment.problem.options.get("least_per_bin", 0)
    total = answer_total if experiment.messages.masked else plain_total
    return read_tables(data.read(), experiment.split, least, total)


def read_tables(reading: Reading, split: Split, least: int = 0, total: Total = plain_total) -> Read:
    prepared = prepare(reading, split, least, total)
    facts = {"features": len(prepared.inputs.outputs), **facts_of(prepared.schema)}
    return Read(prepared.rows, facts, prepared.about(), prepared.names, prepared.notes)


def facts_of(schema: Schema) -> dict[str, Any]:
    """What tables tell a problem of their labels."""
    several = {"labels": list(schema.labels or schema.classes)}
    return {"classes": schema.count, **(several if several["labels"] else {})}


def labels_for(kind: type[Problem], supplied: dict[str, Any]) -> list[str]:
    """The names of several labels or classes, for a problem that ranks them; of one label none."""
    classes, labels = supplied.get("classes", 2), supplied.get("labels", [])
    ranks = "labels" in signature(kind).parameters
    if labels and classes == 2 and not ranks:
        known = [n for n, p in CHOICES["problem"].items() if "labels" in signature(p).parameters]
        raise ConfigError(
            f"the data have {len(labels)} labels, but {kind.__name__} has one: name one in [data], "
            f"or choose one of the problems {named(known)}"
        )
    return labels or [str(number) for number in range(classes if ranks and classes > 2 else 0)]


def outputs_for(kind: type[NetworkProblem], supplied: dict[str, Any]) -> int:
    """How many outputs a problem's network has for the labels of the data."""
    ranked = labels_for(kind, supplied) if "labels" in signature(kind).parameters else []
    return len(ranked) or kind.outputs_for(supplied.get("classes", 2))


def make_problem(experiment: Experiment, supplied: dict[str, Any]) -> Problem:
    """The problem; where it has networks, the model makes them for the data's inputs, unless a
    module is supplied."""
    kind = CHOICES["problem"][experiment.problem.name]
    supplied = {**supplied, "labels": labels_for(kind, supplied)}
    if "features" in supplied:
        supplied = {**supplied, "shape": (supplied["features"],)}
    if issubclass(kind, NetworkProblem) and "shape" in supplied and "module" not in supplied:
        outputs = outputs_for(kind, supplied)
        supplied = supplied | make_networks(experiment, tuple(supplied["shape"]), outputs)
    problem = experiment.make("problem", **supplied)
    if experiment.run.monitor is not None:
        if not issubclass(kind, BinaryProblem):
            raise ConfigError(
                f"[run] monitor is {experiment.run.monitor!r}, by which [problem] "
                f"{experiment.problem.name} is not measured: leave it out"
            )
        problem.monitor = experiment.run.monitor
    return problem


def make_networks(experiment: Experiment, shape: tuple[int, ...], outputs: int) -> dict[str, Any]:
    """The model with its first weights, which depend on the run's seed and on nothing else."""
    with first_weights(experiment.run.seed):
        made = experiment.make("model").build(shape, outputs)
    return made._asdict() if isinstance(made, Players) else {"module": made}


@contextmanager
def first_weights(seed: int) -> Iterator[None]:
    """A module that is made here has the weights of this seed; torch's own chance stays as it
    was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "model"))
        yield


def run_experiment(
    experiment: Experiment,
    folder: str | os.PathLike | None = None,
    resume: bool = False,
    built: Built | None = None,
    backend: Backend | None = None,
    **callbacks: Any,
) -> Run:
    """Runs an experiment; with a folder, everything about the run is written there.

    - resume: go on with the run in the folder.
    - built: the objects of the experiment, if they are at hand.
    - backend: who carries the clients; None: this process.
    - callbacks: those of `simulate`: on_record, on_round, interrupted, profile.
    """
    built = built or build(experiment)
    settings, documents = experiment.run, {}
    if folder is not None:
        documents["config.toml"] = write_toml(settled(experiment))
        documents[PREPARATION] = json_text(_written(built.about))
    return Session(
        problem=built.problem,
        algorithm=built.algorithm,
        clients=built.clients,
        settings=settings,
        messages=experiment.messages,
        privacy=experiment.privacy,
        start=load(settings.start).module(best=False) if settings.start else None,
        folder=folder,
        resume=resume,
        documents=documents,
        backend=backend or Local(),
        callbacks=Callbacks(**callbacks),
    ).run()


def _written(about: dict[str, Any]) -> dict[str, Any]:
    """Without a module of the user's own, which no file describes."""
    facts = {n: v for n, v in about["supplied"].items() if n != "module"}
    return {**about, "supplied": facts}


def settled(experiment: Experiment) -> dict[str, Any]:
    """The settings, with the paths of a user's data, and of the run that this one starts from, as
    any working directory would find them."""
    table = experiment.to_table()
    for section, name in (("data", "path"), ("data", "folder"), ("run", "start")):
        if given := table[section].get(name):
            table[section][name] = str(Path(given).expanduser().resolve())
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
    return Experiment.from_table(tomllib.loads(RunFolder(folder).read_toml_text(path.name)))


def resume(folder: str | os.PathLike, **callbacks: Any) -> Run:
    """Goes on with an interrupted run from its last checkpoint, or from the start without one.

    Arguments:
        folder: of a run that was made from an experiment file.
        callbacks: `on_record`, `on_round` and `interrupted`, as in `simulate`.

    Returns what the run would have returned without the interruption.
    """
    return run_experiment(experiment_of(folder), folder, resume=True, **callbacks)


def load(folder: str | os.PathLike, problem: Problem | None = None) -> Run:
    """Reads a finished run; the training data is not needed.

    Arguments:
        folder: of the run.
        problem: only for a run that was made from Python, whose folder has no configuration.

    Returns the run: its point, its history, and its module.
    """
    place = RunFolder(folder)
    if problem is None:
        experiment = experiment_of(folder)
        problem = make_problem(experiment, place.read_json(PREPARATION)["supplied"])
    tensors, about = checkpoint.read(place.final)
    point, best = Point(tensors["x"], tensors["y"]), best_of(tensors, about)
    return Run(
        problem=problem,
        point=point,
        history=place.read_history(whole=True),
        outcome=about["outcome"],
        rounds=about["round"],
        best=best,
        moments=tensors.get("moments"),
        folder=place,
    )


def preparation(folder: str | os.PathLike) -> tuple[Schema, Inputs]:
    """How the rows of a run were read and encoded."""
    about = RunFolder(folder).read_json(PREPARATION)
    if "schema" not in about:
        raise CheckpointError(f"the run in {folder} was not trained on tables: it scores no rows")
    return Schema.from_json(about["schema"]), inputs_of(about)


def scores(run: Run, features: torch.Tensor, best: bool | None = None) -> torch.Tensor:
    """The score of each row, between 0 and 1: good for ranking; it is not a probability. `best` as
    for `Run.module`."""
    return torch.sigmoid(outputs_of(run, features, best))


def outputs_of(run: Run, features: torch.Tensor, best: bool | None = None) -> torch.Tensor:
    """What the network says of each row, of which `scores` are the sigmoid; with several labels
    there is a column for each. `best` as for `Run.module`."""
    module = run.module(best)
    with torch.no_grad():
        outputs = module(features.to(run.point.x)).reshape(len(features), -1)
    if getattr(run.problem, "labels", ()):
        return outputs.double()
    if outputs.shape[1] != 1:
        raise ValueError(
            f"the run's network has {outputs.shape[1]} outputs per row, one for each class, so "
            "rows have no single score: use load(folder).module() from Python"
        )
    # In double precision, so that large outputs do not tie at 1 as scores.
    return outputs[:, 0].double()


def check_scaling(experiment: Experiment) -> None:
    """Refuses, with privacy for rows, features that are scaled by what training rows tell."""
    if experiment.privacy.by_record and not experiment.split.ranges:
        raise ConfigError(
            '[privacy] level "record": features would be scaled by sums over training rows, '
            "without noise: give their public ranges, such as [split] ranges = {age = [20, 90]}"
        )


def check_split(experiment: Experiment, data: Any) -> None:
    """Refuses what would have no effect on data that make their own clients."""
    for name in ("train", "validation", "test", "positive_share", "standardise", "bins", "sites"):
        if getattr(experiment.split, name) != getattr(Split, name):
            there = f"set {name} in [data]" if hasattr(data, name) else "leave it out"
            raise ConfigError(
                f"[split] {name} is {getattr(experiment.split, name)!r}, but [data] "
                f"{experiment.data.name} splits its rows itself: {there}"
            )


def batches(experiment: Experiment) -> dict[str, Any]:
    run = experiment.run
    return {
        "batch_size": run.batch_size or None,
        "weights": run.weights,
        "sampling": run.sampling,
        "positive_share": run.sampled_positives,
    }
