"""LocalSGDAM: local descent ascent along momenta that are averaged with the point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._momentum import MomentumDescentAscent
from fedminimax.algorithms._tracked import Tracked
from fedminimax.problems.gradients import gradients
from fedminimax.types import Clock, Draw, Problem


@dataclass(frozen=True)
class LocalSGDAM(MomentumDescentAscent):
    """Momentum Local SGDA (Sharma et al., ICML 2022), also called LocalSGDAM.

    Each client, `local_steps` times, moves along its momenta and then tracks them on a fresh batch
    at the point that it has reached:

        x <- P_X( x - lr * primal_lr * momentum_x )
        y <- P_Y( y + lr * dual_lr   * momentum_y )
        momentum_x <- (1 - lr * primal_rate) * momentum_x + lr * primal_rate * grad_x f_k(x, y)
        momentum_y <- (1 - lr * dual_rate)   * momentum_y + lr * dual_rate   * grad_y f_k(x, y)

    The momenta begin as gradients on one batch. The server averages all four. Up and down:
    2 (dx + dy) floats; the first round has no momenta to send down.

    *Differs from the paper*: its text was not at hand; the update is written from memory of it, and
    the rates given here are those of the LocalSCGDAM paper. The first momenta are not averaged
    before the first step. The projections onto the problem's sets after every move are ours.
    """

    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Sharma et al., Federated Minimax Optimization: Improved Convergence Analyses and "
        "Algorithms, ICML 2022, Momentum Local SGDA"
    )

    def local_step(
        self, problem: Problem, down: Tracked, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        new = self.moved(problem, client, clock)
        grad = gradients(problem, new, batch)
        return Tracked(*new, *self.averaged(client, grad, clock))
