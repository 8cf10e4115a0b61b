"""Cross-entropy of a network with one logit per class, in which each class has a weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedminimax.problems.fair import Fair
from fedminimax.types import Batch, Point


class WeightedCrossEntropy(Fair):
    """Class-weighted cross-entropy: a row of class c counts y_c; a method sets y, none ascends it.

    It is what the ratio loss needs (the method local_sgdm_rl). y begins at 1 for every class and
    may be any vector. Labels are 0 .. classes - 1. Measures: as for fair classification.
    """

    maximised = False

    def __init__(self, module: nn.Module, classes: int = 10):
        super().__init__(module, classes)
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        if not layers or layers[-1].out_features != classes:
            raise ValueError(
                f"the network's last layer must be Linear(..., {classes}), with a logit for each "
                "class"
            )
        last = layers[-1].weight
        marks = [torch.full((p.numel(),), p is last) for p in module.parameters()]
        self.in_last_layer = torch.cat(marks)  # which entries of x are its weights

    @classmethod
    def outputs_for(cls, classes: int) -> int:
        return classes

    def start(self) -> Point:
        weights = self.network.start()
        return Point(weights, weights.new_ones(self.groups))

    def project_y(self, y: Tensor, /) -> Tensor:
        return y

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        losses = self.losses(value, batch.features, batch)
        return batch.mean(losses * (self.members(batch, losses.dtype) @ y))

    def class_losses(self, x: Tensor, batch: Batch) -> Tensor:
        """The mean loss of the batch's rows of each class; 0 for a class that it has not."""
        losses = self.losses(x, batch.features, batch)
        members = self.members(batch, losses.dtype)
        shares = batch.mean(members)
        return batch.mean(losses[:, None] * members) / torch.where(shares > 0, shares, 1.0)
