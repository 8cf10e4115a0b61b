"""Fed-DR-SCGD: compositional descent of any depth along doubly recursive estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedminimax.algorithms._recursive import DoublyRecursive
from fedminimax.blocks.schedules import Rate, at
from fedminimax.types import Clock, Point


@dataclass(frozen=True)
class FedDRSCGD(DoublyRecursive):
    """Fed-DR-SCGD (papers/fed-dr-scgd.txt, Algorithm 1), for F_K( ... F_1(x)) of any depth K.

    A client estimates the value of each level but the last, inner^k, with inner^0 = x, and the
    gradient in what each level is given, momentum^k. They begin on `first_batches` batches, as
    values and gradients at the client's own estimates. An iteration, on one fresh batch per level,
    is a move, a sweep up and a sweep down; a dash marks what is new, a = recursion_rate:

        x' = P_X( x - lr * momentum^1 )
        inner'^k    = F_k(inner'^(k-1)) + (1 - a) * ( inner^k - F_k(inner^(k-1)) )    k = 1 .. K-1
        momentum'^K = Pi( grad F_K(inner'^(K-1))
                          + (1 - a) * ( momentum^K - grad F_K(inner^(K-1)) ) )
        momentum'^k = Pi( J_k(inner'^(k-1))^T momentum'^(k+1)
                          + (1 - a) * ( momentum^k - J_k(inner^(k-1))^T momentum^(k+1) ) )

    Old and new point share a level's rows, and so do its value and its Jacobian. `sync` says how
    each `local_steps`-th iteration is averaged, after which the means are what is old:

        "printed"    x and all estimates at once, after both sweeps: as the paper's
        "levelwise"  x, inner^1, ..., inner^(K-1), momentum^K, ..., momentum^1, each before the
                     next is computed from it

    With clients far apart "printed" keeps a floor that depends on neither rate: a level has been
    evaluated at the client's own inner^(k-1), and the jump to its mean enters no estimate, so that
    the covariance over clients of a level's Jacobian with the value below it (or the gradient
    above it) stays. With "levelwise" and `local_steps` 1, full batches and no projection, the mean
    of momentum^1 is the gradient from the first synchronisation on; with more local steps the
    floor falls with the rate. The sweeps of a level-wise synchronisation are made in the round
    after its move, and a schedule in rounds gives them that round's rate.

    `projection` is Pi: "none"; "ball", onto the ball of radius^(K-k+1) for level k, the bound of
    Lemma C.1 if every Jacobian's norm is at most `radius`; or "third", v / 3, the operator of
    Lemma C.21, which is linear but no projection: at a fixed x it makes momentum^k converge to
    (a / (2 + a))^(K-k+1) times its value, and shrinks the steps by the factor of momentum^1.

    Up and down: x, all inner and all momentum; "levelwise" in 2 K exchanges, where "printed" has
    one. The first round sends down x only, and "levelwise" then sends up x only.

    *Differs from the paper*: whose theory needs "third" but which gives no bound to project onto;
    the default is "none", because a radius that is too small biases every step unseen, and "third"
    does so always. "levelwise" is ours. The projection of x onto the problem's set is ours too; the
    move of a level-wise synchronisation is projected at the server, after its mean, and the run
    ends with it, before the sweeps. The last point is returned, not that of a random iteration.
    """

    lr: Rate = 0.1  # gamma * eta
    maximises: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "Gao, A Doubly Recursive Stochastic Compositional Gradient Descent Method for Federated "
        "Multi-Level Compositional Optimization, ICML 2024, Alg. 1"
    )

    def reached(self, client: Any, clock: Clock) -> Point:
        return Point(client.x - at(self.lr, clock) * client.momentum[0], client.y)
