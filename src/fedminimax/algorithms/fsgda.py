"""FSGDA: LocalSGDA whose server has step sizes of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._descent_ascent import TwoSided


@dataclass(frozen=True)
class FSGDA(TwoSided):
    """Federated stochastic gradient descent ascent (Yang et al., 2022: SAGDA without controls).

    A client of the cohort, `local_steps` times, with one batch and both gradients at the old point:

        x <- x - primal_lr * grad_x f_k(x, y),    y <- y + dual_lr * grad_y f_k(x, y)

    The server moves on from where it was:

        x <- x + primal_server_lr * ( mean_k x^k - x ),    y likewise with dual_server_lr

    Clients keep nothing. Up and down: dx + dy floats.

    *Differs from the paper*: whose text was not at hand; the update is that which the FESS-GDA
    paper calls FSGDA (its Algorithm 1 with p = 0). The problem's sets are projected onto after each
    move and after the server's.
    """

    partial: ClassVar[bool] = True
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Yang, Liu, Zhang and Liu, SAGDA: Achieving O(eps^-2) Communication Complexity in "
        "Federated Min-Max Learning, NeurIPS 2022"
    )
