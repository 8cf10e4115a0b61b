"""Finished runs as text, without their vectors: what a table needs of them, on any machine.

A record is a file of JSON lines: what was asked, where and by which commit it was run and how it
ended on the first, then an evaluation on each.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from fedminimax.config import ConfigError, Experiment, write_toml
from fedminimax.engine.state.checkpoint import write_bytes
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import settled

SUFFIX = ".jsonl"


class Record(NamedTuple):
    settings: dict[str, Any]
    environment: dict[str, Any]
    outcome: str
    history: list[dict[str, Any]]


def settings_of(experiment: Experiment, start: dict[str, Any] | None = None) -> dict[str, Any]:
    """The settings as a run folder has them, but that the run which this one starts from stands
    there with its settings in the place of its path."""
    table = tomllib.loads(write_toml(settled(experiment)))
    if start is not None:
        table["run"]["start"] = start
    return table


def keep(path: Path, settings: dict[str, Any], outcome: str, run: RunFolder) -> None:
    """Writes the record of a finished run."""
    history = run.history.read_text(encoding="utf-8")
    first = {
        "settings": settings,
        "environment": run.read_json("environment.json"),
        "outcome": outcome,
        "evaluations": len(history.splitlines()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, (json.dumps(first, sort_keys=True) + "\n" + history).encode())


def read(path: Path) -> Record:
    try:
        first, *history = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found = Record(first["settings"], first["environment"], first["outcome"], history)
        whole = len(history) == first["evaluations"] > 0
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or no record of a run: delete it") from error
    if not whole:
        raise ValueError(f"{path} was cut short: delete it")
    return found


def recall(path: Path, settings: dict[str, Any]) -> Record:
    """The record, of a run with exactly these settings."""
    record = read(path)
    try:
        same = _completed(record.settings) == settings
    except ConfigError:  # an option that is no more
        same = False
    if not same:
        raise ValueError(f"{path} is of a run with other settings: delete it, or name another")
    return record


def _completed(settings: dict[str, Any]) -> dict[str, Any]:
    """With options that are newer than the record."""
    start = settings["run"].get("start")
    if not isinstance(start, dict):
        return settings_of(Experiment.from_table(settings))
    plain = settings | {"run": settings["run"] | {"start": ""}}
    return settings_of(Experiment.from_table(plain), _completed(start))
