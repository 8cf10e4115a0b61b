"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NOTHING = nullcontext()


def no_timing(name: str) -> AbstractContextManager[None]:
    """In the place of `Profile.part`, for a run that is not profiled."""
    return _NOTHING


class Profile:
    """Seconds per part of a run.

    >>> profile = Profile()
    >>> with profile.part("data"):
    ...     pass
    >>> list(profile.parts())
    ['data', 'other']
    """

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    @contextmanager
    def part(self, name: str) -> Generator[None, None, None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._calls[name] = self._calls.get(name, 0) + 1

    def parts(self) -> dict[str, tuple[int, float]]:
        """How often each part was entered, and its seconds; the rest of the time is "other"."""
        whole = time.perf_counter() - self._begun
        found = {name: (self._calls[name], seconds) for name, seconds in self._seconds.items()}
        return {**found, "other": (1, whole - sum(self._seconds.values()))}
