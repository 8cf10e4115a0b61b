"""Every key of an experiment file with its type, default and meaning, from the classes that have
them; also as a JSON Schema, with which editors complete and check a file."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from rich.markup import escape
from rich.table import Table

from fedminimax.blocks.schedules import SCHEDULES, Schedule
from fedminimax.config import CHOICES, FIXED, NEEDED, described, hints_of, options_of
from fedminimax.messages import REDUCERS, STAGES
from fedminimax.problems.auto import AUTO

# What classes leave unsaid because it is the same for all of them.
SHARED = {
    "run.rounds": "how many rounds at most",
    "run.seed": "of all that is drawn by chance in the run",
    "run.batch_size": "rows in a client's batch; 0: all of them",
    "run.sampling": "batches without replacement, with it, or balanced by class",
    "run.cohort": "how many clients take part in a round; all, when not given",
    "run.allow_partial": "a cohort also for methods that are defined for all clients",
    "run.executor": "how clients are computed; auto tries and takes the fastest",
    "run.device": "what computes",
    "run.evaluate_every": "rounds between evaluations",
    "run.checkpoint_every": "rounds between checkpoints; evaluate_every, when not given",
    "run.stop_early": "evaluations without a better validation measure before it ends",
    "run.target": "the measure on validation rows at which the run ends",
    "run.measures": "further measures that evaluations take",
    "run.store": "where clients' states are between rounds",
    "run.dtype": "the numbers' type",
    "run.engine": "one process, or the processes that torchrun starts",
    "split.train": "share of each site's rows to train on",
    "split.validation": "share of each site's rows that decide when to stop",
    "split.test": "share of each site's rows for the result",
    "split.positive_share": "to which the positives of training and validation rows are thinned",
    "split.seed": "of the division of rows",
    "data.path": "the folder or file",
    "data.label": "the column to predict",
    "data.folder": "where the files lie, if not where FEDMINIMAX_DATA says or in the cache",
    "data.clients": "how many clients the rows are dealt out to",
    "data.seed": "of what is drawn by chance in the data",
    "data.partition": "how rows are dealt out to clients",
    "data.concentration": "of the Dirichlet distribution: the smaller, the more unlike are clients",
    "data.column": "the column whose values are the clients",
    "data.validation": "share of the training rows kept for validation",
    "data.positive_share": "of the training rows, to which the positives are thinned",
    "model.hidden": "widths of the hidden layers",
    "method.lr": "the clients' rate",
    "method.primal_lr": "the rate of x",
    "method.dual_lr": "the rate of y",
    "method.server_lr": "the server's rate, by which it follows the clients' mean",
    "method.server_primal_lr": "the server's rate for x",
    "method.server_dual_lr": "the server's rate for y",
    "method.local_steps": "steps that a client takes in a round",
    "method.momentum_rate": "the weight of the new gradient in the momentum",
    "method.heavy_ball": "the weight of the old momentum",
    "method.stage_rounds": "rounds in the first stage",
    "run.weights": "of clients: equal, or by their rows; the problem's own, when not given",
    "run.precision": "in which networks are trained; dtype, when not given",
    "run.evaluate_clients": "how many clients evaluations ask; all, when not given",
    "run.monitor": "of validation rows, chooses the best round; the problem's own, when not given",
    "run.start": "the folder of a finished run, with whose network this one begins",
    "data.assets": "how many assets",
    "data.factors": "how many factors move the returns",
    "data.categorical": "columns of numbers that are codes",
    "data.drop": "columns to leave out",
    "data.missing": "what stands for a missing value",
    "data.rows": "rows of each client",
    "data.tasks": "how many tasks",
    "data.side": "pixels of an image's side",
    "method.inner_rate": "the weight of the new inner value in its estimate",
    "method.primal_rate": "the weight of the new gradient in the momentum of x",
    "method.dual_rate": "the weight of the new gradient in the momentum of y",
    "method.primal_server_lr": "the server's rate for x",
    "method.dual_server_lr": "the server's rate for y",
    "method.weights_lr": "the rate of the clients' weights",
    "method.first_batches": "batches from which the first estimates are made",
    "method.local_steps_growth": "factor of the local steps from stage to stage",
    "method.stage_growth": "factor of a stage's rounds from stage to stage",
    "method.radius": "of the ball that x stays in",
    "method.snapshot_every": "local steps between snapshots",
    "method.snapshot_rounds": "rounds between snapshots",
    "method.most_gb": "gigabytes that its matrices may take",
    "model.activation": "between the layers",
    "model.batch_norm": "whether layers are followed by batch normalisation",
    "problem.positive_share": "of all training rows; estimated from the sites, when not given",
    "problem.x0": "where x begins",
    "problem.y0": "where y begins",
    "data.classes": "two, halves of several labels, or each label a class of its own",
    "data.positive": "the label that counts as positive",
    "data.dimension": "the length of x",
    "method.depth": "how many levels the composition has",
    "data.noise": "the size of the noise",
    "problem.depth": "how many levels the composition has",
    "data.depth": "how many levels the composition has",
}


class Key(NamedTuple):
    """One key of a section."""

    name: str
    type: str
    default: str
    meaning: str


def keys_of(section: str, kind: Any) -> list[Key]:
    """The keys of one class, in its order."""
    hints = hints_of(kind)
    return [
        Key(name, type_text(hints.get(name, Any)), default, meaning(section, kind, name))
        for name, default in options_of(kind, section).items()
    ]


def sections() -> Iterator[tuple[str, str, Any]]:
    """Each section with the name that it may have, if any, and its class."""
    for section, kind in FIXED.items():
        yield section, "", kind
    for section, kinds in CHOICES.items():
        for name, kind in kinds.items():
            yield section, name, kind
    for kinds in (STAGES, REDUCERS):
        for name, kind in kinds.items():
            yield "messages", name, kind


def meaning(section: str, kind: Any, key: str) -> str:
    """What a class's docstring says of a key, as "key: ..." or in a sentence that begins with it;
    or what holds for all classes of a section."""
    prose = [
        " ".join(part.split())
        for part in re.split(r"\n\n|\n(?=\w+: )", inspect.cleandoc(kind.__doc__ or ""))
        if not part.startswith("    ")
    ]
    for part in prose:
        if part.startswith(f"{key}: "):
            return part.removeprefix(f"{key}: ").rstrip(".")
    if shared := SHARED.get(f"{section}.{key}"):
        return shared
    said = [sentence for part in prose for sentence in re.split(r"(?<=[.;]) ", part)]
    for sentence in said:
        if re.match(rf"{key}\b(?!\.\w)", sentence):
            return re.sub(rf"^{key}(:| is| means)? ", "", sentence).rstrip(".;")
    if comment := re.search(rf"^ +{key}: .*  # (\w+ \w+ .*)$", _source(kind), re.MULTILINE):
        return comment[1]
    return next((s.rstrip(".;") for s in said if f"`{key}`" in s and len(s) < 200), "")


def _source(kind: Any) -> str:
    """The source of a class and of those that it extends, as far as there is any."""
    return "\n".join(map(_own_source, kind.__mro__[:-1]))


@cache  # a source is asked for with every key, and found by parsing the whole file
def _own_source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # made in an interpreter, or built in
        return ""


def type_text(hint: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [type_text(part) for part in arguments if part is not types.NoneType]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        return ", ".join(f'"{value}"' for value in arguments)
    if origin is tuple:
        return f"list of {type_text(arguments[0])}s"
    if origin is dict:
        return f"table of {type_text(arguments[1])}s"
    if inspect.isclass(hint) and issubclass(hint, Schedule):
        return "schedule"
    plain = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return plain.get(hint, "any")


def keys_table(section: str, kind: Any) -> Table:
    """The keys of one class, for the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("key", "default", "type", "meaning"):
        table.add_column(heading, no_wrap=heading == "key")
    for key in keys_of(section, kind):
        table.add_row(*map(escape, (key.name, key.default, key.type, key.meaning)))
    return table


def as_json(section: str, name: str, kind: Any) -> dict[str, Any]:
    """One class with its keys."""
    keys = [key._asdict() for key in keys_of(section, kind)]
    return {"section": section, "name": name, "about": described(kind), "keys": keys}


def json_schema() -> dict[str, Any]:
    """A JSON Schema of experiment files."""
    properties: dict[str, Any] = {
        section: _object(section, kind) for section, kind in FIXED.items()
    }
    for section, kinds in CHOICES.items():
        choices = [
            {
                "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
                "then": _object(section, kind, {"name": {"const": name}}),
            }
            for name, kind in kinds.items()
        ]
        properties[section] = {
            "type": "object",
            "properties": {"name": {"enum": [*kinds]}},
            "required": ["name"],
            "allOf": choices,
        }
    stages = {
        name: {"anyOf": [{"type": "number"}, _object("messages", kind)]}
        for name, kind in STAGES.items()
    }
    reducers = [_object("messages", kind, {"name": {"const": n}}) for n, kind in REDUCERS.items()]
    stages["reduce"] = {"anyOf": [{"enum": [*REDUCERS]}, *reducers]}
    properties["messages"] = _closed(stages)
    searched = {"properties": {"problem": {"properties": {"name": {"const": AUTO}}}}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "An experiment of fedminimax",
        **_closed(properties),
        "required": ["data", "problem"],
        "if": searched,
        "else": {"required": ["method"]},
    }


def _object(section: str, kind: Any, fixed: dict[str, Any] | None = None) -> dict[str, Any]:
    hints, properties = hints_of(kind), dict(fixed or {})
    needed = [*properties]
    for key in keys_of(section, kind):
        properties[key.name] = _typed(hints.get(key.name, Any))
        if key.meaning:
            properties[key.name] = {**properties[key.name], "description": key.meaning}
        if key.default == NEEDED:
            needed.append(key.name)
    found = {"description": described(kind), **_closed(properties)}
    return {**found, "required": needed} if needed else found


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _typed(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_typed(part) for part in arguments if part is not types.NoneType]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _typed(arguments[0])}
    if inspect.isclass(hint) and issubclass(hint, Schedule):
        one_of = {"properties": {"kind": {"enum": [*SCHEDULES]}}, "required": ["kind"]}
        return {"type": "object", **one_of}
    if hint is str:
        return {"type": ["string", "number", "boolean"]}  # a shell takes the quotes of "1" away
    plain = {int: "integer", float: "number", bool: "boolean"}
    return {"type": plain[hint]} if hint in plain else {}
