"""Rewritten graphs give the numbers of what was traced."""

from collections.abc import Callable

import pytest
import torch
from table import marked
from test_compiled import FIRST, same
from test_inductor import given, moved
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fedminimax.engine.executors.compiled import graphs, rewrites, shared
from fedminimax.engine.executors.compiled import inductor as making
from fedminimax.engine.executors.compiled.executor import Compiled
from fedminimax.engine.executors.compiled.inductor import inductor
from fedminimax.engine.executors.compiled.rewrites import in_parts, once, sum_early


def test_a_rate_is_computed_once_and_not_with_every_number_of_a_vector():
    graph = make_fx(moved, tracing_mode="fake")(*given()).graph
    once(graph)
    (rate,) = (
        node for node in graph.nodes if "pow" in str(node.target) and node.meta["val"].dim() == 0
    )
    (user,) = rate.users
    assert "realize" in str(user.target)
    assert all(next_.meta["val"].numel() == 5 for next_ in user.users)


def test_a_sum_for_later_is_written_down_before_the_next_product(monkeypatch):
    monkeypatch.setattr(rewrites, "SMALL", 0)

    def steps(x: Tensor, weights: Tensor) -> list[Tensor]:
        first = x @ weights
        total = first + x
        second = (x + first) @ weights  # a sum that the product needs is written down for it
        return [total + second]

    inputs = [torch.eye(3), torch.ones(3, 3)]
    graph = make_fx(steps, tracing_mode="fake")(*inputs).graph
    sum_early(graph)
    held = [node for node in graph.nodes if "realize" in str(node.target)]
    assert [node.args[0].name for node in held] == ["add"]
    assert [user.name for user in held[0].users] == ["add_2"]
    (found,) = inductor(make_fx(steps)(*inputs), inputs)(list(inputs))
    assert torch.equal(found, *steps(*inputs))


def taken(x: Tensor, sums: Tensor, rates: Tensor, number: Tensor) -> list[Tensor]:
    """Steps of a vector per row, whose gradient is put together of two."""
    for _ in range(3):
        first, second = x.split([2, 3], 1)
        slope = torch.cat([torch.sin(first), first[:, :1] * second], 1)
        sums = sums + slope
        moved = torch.addcmul(x, rates, torch.where(slope > number, slope, -slope))
        x = moved / number - sums * 0.5
    return [x, sums, torch.cumsum(sums, 1)]


TAKEN = [torch.rand(4, 5), torch.rand(5), torch.rand(4, 1), torch.tensor(0.9)]


def counted(graph, name: str) -> int:
    return sum(str(node.target).startswith(f"aten.{name}.") for node in graph.nodes)


def test_steps_go_part_by_part_until_the_whole_is_asked_for(monkeypatch):
    monkeypatch.setattr(rewrites, "SMALL", 0)
    traced = make_fx(taken, tracing_mode="fake")(*TAKEN)
    assert (counted(traced.graph, "cat"), counted(traced.graph, "split_with_sizes")) == (3, 3)
    in_parts(traced.graph)
    # The first x is an input; slopes are compared, which is no arithmetic, and x and the sums are
    # returned.
    assert (counted(traced.graph, "cat"), counted(traced.graph, "split_with_sizes")) == (5, 1)
    traced.recompile()
    for found, right in zip(traced(*TAKEN), taken(*TAKEN), strict=True):
        assert torch.equal(found, right)
    for found, right in zip(inductor(traced, TAKEN)(list(TAKEN)), taken(*TAKEN), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.split([3, 2], 1)[0],  # other parts than it is made of
        lambda x: x.split([1, 1, 2], 0)[1],  # rows
        lambda x: torch.cat([x, x], 0) + 1,
        lambda x: x + torch.cat([x[:, :1], x[:, 1:]], 1),  # made of others
        lambda x: (x + 1).sum(1),
        lambda x: torch.add(x, x, alpha=3),
        lambda x: x + torch.ones(3, 4, 5),
    ],
)
def test_what_asks_for_the_whole_gets_it(other, monkeypatch):
    def steps(x: Tensor) -> list[Tensor]:
        return [other(torch.cat([x[:, :2] * 2, x[:, 2:]], 1) * 3)]

    monkeypatch.setattr(rewrites, "SMALL", 0)
    x = torch.rand(4, 5)
    traced = make_fx(steps, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    in_parts(traced.graph)
    traced.recompile()
    assert torch.equal(*traced(x), *steps(x))


def as_rewritten(module: fx.GraphModule, given: list[Tensor]) -> Callable:
    """In the place of a compiler: the graph that it would get, operation by operation."""
    lowered = making.rewritten(module, given)
    for node in list(lowered.graph.nodes):
        if node.target is torch.ops._inductor_test.realize.default:
            node.replace_all_uses_with(node.args[0])
            lowered.graph.erase_node(node)
    lowered.graph.lint()
    lowered.recompile()
    return lambda tensors: lowered(*tensors)


LARGE = ("dr-scgda", "dr-scgda-printed", "dr-scgd-levels", "scgdm-levels", "smvr", "nlasg")


@pytest.mark.parametrize("row", marked(FIRST, lambda row: False, full=LARGE))
def test_rewritten_graphs_compute_what_clients_one_by_one_compute(row, monkeypatch):
    for module in (graphs, making, rewrites):
        monkeypatch.setattr(module, "SMALL", 0)  # or nothing would be large enough here
    monkeypatch.setattr(shared, "_MADE", {})
    monkeypatch.setattr(shared, "_TRACED", {})
    same(row, Compiled(compiler=as_rewritten))
