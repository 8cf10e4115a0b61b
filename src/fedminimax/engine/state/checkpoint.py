"""Named tensors and one JSON text in a safetensors file, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

SCHEMA = 3  # of what is in a file; raised when a version writes or reads another content
_KEY = "fedminimax"
_DEEPEST = 50  # tables within tables of a message


class CheckpointError(ValueError):
    """A file that cannot be used, with the reason."""


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """On failure the file that was there is untouched."""
    write_bytes(path, pack(tensors, {**about, "schema": SCHEMA}))


def pack(tensors: dict[str, Tensor], about: dict[str, Any]) -> bytes:
    """The same tensors and text give the same bytes."""
    # One metadata entry: safetensors writes several in no fixed order.
    text = json.dumps(about, sort_keys=True)
    return save({n: t.contiguous().clone() for n, t in sorted(tensors.items())}, {_KEY: text})


def unpack(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `pack` packed; the sender may be anybody."""
    try:
        tensors = load(content)
        # Eight bytes say how long the header is, which is JSON.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about: Any = json.loads(header["__metadata__"][_KEY])
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # RuntimeError: shapes that are none, and a text nested beyond Python's own limit.
        raise CheckpointError(f"these bytes are not a message of fedminimax ({error})") from error
    if not isinstance(about, dict):
        raise CheckpointError("these bytes are not a message of fedminimax (no table in them)")
    if _deeper(about, _DEEPEST):
        raise CheckpointError(
            f"these bytes are not a message of fedminimax (nested more than {_DEEPEST} times)"
        )
    return tensors, cast("dict[str, Any]", about)


def _deeper(value: Any, most: int) -> bool:
    """Level by level: a function that called itself could be made to do so too often."""
    level: list[Any] = [value]
    for _ in range(most):
        tables: list[Any] = [part for part in level if isinstance(part, dict | list)]
        level = []
        for table in tables:
            level += table.values() if isinstance(table, dict) else table
        if not level:
            return False
    return True


def write_bytes(path: Path, content: bytes) -> None:
    """Through a temporary file beside it, flushed to the disk before it takes the name."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        kept = "the previous file is intact" if path.exists() else "nothing was written"
        raise CheckpointError(
            f"could not write {path}: {error.strerror}; {kept}. Free some space and resume"
        ) from error
    flush_name(path.parent)


def flush_name(folder: Path) -> None:
    """A file's new name too must survive a power cut, where the system can promise that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with _open(path) as (file, about):
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118


def read_about(path: Path) -> dict[str, Any]:
    """The text alone."""
    with _open(path) as (_, about):
        return about


@contextlib.contextmanager
def _open(path: Path) -> Generator[tuple[Any, dict[str, Any]], None, None]:
    try:
        opened: Any = safe_open(path, "pt")
        with opened as file:
            metadata: dict[str, str] = file.metadata() or {}
            text = metadata.get(_KEY)
            if text is None:
                raise CheckpointError(
                    f"{path} is a safetensors file, but not one that fedminimax wrote"
                )
            about = json.loads(text)
            if about.get("schema") != SCHEMA:
                raise CheckpointError(
                    f"{path} has schema {about.get('schema', 1)}, and this version of fedminimax "
                    f"reads schema {SCHEMA}: use the version that wrote it, or begin a new run"
                )
            yield file, about
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short ({error}): delete it to go on from the checkpoint "
            "before it, or start anew"
        ) from error
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}: is this the folder of a run?") from None
