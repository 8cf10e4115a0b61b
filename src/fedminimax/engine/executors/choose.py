"""Choosing how clients are mapped."""

from __future__ import annotations

import time
import warnings
from typing import NamedTuple, get_args

from fedminimax.engine.device import usable_cores, wait_for
from fedminimax.engine.executors.compiled.executor import Compiled, not_compiled
from fedminimax.engine.executors.compiled.inductor import missing_compiler
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.executors.threads import Threads
from fedminimax.engine.executors.vectorised import Vectorised
from fedminimax.engine.job import ClientError, ClientResult, Executor, PhaseJob, PhaseResult
from fedminimax.engine.memory import keep_freed_memory
from fedminimax.engine.settings import ExecutorName
from fedminimax.types import Clock

# On the reference machine, in seconds: what a call of an operation costs, and what compiling it
# does.
CALL, COMPILING = 1e-5, 2e-2
LONG_STEP = 5e-3  # seconds: calls of operations are a small part of it
WORTH_A_TRACE = 60.0  # a run that would be shorter is not even looked at


def make(
    name: str, threads: int | None = None, rounds: int = 0, cores: int | None = None
) -> Executor:
    """`rounds` is how long the run will be, for "auto" to judge what pays; `cores` are those that
    this process has, if not all."""
    cores = cores or usable_cores()
    keep_freed_memory()
    if name == "auto":
        return Auto(rounds, cores)
    if name == "debug":
        return Debug()
    if name == "threads":
        return Threads(threads or cores)
    if name == "vectorised":
        return Vectorised(threads)
    if name == "compiled":
        lack = missing_compiler()
        if lack is None:
            return Compiled(threads or cores)
        warnings.warn(lack, stacklevel=2)
        return Vectorised(threads)
    raise ValueError(f"executor is {name!r}; give one of {', '.join(get_args(ExecutorName))}")


class Auto(Executor):
    """The fastest of the others for the first phase that has a step; numbers do not depend on the
    choice."""

    def __init__(self, rounds: int = 0, cores: int | None = None) -> None:
        self._rounds, self._cores = rounds, cores or usable_cores()
        self._chosen: Executor = Debug()
        self._timed = False
        self._watching: Auto | None = None  # for phases that are watched before any other was timed

    @property
    def name(self) -> str:  # type: ignore[override]  it changes when one is chosen
        return self._chosen.name if self._watching is None else self._watching.name

    @property
    def threads(self) -> int:  # type: ignore[override]  likewise
        return self._chosen.threads

    @property
    def repeatable(self) -> int:  # type: ignore[override]  likewise
        return self._chosen.repeatable if self._timed else 0

    @property
    def eager(self) -> Executor:
        if self._timed:
            return self._chosen.eager
        if self._watching is None:
            self._watching = Auto(cores=self._cores)
        self._watching.part = self.part
        return self._watching

    def run(self, job: PhaseJob) -> ClientResult:
        self._choose(job)
        return self._chosen.run(job)

    def exchange(self, job: PhaseJob) -> PhaseResult:
        self._choose(job)
        return self._chosen.exchange(job)

    def repeat(self, job: PhaseJob, clocks: Clock) -> PhaseResult | None:
        return self._chosen.repeat(job, clocks)

    def close(self) -> None:
        self._chosen.close()

    def _choose(self, job: PhaseJob) -> None:
        if self._timed or not job.most_steps:
            return
        with self.part("choosing the executor"):
            self._chosen, self._timed, self._watching = self._best(job), True, None
        self._chosen.part = self.part

    def _best(self, job: PhaseJob) -> Executor:
        name, threads, seconds = fastest(job, self._cores)
        plain = make(name, threads)
        seconds *= job.most_steps
        there = job.clock.round.device.type == "cpu"
        plainly = job.oracle is not None or name != Vectorised.name or not there
        if plainly or self._rounds * seconds < WORTH_A_TRACE:
            return plain
        lack = missing_compiler()
        if lack is not None:
            warnings.warn(lack, stacklevel=2)
            return plain
        compiled = Compiled(self._cores, eager_threads=threads)
        try:
            operations = compiled.operations(job)
        except ClientError:
            raise
        except Exception as error:
            warnings.warn(not_compiled(error), stacklevel=2)
            return plain
        return compiled if worth_compiling(operations, seconds, self._rounds) else plain


def worth_compiling(operations: int, seconds: float, rounds: int) -> bool:
    """Will compiled rounds win back the time that compiling takes? `seconds` is what a round takes
    without; what is saved is at most what calling its operations costs."""
    saved = min(0.8 * seconds, operations * CALL)
    # Most methods have two kinds of rounds: the first, and all others.
    return rounds * saved > 2 * operations * COMPILING


class Choice(NamedTuple):
    name: str
    threads: int
    seconds: float  # a step


def fastest(job: PhaseJob, cores: int) -> Choice:
    """The executor and number of threads that take a step of this phase in the least time."""
    once = job.limit(1)
    timed: list[Choice] = []
    for name, threads in dict.fromkeys(
        [("vectorised", 1), ("vectorised", cores), ("threads", cores)]
    ):
        executor = make(name, threads)
        try:
            executor.run(once)
            seconds = min(_seconds(executor, once) for _ in range(3))
            timed.append(Choice(name, threads, seconds))
        except ClientError:
            raise
        except Exception:
            # Some operations have no batching rule; then clients go one per thread.
            continue
        finally:
            executor.close()
    return _settle(timed)


def _settle(timed: list[Choice]) -> Choice:
    """The fastest. The last bits depend on the executor, so a close race must not be decided by
    noise. Where a step is long, or all clients at once on one core are far behind, arithmetic
    decides, and threads wait least."""
    best, first, last = min(timed, key=lambda choice: choice.seconds), timed[0], timed[-1]
    if best.seconds > LONG_STEP and 1.1 * best.seconds >= last.seconds:
        return last
    if 1.5 * best.seconds >= first.seconds:
        return first
    return last if 1.3 * best.seconds >= last.seconds else best


def _seconds(executor: Executor, job: PhaseJob) -> float:
    start = time.perf_counter()
    executor.run(job)
    wait_for(job.clock.round.device)
    return time.perf_counter() - start
