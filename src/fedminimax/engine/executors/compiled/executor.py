"""Phases as machine code.

Small problems spend their time in Python and in calls of operations, not in arithmetic. Here a
phase is traced once into a graph of operations (graphs.py), and torch's inductor makes C++
of it (inductor.py). Clients with many numbers together go through the phase in groups
(groups.py).

Methods and problems know nothing of this: they are pure functions of tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.trees import flat, rebuild
from fedminimax.engine.device import threads, usable_cores
from fedminimax.engine.executors.compiled.graphs import (
    SERVER_STEP,
    Compiler,
    Graph,
    Inputs,
    PhaseEnd,
    Places,
    ServerInputs,
    Traced,
    separate,
)
from fedminimax.engine.executors.compiled.groups import ALONE, Group, Whole, groups
from fedminimax.engine.executors.compiled.inductor import inductor
from fedminimax.engine.executors.compiled.shared import code_of, graph_of, kind_of
from fedminimax.engine.executors.vectorised import Span, Vectorised, spans
from fedminimax.engine.job import (
    ClientError,
    ClientResult,
    Executor,
    PhaseJob,
    PhaseResult,
    at,
    stack,
)
from fedminimax.messages.stage import Mean
from fedminimax.types import Clock, Phase

MOST_KINDS = 64  # of phases, in a run
UNROLLED = 12  # local steps in one graph: the compiler needs long for many
COMPILED = "compiled: local steps, averaging, server step"  # a part of a run's time
Shapes = tuple[list[torch.Size], list[torch.dtype]]


class LastGraph(NamedTuple):
    """A span, and the graph that served it."""

    phase: Phase
    shapes: Shapes
    rest: tuple
    graph: Graph | None


class Compiled(Executor):
    name = "compiled"
    repeatable = UNROLLED

    def __init__(
        self,
        threads: int | None = None,
        compiler: Compiler | None = None,
        eager_threads: int | None = None,
    ):
        """`eager_threads` are for phases that are not compiled."""
        self.threads = threads or usable_cores()
        self._compiler = compiler or inductor
        self._eager = Vectorised(eager_threads)
        self._graphs: dict[tuple, Graph | None] = {}  # None: what could not be compiled
        self._traced: dict[tuple, Traced] = {}
        self._last: dict[Span, LastGraph] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def eager(self) -> Executor:
        self._eager.part = self.part
        return self._eager

    def run(self, job: PhaseJob) -> ClientResult:
        return self._eager.run(job)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def exchange(self, job: PhaseJob) -> PhaseResult:
        # The machine code is the host's, and adds up replies.
        if job.clock.round.device.type != "cpu" or job.messages.reducer != Mean():
            return self.eager.exchange(job)
        parts = self._parts(job)
        done = self._in_groups(job, stack([job.clock]), parts) if parts else self._at_once(job)
        return done or self.eager.exchange(job)

    def _at_once(self, job: PhaseJob) -> PhaseResult | None:
        """All clients together; None, if that cannot be compiled."""
        state, graph = job.kept, None
        every = list(spans(job.most_steps, UNROLLED))
        cores = self._cores(job, Inputs.of(job, state, every[0]))
        with threads(cores), torch.no_grad():
            for span in every:
                inputs = Inputs.of(job, state, span)
                given = _contiguous(inputs)
                graph = self._graph(job, span, inputs, given)
                if graph is None:
                    return None
                with self.part(COMPILED):
                    returned = graph.run(given)
                    returned = graph.own(returned) if span.closes else returned
                    state = rebuild(graph.form, returned)
        assert graph is not None
        return graph.result(job, state)

    def repeat(self, job: PhaseJob, clocks: Clock) -> PhaseResult | None:
        if job.clock.round.device.type != "cpu" or job.messages.reducer != Mean():
            return None
        parts = self._parts(job)
        together = partial(self._in_groups, parts=parts) if parts else self._in_a_row
        done = together(job, clocks)
        return None if done is None or done.bad else done

    def _in_a_row(self, job: PhaseJob, clocks: Clock) -> PhaseResult | None:
        """What one round returns goes into the next as it is, and is looked at in the end."""
        span = next(spans(job.most_steps, UNROLLED))
        if not span.closes:
            return None
        inputs, count = Inputs.of(job, job.kept, span), len(clocks.round)
        given, places = _contiguous(inputs), Places.of(inputs)
        columns = places.columns(job.draws.source.rounds(count), clocks)
        moving, flags = places.state.stop, list[Tensor]()
        with threads(self._cores(job, inputs)), torch.no_grad():
            graph = self._graph(job, span, inputs, given)
            if graph is None or not _like(graph.form.server.method, job):
                return None
            with self.part(COMPILED):
                for number in range(count):
                    for place, column in columns.items():
                        given[place] = column[number]
                    *moved, finite = graph.run(given)
                    flags += graph.own([finite])
                    if number == 0 and _shapes(moved) != _shapes(given[:moving]):
                        return None  # the next round is of another kind
                    given[:moving] = [v.contiguous() for v in moved]
                    if number or count == 1:
                        continue
                    if graph.chains(moved, [given[place] for place in columns]):
                        rest = {place: column[1:] for place, column in columns.items()}
                        after = graph.run_on(count - 1, given, moving, rest)
                        if after is None:
                            return None
                        given[:moving] = after
                        break
        ended = rebuild(graph.form, [*graph.own(given[:moving]), torch.stack(flags).all()])
        return graph.result(job, ended)

    def _in_groups(self, job: PhaseJob, clocks: Clock, parts: list[Group]) -> PhaseResult | None:
        """Rounds in which clients go through the phase group by group, as many groups at a time as
        there are threads; None, if that cannot be compiled, or the rounds are of other kinds."""
        (span,) = spans(job.most_steps, UNROLLED)
        span = span._replace(of_all=False)
        inputs = Inputs.of(job, job.kept, span)
        own = [inputs.among(group) for group in parts]
        given = [_contiguous(each) for each in own]
        places, server, flags = Places.of(inputs), inputs.server, list[Tensor]()
        before = _shapes(given[0][: places.state.stop])
        count = len(clocks.round)
        batches = job.draws.source.rounds(count)
        with threads(1), torch.no_grad():
            graph = self._graph(job, span, own[0], given[0])
            if graph is None or (count > 1 and not graph.keeps(places)):
                return None
            grouped = GroupRun(graph, places, given, Whole(len(job.cohort)))
            for number, index in enumerate(batches):
                last, clock = number == count - 1, at(clocks, number)
                play = partial(grouped.play, _contiguous(server), clock, index, last)
                with self.part(COMPILED):
                    *average, finite = map(torch.stack, zip(*self._map(play, parts), strict=True))
                whole = rebuild(graph.form.average, average)
                ended = self._server_step(job, ServerInputs(server, whole, finite, clock))
                if ended is None:
                    return None
                server = ended.server
                flags.append(ended.finite)
                moved = [*flat(server), *given[0][places.state]]
                alike = _like(server.method, job) and _shapes(moved) == before
                if not (last or alike):
                    return None  # the next round is of another kind
        kept = rebuild(graph.form.kept, grouped.whole.tensors)
        return graph.result(job, PhaseEnd(server, kept, torch.stack(flags).all()))

    def _server_step(self, job: PhaseJob, closing: ServerInputs) -> PhaseEnd | None:
        """The server's step, after groups."""
        found = _contiguous(closing)
        graph = self._graph(job, SERVER_STEP, closing, found)
        if graph is None:
            return None
        with self.part(COMPILED):
            return rebuild(graph.form, graph.own(graph.run(found)))

    def _parts(self, job: PhaseJob) -> list[Group]:
        """The groups in which clients go through a phase; none, if they are better off together."""
        span = next(spans(job.most_steps, UNROLLED))
        if not span.closes or not span.count:
            return []
        each = Inputs.of(job, job.kept, span).bytes_each
        return groups(len(job.cohort), each, self.threads)

    def _cores(self, job: PhaseJob, inputs: Inputs) -> int:
        """For the operations of a phase of all clients at once."""
        return self.threads if len(job.cohort) * inputs.bytes_each > ALONE else 1

    def _map(
        self, play: Callable[[Group], list[Tensor]], parts: list[Group]
    ) -> Iterator[list[Tensor]]:
        if self.threads == 1:
            return map(play, parts)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "group", initializer=_begin)
        return self._pool.map(play, parts)

    def _graph(
        self, job: PhaseJob, span: Span, inputs: Inputs | ServerInputs, given: list[Tensor]
    ) -> Graph | None:
        shapes = _shapes(given)
        last, rest = self._last.get(span), (job.problem, job.leave, job.unequal, job.messages)
        # Most phases are of the kind of the one before; hooks that are methods are then equal.
        if last is not None and (last.phase, last.shapes, last.rest) == (job.phase, shapes, rest):
            return last.graph
        key = kind_of(job, span, given)
        if key not in self._graphs:
            with self.part("compiling"):
                self._graphs[key] = self._try(job, span, inputs, key)
        graph = self._graphs[key]
        self._last[span] = LastGraph(job.phase, shapes, rest, graph)
        return graph

    def operations(self, job: PhaseJob) -> int:
        """How many there are in the first span of a phase; what is traced for that is kept."""
        span, parts = next(spans(job.most_steps, UNROLLED)), self._parts(job)
        inputs = Inputs.of(job, job.kept, span)
        if parts:
            span, inputs = span._replace(of_all=False), inputs.among(parts[0])
        key = kind_of(job, span, flat(inputs))
        with torch.no_grad():
            self._traced[key] = found = self._trace(job, span, inputs)
        return len(found.module.graph.nodes)

    def _try(
        self, job: PhaseJob, span: Span, inputs: Inputs | ServerInputs, key: tuple
    ) -> Graph | None:
        if len(self._graphs) >= MOST_KINDS:
            if len(self._graphs) == MOST_KINDS:
                warnings.warn(
                    f"this run has more than {MOST_KINDS} kinds of phases (other shapes in each "
                    "round?), so the others are not compiled",
                    stacklevel=2,
                )
            return None
        try:
            return self._make(job, span, inputs, key)
        except ClientError:
            raise
        except Exception as error:
            warnings.warn(not_compiled(error), stacklevel=2)
            return None

    def _make(self, job: PhaseJob, span: Span, inputs: Inputs | ServerInputs, key: tuple) -> Graph:
        found = self._traced.pop(key, None) or self._trace(job, span, inputs)
        given = separate(inputs._replace(rates=found.rates))
        call = code_of(found.module, [given[p] for p in found.used], self._compiler)
        return Graph(call, *found[1:], (job.phase, job.problem))

    def _trace(self, job: PhaseJob, span: Span, inputs: Inputs | ServerInputs) -> Traced:
        return graph_of(job, span, inputs, partial(self._eager.run, job))


class GroupRun(NamedTuple):
    """The groups of a phase, round after round: what clients keep stays with their group, and is
    put together after the last round, while it is in the cache."""

    graph: Graph
    places: Places
    given: list[list[Tensor]]  # the inputs of each group
    whole: Whole

    def play(
        self, server: list[Tensor], clock: Clock, index: Tensor, last: bool, group: Group
    ) -> list[Tensor]:
        """A round of a group: its part of the mean, and whether its numbers are finite."""
        given, places = self.given[group.number], self.places
        given[places.server], given[places.clock] = server, clock
        given[places.index] = index[:, :, group.rows].contiguous()
        *returned, finite = self.graph.own(self.graph.run(given))
        count = len(flat(self.graph.form.average))
        kept = [v.contiguous() for v in returned[count:]]
        if last:
            self.whole.put(group, kept)
        else:
            given[places.state] = kept
        return [*returned[:count], finite]


def _begin() -> None:
    """What torch keeps per thread: each plays a group on one core."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


def _like(server: Any, job: PhaseJob) -> bool:
    return type(server) is type(job.server)


def _contiguous(values: Any) -> list[Tensor]:
    """Machine code is made for rows that lie one behind the other."""
    return [v.contiguous() for v in flat(values)]


def _shapes(values: list[Tensor]) -> Shapes:
    return [v.shape for v in values], [v.dtype for v in values]


def not_compiled(error: Exception) -> str:
    """The warning that a phase cannot be compiled, with the reason."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"a phase cannot be compiled, so it is not, and the run is slower ({reason}): a method or "
        "problem must not take a Python number out of a tensor"
    )
