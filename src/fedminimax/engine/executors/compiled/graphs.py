"""Phases as graphs of operations: the batches, all clients under vmap or a group of them, their
mean and the server's step, traced once.

Whatever changes from round to round is an input of the graph: the time, and with it all schedules,
the row numbers of the batches, the cohort, and the method's own rates. So one graph serves all
rounds of a kind, and all runs that differ in rates only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedminimax.blocks.trees import flat, rebuild, tree_map
from fedminimax.data.batches import Source
from fedminimax.engine.executors.compiled.chained import play
from fedminimax.engine.executors.compiled.groups import Group
from fedminimax.engine.executors.compiled.inductor import Call, Code
from fedminimax.engine.executors.compiled.rates import with_rates
from fedminimax.engine.executors.compiled.rewrites import SMALL
from fedminimax.engine.executors.vectorised import Span, walk
from fedminimax.engine.job import PhaseJob, PhaseResult, bad_field
from fedminimax.messages.stage import MessageState, bytes_of, weighted_mean
from fedminimax.types import Clock, Phase, Problem, integer

Compiler = Callable[[GraphModule, list[Tensor]], Call]


class AtServer(NamedTuple):
    """What is at the server."""

    method: Any
    held: MessageState  # for the stages of messages


class Inputs(NamedTuple):
    """All that a graph depends on, except for its shapes."""

    server: AtServer
    state: Any  # what the clients kept, or where they are in the middle of a phase
    source: Source
    first: Tensor  # the number of the first step
    clock: Clock
    steps: Tensor
    cohort: Tensor
    weights: Tensor
    rates: tuple[Tensor, ...] = ()

    @staticmethod
    def of(job: PhaseJob, state: Any, span: Span) -> Inputs:
        source = job.draws.source
        if len(source.index) > span.count:
            own = source.index[span.first : span.first + span.count]
            source = source._replace(index=own)
        steps, cohort = job.to_device(job.steps), job.to_device(job.cohort)
        place = integer(span.first), job.clock
        server = AtServer(job.server, job.held)
        return Inputs(server, state, source, *place, steps, cohort, job.weights)

    def among(self, group: Group) -> Inputs:
        """Those of a group; a client that is also in the group before has no weight in it."""
        own = group.rows
        source = self.source._replace(
            index=self.source.index[:, :, own], filled=self.source.filled[own]
        )
        weights = self.weights[own]
        if group.again:
            weights = weights.clone()
            weights[: group.again] = 0
        return self._replace(
            state=tree_map(lambda field: field[own], self.state),
            source=source,
            steps=self.steps[own],
            cohort=self.cohort[own],
            weights=weights,
        )

    @property
    def bytes_each(self) -> int:
        """About what a client needs in a phase: its rows, what it keeps, and vectors like those of
        the server: its own, a gradient, and what becomes of the two."""
        source, count = self.source, len(self.cohort)
        rows = len(source.index) * source.numbers_per_step * source.columns[0].element_size()
        return (rows + bytes_of(self.state)) // count + 3 * bytes_of(self.server)


class Places(NamedTuple):
    """Where things are among the flat inputs."""

    server: slice
    state: slice
    index: int  # type: ignore[reportIncompatibleMethodOverride]  # nobody searches in this tuple
    clock: slice

    @staticmethod
    def of(inputs: Inputs) -> Places:
        server, state = len(flat(inputs.server)), len(flat(inputs.state))
        index = server + state + len(inputs.source.columns)
        clock = len(flat(inputs[: inputs._fields.index("clock")]))
        ends = server + state, clock + len(inputs.clock)
        return Places(slice(server), slice(server, ends[0]), index, slice(clock, ends[1]))

    def columns(self, batches: Tensor, clocks: Clock) -> dict[int, Tensor]:
        """What each round has its own row of: its batches, and its time."""
        places = self.index, *range(self.clock.start, self.clock.stop)
        return dict(zip(places, (batches, *clocks), strict=True))


class ServerInputs(NamedTuple):
    """All that the server's step depends on, after groups of clients."""

    server: AtServer
    averages: Any  # each group's part of the mean, stacked
    finite: Tensor  # likewise
    clock: Clock
    rates: tuple[Tensor, ...] = ()


SERVER_STEP = Span(0, 0, opens=False, closes=True, of_all=False)  # no step of a client's


class GroupResult(NamedTuple):
    """What the graph of a group returns."""

    average: Any  # its part of the mean
    kept: Any
    finite: Tensor


class PhaseEnd(NamedTuple):
    """What the graph that closes a phase returns; any other returns where the clients are."""

    server: AtServer
    kept: Any
    finite: Tensor


class Graph(NamedTuple):
    """A span of a phase, ready to be called."""

    call: Call
    used: tuple[int, ...]  # the inputs that matter; each takes time to hand over
    form: Any  # what it returns is built like this
    bytes_up: int  # from each client
    bytes_down: int
    rates: tuple[Tensor, ...]
    serves: tuple[Phase, Problem]  # keeps alive what the key of this graph names

    def run(self, given: list[Tensor]) -> list[Tensor]:
        """What is returned may be overwritten by the next run; `own` is to be called in time."""
        whole = [*given, *self.rates]
        return self.call([whole[place] for place in self.used])

    def result(self, job: PhaseJob, ended: PhaseEnd) -> PhaseResult:
        """What a phase leaves behind that ends like this."""
        bad = None
        if not bool(ended.finite):
            bad = bad_field(ended.server, ended.kept) or "mean of the replies"
        up, down = (len(job.cohort) * each for each in (self.bytes_up, self.bytes_down))
        return PhaseResult(
            server=ended.server.method,
            kept=ended.kept,
            bytes_up=up,
            bytes_down=down,
            bad=bad,
            held=ended.server.held,
        )

    def own(self, returned: list[Tensor]) -> list[Tensor]:
        return [v.clone() for v in returned] if self.lends else returned

    def keeps(self, places: Places) -> bool:
        """Do clients keep as many tensors as they had?"""
        return len(flat(self.form.kept)) == places.state.stop - places.state.start

    @property
    def lends(self) -> bool:
        return isinstance(self.call, Code) and self.call.lends

    def chains(self, returned: list[Tensor], own: list[Tensor]) -> bool:
        """Can `run_on` follow a run that returned such tensors? What is one of the inputs that each
        round has its own of is overwritten by the next one's."""
        there = isinstance(self.call, Code) and self.call.address is not None
        places = {v.untyped_storage().data_ptr() for v in own if v.numel()}
        return there and all(
            v.is_contiguous() and v.untyped_storage().data_ptr() not in places for v in returned
        )

    def run_on(
        self, count: int, given: list[Tensor], moving: int, columns: dict[int, Tensor]
    ) -> list[Tensor] | None:
        """So many further runs without Python between them, each with its own rows of the columns.
        The first inputs, up to `moving`, are what the run before returned; returned is what the
        last one returns for them. None, if a number is not finite, or the code fails."""
        assert isinstance(self.call, Code)
        assert self.call.address is not None
        whole, at = [*given, *self.rates], {place: i for i, place in enumerate(self.used)}
        own = {at[place]: rows for place, rows in columns.items() if place in at}
        handed = [(at.get(place, -1), given[place]) for place in range(moving)]
        inputs = [whole[place] for place in self.used]
        return play(self.call.address, count, inputs, own, handed)


class Traced(NamedTuple):
    module: GraphModule
    used: tuple[int, ...]
    form: Any
    bytes_up: int
    bytes_down: int
    rates: tuple[Tensor, ...]


def trace(job: PhaseJob, span: Span, inputs: Inputs | ServerInputs) -> Traced:
    """The operations of a span, as a graph."""
    form: Any = None
    bytes_up = bytes_down = 0

    def operations(*tensors: Tensor) -> list[Tensor]:
        nonlocal form, bytes_up, bytes_down
        given: Inputs | ServerInputs = rebuild(inputs, list(tensors))
        phase = with_rates(job.phase, given.rates)
        server, held = given.server
        own = replace(job, phase=phase, server=server, held=held, clock=given.clock)
        if isinstance(given, ServerInputs):
            arrived = tree_map(lambda parts: parts.sum(0), given.averages)
            new, finite = _server_step(own, arrived)
            form = PhaseEnd(new, (), finite & given.finite.all())
            return _rows(form)
        depth = job.problem.depth
        draws = tuple(given.source.stack(number, depth) for number in range(span.count))
        form = walk(own, given.state, draws, span, given.first, given.steps, given.cohort)
        if span.closes:
            arrived, sent = _mean(form.up, given.weights), form.up
            bytes_up, bytes_down = own.messages.bytes(arrived), bytes_of(own.down)
            if not span.of_all:
                form = GroupResult(arrived, form.kept, _finite(arrived, form.kept, known=sent))
                return _rows(form)
            new, finite = _server_step(own, arrived, form.kept, known=sent)
            form = PhaseEnd(new, form.kept, finite)
        return _rows(form)

    # What writes into a tensor becomes an operation that makes a new one.
    module = make_fx(functionalize(operations))(*separate(inputs))
    module.graph.eliminate_dead_code()
    places = enumerate(node for node in module.graph.nodes if node.op == "placeholder")
    used, idle = [], []
    for place, node in places:
        (used if node.users else idle).append((place, node))
    for _, node in idle:
        module.graph.erase_node(node)
    module.recompile()
    form = tree_map(lambda tensor: torch.empty(0), form)  # only its structure is needed
    return Traced(module, tuple(p for p, _ in used), form, bytes_up, bytes_down, inputs.rates)


def _server_step(
    job: PhaseJob, arrived: Any, *values: Any, known: Any = ()
) -> tuple[AtServer, Tensor]:
    """The server's part of a phase, and whether all is finite."""
    average, held = job.messages.at_server(job.held, job.down, arrived, job.clock)
    server = job.phase.aggregate(job.problem, job.server, average, job.clock)
    return AtServer(server, held), _finite(arrived, average, server, *values, known=known)


def _mean(up: Any, weights: Tensor) -> Any:
    """The weighted mean, of small fields in operations that become one with those around them. Of
    large ones they would compute each client's last step again, a few numbers of every row at a
    time."""

    def average(field: Tensor) -> Tensor:
        if field.nbytes > SMALL:
            return weighted_mean(field, weights)
        return (weights.to(field).reshape(-1, *([1] * (field.dim() - 1))) * field).sum(0)

    return tree_map(average, up)


def _rows(form: Any) -> list[Tensor]:
    """Numbers that lie one behind the other, as the next round wants them."""
    return [v.contiguous() for v in flat(form)]


def separate(inputs: Inputs | ServerInputs) -> list[Tensor]:
    """Each input as a tensor of its own: what is one object would be traced as one input, also
    where a later round has two."""
    return [v.contiguous().detach() for v in flat(inputs)]


def _finite(*values: Any, known: Any = ()) -> Tensor:
    """What is kept and also sent has a part in the average, which tells of it."""
    sent = {id(v) for v in flat(known)}
    looked = {id(v): v for v in flat(values) if id(v) not in sent}.values()
    checked = [torch.isfinite(v).all() for v in looked if v.is_floating_point() and v.numel()]
    return reduce(torch.logical_and, checked) if checked else torch.ones((), dtype=torch.bool)
