"""One process at a time in a folder."""

from __future__ import annotations

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
    """Waits that long for another process to leave the folder; where the system or its disk has no
    locks, not at all. The lock lasts as long as its descriptor, which is given, is open here or in
    a process that has inherited it."""
    deadline = time.monotonic() + seconds
    with open(folder / "lock", "a") as file:
        while fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(
                        f"another process is at work in {folder}: stop it first"
                    ) from None
                time.sleep(0.2)
            except OSError:  # a disk of the network
                break
        yield file.fileno()
