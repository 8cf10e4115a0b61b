"""Named tensors and one JSON text in a safetensors file, written whole or not at all, with digests
that find any damage when it is read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

SCHEMA = 4  # of what is in a file; raised when a version writes or reads another content
_KEY = "fedminimax"
_DEEPEST = 50  # tables within tables of a message
_LENGTH = 32  # of a digest, in letters
_PIECE = 2**20  # bytes that are read at once


class CheckpointError(ValueError):
    """A file that cannot be used, with the reason."""


class DamagedError(CheckpointError):
    """A file that is not as it was written."""


def digest_of(*parts: bytes | memoryview) -> str:
    """Of some bytes, in letters.

    >>> digest_of(b"a", b"b") == digest_of(b"ab")
    True
    """
    digest = hashlib.blake2b(digest_size=_LENGTH // 2)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """On failure the file that was there is untouched. The JSON text begins with two digests: of
    the header, in which this one is zeros, and of all behind it."""
    # Every tensor and each letter of the text is under one of the two.
    zeros = b"0" * _LENGTH
    content = bytearray(_packed(tensors, {**about, "schema": SCHEMA}, 2 * zeros.decode()))
    end, place = _header_end(content), content.index(2 * zeros)
    content[place + _LENGTH : place + 2 * _LENGTH] = digest_of(memoryview(content)[end:]).encode()
    content[place : place + _LENGTH] = digest_of(memoryview(content)[:end]).encode()
    write_bytes(path, content)


def pack(tensors: dict[str, Tensor], about: dict[str, Any]) -> bytes:
    """The same tensors and text give the same bytes."""
    return _packed(tensors, about)


def _packed(tensors: dict[str, Tensor], about: dict[str, Any], before: str = "") -> bytes:
    # One metadata entry: safetensors writes several in no fixed order.
    text = before + json.dumps(about, sort_keys=True)
    return save({n: t.contiguous().clone() for n, t in sorted(tensors.items())}, {_KEY: text})


def _header_end(content: bytes | bytearray) -> int:
    """Eight bytes say how long the header is, which is JSON."""
    return 8 + int.from_bytes(content[:8], "little")


def unpack(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `pack` packed; the sender may be anybody."""
    try:
        tensors = load(content)
        header = json.loads(content[8 : _header_end(content)])
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


def write_bytes(path: Path, content: bytes | bytearray) -> None:
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
    """The named tensors and the text of a file of this schema."""
    with _open(path) as (file, about):
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118


def read_about(path: Path) -> dict[str, Any]:
    """The text alone, of which the digest of the header is checked."""
    with _open(path, whole=False) as (_, about):
        return about


@contextlib.contextmanager
def _open(path: Path, whole: bool = True) -> Generator[tuple[Any, dict[str, Any]], None, None]:
    try:
        opened: Any = safe_open(path, "pt")
        with opened as file:
            metadata: dict[str, str] = file.metadata() or {}
            text = metadata.get(_KEY)
            if text is None:
                raise CheckpointError(
                    f"{path} is a safetensors file, but not one that fedminimax wrote"
                )
            digests, text = ("", text) if text[:1] == "{" else _split(text)
            about = json.loads(text)
            if about.get("schema") != SCHEMA:
                raise CheckpointError(
                    f"{path} has schema {about.get('schema', 1)}, and this version of fedminimax "
                    f"reads schema {SCHEMA}: use the version that wrote it, or begin a new run"
                )
            _check_digests(path, digests, whole)
            yield file, about
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(path, str(error)) from error
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}: is this the folder of a run?") from None


def _split(text: str) -> tuple[str, str]:
    return text[: 2 * _LENGTH], text[2 * _LENGTH :]


def _check_digests(path: Path, digests: str, whole: bool) -> None:
    header, rest = digests[:_LENGTH].encode(), digests[_LENGTH:]
    with open(path, "rb") as file:
        begin = file.read(8)
        begin += file.read(_header_end(begin) - 8)
        if digest_of(begin.replace(header, b"0" * _LENGTH, 1)) != header.decode():
            raise _damaged(path, "its header is not as it was written")
        if whole and digest_of(*iter(lambda: file.read(_PIECE), b"")) != rest:
            raise _damaged(path, "it is not as it was written")


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(
        f"{path} is damaged or cut short ({why}): put it back from a copy, or start anew"
    )
