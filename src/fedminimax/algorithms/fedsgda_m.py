"""FedSGDA-M: local descent ascent along STORM estimates that are averaged with the point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedminimax.algorithms._tracked import MoveThenTrack, Tracked, check_weight, storm_tracked
from fedminimax.blocks.schedules import Rate, at
from fedminimax.types import Clock, Draw, Phase, Point, Problem


@dataclass(frozen=True)
class FedSGDAM(MoveThenTrack):
    """FedSGDA-M (Wu et al., NeurIPS 2023), for problems that are strongly concave or PL in y.

    The estimates begin as gradients on `first_batches` batches, averaged over clients. Then each
    client, `local_steps` times, moves and, on one fresh batch, tracks at both ends of the move:

        x' = P_X( x - primal_lr * momentum_x )
        y' = P_Y( y + dual_lr   * momentum_y )
        momentum_x <- grad_x f_k(x', y') + (1 - primal_rate) * ( momentum_x - grad_x f_k(x, y) )
        momentum_y <- grad_y f_k(x', y') + (1 - dual_rate)   * ( momentum_y - grad_y f_k(x, y) )

    and x, y <- x', y'. The server averages all four. Up and down: 2 (dx + dy) floats, and for the
    first estimates dx + dy more in the first round, in one more exchange.

    With clients far apart it keeps a floor of the order of LocalSGDA's at every rate: averaging
    moves each client's point, and that jump enters no estimate.

    *Differs from the paper*: its text was not at hand and there is no public code; the update is
    written from memory of it. The projections onto the problem's sets after every move are ours.
    """

    primal_lr: Rate = 0.1
    dual_lr: Rate = 0.1
    primal_rate: Rate = 0.1
    dual_rate: Rate = 0.1
    local_steps: int = 8  # Q
    first_batches: int = 1
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Wu et al., Solving a Class of Non-Convex Minimax Optimization in Federated Learning, "
        "NeurIPS 2023, FedSGDA-M"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("primal_rate", "dual_rate"):
            check_weight(type(self).__name__, name, getattr(self, name))
        if not isinstance(self.first_batches, int) or self.first_batches < 1:
            raise ValueError(
                f"FedSGDAM: first_batches is {self.first_batches!r}; give a whole number of at "
                "least 1"
            )

    @property
    def init_batches(self) -> int:  # type: ignore[override]
        return self.first_batches

    def phases(self, round: int) -> tuple[Phase, ...]:
        local = self.phase(gradients=2)
        if round:
            return (local,)
        return self.first_phase(send=self.send_momenta, steps=0), local

    def local_step(
        self, problem: Problem, down: Any, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        new = Point(
            problem.project_x(client.x - at(self.primal_lr, clock) * client.momentum_x),
            problem.project_y(client.y + at(self.dual_lr, clock) * client.momentum_y),
        )
        rates = at(self.primal_rate, clock), at(self.dual_rate, clock)
        return storm_tracked(problem, client, new, batch, *rates)
