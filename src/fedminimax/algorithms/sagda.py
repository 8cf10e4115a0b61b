"""SAGDA: FSGDA corrected by the clients' gradients at the server's point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._corrected import Client, Control, Corrected
from fedminimax.algorithms._descent_ascent import TwoSided
from fedminimax.problems.gradients import gradients
from fedminimax.types import Draw, Point, Problem


@dataclass(frozen=True)
class SAGDA(Corrected, TwoSided):
    """Stochastic sampling averaging gradient descent ascent (Yang et al., NeurIPS 2022).

    First exchange: each client of the cohort sends its gradient at the server's point, on a batch
    of its own: control^k. The server returns their mean, the control. Second exchange: the client,
    `local_steps` times,

        x <- x - primal_lr * ( grad_x f_k(x, y) - control_x^k + control_x )
        y <- y + dual_lr   * ( grad_y f_k(x, y) - control_y^k + control_y )

    and the server moves as FSGDA's, with `primal_server_lr` and `dual_server_lr`. Clients keep
    nothing between rounds. Up and down: 2 (dx + dy) floats in two exchanges.

    *Differs from the paper*: whose text was not at hand. control^k is the gradient stored in the
    first exchange (SCAFFOLD's option I without memory), not computed again on each step's batch;
    both exchanges are with the same cohort. The problem's sets are projected onto after each move
    and after the server's.
    """

    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Yang, Liu, Zhang and Liu, SAGDA: Achieving O(eps^-2) Communication Complexity in "
        "Federated Min-Max Learning, NeurIPS 2022"
    )

    def direction(self, problem: Problem, down: Control, client: Client, batch: Draw) -> Point:
        grad = gradients(problem, Point(client.x, client.y), batch)
        return Point(
            grad.x - client.control_x + down.control_x, grad.y - client.control_y + down.control_y
        )
