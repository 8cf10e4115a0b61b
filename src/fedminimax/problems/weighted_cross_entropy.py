"""Cross-entropy with a weight for each class, which a method sets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedminimax.problems.fair import Fair
from fedminimax.types import Batch, Point


class WeightedCrossEntropy(Fair):
    """Class-weighted cross-entropy: a row of class c has the weight y_c.

    y starts at 1 for every class. It is not maximised: a method may set it, as LocalSGDMRL does
    for the ratio loss. Measures: as for fair classification.

    Arguments:
        module: a network that ends in a Linear layer with one logit per class.
        classes: how many there are; labels are 0 .. classes - 1.
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
        """The mean loss of the batch's rows of each class; 0 for a class without rows."""
        losses = self.losses(x, batch.features, batch)
        members = self.members(batch, losses.dtype)
        shares = batch.mean(members)
        return batch.mean(losses[:, None] * members) / torch.where(shares > 0, shares, 1.0)
