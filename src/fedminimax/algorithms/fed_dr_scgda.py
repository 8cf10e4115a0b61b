"""Fed-DR-SCGDA: compositional minimax of any depth along doubly recursive estimates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedminimax.algorithms._recursive import DoublyRecursive, Sync
from fedminimax.blocks.schedules import Rate, at
from fedminimax.types import Clock, Point


@dataclass(frozen=True)
class FedDRSCGDA(DoublyRecursive):
    """Fed-DR-SCGD with a dual, for min over x, max over y of F_K( ... F_1(x) ... , y).

    No paper has this method. Its support is the derivation and the experiments in this repository:
    there is no convergence proof.

    To the iteration of FedDRSCGD it adds an ascent in y and a recursive estimate of the gradient in
    y, on the rows of level K; a dash marks what is new, a = recursion_rate:

        x' = P_X( x - primal_lr * momentum^1 ),    y' = P_Y( y + dual_lr * momentum_y )
        momentum'^K = Pi( grad_h F_K(h', y') + (1 - a) * ( momentum^K - grad_h F_K(h, y) ) )
        momentum_y' =     grad_y F_K(h', y') + (1 - a) * ( momentum_y - grad_y F_K(h, y) )

    with h = inner^(K-1), after the same sweep up and before the same sweep down. `sync`,
    `projection` and the other settings are FedDRSCGD's; Pi is not applied to momentum_y. In a
    level-wise synchronisation y is averaged with x and momentum_y with momentum^K, which both
    follow from inner^(K-1): exact functions and one local step give the exact gradients in x and y
    from the first synchronisation on, however far apart the clients are.

    With a y of length 0 it is FedDRSCGD. With K = 1 "printed" is FedSGDA-M without its exchange of
    first estimates, and "levelwise" is FGDA with sync "reaverage" and lr 1.

    Up and down: x, y, all inner, all momentum and momentum_y; "levelwise" in 2 K exchanges. The
    first round sends down x and y only, and "levelwise" then sends up x and y only.

    *Differs from the paper*: there is none. The default is "levelwise"; "printed" averages as
    papers/fed-dr-scgd.txt does and keeps the floor that is told of FedDRSCGD.
    """

    primal_lr: Rate = 0.1
    dual_lr: Rate = 0.1
    sync: Sync = field(default="levelwise", kw_only=True)
    reference: ClassVar[str] = "none: a K-level minimax form of Fed-DR-SCGD"

    def reached(self, client: Any, clock: Clock) -> Point:
        return Point(
            client.x - at(self.primal_lr, clock) * client.momentum[0],
            client.y + at(self.dual_lr, clock) * client.momentum_y,
        )
