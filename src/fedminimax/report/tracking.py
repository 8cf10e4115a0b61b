"""The records of runs for TensorBoard or MLflow, written to a folder of this machine.

Neither is needed, and nothing is sent anywhere: both packages are asked to write files.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedminimax.report.runs import Group, Record, Told, metric

COSTS = ("gradients", "rows", "bytes_up", "bytes_down", "exchanges", "evaluation_bytes", "seconds")
PARTS = ("validation", "test", "train", "variables", "optimality")


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record: cost/bytes_up, test/auc, test/sites/NAME, ..."""
    for name in COSTS:
        yield f"cost/{name}", float(record[name])
    for part in PARTS:
        for name, value in record.get(part, {}).items():
            number = metric(part, name)(record)
            if number is not None:
                yield f"{part}/{name}", number
            elif isinstance(value, dict):
                own = {name: value}
                for key in value:
                    if (inner := metric(name, key)(own)) is not None:
                        yield f"{part}/{name}/{key}", inner


def to_tensorboard(groups: Sequence[Group], folder: Path) -> int:
    """An event file for each run; returns how many."""
    _package("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    runs = _runs(groups)
    for name, run in runs:
        with SummaryWriter(str(folder / name)) as writer:
            writer.add_text("config", "\n".join(f"    {s}" for s in run.config.splitlines()))
            for record in run.history:
                for tag, value in scalars(record):
                    writer.add_scalar(tag, value, record["round"])
    return len(runs)


def to_mlflow(groups: Sequence[Group], folder: Path) -> int:
    """A run of MLflow for each run, in a store of files; returns how many."""
    # MLflow counts its uses over the network, and refuses stores of files, unless told otherwise.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    _package("mlflow", "mlflow-skinny")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    folder.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=folder.resolve().as_uri())
    known = client.get_experiment_by_name("fedminimax")
    experiment = known.experiment_id if known else client.create_experiment("fedminimax")
    runs = _runs(groups)
    for name, run in runs:
        made = client.create_run(experiment, run_name=name, tags={"outcome": run.outcome})
        params = [Param(key, value[:6000]) for key, value in run.settings.items()]
        client.log_batch(made.info.run_id, params=params)
        for record in run.history:
            found = [
                Metric(_plain(tag), value, 0, record["round"]) for tag, value in scalars(record)
            ]
            client.log_batch(made.info.run_id, metrics=found)
        client.set_terminated(made.info.run_id, "FINISHED" if run.finished else "FAILED")
    return len(runs)


def _runs(groups: Sequence[Group]) -> list[tuple[str, Told]]:
    """Each run with a name for a folder: its label, and its place if there are several alike."""
    named = []
    for group in groups:
        for number, run in enumerate(group.runs, start=1):
            label = _plain(group.label.replace("/", "-"))
            named.append((label if len(group.runs) == 1 else f"{label} {number}", run))
    return named


def _plain(text: str) -> str:
    """Letters, digits and what both packages allow; anything else becomes a dash."""
    return "".join(sign if sign.isalnum() or sign in "_-./ " else "-" for sign in text)


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"{module} is not installed: pip install {package}, or leave --{module} out"
        ) from None
