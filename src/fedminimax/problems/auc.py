"""AUC maximisation as a minimax problem: a sum over rows, not over pairs of rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from fedminimax.problems.binary import BinaryProblem
from fedminimax.problems.network import Parameters
from fedminimax.problems.questions import shares
from fedminimax.types import MOST_VARIABLES, AnswerCheck, Batch, Point, Query, Vectors


class AUC(BinaryProblem):
    """AUC maximisation, by the square (Ying et al. 2016) or the margin (Yuan et al. 2021) loss.

    x = (network weights, a, b), y = (alpha). With p the share of positives, s the score of a row
    and [+], [-] its class, the loss of a row is

        (1-p) (s-a)^2 [+]  +  p (s-b)^2 [-]  -  p (1-p) alpha^2
            +  2 (1 + alpha) ( p s [-] - (1-p) s [+] )                  square
            +  2 alpha ( p (1-p) m + p s [-] - (1-p) s [+] )            margin

    where the margin form keeps alpha >= 0. At the best a, b and alpha the square form is p (1-p)
    times the mean over pairs of (1 - s_+ + s_-)^2, less p (1-p).

    With L labels, or classes against all others, the loss is the sum of these: x = (network
    weights, a_1 .. a_L, b_1 .. b_L), y = (alpha_1 .. alpha_L), and each label has its own p.

    Arguments:
        module: the network, with one output per row.
        positive_share: p. None: `prepare` asks the clients for sum_k w_k p_k before round 0, or
            takes the share that class-balanced batches are drawn with. For one label only.
        form: the loss, "square" or "margin".
        score: "sigmoid" puts the output through a sigmoid, "raw" does not.
        margin: m, of the margin form.
        least_per_bin, labels: see `BinaryProblem`.
    """

    by_rows = True
    checks: ClassVar[Mapping[str, AnswerCheck]] = {**BinaryProblem.checks, "positive_share": shares}

    def __init__(
        self,
        module: nn.Module,
        positive_share: float | None = None,
        form: Literal["square", "margin"] = "square",
        score: Literal["sigmoid", "raw"] = "sigmoid",
        margin: float = 1.0,
        least_per_bin: int = 0,
        labels: Sequence[str] = (),
    ):
        super().__init__(module, least_per_bin, labels)
        if form not in ("square", "margin") or score not in ("sigmoid", "raw"):
            raise ValueError(
                f'form is {form!r} and score {score!r}; give "square" or "margin", and '
                '"sigmoid" or "raw"'
            )
        if not margin > 0:
            raise ValueError(f"margin is {margin}; give a number above 0")
        if positive_share is not None and not 0 < positive_share < 1:
            raise ValueError(
                f"positive_share is {positive_share}; give a share between 0 and 1, or None to "
                "estimate it"
            )
        if positive_share is not None and labels:
            raise ValueError(
                f"positive_share is {positive_share}, but there are {len(labels)} labels, each "
                "with its own: leave it out, so that they are estimated"
            )
        self.positive_share, self.margin = positive_share, margin
        self.form, self.score = form, score

    def start(self) -> Point:
        weights = self.network.start()
        count = len(self.labels) or 1
        return Point(torch.cat([weights, weights.new_zeros(2 * count)]), weights.new_zeros(count))

    def prepare(self, ask: Query) -> Self:
        """The problem with its share of positives, or those of several labels."""
        if self.labels:
            return super().prepare(ask)
        share = self.positive_share
        if share is None:
            share = ask.sampled_positive_share
        if share is None:
            share = float(ask.mean("positive_share")[0])
        if not 0 < share < 1:
            raise ValueError(
                "the clients' training rows are of one class only (share of positives "
                f"{share}): AUC needs two"
            )
        known = copy.copy(self)
        known.positive_share = share
        return known

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question == "positive_share":
            self.check_labels(batch)
            return (batch.mean((batch.labels > 0).to(batch.weight.dtype)),)
        return super().answer(question, vectors, batch)

    def scores(self, x: Tensor | Parameters, batch: Batch) -> Tensor:
        """The score of each row of a training batch."""
        raw = self.raw_scores(x, batch)
        return torch.sigmoid(raw) if self.score == "sigmoid" else raw

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        weights, own = self.network.parts(value)
        p, s = self.prior(y), self.scores(weights, batch)
        positive, negative = self.sides(batch, s.dtype)
        if self.labels:
            (a, b), alpha = own.view(2, -1).unbind(), y
        else:
            (a, b), (alpha,) = own.unbind(), y.unbind()
        known = positive + negative if self.labels else 1.0
        squares = (1 - p) * (s - a) ** 2 * positive + p * (s - b) ** 2 * negative
        difference = p * s * negative - (1 - p) * s * positive
        if self.form == "square":
            coupling = 2 * (1 + alpha) * difference
        else:
            coupling = 2 * alpha * (p * (1 - p) * self.margin * known + difference)
        if not self.labels:
            return batch.mean(squares + coupling) - p * (1 - p) * alpha**2
        return batch.mean(squares + coupling - p * (1 - p) * alpha**2 * known).sum()

    def prior(self, like: Tensor) -> Any:
        """p, or that of each label."""
        if self.labels and self.positive_shares:
            return torch.tensor(self.positive_shares, dtype=like.dtype, device=like.device)
        if self.positive_share is None:
            raise ValueError(
                "the share of positives is not known yet: call prepare first, or give "
                "positive_share"
            )
        return self.positive_share

    def variables(self, point: Point, ask: Query) -> dict[str, float]:
        """a, b and alpha, of each label."""
        count, names = len(point.y), [f" {name}" for name in self.labels] or [""]
        if 3 * count > MOST_VARIABLES:
            return {}
        own = torch.cat([point.x[-2 * count :], point.y]).tolist()
        keys = [f"{letter}{name}" for letter in ("a", "b", "alpha") for name in names]
        return dict(zip(keys, own, strict=True))

    def project_y(self, y: Tensor, /) -> Tensor:
        return torch.clamp(y, min=0) if self.form == "margin" else y

    def dual_statistics(self, x: Tensor, batch: Batch) -> Tensor:
        """Four means over rows, for each label: the scores and the number of positives, then of
        negatives."""
        s = self.scores(x, batch)
        positive, negative = self.sides(batch, s.dtype)
        each = [batch.mean(v) for v in (s * positive, positive, s * negative, negative)]
        return torch.stack(each).reshape(-1)

    def dual_from(self, mean: Tensor) -> Tensor:
        """CODA's alpha: the mean score of negatives less that of positives (plus the margin)."""
        upper, positive, lower, negative = mean.reshape(4, -1)
        tiny = torch.finfo(mean.dtype).tiny
        gap = lower / negative.clamp(min=tiny) - upper / positive.clamp(min=tiny)
        return gap if self.form == "square" else self.margin + gap

    def best_dual_from(self, mean: Tensor) -> Tensor:
        """The alpha that maximises the objective with its p. It equals `dual_from` if p is the
        share of positives in the rows themselves."""
        upper, _, lower, _ = mean.reshape(4, -1)
        p = self.prior(mean)
        gap = (p * lower - (1 - p) * upper) / (p * (1 - p))
        return gap if self.form == "square" else self.margin + gap
