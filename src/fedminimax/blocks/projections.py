"""Euclidean projections of a vector onto a convex set, as tensor operations that work under vmap
and in compiled graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def simplex(v: Tensor) -> Tensor:
    """Projects a vector onto the simplex: the nearest of non-negative entries that add up to 1.

    >>> simplex(torch.tensor([0.5, 0.9, -1.0]))
    tensor([0.3000, 0.7000, 0.0000])
    """
    # Subtracting a constant changes nothing, and entries 1 below the largest become 0 in any case.
    # So the sums below are accurate for entries of any size.
    v = torch.clamp(v - v.max(), min=-1)
    ordered = torch.sort(v, descending=True).values
    count = torch.arange(1, v.numel() + 1, dtype=v.dtype, device=v.device)
    excess = (torch.cumsum(ordered, 0) - 1) / count
    # The positive entries are the first ones in this order; the excess of the last of them is what
    # is subtracted from every entry.
    last = ((ordered > excess).sum() - 1).clamp(min=0)
    return torch.clamp(v - excess.index_select(0, last.reshape(1)), min=0)


def ball(radius: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Returns the function that projects a vector onto the Euclidean ball of that radius around 0.

    >>> ball(1.0)(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    def project(v: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(v)
        return v * torch.clamp(radius / torch.clamp(norm, min=torch.finfo(v.dtype).tiny), max=1.0)

    return project


def nonnegative(v: Tensor) -> Tensor:
    """Projects a vector onto those without negative entries: returns it with 0 in their place.

    >>> nonnegative(torch.tensor([1.0, -2.0]))
    tensor([1., 0.])
    """
    return torch.clamp(v, min=0)
