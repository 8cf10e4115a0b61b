"""Binary cross-entropy of a network with one logit: the usual baseline."""

from __future__ import annotations

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
        return self.cross_entropy(value, batch)
