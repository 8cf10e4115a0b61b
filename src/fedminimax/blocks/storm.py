"""STORM: a running average of gradients that is moved along with the point, so that it needs no
large batches."""

from __future__ import annotations

from torch import Tensor

from fedminimax.blocks.vectors import plus_difference


def storm(estimate: Tensor, new: Tensor, old: Tensor, rate: Tensor | float) -> Tensor:
    """Returns the estimate at the new point, from the `estimate` at the old one and the gradients
    `new` and `old` at both, on the same rows; `rate` is the weight of the new gradient.

        estimate <- new + (1 - rate) * (estimate - old)

    With rate 1 it is the plain gradient; with rate 0 a sum of differences that never forgets.

    >>> import torch
    >>> storm(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]), 0.5)
    tensor([2.5000])
    """
    return plus_difference(new, 1 - rate, estimate, old)
