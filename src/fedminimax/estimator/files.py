"""A fitted estimator as a folder: weights as safetensors, all else as JSON; nothing is pickled."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, from_numpy, nn

from fedminimax.algorithms import METHODS
from fedminimax.blocks.schedules import SCHEDULES, Schedule
from fedminimax.config import CHOICES, part_of
from fedminimax.data.prepare import inputs_of, inputs_table
from fedminimax.data.sites import Column, tuples
from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.checkpoint import CheckpointError, write_bytes
from fedminimax.engine.state.folder import json_text, read_json
from fedminimax.metrics import calibration
from fedminimax.metrics.federated_auc import Histogram
from fedminimax.types import Algorithm

FORMAT = 5
WEIGHTS, ABOUT = "model.safetensors", "estimator.json"
SAME = ("threshold_", "operating_point_", "outcome_", "rounds_", "history_", "seed_")
SAME += ("search_", "model_")


def save(model: Any, folder: Path) -> None:
    names, counts = getattr(model, "feature_names_in_", None), _each(model.validation_counts_)
    known = _each(model.calibration_)
    about = {
        "format": FORMAT,
        "parameters": {n: written(v) for n, v in model.get_params(deep=False).items()},
        "classes": {"values": model.classes_.tolist(), "dtype": model.classes_.dtype.str},
        "features": model.n_features_in_,
        "feature_names": None if names is None else names.tolist(),
        "columns": model.columns_ and [dataclasses.asdict(column) for column in model.columns_],
        "labels": list(model.labels_),
        "sites": list(model.sites_),
        "inputs": inputs_table(model.inputs_),
        "several": isinstance(model.calibration_, list),
        "calibration": [None if each is None else each.to_json() for each in known],
        "withheld": [None if each is None else list(each.withheld) for each in counts],
        **{name: written(getattr(model, name)) for name in SAME},
    }
    try:
        json.dumps(about, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"a setting or a class is nothing that JSON has: {error}") from error
    tensors = {f"module.{n}": t for n, t in model.module_.state_dict().items()}
    tensors["dual"] = from_numpy(model.dual_)
    for place, each in enumerate(counts):
        if each is not None:
            tensors[f"validation.{place}.edges"] = from_numpy(each.edges)
            tensors[f"validation.{place}.counts"] = from_numpy(each.counts)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write(folder / WEIGHTS, tensors, {"format": FORMAT})
    about["weights"] = _digest(folder / WEIGHTS)
    write_bytes(folder / ABOUT, json_text(about).encode())


def load(kind: type, folder: Path, module: nn.Module | None) -> Any:
    about = _about(folder / ABOUT)
    tensors, _ = checkpoint.read(folder / WEIGHTS)
    if _digest(folder / WEIGHTS) != about["weights"]:
        raise CheckpointError(
            f"{folder / WEIGHTS} is not the file that {ABOUT} was written with: save the model "
            "again"
        )
    try:
        model = kind(**about["parameters"])
    except TypeError as error:
        raise CheckpointError(f"{folder / ABOUT} is of another version: {error}") from error
    classes = about["classes"]
    model.classes_ = np.array(classes["values"], dtype=np.dtype(classes["dtype"]))
    model.n_features_in_ = about["features"]
    if about["feature_names"] is not None:
        model.feature_names_in_ = np.array(about["feature_names"], dtype=object)
    held = about.get("columns")
    model.columns_ = None if held is None else tuple(Column(**tuples(column)) for column in held)
    model.sites_ = tuple(about["sites"])
    model.inputs_ = inputs_of(about["inputs"])
    model.labels_ = tuple(about["labels"])
    known = [None if map_ is None else calibration.from_json(map_) for map_ in about["calibration"]]
    counts = [
        withheld and Histogram(*_arrays(tensors, place), tuple(withheld))
        for place, withheld in enumerate(about["withheld"])
    ]
    model.calibration_, model.validation_counts_ = (
        (known, counts) if about["several"] else (known[0], counts[0])
    )
    for name in SAME:
        setattr(model, name, about[name])
    model.dual_ = tensors["dual"].numpy()
    weights = {n.removeprefix("module."): t for n, t in tensors.items() if n.startswith("module.")}
    if module is not None:
        model.module = module
    model.module_ = _restored(model, weights)
    return model


def _each(held: Any) -> list[Any]:
    """One, or those of several labels."""
    return held if isinstance(held, list) else [held]


def _arrays(tensors: dict[str, Tensor], place: int) -> tuple[Any, Any]:
    edges, counts = (tensors[f"validation.{place}.{name}"].numpy() for name in ("edges", "counts"))
    return edges, counts


def _restored(model: Any, weights: dict[str, Tensor]) -> nn.Module:
    if model.module is None:
        raise ValueError(
            "the model was trained with a module of your own: give load(folder, module=...) one of "
            "the same architecture"
        )
    if isinstance(model.module, nn.Module):
        made = copy.deepcopy(model.module)
    else:
        part, count = part_of("model", table_of(model.model_), "module"), len(model.classes_)
        network = CHOICES["model"][part.name](**part.options)
        outputs = 1 if count == 2 and not model.labels_ else count
        made = network.build((len(model.inputs_.outputs),), outputs)
    dtype = next((t.dtype for t in weights.values() if t.is_floating_point()), None)
    try:
        made.to(dtype).load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the module is not the one that was trained: {error}") from error
    return made.eval()


def _about(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}: give a folder that save made")
    try:
        found = json.loads(path.read_bytes())["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from error
    if found != FORMAT:
        raise CheckpointError(f"{path} is of format {found}, but this version reads {FORMAT}")
    return read_json(path)


def table_of(choice: Any) -> dict[str, Any]:
    """A name, or a table with a name and options, as a table."""
    if isinstance(choice, Mapping):
        return {str(key): plain_of(value) for key, value in choice.items()}
    return {"name": choice}


def plain_of(value: Any) -> Any:
    """A numpy number, as a grid of settings has them, as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def written(value: Any) -> Any:
    """A value as JSON has it; None for NaN, infinities and objects of the user's own."""
    if isinstance(value, Algorithm):
        name = next((name for name, kind in METHODS.items() if type(value) is kind), None)
        return name and {"name": name, **_fields(value)}
    if isinstance(value, Schedule):
        kind = next(name for name, cls in SCHEDULES.items() if type(value) is cls)
        return {"kind": kind, **_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [written(item) for item in value]
    if isinstance(value, nn.Module | np.random.RandomState) or callable(value):
        return None
    value = plain_of(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: written(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _digest(path: Path) -> str:
    return hashlib.blake2s(path.read_bytes()).hexdigest()
