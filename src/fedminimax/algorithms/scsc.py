"""SCSC: corrected averages of every level's value, and Jacobians that are fresh in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._jacobians import JacobianMethod, Levels, product
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.storm import storm
from fedminimax.types import Clock, Draw, Problem


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

    def local_step(
        self, problem: Problem, down: Levels, client: Levels, batch: Draw, clock: Clock
    ) -> Levels:
        F, rate = SampledLevels(problem, batch), at(self.averaging_rate, clock)
        along = product(self.unpack(problem, client.jacobians))
        x = problem.project_x(client.x - at(self.lr, clock) * along)
        old, h, jacobians = (client.x, *client.inner), [x], ()
        for k in range(1, problem.depth):
            value, jacobian = F.value_and_jacobian(k, h[k - 1])
            h.append(storm(old[k], value, F.value(k, old[k - 1]), rate))
            jacobians = (*jacobians, jacobian)
        jacobians = self.pack(problem, (*jacobians, F.slope(h[-1])))
        return Levels(x=x, inner=tuple(h[1:]), jacobians=jacobians)
