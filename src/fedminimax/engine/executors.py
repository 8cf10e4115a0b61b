"""Choosing how clients are mapped."""

from __future__ import annotations

import os
import time

from fedminimax.engine.debug import Debug
from fedminimax.engine.threads import Threads
from fedminimax.engine.vectorised import Vectorised
from fedminimax.engine.work import ClientError, Executor, Result, Work

NAMES = ("auto", "debug", "threads", "vectorised")


def make(name: str, threads: int | None = None) -> Executor:
    if name == "auto":
        return Auto()
    if name == "debug":
        return Debug()
    if name == "threads":
        return Threads(threads)
    if name == "vectorised":
        return Vectorised(threads)
    raise ValueError(f"executor is {name!r}; give one of {', '.join(NAMES)}")


class Auto:
    """The fastest of the others, timed on the first work that has a step; numbers do not depend on
    the choice."""

    def __init__(self) -> None:
        self._chosen: Executor = Debug()
        self._timed = False

    @property
    def name(self) -> str:
        return self._chosen.name

    @property
    def threads(self) -> int:
        return self._chosen.threads

    def run(self, work: Work) -> Result:
        if not self._timed and work.most_steps:
            self._chosen, self._timed = make(*fastest(work)), True
        return self._chosen.run(work)

    def close(self) -> None:
        self._chosen.close()


def fastest(work: Work) -> tuple[str, int]:
    """The executor and number of threads that take a step of this work in the least time."""
    once, cores = work.limited(1), os.cpu_count() or 1
    timed: dict[tuple[str, int], float] = {}
    for candidate in dict.fromkeys([("vectorised", 1), ("vectorised", cores), ("threads", cores)]):
        executor = make(*candidate)
        try:
            executor.run(once)
            timed[candidate] = min(_seconds(executor, once) for _ in range(3))
        except ClientError:
            raise
        except Exception:
            # Some operations have no batching rule; then clients go one per thread.
            continue
        finally:
            executor.close()
    # The last bits depend on the executor, so a close race must not be decided by noise.
    first = next(iter(timed))
    best = min(timed, key=lambda candidate: timed[candidate])
    return best if 1.5 * timed[best] < timed[first] else first


def _seconds(executor: Executor, work: Work) -> float:
    start = time.perf_counter()
    executor.run(work)
    return time.perf_counter() - start
