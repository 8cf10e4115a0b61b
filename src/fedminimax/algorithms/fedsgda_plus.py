"""FedSGDA+: Local SGDA+ with a step of the server along what the clients have moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._snapshot import SnapshotAscent
from fedminimax.blocks.schedules import Rate, at
from fedminimax.types import Clock, Point, Problem


@dataclass(frozen=True)
class FedSGDAPlus(SnapshotAscent):
    """FedSGDA+ (Wu et al., NeurIPS 2023), for problems that are concave in y.

    Each client, `local_steps` times, with one batch for both players:

        x <- P_X( x - primal_lr * grad_x f_k(x, y) )
        y <- P_Y( y + dual_lr   * grad_y f_k(snapshot, y) )

    The server moves on from where it was,

        x <- P_X( x + server_lr * ( mean_k x^k - x ) ),    y likewise,

    and every `snapshot_rounds` rounds the snapshot becomes its x. Up and down: dx + dy floats: the
    snapshot is what was broadcast then.

    *Differs from the paper*: its text was not at hand; the update is that of the authors' public
    code, except that this one projects as the problem says, onto the nearest point. The authors'
    code clips y at 0 and divides by its sum, which is not the nearest point of the simplex, and
    does not project again after the server's step, which may leave the set when server_lr > 1.
    """

    server_lr: Rate = 1.0  # glr
    snapshot_rounds: int = 1  # otLoop
    solves: ClassVar[str] = "minimax: nonconvex-concave"
    reference: ClassVar[str] = (
        "Wu et al., Solving a Class of Non-Convex Minimax Optimization in Federated Learning, "
        "NeurIPS 2023, FedSGDA+"
    )

    def refreshes(self, round: int) -> bool:
        return round % self.snapshot_rounds == 0

    def aggregate(self, problem: Problem, server: Point, mean: Point, clock: Clock) -> Point:
        lr = at(self.server_lr, clock)
        x = problem.project_x(server.x + lr * (mean.x - server.x))
        y = problem.project_y(server.y + lr * (mean.y - server.y))
        return Point(x, y)
