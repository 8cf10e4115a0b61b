"""Compositional AUC maximisation: the AUC loss of the weights after a step on cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedminimax.problems.auc import AUC
from fedminimax.problems.gradients import slope
from fedminimax.types import Batch, Measures, Point, Query

Hessian = Literal["exact", "none"]
Evaluated = Literal["x", "stepped"]


class CompositionalAUC(AUC):
    """AUC maximisation after an inner step on cross-entropy (Yuan et al., Compositional Training
    for End-to-End Deep AUC Maximization, ICLR 2022; LocalSCGDAM paper, eq. 2 and 3).

    x = (w, a, b) with w the network's weights, y = (alpha), two levels:

        F_1(x) = ( w - inner_lr * grad L(w), a, b ),     L the mean cross-entropy of the logits
        F_2(z, y) = the AUC loss of `AUC`, of the network with the weights in z

    The step is averaged over all clients before the AUC loss is computed. The Jacobian of F_1 times
    a vector v is ( v_w - inner_lr * H v_w, v_a, v_b ), with H the Hessian of L on the same rows.
    Batch normalisation uses the statistics of the batch that a loss is computed on. A batch with
    rows of one class only is allowed.

    Arguments, beside those of `AUC`:
        inner_lr: the papers' rho; 0 makes the problem that of `AUC`.
        hessian: "exact" computes H v by a second backward pass; "none" leaves H out, so that the
            product is v itself.
        evaluated: which weights are measured and returned as a module: "x", or "stepped", those
            after the inner step F_1(x) on all training rows, asked from the clients at every
            evaluation. The loss is that of the composition: for "x" both levels use the rows of the
            split, for "stepped" the inner step uses the training rows.
    """

    depth = 2

    def __init__(
        self,
        module: nn.Module,
        positive_share: float | None = None,
        form: Literal["square", "margin"] = "square",
        score: Literal["sigmoid", "raw"] = "sigmoid",
        margin: float = 1.0,
        least_per_bin: int = 0,
        inner_lr: float = 0.1,
        hessian: Hessian = "exact",
        evaluated: Evaluated = "x",
        labels: Sequence[str] = (),
    ):
        super().__init__(module, positive_share, form, score, margin, least_per_bin, labels)
        if not (math.isfinite(inner_lr) and inner_lr >= 0):
            raise ValueError(
                f"inner_lr is {inner_lr!r}; give a finite number of at least 0: the inner step "
                "goes down the cross-entropy"
            )
        if hessian not in get_args(Hessian):
            raise ValueError(f'hessian is {hessian!r}; give "exact" or "none"')
        if evaluated not in get_args(Evaluated):
            raise ValueError(f'evaluated is {evaluated!r}; give "x" or "stepped"')
        self.inner_lr, self.hessian, self.evaluated = inner_lr, hessian, evaluated

    @property
    def sweep_gradients(self) -> int:
        """One for cross-entropy, one for AUC, and two for the product with the Hessian."""
        return 4 if self.hessian == "exact" else 2

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        if level != 1:
            return super().inner(level, value, batch)
        # The derivative in the whole vector: it is 0 in a and b, on which cross-entropy does not
        # depend. Splitting the vector and joining it again would be two more passes over it.
        at = value if self.hessian == "exact" else value.detach()
        # The loss is scaled, not its gradient, which would be a pass over all weights.
        return value + slope(lambda v: -self.inner_lr * self.cross_entropy(v, batch), at)

    def reference(self, level: int, value: Tensor) -> Tensor:
        """Without the step, the weights stay as they are."""
        return value

    def row_scale(self, level: int) -> float:
        return self.inner_lr

    # The weights after the inner step depend on training rows, as batch-norm moments do, and so
    # travel with them.

    def moments(self, point: Point, ask: Query) -> Tensor | None:
        if self.evaluated == "x":
            return super().moments(point, ask)
        value = ask.mean("inner", point.x, torch.tensor(1))[0].to(point.x.dtype)
        norms = super().moments(Point(value, point.y), ask)
        return value if norms is None else torch.cat([value, norms])

    def stepped(self, point: Point, moments: Tensor | None) -> tuple[Point, Tensor | None]:
        """The point after the inner step, and its batch-norm moments."""
        if moments is None:
            raise ValueError(
                'evaluated is "stepped", but the weights after the inner step were not asked for: '
                "give what `moments` returns"
            )
        value, norms = moments.tensor_split([len(point.x)])
        step = Point(value.to(point.x.dtype), point.y)
        return step, norms if self.network.has_norms else None

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        if self.evaluated == "x":
            return super().evaluate(point, ask, moments)
        step, norms = self.stepped(point, moments)
        (loss,) = ask.mean("loss", *step)
        return super().evaluate(step, ask, norms) | {"loss": float(loss)}

    def module(self, point: Point, moments: Tensor | None = None) -> nn.Module:
        if self.evaluated == "x":
            return super().module(point, moments)
        return super().module(*self.stepped(point, moments))
