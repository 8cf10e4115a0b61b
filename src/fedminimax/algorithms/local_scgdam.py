"""LocalSCGDAM: local descent ascent on a composition, along momenta, with averages of the inner
values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._moving_average import MovingAverages, Number
from fedminimax.blocks.schedules import Rate, at
from fedminimax.types import Clock


@dataclass(frozen=True, kw_only=True)
class LocalSCGDAM(MovingAverages):
    """LocalSCGDAM (papers/local-scgdam.txt, Algorithm 1), for F_K( ... F_1(x) ..., y).

    A client holds an estimate `inner` of the value of each level but the last, with inner^0 = x,
    and a momentum for each player. They begin as values and gradients on one batch. Each client,
    `local_steps` times, on one fresh batch per level,

        x <- P_X( x - lr * primal_lr * momentum_x )
        y <- P_Y( y + lr * dual_lr   * momentum_y )
        inner^k <- (1 - lr * inner_rate) * inner^k + lr * inner_rate * F_k(inner^(k-1))
        momentum_x <- (1 - lr * primal_rate) * momentum_x
                      + lr * primal_rate * J_1^T ... J_(K-1)^T grad_z F_K(inner^(K-1), y)
        momentum_y <- (1 - lr * dual_rate) * momentum_y
                      + lr * dual_rate * grad_y F_K(inner^(K-1), y)

    in that order, k = 1 .. K-1, with J_k the Jacobian of F_k at inner^(k-1). Value and Jacobian of
    a level share their rows, and so do the two gradients. The server averages all five. A schedule
    for `lr` moves steps and weights together; one for `primal_lr` and one for `dual_lr` leave the
    weights alone.

    With clients far apart this keeps a floor at every rate, because the mean of J^T grad is not
    the product of the means: `sync` "printed" is as above; "levelwise" makes the last of each
    `local_steps` iterations exchange by exchange: x and y, inner^1, ..., inner^(K-1), then
    grad_z F_K with momentum_y, its products with J_(K-1), ..., J_2 one after another, and
    momentum_x, each averaged before the next is computed from it. With one local step and exact
    functions nothing of the floor is left; the local iterations between two synchronisations keep
    the client's own products, and their part of it. Its sweeps through the levels are made in the
    round after its move, and a schedule in rounds gives them that round's rate.

    `output` "inner" returns and measures inner^(K-1) in the place of x, where it is of the same
    length (compositional AUC): the scores are those of the weights h after the inner step, but the
    logged loss is that of the composition at h, F_2(F_1(h), y), one inner step further. It needs
    "printed", and a problem that measures x.

    Up and down: 2 (dx + dy) and all inner, 3d + 8 floats for the AUC of d weights; the first round
    sends down x and y only. "levelwise": 2 (dx + dy) and all inner twice, in 2 K exchanges; the
    first round only x and y, both ways.

    *Differs from the paper*: which has two levels, uses every client with the same weight, does
    not say which rates fall when "the learning rate" is divided by 10, and does not say whether x,
    inner or the value of F_1(x) is tested; here x, unless told otherwise. The first estimates are
    not averaged before the first step, as in the paper. "levelwise" is ours; the move that begins
    its synchronisation is projected at the server, and the run ends with it. The projections onto
    the problem's sets are ours.
    """

    dual_lr: Rate = 0.33  # gamma_y
    dual_rate: Rate = 3.3  # beta_y
    solves: ClassVar[str] = "compositional minimax: nonconvex-strongly concave"
    reference: ClassVar[str] = (
        "Zhang et al., Federated Compositional Deep AUC Maximization, NeurIPS 2023, Alg. 1"
    )

    def dual_rates(self, clock: Clock) -> tuple[Number, Number]:
        return at(self.dual_lr, clock), at(self.dual_rate, clock)
