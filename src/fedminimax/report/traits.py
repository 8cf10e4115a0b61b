"""What a method solves and costs, found out by playing two rounds of it on small problems.

Nothing is declared: a table of costs that is kept by hand would sooner or later be wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from fedminimax.blocks.trees import leaves
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.vectorised import Vectorised
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.state.store import Store
from fedminimax.problems.weighted_cross_entropy import WeightedCrossEntropy
from fedminimax.types import Algorithm, Batch, Cost, Point, Problem

DEPTH = 3  # of the composition that methods for any depth are played on


class Traits(NamedTuple):
    solves: str
    gradients: str  # per local step, and what a round needs besides
    exchanges: int  # per round
    up: str  # floats per client and round
    down: str
    kept: str  # floats that a client keeps from round to round
    partial: bool
    reference: str


class Sizes(NamedTuple):
    """The lengths of x, of the inner values of a composition, and of y; and how many clients."""

    x: int
    inner: tuple[int, ...]
    y: int
    clients: int

    def terms(self) -> dict[str, int]:
        """What a number of floats may be made of."""
        lengths = (self.x, *self.inner)
        names = [f"d{k}" for k in range(len(lengths))] if self.inner else ["dx"]
        terms = dict(zip(names, lengths, strict=True))
        # Jacobians: of level k, and of the last level, whose value is a number
        pairs = zip(itertools.pairwise(names), itertools.pairwise(lengths), strict=True)
        terms |= {f"{a} {b}": m * n for (a, b), (m, n) in pairs}
        return terms | {"dy": self.y, "N": self.clients, "": 1}


class Probe(Problem):
    """A composition of the given sizes in which every level is a mean of tangents."""

    def __init__(self, sizes: Sizes):
        self.sizes, self.depth = sizes, len(sizes.inner) + 1

    def start(self) -> Point:
        return Point(torch.full((self.sizes.x,), 0.1), torch.full((self.sizes.y,), 0.1))

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        one = value.new_ones(self.sizes.inner[level - 1])
        return torch.tanh(value.sum() * batch.mean(batch.features)) * one

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        along = batch.mean(batch.features) * value.sum() * y.sum()
        return value.square().sum() / 2 + along - y.square().sum() / 2

    def dual_statistics(self, x: Tensor, batch: Batch) -> Tensor:
        return x[:1]

    def dual_from(self, mean: Tensor) -> Tensor:
        return mean.expand(self.sizes.y)


@cache
def traits(kind: type[Algorithm]) -> Traits:
    """Those of a method with its default settings, in an ordinary round."""
    method = kind()
    sizes = _sizes(method)
    method = method.for_problem(_posed(method, sizes[0])[0])
    probes = [_second_round(method, chosen) for chosen in sizes]
    lengths = [played.sizes for played in probes]
    return Traits(
        solves(method),
        gradients(method),
        probes[0].cost.exchanges,
        _formula(lengths, [played.cost.bytes_up // 8 for played in probes], method.auxiliary),
        _formula(lengths, [played.cost.bytes_down // 8 for played in probes], method.auxiliary),
        _formula(lengths, [played.kept for played in probes], False),
        method.partial,
        method.reference,
    )


def solves(method: Algorithm) -> str:
    if method.solves:
        return method.solves
    problem = "minimax" if method.maximises else "minimisation"
    return problem if method.levels == 1 else f"compositional {problem}"


def gradients(method: Algorithm) -> str:
    """Gradient evaluations of a local step; then those that a round needs besides."""
    phases = method.phases(1)
    besides = {"": 0, " on all rows": 0, " on the server's rows": 0}
    for p in phases:
        own, whole = p.cohort == "auxiliary", p.data == "whole"
        kind = " on the server's rows" if own else " on all rows" if whole else ""
        besides[kind] += p.gradients * (p.steps or 0)
    step = sum(p.gradients for p in phases if p.steps is None)
    if not any(p.steps is None for p in phases):  # the exchanges divide the local steps
        step, besides[""] = besides[""] / method.steps(1, 0), 0
    more = [f" + {count}{kind}" for kind, count in besides.items() if count]
    return f"{step:g}" + "".join(more) + " a round" * bool(more)


# fmt: off
HEADINGS = (
    "method", "solves", "gradients per step", "exchanges",
    "floats up", "floats down", "floats kept", "partial", "reference",
)
# fmt: on
SHORT = ("method", "solves", "exchanges", "partial")  # what a terminal is wide enough for
LEGEND = (
    "With default settings in an ordinary round; floats are per client, d0 = dx is the length of "
    "x, d1, d2 those of a composition's inner values (here of three levels), dy that of y, N the "
    "number of clients"
)


def cells(name: str, kind: type[Algorithm]) -> tuple[str, ...]:
    """A method's line in a table with the HEADINGS."""
    *found, partial, reference = traits(kind)
    return (name, *map(str, found), "yes" if partial else "no", reference)


def traits_table(methods: dict[str, type[Algorithm]]) -> Table:
    """What tells methods apart, in at most 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in SHORT:
        table.add_column(heading, no_wrap=heading == "method", max_width=38)
    for name, kind in methods.items():
        found = dict(zip(HEADINGS, cells(name, kind), strict=True))
        table.add_row(*(found[heading] for heading in SHORT))
    return table


def trait_table(name: str, kind: type[Algorithm]) -> Table:
    """All that is known of one method, a line each."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, caption=f"\n{LEGEND}.")
    table.caption_justify = "left"
    for heading, cell in zip(HEADINGS[1:], cells(name, kind)[1:], strict=True):
        table.add_row(heading, cell)
    return table


def _sizes(method: Algorithm) -> list[Sizes]:
    """As many different ones as there are terms, and one more to see that the formula holds."""
    random = np.random.default_rng(0)
    levels = 0 if method.levels == 1 else (method.levels or DEPTH) - 1
    terms = len(Sizes(1, (1,) * levels, 1, 1).terms()) * (2 if method.auxiliary else 1)
    found = []
    for _ in range(terms + 1):
        x, *inner = (int(n) for n in random.integers(3, 40, 1 + levels))
        y = int(random.integers(2, 40)) if method.maximises or method.auxiliary else 0
        # the weights of a layer with a logit for each of y classes
        x = x * y if method.auxiliary else x
        found.append(Sizes(x, tuple(inner), y, int(random.integers(2, 12))))
    return found


def _posed(method: Algorithm, sizes: Sizes) -> tuple[Problem, Clients]:
    """A problem of these sizes that the method accepts, and clients with four rows each."""
    random = np.random.default_rng(1)
    labels = np.arange(4.0) % 2
    if not method.auxiliary:
        rows = [(random.random(4), labels) for _ in range(sizes.clients)]
        return Probe(sizes), Clients(rows, batch_size=2)
    width = sizes.x // sizes.y
    rows = [(random.random((4, width)), labels) for _ in range(sizes.clients)]
    module = nn.Linear(width, sizes.y, bias=False)
    return WeightedCrossEntropy(module, sizes.y), Clients(rows, batch_size=2, auxiliary=rows[0])


class Played(NamedTuple):
    sizes: Sizes
    cost: Cost
    kept: int  # floats at all clients, between this round and the next


def _second_round(method: Algorithm, sizes: Sizes) -> Played:
    """What the second round costs: the first may have less to send."""
    problem, clients = _posed(method, sizes)
    clients = clients.to(torch.float64)
    weights = clients.weight_vector("uniform")
    federation = Federation.of(problem, method, clients, weights, 0, len(clients))
    start = Point(*(v.double() for v in problem.start()))
    state = State(0, 0, federation.algorithm.init_server(problem, start), Cost())
    store, executor = Store(federation.algorithm.keep), Vectorised(1)
    state = play_round(federation, state, store, executor)
    after = play_round(federation, state, store, executor).cost
    cost = Cost(*(b - a for a, b in zip(state.cost, after, strict=True)))
    kept = (tensor for state in store.states.values() for _, tensor in leaves(state))
    return Played(sizes, cost, sum(tensor.numel() for tensor in kept))


def _formula(found: Sequence[Sizes], floats: Sequence[int], auxiliary: bool) -> str:
    """The floats per client as a sum of lengths; and those of the server's own rows."""
    names = list(found[0].terms())
    lengths = np.array([list(sizes.terms().values()) for sizes in found])
    clients = np.array([[sizes.clients] for sizes in found])
    table = np.hstack([lengths * clients, lengths]) if auxiliary else lengths * clients
    counts = np.linalg.lstsq(table, floats)[0].round().astype(int)
    if (table @ counts != np.array(floats)).any():
        raise ValueError(f"what travels is no sum of lengths: {floats} floats for {table}")
    each, own = counts[: len(names)], counts[len(names) :]
    text = _text({name: c for name, c in zip(names, each, strict=True) if c})
    if not auxiliary:
        return text
    return f"{text}; server {_text({n: c for n, c in zip(names, own, strict=True) if c})}"


def _text(terms: dict[str, Any]) -> str:
    """{"dx": 2, "dy": 2, "": 1} -> "2 (dx + dy) + 1" """
    parts = []
    for count, same in itertools.groupby(terms.items(), key=lambda item: item[1]):
        names = [name for name, _ in same]
        lengths = [name for name in names if name]
        joined = " + ".join(lengths)
        if lengths:
            bracketed = f"({joined})" if len(lengths) > 1 else joined
            parts.append(joined if count == 1 else f"{count} {bracketed}")
        if "" in names:
            parts.append(str(count))
    return " + ".join(parts) or "0"
