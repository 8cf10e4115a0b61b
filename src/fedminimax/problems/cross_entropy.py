"""Binary cross-entropy of a network with one logit: the usual baseline."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedminimax.problems.binary import BinaryProblem
from fedminimax.types import Batch, Point


class CrossEntropy(BinaryProblem):
    """Binary cross-entropy with the network's output as the logit: a minimisation without y."""

    by_rows = True

    def start(self) -> Point:
        weights = self.network.start()
        return Point(weights, weights.new_zeros(0))

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        logits = self.raw_scores(value, batch)
        target = (batch.labels > 0).to(logits.dtype)
        return batch.mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none"))
