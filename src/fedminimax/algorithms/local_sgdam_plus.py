"""LocalSGDAM+: LocalSGDAM whose dual momentum is tracked at a snapshot of x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fedminimax.algorithms._momentum import MomentumDescentAscent
from fedminimax.algorithms._snapshot import rounds_between
from fedminimax.algorithms._tracked import Tracked
from fedminimax.problems.gradients import gradients
from fedminimax.types import Clock, Draw, Phase, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    momentum_x: Tensor
    momentum_y: Tensor
    snapshot: Tensor  # x~


@dataclass(frozen=True)
class LocalSGDAMPlus(MomentumDescentAscent):
    """Momentum Local SGDA+ (Sharma et al., ICML 2022), for problems that are not concave in y.

    LocalSGDAM with another gradient in the dual's momentum:

        x <- P_X( x - lr * primal_lr * momentum_x )
        y <- P_Y( y + lr * dual_lr   * momentum_y )
        momentum_x <- (1 - lr * primal_rate) * momentum_x + lr * primal_rate * grad_x f_k(x, y)
        momentum_y <- (1 - lr * dual_rate) * momentum_y + lr * dual_rate * grad_y f_k(snapshot, y)

    The server averages all four. Every `snapshot_every` steps the snapshot becomes the average x.
    Up and down: 2 (dx + dy) floats, the first round dx + dy down: the snapshot is what was
    broadcast then.

    *Differs from the paper*: its text was not at hand; the method is named in the experiments of
    the AdaFGDA paper, with the period `local_steps`^2 that is used when none is given. The period
    is a multiple of `local_steps`, so that the snapshot needs no exchange of its own. A client that
    is away at a refresh keeps its older snapshot. The first momenta are not averaged before the
    first step. The projections onto the problem's sets after every move are ours.
    """

    snapshot_every: int | None = None  # S
    keep: ClassVar[tuple[str, ...]] = ("momentum_x", "momentum_y", "snapshot")
    solves: ClassVar[str] = "minimax: nonconvex-concave"
    reference: ClassVar[str] = (
        "Sharma et al., Federated Minimax Optimization: Improved Convergence Analyses and "
        "Algorithms, ICML 2022, Momentum Local SGDA+"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rounds_between(type(self).__name__, self.snapshot_every, self.local_steps)

    def init_client(self, problem: Problem, down: Any, batch: Draw | None) -> Client:
        return Client(*super().init_client(problem, down, batch), snapshot=down.x)

    def phases(self, round: int) -> tuple[Phase, ...]:
        period = rounds_between(type(self).__name__, self.snapshot_every, self.local_steps)
        if round == 0 or round % period:
            return super().phases(round)
        return (self.phase(receive=self.receive_snapshot),)

    def receive_first(self, down: Any, client: Any, clock: Clock) -> Client:
        return Client(*super().receive_first(down, client, clock), snapshot=client.snapshot)

    def receive(self, down: Tracked, client: Any, clock: Clock) -> Client:
        return Client(*down, snapshot=client.snapshot)

    def receive_snapshot(self, down: Tracked, client: Any, clock: Clock) -> Client:
        return Client(*down, snapshot=down.x)

    def local_step(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        new = self.moved(problem, client, clock)
        grad = gradients(problem, new, batch, client.snapshot)
        return Client(*new, *self.averaged(client, grad, clock), client.snapshot)
