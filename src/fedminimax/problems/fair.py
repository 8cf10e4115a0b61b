"""Fair classification: minimise the loss of the class with the largest loss."""

from __future__ import annotations

from torch import Tensor, nn

from fedminimax.problems.groups import WorstGroup
from fedminimax.types import Batch, Query


class Fair(WorstGroup):
    """Fair classification: min over network weights, max over class weights on the simplex.

    min over x, max over y of sum_c y_c F_c(x), where F_c is the mean cross-entropy of the
    federation's rows of class c (Nouiehed et al., Solving a Class of Non-Convex Min-Max Games,
    NeurIPS 2019; FESS-GDA paper, Section 4.2). `WorstGroup` says how a batch estimates F_c.
    Measures: accuracy, and that of the worst class.

    Arguments:
        module: the network, with one logit per class, or a single one for two classes.
        classes: how many there are; labels are 0 .. classes - 1. An experiment takes the number
            from its data.
    """

    word, words = "class", "classes"
    monitor = "worst_class_accuracy"

    def __init__(self, module: nn.Module, classes: int = 10):
        super().__init__(module, classes)

    def group(self, batch: Batch) -> Tensor:
        if self.groups == 2:
            return (batch.labels > 0).long()  # labels of -1 and 1 as well as of 0 and 1
        return batch.labels.long()

    def prepare(self, ask: Query) -> WorstGroup:
        known = super().prepare(ask)
        if ask.sampled_positive_share is not None:
            if self.groups != 2:
                raise ValueError(
                    'sampling "balanced" knows two classes, but the problem has '
                    f'{self.groups}: use sampling "epoch"'
                )
            # Every batch is drawn with these shares, whatever those of the rows are.
            known.shares = (1 - ask.sampled_positive_share, ask.sampled_positive_share)
        return known
