"""FGDA: descent ascent along STORM estimates for both players, synchronised every so often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedminimax.algorithms._fgda import FederatedDescentAscent
from fedminimax.types import Point


@dataclass(frozen=True)
class FGDA(FederatedDescentAscent):
    """FGDA (Huang et al., AISTATS 2024, Algorithm 1 with A = B = I).

    The estimates begin as gradients on `local_steps` batches. A client moves and, on one fresh
    batch, tracks at both ends of the move:

        x' = P_X( x - lr * primal_lr * momentum_x )
        y' = P_Y( y + lr * dual_lr   * momentum_y )
        momentum_x <- grad_x f_k(x', y') + (1 - primal_rate) * ( momentum_x - grad_x f_k(x, y) )
        momentum_y <- grad_y f_k(x', y') + (1 - dual_rate)   * ( momentum_y - grad_y f_k(x, y) )

    and x, y <- x', y'. In every iteration t with t mod local_steps = 0 all four are averaged before
    the move. `sync` says what is tracked then:

        "track"      from the averages, as if they were the client's own
        "reaverage"  from the client's own four vectors, and momentum_x and momentum_y are averaged
                     once more

    With clients far apart "track" keeps a floor of the order of LocalSGDA's at every rate: the jump
    of the average enters no estimate. The floor of "reaverage" falls with the rates.

    Up and down: 2 (dx + dy) floats, with "reaverage" 3 (dx + dy) in two exchanges; the first round
    sends dx + dy less down. The rates of the theory, eta_t = n K^(1/3) / (m + t)^(1/3) with t from
    1 and c eta_t^2, are InverseRoot(n K^(1/3), shift = m + 1, power = 1/3) for lr and
    InverseRoot(c n^2 K^(2/3), shift = m + 1, power = 2/3) for the two others; K is the number of
    clients.

    *Differs from the paper*: the box does not say what is tracked at a synchronisation, and its
    proofs need what excludes each other; "track" is the usual choice, "reaverage" the one for which
    the mean of the estimates obeys the recursion of Lemma 8. With "track" the server's point after
    a round is the average before the common move, which each client then makes itself: the old and
    the new point need not both travel. The run returns the last point, not that of a random
    iteration. Section 4 subtracts where y ascends; the box and the proofs add, and so does this.
    Its prose calls lambda the primal and gamma the dual step size; the box has them the other way
    round, as here. Its runs have lr = 0.001 and primal_lr = dual_lr = 0.1; lr = 1 is our default,
    as the product is the step. The projections onto the problem's sets after every move are ours.
    """

    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Huang et al., Adaptive Federated Minimax Optimization with Lower Complexities, AISTATS "
        "2024, Alg. 1"
    )

    def direction(self, state: Any, down: Any) -> Point:
        return Point(state.momentum_x, state.momentum_y)
