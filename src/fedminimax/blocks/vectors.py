"""Arithmetic on vectors that may be as long as a network."""

from __future__ import annotations

import torch
from torch import Tensor


def transformed() -> bool:
    """Is this inside vmap, or another derivative, or being traced? If not, a client is alone."""
    stack = torch._C._functorch.peek_interpreter_stack()  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() or stack is not None


def plus(vector: Tensor, rate: Tensor | float, direction: Tensor) -> Tensor:
    """vector + rate * direction, in one pass over them.

    >>> plus(torch.tensor([1.0, 2.0]), -0.5, torch.tensor([4.0, 2.0]))
    tensor([-1.,  1.])
    """
    if isinstance(rate, Tensor):
        return torch.addcmul(vector, rate.to(direction), direction)
    return torch.add(vector, direction, alpha=rate)


def average(old: Tensor, new: Tensor, weight: Tensor | float) -> Tensor:
    """(1 - weight) * old + weight * new, in one pass over them.

    >>> average(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0]), 0.5)
    tensor([2., 1.])
    """
    return torch.lerp(old, new, torch.as_tensor(weight, dtype=old.dtype, device=old.device))
