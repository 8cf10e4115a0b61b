"""Operations on trees: tensors, tuples and NamedTuples of trees, such as a client's state."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tree_map(function: Callable[..., Any], *values: Any) -> Any:
    """Applies a function to the tensors at the same places of several trees of one structure.

    Arguments:
        function: from one tensor of each tree to a tensor or a tree.
        values: the trees.

    Returns a tree of that structure.

    >>> import torch
    >>> tree_map(torch.add, (torch.ones(1), (torch.ones(1),)), (torch.ones(1), (torch.ones(1),)))
    (tensor([2.]), (tensor([2.]),))
    """
    first = values[0]
    if isinstance(first, Tensor):
        return function(*values)
    parts = [tree_map(function, *part) for part in zip(*values, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree with their names: `inner.0` is the first tensor of a field `inner`."""
    if isinstance(value, Tensor):
        yield name, value
        return
    names = value._fields if hasattr(value, "_fields") else range(len(value))
    for part_name, part in zip(names, value, strict=True):
        yield from leaves(part, f"{name}.{part_name}" if name else str(part_name))


def nest(named: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of a NamedTuple, from the named tensors that `leaves` gives.

    >>> import torch
    >>> nest({"x": torch.ones(1), "inner.0": torch.ones(1), "inner.1": torch.zeros(1)})
    {'x': tensor([1.]), 'inner': (tensor([1.]), tensor([0.]))}
    """
    fields: dict[str, Any] = {}
    for name, tensor in named.items():
        field, dot, rest = name.partition(".")
        if dot:
            fields.setdefault(field, {})[rest] = tensor
        else:
            fields[field] = tensor
    return {
        name: tuple(nest(value)[str(i)] for i in range(len(nest(value))))
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }


def form_of(value: Any) -> Any:
    """The structure of a tree as lists and names that JSON can hold, for `built`.

    >>> import torch
    >>> form_of((torch.ones(1), (torch.ones(1),)))
    [None, [None]]
    """
    if isinstance(value, Tensor):
        return None
    parts = [form_of(part) for part in value]
    return {"fields": value._fields, "parts": parts} if hasattr(value, "_fields") else parts


def build_tree(form: Any, named: dict[str, Tensor], name: str = "") -> Any:
    """The tree whose structure `form_of` gave and whose tensors `leaves` named.

    >>> import torch
    >>> build_tree({"fields": ["x", "inner"], "parts": [None, []]}, {"x": torch.ones(1)})
    Built(x=tensor([1.]), inner=())
    """
    if form is None:
        return named[name]
    record = isinstance(form, dict)
    fields: Any = form["fields"] if record else range(len(form))
    inside = form["parts"] if record else form
    parts = [
        build_tree(part, named, f"{name}.{field}" if name else str(field))
        for field, part in zip(fields, inside, strict=True)
    ]
    return namedtuple("Built", fields)(*parts) if record else tuple(parts)


def flat(value: Any) -> list[Tensor]:
    """The tensors of a tree, in order.

    >>> import torch
    >>> flat((torch.ones(1), (torch.zeros(1),)))
    [tensor([1.]), tensor([0.])]
    """
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    for part in value:
        _collect(part, found)


def rebuild(form: Any, tensors: list[Tensor]) -> Any:
    """A tree with the structure of the tree `form`, from tensors in the order of `flat`."""
    return _grow(form, iter(tensors))


def _grow(form: Any, ordered: Iterator[Tensor]) -> Any:
    if isinstance(form, Tensor):
        return next(ordered)
    parts = [_grow(part, ordered) for part in form]
    return type(form)(*parts) if hasattr(form, "_fields") else tuple(parts)
