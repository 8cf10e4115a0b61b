"""Arithmetic on vectors that may be as long as a network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedminimax.blocks.parted import Parted, whole


def transformed() -> bool:
    """Is this inside vmap, or another derivative, or being traced? If not, a client is alone."""
    stack = torch._C._functorch.peek_interpreter_stack()  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() or stack is not None


def plus(vector: Tensor, rate: Tensor | float, direction: Tensor, spent: bool = False) -> Tensor:
    """vector + rate * direction, in one pass over them. A direction that the caller has made, and
    will not look at again, is `spent`: its memory may be taken, which is quicker than new memory.

    >>> plus(torch.tensor([1.0, 2.0]), -0.5, torch.tensor([4.0, 2.0]))
    tensor([-1.,  1.])
    """
    taken = direction if spent and _unwatched(vector, direction) else None
    if not isinstance(rate, Tensor):
        return _one_pass(partial(torch.add, alpha=rate), vector, direction, taken)
    rate = rate.to(direction.device, direction.dtype)
    return _one_pass(lambda v, d, out: torch.addcmul(v, rate, d, out=out), vector, direction, taken)


def average(old: Tensor, new: Tensor, weight: Tensor | float) -> Tensor:
    """(1 - weight) * old + weight * new, in one pass over them, and in none if the weight is 1.

    >>> average(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0]), 0.5)
    tensor([2., 1.])
    """
    here = not isinstance(weight, Tensor) or (weight.device.type == "cpu" and weight.dim() == 0)
    same = old.dtype == new.dtype and not isinstance(new, Parted)
    if here and same and not transformed() and weight == 1:
        return new
    weight = torch.as_tensor(weight, dtype=old.dtype, device=old.device)
    return _one_pass(lambda o, n, out: torch.lerp(o, n, weight, out=out), old, new, None)


def chosen(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`torch.where` for one condition; for a client alone without a copy.

    >>> chosen(torch.tensor(True), torch.zeros(2), torch.ones(2))
    tensor([0., 0.])
    """
    if transformed() or condition.device.type != "cpu":
        return torch.where(condition, yes, no)
    return yes if condition else no


def _unwatched(vector: Tensor, direction: Tensor) -> bool:
    """Is nobody watching, so that what is written over is not missed?"""
    alike = vector.shape == direction.shape and vector.dtype == direction.dtype
    watched = vector.requires_grad or direction.requires_grad or transformed()
    return alike and not watched


def _one_pass(operation: Callable[..., Tensor], a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """An operation entry by entry; part by part, if one of the vectors is in parts and no
    derivative is taken of it."""
    watched = a.requires_grad or b.requires_grad
    alike = a.shape == b.shape and a.dtype == b.dtype
    parted = [v for v in (a, b) if isinstance(v, Parted) and v.pieces]
    if watched or not alike or not parted:
        a, b = (v if v.requires_grad else whole(v) for v in (a, b))
        return operation(a, b, out=whole(out))
    sizes = parted[0].sizes
    if out is None:
        out = parted[0].pieces[0].new_empty(sum(sizes))
    outs = _pieces(out, sizes)
    for parts in zip(_pieces(a, sizes), _pieces(b, sizes), outs, strict=True):
        operation(*parts[:2], out=parts[2])
    return Parted(outs) if isinstance(out, Parted) else out


def _pieces(vector: Tensor, sizes: list[int]) -> list[Tensor]:
    if isinstance(vector, Parted) and vector.pieces and vector.sizes == sizes:
        return vector.pieces
    return list(vector.split(sizes))
