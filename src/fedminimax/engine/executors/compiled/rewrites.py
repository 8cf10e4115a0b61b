"""Rewritten graphs of operations, of which torch's compiler makes faster code for the same
numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

SMALL = 1 << 14  # bytes
_ATEN = torch.ops.aten
PRODUCTS = {_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm, _ATEN.convolution}
ENTRYWISE = {_ATEN.add, _ATEN.sub, _ATEN.mul, _ATEN.div, _ATEN.neg, _ATEN.addcmul, _ATEN.where}
COSTLY = {_ATEN.pow, _ATEN.exp, _ATEN.log, _ATEN.sqrt, _ATEN.sin, _ATEN.cos}


def in_parts(graph: fx.Graph) -> None:
    """A gradient is put together of those in the weights of each layer, and the vector that it
    moves is taken apart again in the next step. The arithmetic between the two goes part by part,
    and whole is only what something else asks for."""
    parts: dict[fx.Node, list[fx.Node]] = {}
    whole: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if _puts_together(node):
            parts[node], whole[node] = list(node.args[0]), node
            continue
        given = [of for of in node.all_input_nodes if of in parts]
        lengths = [_lengths(parts[of]) for of in given]
        if not given:
            continue
        if _takes_apart(node, lengths[0]):
            for taken in list(node.users):
                taken.replace_all_uses_with(parts[given[0]][taken.args[1]])
            continue
        with graph.inserting_before(node):
            if _is_entrywise(node) and all(own == lengths[0] for own in lengths):
                parts[node] = _part_by_part(graph, node, parts, lengths[0])
                continue
            for of in given:
                if of not in whole:
                    whole[of] = _make(graph, _ATEN.cat.default, (parts[of], _value(of).dim() - 1))
                node.replace_input_with(of, whole[of])
    graph.eliminate_dead_code()


def _part_by_part(
    graph: fx.Graph, node: fx.Node, parts: dict[fx.Node, list[fx.Node]], lengths: list[int]
) -> list[fx.Node]:
    """The operation on each part; of vectors that are whole, on slices."""
    found, first = [], 0
    for place, length in enumerate(lengths):

        def part(of: object, place: int = place, first: int = first, end: int = first + length):
            if not isinstance(of, fx.Node):
                return of
            if of in parts:
                return parts[of][place]
            shape = _value(of).shape
            if not shape or shape[-1] == 1:  # the same for all entries
                return of
            return _make(graph, _ATEN.slice.Tensor, (of, len(shape) - 1, first, end))

        found.append(_make(graph, node.target, tuple(map(part, node.args)), node.kwargs))
        first += length
    return found


def _puts_together(node: fx.Node) -> bool:
    """Is it a large vector, or a row of them, made of several?"""
    if node.target is not _ATEN.cat.default or _value(node).nbytes <= SMALL:
        return False
    parts: Any = node.args[0]
    alike = all(_value(part).dim() == _value(node).dim() for part in parts)
    return alike and _is_last(node, node.args[1:])


def _is_entrywise(node: fx.Node) -> bool:
    known = all(isinstance(of.meta.get("val"), Tensor) for of in node.all_input_nodes)
    return known and operation(node) in ENTRYWISE


def _takes_apart(node: fx.Node, lengths: list[int]) -> bool:
    if node.target is not _ATEN.split_with_sizes.default:
        return False
    vector, sizes, *dim = node.args
    # Unchecked: torch.fx gives arguments no types.
    return list(sizes) == lengths and _is_last(vector, dim)  # type: ignore[arg-type]


def _is_last(node: fx.Node, dim: Sequence) -> bool:
    """Is this, or 0 if there is none, the last dimension?"""
    count = _value(node).dim()
    return (dim[0] if dim else 0) % count == count - 1


def _lengths(parts: list[fx.Node]) -> list[int]:
    return [_value(part).shape[-1] for part in parts]


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


def _make(graph: fx.Graph, target: Any, args: tuple, kwargs: dict | None = None) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    values = map_arg((node.args, node.kwargs), _value)
    node.meta["val"] = target(*values[0], **values[1])
    return node


def once(graph: fx.Graph) -> None:
    """A number that takes a while, such as the rate of a schedule, is computed once: the compiler
    would compute it again for every few numbers of each vector that it moves."""
    sizes = {node: value.numel() for node, value in tensors(graph).items()}
    late: set[fx.Node] = set()
    for node in [node for node, size in sizes.items() if size == 1]:
        if operation(node) not in COSTLY and not late.intersection(node.all_input_nodes):
            continue
        late.add(node)
        wide = [user for user in node.users if sizes.get(user, 0) > 1]
        if wide:
            held = insert(graph, node, torch.ops._inductor_test.realize.default, node.next)
            for user in wide:
                user.replace_input_with(node, held)


def sum_early(graph: fx.Graph) -> None:
    """A sum that is needed only after the next product of matrices is written down where its terms
    are at hand: the compiler would keep all terms for as long, and read them again."""
    products, before = 0, {}
    for node in graph.nodes:
        before[node] = products
        products += operation(node) in PRODUCTS
    sizes = {node: value.nbytes for node, value in tensors(graph).items()}
    for node, size in sizes.items():
        if operation(node) is not _ATEN.add or size <= SMALL:
            continue
        # Products and what is returned have it written down in any case.
        users = [u for u in node.users if u.op != "output" and operation(u) not in PRODUCTS]
        if users and all(before[user] > before[node] for user in node.users):
            held = insert(graph, node, torch.ops._inductor_test.realize.default, node.next)
            for user in users:
                user.replace_input_with(node, held)


def insert(graph: fx.Graph, of: fx.Node, target: Any, before: fx.Node) -> fx.Node:
    """A new node of the graph before another: `target` of `of`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, (of,))
    node.meta = dict(of.meta)
    return node


def operation(node: fx.Node) -> object:
    """What a node calls, whatever the overload; None for other nodes."""
    return getattr(node.target, "overloadpacket", None)


def tensors(graph: fx.Graph) -> dict[fx.Node, Tensor]:
    """What the operations return that return one tensor; of these tensors only the shape counts."""
    found = ((node, node.meta.get("val")) for node in graph.nodes if node.op == "call_function")
    return {node: value for node, value in found if isinstance(value, Tensor)}
