"""FedSGDA-M: local descent ascent along STORM estimates that are averaged with the point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._tracked import FourVectors, Momenta, Tracked, check_weight
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.storm import storm
from fedminimax.blocks.vectors import plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Clock, Draw, Phase, Point, Problem


@dataclass(frozen=True)
class FedSGDAM(FourVectors):
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

    @property
    def init_batches(self) -> int:  # type: ignore[override]  a setting decides
        return self.first_batches

    def phases(self, round: int) -> tuple[Phase, ...]:
        local = self.phase(gradients=2)
        if round:
            return (local,)
        estimates = self.phase(
            broadcast=self.broadcast_point,
            receive=self.receive_point,
            send=self.send_momenta,
            aggregate=self.set_momenta,
            steps=0,
        )
        return estimates, local

    def send_momenta(self, down: Point, client: Tracked, clock: Clock) -> tuple[Momenta, Tracked]:
        sent = Momenta(momentum_x=client.momentum_x, momentum_y=client.momentum_y)
        return sent, client

    def set_momenta(
        self, problem: Problem, server: Tracked, mean: Momenta, clock: Clock
    ) -> Tracked:
        return server._replace(momentum_x=mean.momentum_x, momentum_y=mean.momentum_y)

    def local_step(
        self, problem: Problem, down: Tracked, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        x = problem.project_x(plus(client.x, -at(self.primal_lr, clock), client.momentum_x))
        y = problem.project_y(plus(client.y, at(self.dual_lr, clock), client.momentum_y))
        old = gradients(problem, Point(client.x, client.y), batch)
        grad = gradients(problem, Point(x, y), batch)
        return Tracked(
            x=x,
            y=y,
            momentum_x=storm(client.momentum_x, grad.x, old.x, at(self.primal_rate, clock)),
            momentum_y=storm(client.momentum_y, grad.y, old.y, at(self.dual_rate, clock)),
        )
