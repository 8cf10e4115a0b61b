"""Files that a store on disk is made of: plain npy, and a journal of what was written over.

Nothing is buffered here: what a call has written, a kill of this process leaves as it is.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedminimax.engine.state.checkpoint import CheckpointError, flush_name

_BLOCK = struct.Struct("<4sIQ")  # a mark, the checksum of what follows, and its length
_MARK = b"undo"


def write_all(file, data: bytes | memoryview) -> None:
    """An unbuffered file may take less than it is given."""
    left = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while len(left):
        left = left[file.write(left) :]


def sync(file) -> None:
    """Onto the disk: a power cut too must find what was written so far."""
    os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Removes a file so that it stays removed after a power cut."""
    path.unlink()
    flush_name(path.parent)


class RowFile:
    """An npy file with one row per client. Rows that were never written are holes, which take no
    space on most disks."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...], count: int):
        """Makes the file."""
        with open(path, "w+b", buffering=0) as file:
            about = {"descr": dtype.str, "fortran_order": False, "shape": (count, *shape)}
            # Unchecked: numpy's stubs lack it.
            np.lib.format.write_array_header_1_0(file, about)  # type: ignore[arg-type]
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            file.truncate(file.tell() + size * count)
        flush_name(path.parent)
        self._open(path)

    @classmethod
    def at(cls, path: Path) -> RowFile:
        """A file that is there."""
        opened = object.__new__(cls)
        opened._open(path)
        return opened

    def _open(self, path: Path) -> None:
        try:
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            raise CheckpointError(
                f"there is no file {path}, which holds states of the run's clients: start anew"
            ) from None
        try:
            np.lib.format.read_magic(self._file)
            (self.count, *shape), _, self.dtype = np.lib.format.read_array_header_1_0(self._file)
            self._size = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        except Exception as error:  # numpy reads the header as Python
            self._file.close()
            raise CheckpointError(f"{path} is damaged ({error}): start anew") from error
        self.shape, self._begin = tuple(shape), self._file.tell()
        if path.stat().st_size < self._begin + self._size * self.count:
            self._file.close()
            raise CheckpointError(f"{path} is cut short: start anew")

    @property
    def kind(self) -> list[Any]:
        """Type and shape, as JSON."""
        return [self.dtype.str, self.count, *self.shape]

    def read(self, clients: np.ndarray) -> np.ndarray:
        rows = np.empty((len(clients), *self.shape), dtype=self.dtype)
        whole = _bytes(rows)
        for first, last in _runs(clients) if rows.size else ():
            part = whole[first * self._size : last * self._size]
            self._seek(clients[first])
            while len(part):
                got = self._file.readinto(part)
                if not got:
                    raise CheckpointError(f"{self._file.name} is cut short: start anew")
                part = part[got:]
        return rows

    def write(self, clients: np.ndarray, rows: np.ndarray) -> None:
        """The clients' numbers ascend, each is there once."""
        if not rows.size:
            return
        whole = _bytes(np.ascontiguousarray(rows))
        for first, last in _runs(clients):
            self._seek(clients[first])
            write_all(self._file, whole[first * self._size : last * self._size])

    def sync(self) -> None:
        sync(self._file)

    def close(self) -> None:
        self._file.close()

    def _seek(self, client: np.integer) -> None:
        self._file.seek(self._begin + int(client) * self._size)


def _bytes(rows: np.ndarray) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data if rows.size else memoryview(b"")


def _runs(clients: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where consecutive clients stand: one call of the system serves all of a run.

    >>> list(_runs(np.array([3, 4, 5, 9, 11, 12])))
    [(0, 3), (3, 4), (4, 6)]
    """
    cuts = (np.flatnonzero(np.diff(clients) != 1) + 1).tolist()
    return zip([0, *cuts], [*cuts, len(clients)], strict=True)


class Undo(NamedTuple):
    """How some clients were at a checkpoint."""

    clients: np.ndarray
    sums: np.ndarray  # checksums; 0: the client had not been met
    rows: list[np.ndarray]  # of each field, for those that had been met


class Journal:
    """What brings the rows back to a checkpoint: blocks of old rows, each on the disk before the
    rows are written over."""

    def __init__(self, path: Path):
        """Begins an empty one."""
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        try:
            sync(self._file)
            flush_name(path.parent)
        except BaseException:
            self._file.close()
            raise

    def append(self, undo: Undo) -> None:
        about = (np.array([len(undo.clients)]), undo.clients, undo.sums)
        # The rows are not copied: they are as large as a cohort.
        parts = [b"".join(part.tobytes() for part in about), *map(_bytes, undo.rows)]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        for part in (_BLOCK.pack(_MARK, checksum, sum(map(len, parts))), *parts):
            write_all(self._file, part)

    def sync(self) -> None:
        sync(self._file)

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def backwards(path: Path, fields: list[RowFile]) -> Iterator[Undo]:
        """The blocks of a journal, the last one first."""
        with open(path, "rb") as file:
            for place in reversed(_blocks(path, file)):
                yield _undo(_content(file, place), fields)


def _blocks(path: Path, file) -> list[int]:
    """Where whole blocks begin. A kill may have cut the last one; then no row of it was touched."""
    places, place, end = [], 0, path.stat().st_size
    while place < end:
        content = _content(file, place)
        if content is None:
            file.seek(place)
            head = file.read(_BLOCK.size)
            cut = len(head) < _BLOCK.size or place + _BLOCK.size + _BLOCK.unpack(head)[2] >= end
            # After a power cut the end of a file may be nothing but zeros.
            if cut or not any(head + file.read()):
                break
            raise CheckpointError(f"{path} is damaged at byte {place}: start anew")
        places.append(place)
        place += _BLOCK.size + len(content)
    return places


def _content(file, place: int) -> bytes | None:
    file.seek(place)
    head = file.read(_BLOCK.size)
    if len(head) < _BLOCK.size:
        return None
    mark, checksum, length = _BLOCK.unpack(head)
    content = file.read(length) if mark == _MARK else b""
    whole = mark == _MARK and len(content) == length and zlib.crc32(content) == checksum
    return content if whole else None


def _undo(content: bytes | None, fields: list[RowFile]) -> Undo:
    assert content is not None
    count = int(np.frombuffer(content, np.int64, 1)[0])
    clients = np.frombuffer(content, np.int64, count, offset=8)
    sums = np.frombuffer(content, np.uint32, count, offset=8 + 8 * count)
    place, rows = 8 + 12 * count, []
    for field in fields:
        shape = (int(np.count_nonzero(sums)), *field.shape)
        numbers = int(np.prod(shape, dtype=np.int64))
        values = np.frombuffer(content, field.dtype, numbers, offset=place) if numbers else []
        rows.append(np.asarray(values, dtype=field.dtype).reshape(shape))
        place += numbers * field.dtype.itemsize
    return Undo(clients, sums, rows)
