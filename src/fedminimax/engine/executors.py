"""Choosing how clients are mapped."""

from __future__ import annotations

import os
import time

from fedminimax.engine.debug import Debug
from fedminimax.engine.threads import Threads
from fedminimax.engine.vectorised import Vectorised
from fedminimax.engine.work import ClientError, Executor, Work

NAMES = ("auto", "debug", "threads", "vectorised")


def make(name: str, threads: int | None = None) -> Executor:
    if name == "debug":
        return Debug()
    if name == "threads":
        return Threads(threads)
    if name == "vectorised":
        return Vectorised(threads)
    raise ValueError(f"executor is {name!r}; give one of {', '.join(NAMES)}")


def fastest(work: Work) -> tuple[str, int]:
    """The executor and number of threads that take a step of this work in the least time; results
    do not depend on the choice."""
    once, cores = work.limited(1), os.cpu_count() or 1
    timed: dict[tuple[str, int], float] = {}
    for candidate in dict.fromkeys([("vectorised", 1), ("vectorised", cores), ("threads", cores)]):
        executor = make(*candidate)
        try:
            executor.run(once)
            start = time.perf_counter()
            executor.run(once)
            timed[candidate] = time.perf_counter() - start
        except ClientError:
            raise
        except Exception:
            # Some operations have no batching rule; then clients go one per thread.
            continue
        finally:
            executor.close()
    return min(timed, key=lambda candidate: timed[candidate])
