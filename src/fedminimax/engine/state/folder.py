"""The folder of a run.

config.toml         what was asked, with every default
environment.json    versions, machine, and the executor that was chosen
preparation.json    how rows were read and scaled
history.jsonl       one line per evaluation
checkpoints/        round-NNNNNNN.safetensors, the last two
clients/            what clients keep, if the store is on disk (disk_store.py)
final.safetensors   the result: no time, no host
lock                held by the process that is at work here (lock.py)

Each file, and each line of the history, holds a digest of the rest of it, which is checked when it
is read.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.checkpoint import CheckpointError, DamagedError, digest_of

_SEAL = "# digest of the lines above: "


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
        return self._last_whole(self.list_checkpoints())

    def _last_whole(self, found: list[Path]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, or the one before it, with a warning, if that one is damaged."""
        if not found:
            return None
        try:
            return checkpoint.read(found[-1])
        except DamagedError as error:
            if len(found) == 1:
                raise
            warnings.warn(f"{error}. The run goes on from {found[-2].name}", stacklevel=2)
            return self._last_whole(found[:-1])

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

    def read_history(self, whole: bool = False) -> list[dict[str, Any]]:
        """The records; `whole`: the last line too must be complete."""
        if not self.history.exists():
            return []
        records: list[dict[str, Any]] = []
        content = self.history.read_bytes()
        lines = content.splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                records.append(_opened(line))
            except DamagedError:
                # A kill in the middle of a line; what follows the last checkpoint is written again.
                if number == len(lines) and content[-1:] != b"\n" and not whole:
                    break
                raise DamagedError(
                    f"line {number} of {self.history} is damaged or cut short: put it back from a "
                    "copy, or begin a new run"
                ) from None
        return records

    def cut_history(self, round: int, count: int) -> list[dict[str, Any]]:
        """Records of rounds that the checkpoint has not seen are dropped: they will be made
        again. It has seen `count` of them."""
        kept = self._kept(round, count)
        checkpoint.write_bytes(self.history, "".join(map(_line, kept)).encode())
        return kept

    def _kept(self, round: int, count: int) -> list[dict[str, Any]]:
        kept = [record for record in self.read_history() if record["round"] <= round]
        if len(kept) != count:
            raise DamagedError(
                f"{self.history} has {len(kept)} records up to round {round}, and the checkpoint "
                f"of that round has seen {count}: put it back from a copy, or begin a new run"
            )
        return kept

    def write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json_text(content))

    def write_text(self, name: str, text: str) -> None:
        if name.endswith(".toml"):
            text += f"{_SEAL}{digest_of(text.encode())}\n"
        checkpoint.write_bytes(self.path / name, text.encode())

    def read_toml_text(self, name: str) -> str:
        """The text of a TOML file, without its digest."""
        content = (self.path / name).read_bytes()
        text, seal, digest = content.rpartition(_SEAL.encode())
        if not seal or digest != f"{digest_of(text)}\n".encode():
            raise DamagedError(
                f"{self.path / name} is not as it was written: put it back from a copy, or begin a "
                "new run with the settings that you want"
            )
        return text.decode()

    def read_json(self, name: str, missing: Any = None) -> Any:
        path = self.path / name
        if not path.exists():
            if missing is not None:
                return missing
            raise CheckpointError(
                f"there is no {name} in {self.path}: is this the folder of a run?"
            )
        return read_json(path)


def json_text(content: dict[str, Any]) -> str:
    """The text of a JSON file of the folder, with a digest of its content."""
    return json.dumps(_sealed(content), indent=2, sort_keys=True) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """What is in a JSON file that `json_text` made."""
    try:
        return _opened(path.read_bytes())
    except DamagedError as error:
        raise DamagedError(
            f"{path} is damaged or cut short: {error}. Put it back from a copy, or begin a new run"
        ) from error


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "digest": _digest(json.loads(json.dumps(content)))}


def _opened(content: bytes) -> dict[str, Any]:
    """What `_sealed` sealed."""
    try:
        table: Any = json.loads(content)
        digest = table.pop("digest")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{type(error).__name__} ({error})") from error
    if digest != _digest(table):
        raise DamagedError("its content is not that of its digest")
    return table


def _digest(content: Any) -> str:
    return digest_of(json.dumps(content, sort_keys=True).encode())


def _line(record: dict[str, Any]) -> str:
    """JSON has no NaN or infinity: they become null."""

    def plain(value: Any) -> Any:
        parts: Any = value
        if isinstance(value, dict):
            return {key: plain(item) for key, item in parts.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in parts]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(_sealed(plain(record))) + "\n"


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
