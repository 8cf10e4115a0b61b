"""LocalSCGDM: local descent on a composition, along a momentum, with averages of the inner
values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._moving_average import MovingAverages


@dataclass(frozen=True, kw_only=True)
class LocalSCGDM(MovingAverages):
    """LocalSCGDM (Gao et al. 2022; papers/fed-dr-scgd.txt, Algorithm 2), for F_K( ... F_1(x)).

    LocalSCGDAM without a dual: a client, `local_steps` times, on one fresh batch per level,

        x <- P_X( x - lr * primal_lr * momentum_x )
        inner^k <- (1 - lr * inner_rate) * inner^k + lr * inner_rate * F_k(inner^(k-1))
        momentum_x <- (1 - lr * primal_rate) * momentum_x
                      + lr * primal_rate * J_1^T ... J_(K-1)^T grad F_K(inner^(K-1))

    in that order, k = 1 .. K-1, with inner^0 = x and J_k the Jacobian of F_k at inner^(k-1). The
    estimates begin on one batch; the server averages x, all inner and momentum_x. `sync`, `output`
    and the rates are LocalSCGDAM's. Values are averaged over clients, Jacobians are not: "printed"
    keeps the floor of Theorem 3.5 when both the Jacobians and the gradients that they multiply
    differ between clients; "levelwise" with one local step does not.

    Up and down: 2 dx and all inner; the first round sends down x only. "levelwise": 2 dx and all
    inner twice, in 2 K exchanges; the first round x only, both ways.

    *Differs from the paper*: the text of Gao et al. was not at hand; the box is that of the
    Fed-DR-SCGD paper, which has two levels and whose first inner value lacks the client's index.
    Its alpha is the rate of the momentum and its beta that of the inner value, the reverse of
    LocalSCGDAM's. The default rates are those of the LocalSCGDAM paper. More than two levels and
    "levelwise" are ours, as are the projections onto the problem's set.
    """

    maximises: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "Gao, Li and Huang, On the Convergence of Local Stochastic Compositional Gradient Descent "
        "with Momentum, ICML 2022; papers/fed-dr-scgd.txt, Algorithm 2"
    )
