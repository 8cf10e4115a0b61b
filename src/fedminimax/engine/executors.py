"""Choosing how clients are mapped."""

from __future__ import annotations

import time

import torch

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
        return Vectorised()
    raise ValueError(f"executor is {name!r}; give one of {', '.join(NAMES)}")


def fastest(work: Work) -> str:
    """The executor that takes a step of this work in the least time; results do not depend on the
    choice."""
    once = work.limited(1)
    timed = {}
    for name in ("vectorised", "threads"):
        executor = make(name, torch.get_num_threads())
        try:
            executor.run(once)
            start = time.perf_counter()
            executor.run(once)
            timed[name] = time.perf_counter() - start
        except ClientError:
            raise
        except Exception:
            # Some operations have no batching rule; then clients go one per thread.
            continue
        finally:
            executor.close()
    return min(timed, key=lambda name: timed[name])
