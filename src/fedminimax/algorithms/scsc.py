"""SCSC: corrected averages of every level's value, and Jacobians that are fresh in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedminimax.algorithms._jacobians import JacobianMethod, Level
from fedminimax.blocks.schedules import Rate
from fedminimax.blocks.storm import storm


@dataclass(frozen=True)
class SCSC(JacobianMethod):
    """Stochastically corrected compositional gradient (Chen et al., 2020), at every client.

    With h_0 = x, every level k has an inner value h_k and the Jacobian J_k of the last step, which
    for the last level is a gradient. A client, `local_steps` times, moves and then goes through the
    levels from the first to the last, with one batch per level:

        x   <- P_X( x - lr * J_1' J_2' ... J_K' )
        h_k <- F_k(h_{k-1} new) + (1 - averaging_rate) * ( h_k - F_k(h_{k-1} old) )
        J_k <- the Jacobian of F_k at h_{k-1} new

    The server averages x, all h_k and all J_k: the first step of a round moves along the product of
    the averaged Jacobians, the others along the product of the client's own. Values and Jacobians
    begin on one batch. With d_k the length of h_k, up and down: sum_{k<K} d_k + sum_k d_k d_{k-1}
    floats, where d_K = 1; the first round sends only x down. `sent` = "structured" sends only
    those entries of a Jacobian that rows or points can change, where the problem says which.

    *Differs from the paper*: whose text was not at hand; the update is reasoned from the algorithm
    sheet. A level's Jacobian is taken on the batch of its value; the paper allows another. That
    Jacobians are averaged, though SCSC keeps none, and lr and averaging_rate are as in the
    experiments of the Fed-DR-SCGD paper, which does not say what they are averaged for: that the
    next step uses them is our reading. The projection of x is ours.
    """

    lr: Rate = 1e-6
    reference: ClassVar[str] = (
        "Chen, Sun and Yin, Solving Stochastic Compositional Optimization is Nearly as Easy as "
        "Solving Stochastic Optimization, arXiv 2008.10847, SCSC"
    )

    def track(
        self,
        level: Level,
        value: Tensor,
        jacobian: Tensor,
        old: Tensor,
        new: Tensor,
        rate: Tensor | float,
    ) -> tuple[Tensor, Tensor]:
        value_new, fresh = level.value_and_jacobian(new)
        return storm(value, value_new, level.value(old), rate), fresh
