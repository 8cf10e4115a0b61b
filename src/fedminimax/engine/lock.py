"""One process at a time in a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class BusyError(ValueError):
    """Another process is at work in a folder."""


@contextmanager
def alone(folder: Path, seconds: float = 60.0) -> Iterator[int]:
    """Waits that long for another process to leave the folder. The lock lasts as long as its
    descriptor, which is given, is open here or in a process that has inherited it."""
    assert fcntl is not None, "sites need a system with file locks"
    deadline = time.monotonic() + seconds
    with open(folder / "lock", "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise BusyError(
                        f"another process is at work in {folder}: stop it first"
                    ) from None
                time.sleep(0.2)
        yield file.fileno()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder, where the system and its disk have locks."""
    handle = hold(folder)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def hold(folder: Path) -> int | None:
    """The same, until the handle is closed, or the process ends."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BusyError(
            f"another process is at work in {folder}: wait for its end, or stop it"
        ) from None
    except OSError:  # a disk of the network that has no locks
        os.close(handle)
        return None
    return handle
