"""Finished runs as text, without their vectors: what a table needs of them, on any machine.

A record is a file of JSON lines: what was asked, where and by which commit it was run and how it
ended on the first, then an evaluation on each.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from fedminimax.config import Experiment, write_toml
from fedminimax.engine.checkpoint import write_bytes
from fedminimax.engine.folder import RunFolder
from fedminimax.experiment import settled

SUFFIX = ".jsonl"


class Record(NamedTuple):
    settings: dict[str, Any]
    environment: dict[str, Any]
    outcome: str
    history: list[dict[str, Any]]


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """The settings as a run folder has them, but for the run that this one starts from: by its
    name alone."""
    table = tomllib.loads(write_toml(settled(experiment)))
    if start := table["run"].get("start"):
        table["run"]["start"] = Path(start).name
    return table


def keep(path: Path, experiment: Experiment, outcome: str, run: RunFolder) -> None:
    """Writes the record of a finished run."""
    first = {
        "settings": settings_of(experiment),
        "environment": run.read_json("environment.json"),
        "outcome": outcome,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(first, sort_keys=True) + "\n", run.history.read_text(encoding="utf-8")]
    write_bytes(path, "".join(lines).encode())


def read(path: Path) -> Record:
    try:
        first, *history = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found = Record(first["settings"], first["environment"], first["outcome"], history)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or no record of a run: delete it") from error
    if not history:
        raise ValueError(f"{path} has no evaluation: it was cut short; delete it")
    return found


def recall(path: Path, experiment: Experiment) -> Record:
    """The record, of a run with exactly these settings."""
    record = read(path)
    if record.settings != settings_of(experiment):
        raise ValueError(f"{path} is of a run with other settings: delete it, or name another")
    return record
