"""Euclidean projections of a vector onto a convex set, in tensor operations that vmap and
compile."""

from __future__ import annotations

import torch
from torch import Tensor


def simplex(v: Tensor) -> Tensor:
    """The nearest point with non-negative entries that sum to one.

    >>> simplex(torch.tensor([0.5, 0.9, -1.0]))
    tensor([0.3000, 0.7000, 0.0000])
    """
    # A constant changes nothing, and what lies 1 below the largest entry becomes 0 anyway: so the
    # sums below are exact enough for entries of any size.
    v = torch.clamp(v - v.max(), min=-1)
    ordered = torch.sort(v, descending=True).values
    count = torch.arange(1, v.numel() + 1, dtype=v.dtype, device=v.device)
    excess = (torch.cumsum(ordered, 0) - 1) / count
    # The support is a prefix of the sorted entries; its last excess is the amount that every entry
    # gives up.
    last = ((ordered > excess).sum() - 1).clamp(min=0)
    return torch.clamp(v - excess.index_select(0, last.reshape(1)), min=0)


def ball(radius: float = 1.0):
    """The projection onto the ball of that radius around 0.

    >>> ball(1.0)(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    def project(v: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(v)
        return v * torch.clamp(radius / torch.clamp(norm, min=torch.finfo(v.dtype).tiny), max=1.0)

    return project


def nonnegative(v: Tensor) -> Tensor:
    return torch.clamp(v, min=0)
