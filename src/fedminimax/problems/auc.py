"""AUC maximisation as a minimax problem: no two rows ever have to meet, so they can stay apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedminimax.problems.binary import BinaryProblem
from fedminimax.problems.network import Parameters
from fedminimax.problems.questions import shares
from fedminimax.types import AnswerCheck, Ask, Batch, Point, Weights


class AUC(BinaryProblem):
    """AUC maximisation, by the square (Ying et al. 2016) or the margin (Yuan et al. 2021) loss.

    x = (network weights, a, b), y = (alpha). With p the share of positives, s the score of a row
    and [+], [-] its class, a row's loss is

        (1-p) (s-a)^2 [+]  +  p (s-b)^2 [-]  -  p (1-p) alpha^2
            +  2 (1 + alpha) ( p s [-] - (1-p) s [+] )                  square
            +  2 alpha ( p (1-p) m + p s [-] - (1-p) s [+] )            margin

    where the margin form keeps alpha >= 0. At the best a, b and alpha the square form is p (1-p)
    times the mean over pairs of (1 - s_+ + s_-)^2, less p (1-p). p is that of the whole federation,
    sum_k w_k p_k, asked from the clients before round 0 (never the batch's) unless given;
    class-balanced batches use the share they are drawn with.
    """

    client_weights: Weights = "size"
    checks: ClassVar[Mapping[str, AnswerCheck]] = {**BinaryProblem.checks, "positive_share": shares}

    def __init__(
        self,
        module: nn.Module,
        positive_share: float | None = None,
        form: Literal["square", "margin"] = "square",
        score: Literal["sigmoid", "raw"] = "sigmoid",
        margin: float = 1.0,
        least_per_bin: int = 0,
    ):
        super().__init__(module, least_per_bin)
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
        self.positive_share, self.form, self.score, self.margin = (
            positive_share,
            form,
            score,
            margin,
        )

    def start(self) -> Point:
        weights = self.network.start()
        return Point(torch.cat([weights, weights.new_zeros(2)]), weights.new_zeros(1))

    def prepare(self, ask: Ask) -> AUC:
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

    def answer(
        self, question: str, vectors: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, ...]:
        if question == "positive_share":
            self.check_labels(batch)
            return (batch.mean((batch.labels > 0).to(batch.weight.dtype)),)
        return super().answer(question, vectors, batch)

    def scores(self, x: Tensor | Parameters, batch: Batch) -> Tensor:
        raw = self.raw_scores(x, batch)
        return torch.sigmoid(raw) if self.score == "sigmoid" else raw

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        if self.positive_share is None:
            raise ValueError(
                "the share of positives is not known yet: call prepare first, or give "
                "positive_share"
            )
        weights, own = self.network.parts(value)
        p, s = self.positive_share, self.scores(weights, batch)
        (a, b), (alpha,) = own.unbind(), y.unbind()
        positive = (batch.labels > 0).to(s.dtype)
        negative = 1 - positive
        squares = (1 - p) * (s - a) ** 2 * positive + p * (s - b) ** 2 * negative
        difference = p * s * negative - (1 - p) * s * positive
        if self.form == "square":
            coupling = 2 * (1 + alpha) * difference
        else:
            coupling = 2 * alpha * (p * (1 - p) * self.margin + difference)
        return batch.mean(squares + coupling) - p * (1 - p) * alpha**2

    def variables(self, point: Point, ask: Ask) -> dict[str, float]:
        a, b = point.x[-2:].tolist()
        return {"a": a, "b": b, "alpha": float(point.y[0])}

    def project_y(self, y: Tensor, /) -> Tensor:
        return torch.clamp(y, min=0) if self.form == "margin" else y

    def dual_statistics(self, x: Tensor, batch: Batch) -> Tensor:
        """Sums of scores and of rows per class, over the number of rows."""
        s = self.scores(x, batch)
        positive = (batch.labels > 0).to(s.dtype)
        return torch.stack(
            [batch.mean(v) for v in (s * positive, positive, s * (1 - positive), 1 - positive)]
        )

    def dual_from(self, mean: Tensor) -> Tensor:
        tiny = torch.finfo(mean.dtype).tiny
        gap = mean[2] / mean[3].clamp(min=tiny) - mean[0] / mean[1].clamp(min=tiny)
        return (gap if self.form == "square" else self.margin + gap).reshape(1)

    def best_dual_from(self, mean: Tensor) -> Tensor:
        """The alpha that maximises the objective for the p that it has. `dual_from`, which is
        CODA's rule, is that alpha where p is the share of the rows themselves."""
        p = self.positive_share
        assert p is not None
        gap = (p * mean[2] - (1 - p) * mean[0]) / (p * (1 - p))
        return (gap if self.form == "square" else self.margin + gap).reshape(1)
