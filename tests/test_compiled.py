"""Every row as one graph per round: all clients under vmap, their mean and the server's step.

What changes from round to round (round, stage, iteration, and with them the rates) is in tensors,
so a graph is compiled once for each kind of phase and then serves the whole run.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rows import Row, federation_of
from table import ROWS
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from fedminimax.engine.debug import Debug
from fedminimax.engine.round import Federation, play_round
from fedminimax.engine.vectorised import _CLOCK, _differing
from fedminimax.engine.work import Result, Work, at_step, mean
from fedminimax.types import Phase

_LAST_CLOCK = _differing("steps", "client", "step", "iteration")
ROUNDS = 5  # at least two of each kind in the rows whose stages have two rounds


class Limited(Debug):
    """The reference, with as many local steps as the graph."""

    def __init__(self, steps: int):
        self.steps = steps

    def run(self, work: Work) -> Result:
        return super().run(work.limited(self.steps))


class Compiled(Debug):
    """An executor that compiles each kind of phase that it meets, once, and has the graph do all.

    The engine's own loop drives it: `whole` lends its hooks to the graph, and gives the engine a
    phase whose aggregate is what the graph has computed.
    """

    server: Any
    phase: Phase

    def __init__(self, backend: str, steps: int, federation: Federation):
        self.backend, self.steps, self.federation = backend, steps, federation
        self.graphs, self.functions = 0, {}

    def whole(self, phase: Phase) -> Phase:
        def broadcast(server: Any, clock: Any) -> Any:
            self.server, self.phase = server, phase
            return phase.broadcast(server, clock)

        return replace(phase, broadcast=broadcast, aggregate=lambda *_: self.server)

    def run(self, work: Work) -> Result:
        work = work.limited(self.steps)
        unequal = bool((work.steps != work.most_steps).any())
        hooks = (self.phase.receive, self.phase.local_step, self.phase.send, self.phase.aggregate)
        # The lengths of inner values are known to the server from the first replies on.
        shapes = tuple(v.shape for v in tree_leaves(self.server))
        kind = (*(hook.__name__ for hook in hooks), work.leave, work.most_steps, unequal, shapes)
        if kind not in self.functions:
            self.functions[kind] = self.compile(work, unequal)
        draws = [work.draws.stacked(n, work.problem.depth) for n in range(work.most_steps)]
        weights = self.federation.weights_of(self.phase, work.cohort)
        steps, cohort = torch.from_numpy(work.steps), torch.from_numpy(work.cohort)
        result, self.server = self.functions[kind](
            self.server, work.kept, draws, work.clock, steps, cohort, weights
        )
        return result

    def compile(self, work: Work, unequal: bool) -> Callable:
        problem, phase, most = work.problem, self.phase, work.most_steps
        # Made here: inside a graph its cache would be traced, with a warning.
        leave, kept_after = work.leave._fields, work.leave

        def graph(server, kept, draws, clock, steps, cohort, weights):
            down = phase.broadcast(server, clock)
            own = clock._replace(steps=steps.to(torch.float64), client=cohort)

            def begin(kept: Any, clock: Any) -> Any:
                return phase.receive(down, kept, clock)

            def step(client: Any, draw: Any, clock: Any) -> Any:
                return phase.local_step(problem, down, client, draw, clock)

            def finish(client: Any, clock: Any) -> Any:
                up, client = phase.send(down, client, clock)
                return Result(up, kept_after(*(getattr(client, field) for field in leave)))

            client = vmap(begin, (0, _CLOCK))(kept, own)
            for number in range(most):
                moved = vmap(step, (0, 0, _CLOCK))(client, draws[number], at_step(own, number))
                client = where(number < steps, moved, client) if unequal else moved
            result = vmap(finish, (0, _LAST_CLOCK))(client, at_step(own, steps))
            new = phase.aggregate(problem, server, mean(result.up, weights), clock)
            return result, new

        # Dynamo keeps graphs by code object; a copy of its own makes a second graph an error.
        code = graph.__code__.replace(co_name=f"graph_{len(self.functions)}")
        own = types.FunctionType(code, graph.__globals__, code.co_name, None, graph.__closure__)
        return torch.compile(own, fullgraph=True, backend=self.counting, dynamic=False)

    def counting(self, module: Any, inputs: Any) -> Any:
        made = torch._dynamo.lookup_backend(self.backend)(module, inputs)
        self.graphs += 1  # afterwards: a backend may ask for another trace before it is done
        return made


def where(active: Tensor, new: Any, old: Any) -> Any:
    """A client that has taken all its steps stays as it was."""

    def choose(n: Tensor, o: Tensor) -> Tensor:
        return torch.where(active.reshape(-1, *([1] * (n.dim() - 1))), n, o)

    return tree_map(choose, new, old)


def compare(row: Row, backend: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run compiled and the run client by client; any second compilation raises.

    The graph unrolls its local steps, so `steps` limits them.
    """
    torch._dynamo.reset()
    federation, start, reference = federation_of(row.problem(), row.algorithm, row.clients())
    expected = start
    for _ in range(ROUNDS):
        expected = play_round(federation, expected, reference, Limited(steps))

    compiled = Compiled(backend, steps, federation)
    method, plain = type(row.algorithm), type(row.algorithm).phases
    monkeypatch.setattr(method, "phases", lambda s, r: tuple(map(compiled.whole, plain(s, r))))
    federation, state, store = federation_of(row.problem(), row.algorithm, row.clients())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(ROUNDS):
            state = play_round(federation, state, store, compiled)

    kinds = sum(len(row.algorithm.phases(round)) for round in range(ROUNDS))
    assert compiled.graphs == len(compiled.functions) < kinds
    close(state.server, expected.server)
    assert not torch.equal(state.server.x, start.server.x)
    close(store.states, reference.states)


def close(found: Any, expected: Any) -> None:
    (a, form), (b, other) = tree_flatten(found), tree_flatten(expected)
    assert form == other
    for number, pair in enumerate(zip(a, b, strict=True)):
        assert torch.allclose(*pair, rtol=1e-10, atol=1e-13), number


NEAR = [row for row in ROWS if row.distance is None]
# Compiling takes half a minute a row: the first row of each method stands for it.
FIRST = list({type(row.algorithm): row for row in reversed(NEAR)}.values())[::-1]


@pytest.mark.parametrize(
    "row",
    [row if row in FIRST else pytest.param(row, marks=pytest.mark.slow) for row in NEAR],
    ids=lambda row: row.name,
)
def test_a_round_is_one_graph(row, monkeypatch):
    compare(row, "eager", 1, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*_prims_common.check:FutureWarning")  # likewise
@pytest.mark.parametrize("row", FIRST, ids=lambda row: row.name)
def test_a_round_is_one_compiled_graph(row, monkeypatch):
    compare(row, "inductor", 2, monkeypatch)
