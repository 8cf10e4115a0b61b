"""Ratio loss: cross-entropy with a larger weight for the rarer class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.questions import counts
from fedminimax.types import AnswerCheck, Batch, Query, Vectors


class RatioLoss(CrossEntropy):
    """Ratio loss for a network with one logit: cross-entropy times a weight per class.

    A row of class c has the weight alpha_c = base + slope * min(R_c, 5000). Wang et al. (Addressing
    Class Imbalance in Federated Learning, AAAI 2021) estimate R_c in every round from the last
    layer's weights for class c, which a single logit does not have. Here R_+ = N_- / N_+ and R_- =
    N_+ / N_-, from the federation's counts, which `prepare` asks for before round 0. With LocalSGDM
    it is the baseline LocalSGDM_RL of the LocalSCGDAM paper.

    Arguments:
        module: the network, with one output per row.
        base, slope: as above; 1 and 0.1 in the paper.
        least_per_bin: see `BinaryProblem`.
    """

    cap = 5000.0
    checks: ClassVar[Mapping[str, AnswerCheck]] = {**CrossEntropy.checks, "class_counts": counts}

    def __init__(
        self, module: nn.Module, base: float = 1.0, slope: float = 0.1, least_per_bin: int = 0
    ):
        super().__init__(module, least_per_bin)
        if not base >= 0 or not slope >= 0 or base + slope == 0:
            raise ValueError(
                f"base is {base!r} and slope {slope!r}; give numbers of at least 0, not both 0"
            )
        self.base, self.slope = base, slope
        self.class_weights: tuple[float, float] | None = None  # of negatives, of positives

    def prepare(self, ask: Query) -> RatioLoss:
        negative, positive = (float(count) for count in ask.sum("class_counts"))
        if not negative or not positive:
            raise ValueError(
                "the clients' training rows are of one class only "
                f"({int(negative)} negative, {int(positive)} positive): a ratio needs two"
            )
        ratios = (positive / negative, negative / positive)
        known = copy.copy(self)
        lower, upper = (self.base + self.slope * min(ratio, self.cap) for ratio in ratios)
        known.class_weights = (lower, upper)
        return known

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question == "class_counts":
            positive = (batch.labels > 0).to(batch.weight.dtype)
            return (1 - positive).sum(), positive.sum()
        return super().answer(question, vectors, batch)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        if self.class_weights is None:
            raise ValueError("the counts of the classes are not known yet: call prepare first")
        negative, positive = self.class_weights
        logits = self.raw_scores(value, batch)
        target = (batch.labels > 0).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return batch.mean((positive * target + negative * (1 - target)) * losses)
