"""SMVR: STORM on every level's value and on every level's Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._jacobians import JacobianMethod, Levels, product
from fedminimax.blocks.projections import ball
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.storm import storm
from fedminimax.types import Clock, Draw, Problem


@dataclass(frozen=True)
class SMVR(JacobianMethod):
    """Stochastic multi-level variance reduction (Jiang et al., ICML 2022), at every client.

    With h_0 = x, every level k has an inner value h_k and a Jacobian V_k; the last one's V_K is a
    gradient. A client, `local_steps` times, moves and then goes through the levels from the first
    to the last, with one batch per level for both points and for value and Jacobian:

        x   <- P_X( x - lr * V_1' V_2' ... V_K' )
        h_k <- F_k(h_{k-1} new) + (1 - averaging_rate) * ( h_k - F_k(h_{k-1} old) )
        V_k <- P( J_k(h_{k-1} new) + (1 - averaging_rate) * ( V_k - J_k(h_{k-1} old) ) )

    P scales a Jacobian whose Frobenius norm is above `radius` back to it; none by default. Values
    and Jacobians begin on one batch, and P is applied to these too. The server averages x, all h_k
    and all V_k. With d_k the length of h_k, up and down: sum_{k<K} d_k + sum_k d_k d_{k-1} floats,
    where d_K = 1; the first round sends only x down. `sent` = "structured" sends only
    those entries of a Jacobian that rows or points can change, where the problem says which.

    *Differs from the paper*: whose text was not at hand; the update is reasoned from the algorithm
    sheet. Its P has the levels' Lipschitz constant for a radius, which is rarely known. What is
    averaged, and lr and averaging_rate, are as in the experiments of the Fed-DR-SCGD paper; the
    first estimates are not averaged before the first step. The projection of x is ours.
    """

    lr: Rate = 1e-3
    radius: float | None = None  # L_f
    step_gradients: ClassVar[int] = 2
    reference: ClassVar[str] = (
        "Jiang, Wang, Wang, Zhang and Yang, Optimal Algorithms for Stochastic Multi-Level "
        "Compositional Optimization, ICML 2022, SMVR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"SMVR: radius is {self.radius!r}; give a number above 0, or None")
        if self.radius is not None and self.sent == "structured":
            raise ValueError(
                f"SMVR: sent is 'structured' and radius is {self.radius!r}, but the projection "
                "changes entries that would otherwise be known: send 'dense', or leave radius out"
            )

    def init_client(self, problem: Problem, down: Levels, batch: Draw | None) -> Levels:
        first = super().init_client(problem, down, batch)
        return first._replace(jacobians=tuple(map(self.bound, first.jacobians)))

    def local_step(
        self, problem: Problem, down: Levels, client: Levels, batch: Draw, clock: Clock
    ) -> Levels:
        F, rate = SampledLevels(problem, batch), at(self.averaging_rate, clock)
        V = self.unpack(problem, client.jacobians)
        x = problem.project_x(client.x - at(self.lr, clock) * product(V))
        old, h, jacobians = (client.x, *client.inner), [x], ()
        for k in range(1, problem.depth):
            value_old, jacobian_old = F.value_and_jacobian(k, old[k - 1])
            value, jacobian = F.value_and_jacobian(k, h[k - 1])
            h.append(storm(old[k], value, value_old, rate))
            tracked = self.bound(storm(V[k - 1], jacobian, jacobian_old, rate))
            jacobians = (*jacobians, tracked)
        last = self.bound(storm(V[-1], F.slope(h[-1]), F.slope(old[-1]), rate))
        jacobians = self.pack(problem, (*jacobians, last))
        return Levels(x=x, inner=tuple(h[1:]), jacobians=jacobians)

    def bound(self, jacobian: Tensor) -> Tensor:
        return jacobian if self.radius is None else ball(self.radius)(jacobian)
