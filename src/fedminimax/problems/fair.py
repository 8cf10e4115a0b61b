"""Fair classification: a network for the class that fares worst."""

from __future__ import annotations

from torch import Tensor, nn

from fedminimax.problems._groups import WorstGroup
from fedminimax.types import Ask, Batch


class Fair(WorstGroup):
    """Fair classification: min over network weights, max over class weights on the simplex.

    min over x, max over y of sum_c y_c F_c(x), where F_c is the mean cross-entropy of the
    federation's rows of class c (papers/fess-gda.txt, Section 4.2; Nouiehed et al. 2019). Labels
    are 0 .. classes - 1; a network with one logit has two classes (an experiment takes their number
    from the data: classes = "all" for tables). A batch's stochastic F_c is the batch's sum over
    rows of class c divided by (rows in the batch) * (share of class c in the federation), so that
    its mean is F_c; a class absent from the batch gets gradient 0. Measures: accuracy, and that of
    the worst class.
    """

    word, words = "class", "classes"
    monitor = "worst_class_accuracy"

    def __init__(self, module: nn.Module, classes: int = 10):
        super().__init__(module, classes)

    def group(self, batch: Batch) -> Tensor:
        if self.groups == 2:
            return (batch.labels > 0).long()  # labels of -1 and 1 as well as of 0 and 1
        return batch.labels.long()

    def prepare(self, ask: Ask) -> WorstGroup:
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
