"""A phase as machine code: the batches, all clients under vmap, their mean and the server's step.

Small problems spend their time in Python and in calls of operations, not in arithmetic. Here a
phase is traced once into a graph of operations, and torch's inductor makes C++ of it. Whatever
changes from round to round is an input of the graph: the time, and with it all schedules, the row
numbers of the batches, the cohort, and the method's own rates. So one graph serves all rounds of a
kind, and all runs that differ in rates only.

Methods and problems know nothing of this: they are pure functions of tensors.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from functools import partial, reduce
from types import FunctionType, MethodType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedminimax.blocks.schedules import Schedule
from fedminimax.data.batches import Source
from fedminimax.engine.device import threads
from fedminimax.engine.inductor import Call, Lending, inductor
from fedminimax.engine.rewrites import SMALL
from fedminimax.engine.trees import flat, rebuilt, tree_map
from fedminimax.engine.vectorised import Span, Vectorised, spans, walk
from fedminimax.engine.work import (
    ClientError,
    Exchanged,
    Executor,
    Result,
    Work,
    bad_field,
    bytes_of,
    weighted,
)
from fedminimax.types import Algorithm, Clock, Phase, Problem, whole

HOOKS = ("broadcast", "receive", "local_step", "send", "aggregate")
MOST_KINDS = 64  # of phases, in a run
UNROLLED = 12  # local steps in one graph: the compiler needs long for many
Compiler = Callable[[GraphModule, list[Tensor]], Call]


class Inputs(NamedTuple):
    """All that a graph depends on, except for its shapes."""

    server: Any
    state: Any  # what the clients kept, or where they are in the middle of a phase
    source: Source
    first: Tensor  # the number of the first step
    clock: Clock
    steps: Tensor
    cohort: Tensor
    weights: Tensor
    rates: tuple[Tensor, ...] = ()

    @staticmethod
    def of(work: Work, state: Any, span: Span) -> Inputs:
        source = work.draws.source
        if len(source.index) > span.count:
            own = source.index[span.first : span.first + span.count]
            source = source._replace(index=own)
        steps, cohort = work.placed(work.steps), work.placed(work.cohort)
        place = whole(span.first), work.clock
        return Inputs(work.server, state, source, *place, steps, cohort, work.weights)


class Ended(NamedTuple):
    """What the graph that closes a phase returns; any other returns where the clients are."""

    server: Any
    kept: Any
    finite: Tensor


class Graph(NamedTuple):
    """A span of a phase, ready to be called."""

    call: Call
    used: tuple[int, ...]  # the inputs that matter; each takes time to hand over
    form: Any  # what it returns is built like this
    bytes_up: int
    bytes_down: int  # to each client
    rates: tuple[Tensor, ...]
    serves: tuple[Phase, Problem]  # keeps alive what the key of this graph names

    def run(self, given: list[Tensor]) -> list[Tensor]:
        """What is returned may be overwritten by the next run; `own` is to be called in time."""
        whole = [*given, *self.rates]
        return self.call([whole[place] for place in self.used])

    def own(self, returned: list[Tensor]) -> list[Tensor]:
        return [v.clone() for v in returned] if isinstance(self.call, Lending) else returned


class Served(NamedTuple):
    """A span, and the graph that served it."""

    phase: Phase
    shapes: tuple[list[torch.Size], list[torch.dtype]]
    rest: tuple
    graph: Graph | None


class Compiled(Executor):
    name = "compiled"
    repeatable = UNROLLED

    def __init__(self, threads: int | None = None, compiler: Compiler | None = None):
        self.threads = threads or 1
        self._compiler = compiler or inductor
        self._eager = Vectorised(self.threads)
        self._graphs: dict[tuple, Graph | None] = {}  # None: what could not be compiled
        self._traced: dict[tuple, Traced] = {}
        self._last: Served | None = None

    @property
    def eager(self) -> Executor:
        self._eager.part = self.part
        return self._eager

    def run(self, work: Work) -> Result:
        return self._eager.run(work)

    def exchange(self, work: Work) -> Exchanged:
        if work.clock.round.device.type != "cpu":
            return self.eager.exchange(work)  # the machine code is the host's
        state = work.kept
        with threads(self.threads), torch.no_grad():
            for span in spans(work.most_steps, UNROLLED):
                inputs = Inputs.of(work, state, span)
                # Machine code is made for rows that lie one behind the other.
                given = [v.contiguous() for v in flat(inputs)]
                graph = self._graph(work, span, inputs, given)
                if graph is None:
                    return self.eager.exchange(work)
                with self.part("compiled: local steps, averaging, server step"):
                    returned = graph.run(given)
                    returned = graph.own(returned) if span.closes else returned
                    state = rebuilt(graph.form, returned)
        ended: Ended = state
        assert graph is not None
        bad = None
        if not bool(ended.finite):
            bad = bad_field(ended.server, ended.kept) or "mean of the replies"
        down = graph.bytes_down * len(work.cohort)
        return Exchanged(ended.server, ended.kept, graph.bytes_up, down, bad)

    def repeat(self, work: Work, clocks: Sequence[Clock]) -> Exchanged | None:
        """What one round returns goes into the next as it is, and is looked at in the end."""
        if work.clock.round.device.type != "cpu":
            return None
        span = next(spans(work.most_steps, UNROLLED))
        if not span.closes:
            return None
        inputs = Inputs.of(work, work.kept, span)
        given = [v.contiguous() for v in flat(inputs)]
        moving = len(flat((work.server, work.kept)))
        index = moving + len(inputs.source.columns)
        times = len(given) - len(flat((inputs.clock, *inputs[inputs._fields.index("steps") :])))
        rows = work.draws.source.index
        batches = rows.split(span.count) if len(rows) > 1 else (rows,) * len(clocks)
        flags: list[Tensor] = []
        with threads(self.threads), torch.no_grad():
            graph = self._graph(work, span, inputs, given)
            if graph is None or type(graph.form.server) is not type(work.server):
                return None
            with self.part("compiled: local steps, averaging, server step"):
                for clock, own in zip(clocks, batches, strict=True):
                    given[index] = own
                    given[times : times + len(clock)] = clock
                    *moved, finite = graph.run(given)
                    flags += graph.own([finite])
                    if len(flags) == 1 and _shapes(moved) != _shapes(given[:moving]):
                        return None  # the next round is of another kind
                    given[:moving] = [v.contiguous() for v in moved]
        if not bool(torch.stack(flags).all()):
            return None
        ended: Ended = rebuilt(graph.form, [*graph.own(given[:moving]), flags[-1]])
        down = graph.bytes_down * len(work.cohort)
        return Exchanged(ended.server, ended.kept, graph.bytes_up, down, None)

    def _graph(self, work: Work, span: Span, inputs: Inputs, given: list[Tensor]) -> Graph | None:
        shapes = _shapes(given)
        last, rest = self._last, (work.problem, work.leave, span, work.unequal)
        # Most phases are of the kind of the one before; hooks that are methods are then equal.
        if last is not None and (last.phase, last.shapes, last.rest) == (work.phase, shapes, rest):
            return last.graph
        key = _kind(work, span, given)
        if key not in self._graphs:
            with self.part("compiling"):
                self._graphs[key] = self._tried(work, span, inputs, key)
        graph = self._graphs[key]
        self._last = Served(work.phase, shapes, rest, graph)
        return graph

    def operations(self, work: Work) -> int:
        """How many there are in the first span of a phase; what is traced for that is kept."""
        span = next(spans(work.most_steps, UNROLLED))
        inputs = Inputs.of(work, work.kept, span)
        key = _kind(work, span, flat(inputs))
        with torch.no_grad():
            self._traced[key] = traced = self._trace(work, span, inputs)
        return len(traced.module.graph.nodes)

    def _tried(self, work: Work, span: Span, inputs: Inputs, key: tuple) -> Graph | None:
        if len(self._graphs) >= MOST_KINDS:
            if len(self._graphs) == MOST_KINDS:
                warnings.warn(
                    f"this run has more than {MOST_KINDS} kinds of phases (other shapes in each "
                    "round?), so the others are not compiled",
                    stacklevel=2,
                )
            return None
        try:
            return self._made(work, span, inputs, key)
        except ClientError:
            raise
        except Exception as error:
            warnings.warn(not_compiled(error), stacklevel=2)
            return None

    def _made(self, work: Work, span: Span, inputs: Inputs, key: tuple) -> Graph:
        traced = self._traced.pop(key, None) or self._trace(work, span, inputs)
        given = _apart(inputs._replace(rates=traced.rates))
        call = compiled(traced.module, [given[p] for p in traced.used], self._compiler)
        return Graph(call, *traced[1:], (work.phase, work.problem))

    def _trace(self, work: Work, span: Span, inputs: Inputs) -> Traced:
        """The span's graph, perhaps as another run in this process has traced it."""
        rates = _rates(work)
        for given in (rates, ()):
            key = _known(work, span, flat(inputs), bool(given))
            if key is not None and key in _TRACED:
                return _TRACED[key]._replace(rates=given)
        try:
            traced = trace(work, span, inputs._replace(rates=rates))
        except Exception:
            # A rate that decides which way the method goes must stay a number; and if that was not
            # the reason, the clients' own work says where the fault is.
            self._eager.run(work)
            traced = trace(work, span, inputs)
        key = _known(work, span, flat(inputs), bool(traced.rates))
        if key is not None:
            _bounded(_TRACED, key, traced)
        return traced


def _shapes(values: list[Tensor]) -> tuple[list[torch.Size], list[torch.dtype]]:
    return [v.shape for v in values], [v.dtype for v in values]


def not_compiled(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"a phase cannot be compiled, so it is not, and the run is slower ({reason}): a method or "
        "problem must not take a Python number out of a tensor"
    )


class Traced(NamedTuple):
    module: GraphModule
    used: tuple[int, ...]
    form: Any
    bytes_up: int
    bytes_down: int
    rates: tuple[Tensor, ...]


def trace(work: Work, span: Span, inputs: Inputs) -> Traced:
    """The operations of a span, as a graph."""
    form: Any = None
    bytes_up = bytes_down = 0

    def operations(*tensors: Tensor) -> list[Tensor]:
        nonlocal form, bytes_up, bytes_down
        given: Inputs = rebuilt(inputs, list(tensors))
        phase = _with_rates(work.phase, given.rates)
        own = replace(work, phase=phase, server=given.server, clock=given.clock)
        depth = work.problem.depth
        draws = tuple(given.source.stacked(number, depth) for number in range(span.count))
        form = walk(own, given.state, draws, span, given.first, given.steps, given.cohort)
        if span.closes:
            bytes_up, bytes_down = bytes_of(form.up), bytes_of(own.down)
            average = _mean(form.up, given.weights)
            server = phase.aggregate(own.problem, own.server, average, own.clock)
            form = Ended(server, form.kept, _finite(average, server, form.kept, form.up))
        return flat(form)

    # What writes into a tensor becomes an operation that makes a new one.
    module = make_fx(functionalize(operations))(*_apart(inputs))
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


def _mean(up: Any, weights: Tensor) -> Any:
    """`work.mean`, of small fields in operations that become one with those around them. Of large
    ones they would compute each client's last step again, a few numbers of every row at a time."""

    def average(field: Tensor) -> Tensor:
        if field.nbytes > SMALL:
            return weighted(field, weights)
        return (weights.to(field).reshape(-1, *([1] * (field.dim() - 1))) * field).sum(0)

    return tree_map(average, up)


def _apart(inputs: Inputs) -> list[Tensor]:
    """Each input as a tensor of its own: what is one object would be traced as one input, also
    where a later round has two."""
    return [v.contiguous().detach() for v in flat(inputs)]


def _finite(average: Any, server: Any, kept: Any, up: Any) -> Tensor:
    """What is kept and also sent has a part in the average, which tells of it."""
    sent = {id(v) for v in flat(up)}
    values = {id(v): v for v in flat((average, server, kept)) if id(v) not in sent}.values()
    checked = [torch.isfinite(v).all() for v in values if v.is_floating_point() and v.numel()]
    return reduce(torch.logical_and, checked)


_TRACED: dict[tuple, Traced] = {}
_MADE: dict[tuple, Callable] = {}
MOST_HELD = 100  # graphs of either kind, in a process


def _bounded(held: dict, key: tuple, value: Any) -> None:
    if len(held) >= MOST_HELD:
        del held[next(iter(held))]
    held[key] = value


def compiled(module: GraphModule, given: list[Tensor], compiler: Compiler) -> Callable:
    """What the compiler makes of a graph; of equal graphs, once in a process."""
    digest = hashlib.blake2s(module.code.encode())
    digest.update(repr([(v.shape, v.stride(), v.dtype) for v in given]).encode())
    held = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for name, value in sorted(held.items()):  # what the problem and the method hold
        digest.update(f"{name} {_plain(value)}".encode())
    key = (digest.hexdigest(), compiler, torch.get_num_threads())
    if key not in _MADE:
        _bounded(_MADE, key, compiler(module, given))
    return _MADE[key]


class _NotPlainError(Exception):
    pass


def _known(work: Work, span: Span, given: list[Tensor], lifted: bool) -> tuple | None:
    """Equal for spans of different runs that trace alike; None where that cannot be told: a problem
    may hold functions or a network."""
    owner = _owner(work.phase)
    # What a class of the user's depends on beside its attributes may change in a process.
    ours = all(type(v).__module__.startswith("fedminimax.") for v in (work.problem, owner))
    if owner is None or not ours:
        return None
    try:
        problem = tuple((name, _plain(value)) for name, value in sorted(vars(work.problem).items()))
        numbers = dict(_numbers(owner)) if lifted else {}
        values = [(field.name, getattr(owner, field.name)) for field in fields(owner)]
        method = tuple((name, "" if name in numbers else _plain(v)) for name, v in values)
    except _NotPlainError:
        return None
    hooks = tuple(getattr(work.phase, name).__func__ for name in HOOKS)
    shapes = tuple((v.shape, v.dtype) for v in given)
    kinds = (type(work.problem), type(owner), type(work.server), type(work.kept))
    return (kinds, problem, method, lifted, hooks, work.leave, span[1:], work.unequal, shapes)


def _plain(value: Any) -> Hashable:
    """The value, or what stands for it, if it is nothing but data."""
    if isinstance(value, Tensor):
        content = hashlib.blake2s(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
        return str(value.dtype), tuple(value.shape), content
    if isinstance(value, Schedule):
        return type(value), *(_plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple | list):
        return type(value), *map(_plain, value)
    if isinstance(value, str | int | float | NoneType):
        return type(value), value
    raise _NotPlainError


def _kind(work: Work, span: Span, given: list[Tensor]) -> tuple:
    """Equal for spans of which one graph can serve both."""
    hooks = tuple(_same(getattr(work.phase, name)) for name in HOOKS)
    shapes = tuple((v.shape, v.dtype) for v in given)
    return id(work.problem), hooks, work.leave, span[1:], work.unequal, shapes


def _same(value: Any) -> Hashable:
    """Equal for hooks that do the same. Functions are made anew for each round; their instructions
    and what they hold are not."""
    if isinstance(value, MethodType):
        return value.__func__, _same(value.__self__)
    if isinstance(value, partial):
        named = tuple(sorted(value.keywords.items()))
        return _same(value.func), _same(value.args), _same(named)
    if isinstance(value, FunctionType):
        held = tuple(cell.cell_contents for cell in value.__closure__ or ())
        named = tuple(sorted((value.__kwdefaults__ or {}).items()))
        return value.__code__, _same(held), _same(value.__defaults__), _same(named)
    if isinstance(value, tuple):
        return type(value), *map(_same, value)
    return value if isinstance(value, str | int | float | NoneType) else id(value)


def _rates(work: Work) -> tuple[Tensor, ...]:
    """The numbers of a method that are not whole: rates, weights, radii. They have the precision of
    the run, so that a number of the method's state keeps its own."""
    owner = _owner(work.phase)
    dtype = next((v.dtype for v in flat(work.server) if v.is_floating_point()), torch.float64)
    numbers = () if owner is None else _numbers(owner)
    return tuple(torch.tensor(value, dtype=dtype) for _, value in numbers)


def _with_rates(phase: Phase, rates: tuple[Tensor, ...]) -> Phase:
    """The same phase, of a method whose numbers are these tensors."""
    if not rates:
        return phase
    owner = _owner(phase)
    assert owner is not None
    same = copy.copy(owner)
    for (name, _), rate in zip(_numbers(owner), rates, strict=True):
        object.__setattr__(same, name, rate)
    return replace(phase, **{n: getattr(phase, n).__func__.__get__(same) for n in HOOKS})


def _owner(phase: Phase) -> Algorithm | None:
    """The one method that all hooks are bound to, if there is one."""
    first, *others = (getattr(getattr(phase, name), "__self__", None) for name in HOOKS)
    return first if isinstance(first, Algorithm) and all(o is first for o in others) else None


def _numbers(algorithm: Algorithm) -> list[tuple[str, float]]:
    values = ((field.name, getattr(algorithm, field.name)) for field in fields(algorithm))
    # A method may leave out what has a rate of 0.
    return [(name, value) for name, value in values if isinstance(value, float) and value]
