"""One process at a time in the folder of a run."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class BusyError(ValueError):
    """Another process is at work in a folder."""


@contextmanager
def locked(folder: Path, seconds: float = 60.0) -> Generator[int, None, None]:
    """Locks a folder, and waits at most `seconds` for another process to release it.

    Where the system or its disk has no locks, nothing is locked. The lock lasts while its file
    descriptor, which is returned, is open here or in a process that has inherited it.
    """
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
