"""Arithmetic on vectors that may be as long as a network."""

from __future__ import annotations

import torch
from torch import Tensor


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
    if isinstance(rate, Tensor):
        return torch.addcmul(vector, rate.to(direction), direction, out=taken)
    return torch.add(vector, direction, alpha=rate, out=taken)


def _unwatched(vector: Tensor, direction: Tensor) -> bool:
    """Is nobody watching, so that what is written over is not missed?"""
    alike = vector.shape == direction.shape and vector.dtype == direction.dtype
    watched = vector.requires_grad or direction.requires_grad or transformed()
    return alike and not watched


def chosen(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`torch.where` for one condition; for a client alone without a copy.

    >>> chosen(torch.tensor(True), torch.zeros(2), torch.ones(2))
    tensor([0., 0.])
    """
    if transformed() or condition.device.type != "cpu":
        return torch.where(condition, yes, no)
    return yes if condition else no


def average(old: Tensor, new: Tensor, weight: Tensor | float) -> Tensor:
    """(1 - weight) * old + weight * new, in one pass over them.

    >>> average(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0]), 0.5)
    tensor([2., 1.])
    """
    return torch.lerp(old, new, torch.as_tensor(weight, dtype=old.dtype, device=old.device))
