"""Arithmetic on vectors that may be as long as a network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedminimax.blocks.parted import Parted, join_parts


def is_transformed() -> bool:
    """Is this inside vmap, or another derivative, or being traced? If not, a client is alone."""
    stack = torch._C._functorch.peek_interpreter_stack()  # type: ignore[attr-defined]  not public
    return torch.compiler.is_compiling() or stack is not None


def plus(vector: Tensor, rate: Tensor | float, direction: Tensor) -> Tensor:
    """vector + rate * direction, in one pass over them.

    >>> plus(torch.tensor([1.0, 2.0]), -0.5, torch.tensor([4.0, 2.0]))
    tensor([-1.,  1.])
    """
    return _plus(vector, rate, direction, None)


def plus_difference(vector: Tensor, rate: Tensor | float, new: Tensor, old: Tensor) -> Tensor:
    """vector + rate * (new - old), in two passes over them and the memory of one new vector.

    >>> plus_difference(torch.tensor([1.0]), 0.5, torch.tensor([4.0]), torch.tensor([2.0]))
    tensor([2.])
    """
    difference = plus(new, -1.0, old)
    return _plus(vector, rate, difference, difference if _writable(vector, difference) else None)


def average(old: Tensor, new: Tensor, weight: Tensor | float) -> Tensor:
    """(1 - weight) * old + weight * new, in one pass over them, and in none if the weight is 1.

    >>> average(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0]), 0.5)
    tensor([2., 1.])
    """
    here = not isinstance(weight, Tensor) or (weight.device.type == "cpu" and weight.dim() == 0)
    if here and old.dtype == new.dtype and not is_transformed() and weight == 1:
        return new
    weight = torch.as_tensor(weight, dtype=old.dtype, device=old.device)
    return _one_pass(lambda o, n, out: torch.lerp(o, n, weight, out=out), old, new, None)


def choose(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`torch.where` for one condition; for a client alone without a copy.

    >>> choose(torch.tensor(True), torch.zeros(2), torch.ones(2))
    tensor([0., 0.])
    """
    if is_transformed() or condition.device.type != "cpu":
        return torch.where(condition, yes, no)
    return yes if condition else no


def _plus(vector: Tensor, rate: Tensor | float, direction: Tensor, out: Tensor | None) -> Tensor:
    if not isinstance(rate, Tensor):
        return _one_pass(partial(torch.add, alpha=rate), vector, direction, out)
    rate = rate.to(direction.device, direction.dtype)
    return _one_pass(lambda v, d, out: torch.addcmul(v, rate, d, out=out), vector, direction, out)


def _writable(vector: Tensor, direction: Tensor) -> bool:
    """May the sum be written over the direction: has it that form, and is no derivative taken?"""
    alike = vector.shape == direction.shape and vector.dtype == direction.dtype
    return alike and not (vector.requires_grad or direction.requires_grad or is_transformed())


def _one_pass(operation: Callable[..., Tensor], a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """An operation entry by entry; part by part, if one of the vectors is in parts and no
    derivative is taken of it."""
    watched = a.requires_grad or b.requires_grad
    alike = a.shape == b.shape and a.dtype == b.dtype
    parted = [v for v in (a, b) if isinstance(v, Parted) and v.pieces]
    if watched or not alike or not parted:
        a, b = (v if v.requires_grad else join_parts(v) for v in (a, b))
        return operation(a, b, out=out)
    sizes = parted[0].sizes
    if out is None:
        out = parted[0].pieces[0].new_empty(sum(sizes))
    for parts in zip(_pieces(a, sizes), _pieces(b, sizes), out.split(sizes), strict=True):
        operation(*parts[:2], out=parts[2])
    return out


def _pieces(vector: Tensor, sizes: list[int]) -> list[Tensor]:
    if isinstance(vector, Parted) and vector.pieces and vector.sizes == sizes:
        return vector.pieces
    return list(vector.split(sizes))
