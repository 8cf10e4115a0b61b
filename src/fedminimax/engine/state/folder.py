"""The folder of a run.

config.toml         what was asked, with every default
environment.json    versions, machine, and the executor that was chosen
preparation.json    how rows were read and scaled
history.jsonl       one line per evaluation
checkpoints/        round-NNNNNNN.safetensors, the last two
clients/            what clients keep, if the store is on disk (disk_store.py)
final.safetensors   the result: no time, no host
lock                held by the process that is at work here (lock.py)
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.checkpoint import CheckpointError


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.clients = self.path / "clients"
        self.history = self.path / "history.jsonl"
        self.final = self.path / "final.safetensors"

    def create(self) -> None:
        if self.history.exists() or self.final.exists() or self.list_checkpoints():
            raise FileExistsError(
                f"{self.path} already holds a run: resume it, or give another folder "
                f"(fedminimax run --resume {self.path})"
            )
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def list_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoints.glob("round-*.safetensors"))

    def save_checkpoint(
        self, round: int, tensors: dict[str, Tensor], about: dict[str, Any]
    ) -> None:
        checkpoint.write(self.checkpoints / f"round-{round:07d}.safetensors", tensors, about)
        for old in self.list_checkpoints()[:-2]:
            old.unlink()

    def last_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for leftover in self.checkpoints.glob(".*.partial"):
            leftover.unlink()
        found = self.list_checkpoints()
        return checkpoint.read(found[-1]) if found else None

    def save_final(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        checkpoint.write(self.final, tensors, about)

    def append(self, record: dict[str, Any]) -> None:
        try:
            with open(self.history, "a", encoding="utf-8") as file:
                file.write(_line(record))
        except OSError as error:
            raise CheckpointError(
                f"could not write {self.history}: {error.strerror}; the last checkpoint is "
                "intact. Free some space and resume"
            ) from error

    def read_history(self) -> list[dict[str, Any]]:
        if not self.history.exists():
            return []
        records: list[dict[str, Any]] = []
        for line in self.history.read_bytes().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                # a kill in the middle of a line; what follows the last checkpoint is written again
                break
        return records

    def cut_history(self, round: int) -> list[dict[str, Any]]:
        """Records of rounds that the checkpoint has not seen are dropped: they will be made
        again."""
        kept = [record for record in self.read_history() if record["round"] <= round]
        checkpoint.write_bytes(self.history, "".join(map(_line, kept)).encode())
        return kept

    def write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json_text(content))

    def write_text(self, name: str, text: str) -> None:
        checkpoint.write_bytes(self.path / name, text.encode())

    def read_json(self, name: str, missing: Any = None) -> Any:
        path = self.path / name
        if not path.exists():
            if missing is not None:
                return missing
            raise CheckpointError(
                f"there is no {name} in {self.path}: is this the folder of a run?"
            )
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path} is damaged or cut short: {error}") from error


def json_text(content: Any) -> str:
    """The text of a JSON file of the folder."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _line(record: dict[str, Any]) -> str:
    """JSON has no NaN or infinity: they become null."""

    def plain(value: Any) -> Any:
        parts: Any = value
        if isinstance(value, dict):
            return {key: plain(item) for key, item in parts.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in parts]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(record)) + "\n"


@cache  # Git is asked once: a process runs the code that it has loaded
def environment() -> dict[str, Any]:
    """What else decides the numbers of a run."""
    from fedminimax import __version__

    return {
        "fedminimax": __version__,
        "commit": commit_of(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
    }


def commit_of(package: Path) -> str | None:
    """The commit of the source tree that holds a package, with "-dirty" behind it where files of
    the package have changed since; None for a package that no repository tracks."""

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=package, capture_output=True, text=True)
        return found.stdout.strip()

    try:
        commit = git("describe", "--always") if git("ls-files", ".") else ""
        changes = git("status", "--porcelain", ".")
    except OSError:  # there is no git
        return None
    return commit + ("-dirty" if changes else "") if commit else None
