"""Base class of `Fair` and `WorstSite`: y holds the weights of the losses of groups of rows."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fedminimax.blocks.projections import simplex
from fedminimax.problems.classifier import Classifier, one_hot, worst
from fedminimax.problems.questions import counts, shares
from fedminimax.types import MOST_VARIABLES, AnswerCheck, Batch, Measures, Point, Query, Vectors

MOST_GROUPS = 10_000


class WorstGroup(Classifier):
    """min over x, max over y on the simplex of sum_g y_g F_g(x), F_g the mean loss of group g.

    With q_g = sum_k w_k q_gk the federation's share of rows of group g, which `prepare` asks for
    before round 0, a batch of client k gives

        f_k(x, y) = sum_g y_g / q_g * mean over rows of ( loss(row) [row is of group g] )

    The weighted mean over clients is exactly sum_g y_g F_g, and gradients on a random batch are
    unbiased, however the groups are spread over the clients. A group that is absent from a batch
    contributes 0. (Averaging over the group's rows in the batch would be biased: a group would
    count once for every batch and client that has it.)

    Arguments:
        module: the network, as in `Classifier`.
        groups: how many there are, numbered from 0.
    """

    word, words = "group", "groups"  # how groups are called in measures and errors
    checks: ClassVar[Mapping[str, AnswerCheck]] = {
        **Classifier.checks,
        "group_shares": shares,
        "group_outside": counts,
        "group_counts": counts,
    }

    def __init__(self, module: nn.Module, groups: int):
        super().__init__(module)
        if not isinstance(groups, int) or groups < 1:
            raise ValueError(f"the number of {self.words} is {groups!r}; give at least 1")
        if groups > MOST_GROUPS:
            raise ValueError(
                f"a weight for each of {groups} {self.words} travels with every message: it is "
                f"refused beyond {MOST_GROUPS}; merge some of them"
            )
        self.groups = groups
        self.shares: tuple[float, ...] | None = None

    @abstractmethod
    def group(self, batch: Batch) -> Tensor:
        """The number of each row's group."""

    def start(self) -> Point:
        weights = self.network.start()
        return Point(weights, weights.new_full((self.groups,), 1 / self.groups))

    def project_y(self, y: Tensor, /) -> Tensor:
        return simplex(y)

    def prepare(self, ask: Query) -> Self:
        super().prepare(ask)
        outside = float(ask.sum("group_outside")[0])
        if outside:
            raise ValueError(
                f"{int(outside)} training rows have a {self.word} that is not one of "
                f"0 .. {self.groups - 1}: number them so, or give another number of {self.words}"
            )
        (shares,) = ask.mean("group_shares")
        if absent := (shares <= 0).nonzero().flatten().tolist():
            raise ValueError(
                f"no client has training rows of {self.word} {absent[0]}: it has no loss to weigh; "
                f"leave such {self.words} out of the count"
            )
        known = copy.copy(self)
        known.shares = tuple(shares.tolist())
        return known

    def members(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """A matrix (rows, groups) with a 1 at each row's group."""
        return one_hot(self.group(batch), self.groups, dtype)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        if self.shares is None:
            raise ValueError(f"the shares of the {self.words} are not known yet: call prepare")
        losses = self.losses(value, batch.features, batch)
        weighted = y / torch.tensor(self.shares, dtype=y.dtype, device=y.device)
        # One weight per row: a matrix of losses by groups would need more memory.
        return batch.mean(losses * (self.members(batch, losses.dtype) @ weighted))

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question == "group_shares":
            return (batch.mean(self.members(batch, batch.weight.dtype)),)
        if question == "group_outside":
            return ((1 - self.members(batch, batch.weight.dtype).sum(1)).sum().reshape(1),)
        if question == "group_losses":
            members = self.members(batch, batch.weight.dtype)
            losses = self.losses(vectors[0], batch.features, batch)
            return (losses @ members.to(losses.dtype),)
        if question == "group_counts":
            moments = self.network_moments(vectors)
            right = self.correct(vectors[0], moments, batch.features, batch.labels)
            members = self.members(batch, right.dtype)
            return right @ members, members.sum(0)
        return super().answer(question, vectors, batch)

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        """The loss, the accuracy over all rows, and accuracy and loss of the worst group. Groups
        without rows in this split are left out."""
        right, count = ask.sum("group_counts", *self.at(point, moments))
        (losses,) = ask.sum("group_losses", point.x, point.y)
        seen = (count > 0).nonzero().flatten().tolist()
        names = [self.group_name(group) for group in seen]
        accuracies = [float(right[g] / count[g]) for g in seen]
        means = [float(losses[g] / count[g]) for g in seen]
        worst_name, least = worst(names, accuracies)
        return super().evaluate(point, ask, moments) | {
            "accuracy": float(right.sum() / count.sum()),
            f"worst_{self.word}_accuracy": least,
            f"worst_{self.word}": worst_name,
            f"worst_{self.word}_loss": max(means),
            f"{self.word}_accuracies": dict(zip(names, accuracies, strict=True)),
        }

    def variables(self, point: Point, ask: Query) -> dict[str, float]:
        """The weight of each group."""
        if self.groups > MOST_VARIABLES:
            return {}
        names = [f"{self.word} {self.group_name(group)}" for group in range(self.groups)]
        return dict(zip(names, point.y.tolist(), strict=True))

    def group_name(self, group: int) -> str:
        """How a group is called in measures."""
        return str(group)
