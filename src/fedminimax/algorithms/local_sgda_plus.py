"""Local SGDA+: LocalSGDA whose dual ascends at a snapshot of x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._snapshot import SnapshotAscent, rounds_between


@dataclass(frozen=True)
class LocalSGDAPlus(SnapshotAscent):
    """Local SGDA+ (Deng and Mahdavi, AISTATS 2021), for problems that are not concave in y.

    Each client, `local_steps` times, with one batch for both players:

        x <- P_X( x - primal_lr * grad_x f_k(x, y) )
        y <- P_Y( y + dual_lr   * grad_y f_k(snapshot, y) )

    The server averages x and y. Every `snapshot_every` steps the snapshot becomes the average x.
    Up and down: dx + dy floats: the snapshot is what was broadcast then.

    *Differs from the paper*: its text was not at hand. The period of the snapshot is a multiple of
    `local_steps`, so that it needs no exchange of its own; left out, it is their square, as in the
    AdaFGDA paper. A client that is away at a refresh keeps its older snapshot. The projections
    onto the problem's sets after every move are ours.
    """

    snapshot_every: int | None = None  # S
    solves: ClassVar[str] = "minimax: nonconvex-concave"
    reference: ClassVar[str] = (
        "Deng and Mahdavi, Local Stochastic Gradient Descent Ascent, AISTATS 2021, Local SGDA+"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rounds_between(type(self).__name__, self.snapshot_every, self.local_steps)

    def refreshes(self, round: int) -> bool:
        period = rounds_between(type(self).__name__, self.snapshot_every, self.local_steps)
        return round % period == 0
