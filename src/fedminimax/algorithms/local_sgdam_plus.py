"""LocalSGDAM+: LocalSGDAM whose dual momentum is tracked at a snapshot of x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._snapshot import rounds_between
from fedminimax.algorithms._tracked import Tracked, check_weight
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import average, plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    momentum_x: Tensor
    momentum_y: Tensor
    snapshot: Tensor  # x~


@dataclass(frozen=True)
class LocalSGDAMPlus(Algorithm[Tracked, Tracked, Client, Tracked]):
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

    lr: Rate = 0.3  # alpha_t; eta in the LocalSCGDAM paper, whose values these are
    primal_lr: float = 0.33  # eta_x
    dual_lr: float = 0.33  # eta_y
    primal_rate: float = 3.3  # beta_x
    dual_rate: float = 3.3  # beta_y
    local_steps: int = 8  # tau
    snapshot_every: int | None = None  # S
    init_batches: ClassVar[int] = 1
    keep: ClassVar[tuple[str, ...]] = ("momentum_x", "momentum_y", "snapshot")
    solves: ClassVar[str] = "minimax: nonconvex-concave"
    reference: ClassVar[str] = (
        "Sharma et al., Federated Minimax Optimization: Improved Convergence Analyses and "
        "Algorithms, ICML 2022, Momentum Local SGDA+"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("primal_rate", "dual_rate"):
            check_weight(type(self).__name__, f"lr * {name}", self.lr, getattr(self, name))
        rounds_between(type(self).__name__, self.snapshot_every, self.local_steps)

    def init_server(self, problem: Problem, start: Point) -> Tracked:
        none_x, none_y = torch.zeros_like(start.x), torch.zeros_like(start.y)
        return Tracked(x=start.x, y=start.y, momentum_x=none_x, momentum_y=none_y)

    def init_client(self, problem: Problem, down: Point | Tracked, batch: Draw | None) -> Client:
        assert batch is not None
        grad = gradients(problem, Point(down.x, down.y), batch)
        return Client(x=down.x, y=down.y, momentum_x=grad.x, momentum_y=grad.y, snapshot=down.x)

    def phases(self, round: int) -> tuple[Phase, ...]:
        period = rounds_between(type(self).__name__, self.snapshot_every, self.local_steps)
        if round == 0:
            return (self.phase(broadcast=self.broadcast_point, receive=self.receive_point),)
        return (self.phase(receive=self.receive if round % period else self.receive_snapshot),)

    def broadcast_point(self, server: Tracked, clock: Clock) -> Point:
        return Point(server.x, server.y)

    def receive_point(self, down: Point, client: Client, clock: Clock) -> Client:
        return Client(
            x=down.x,
            y=down.y,
            momentum_x=client.momentum_x,
            momentum_y=client.momentum_y,
            snapshot=client.snapshot,
        )

    def broadcast(self, server: Tracked, clock: Clock) -> Tracked:
        return server

    def receive(self, down: Tracked, client: Client, clock: Clock) -> Client:
        return client_at(down, client.snapshot)

    def receive_snapshot(self, down: Tracked, client: Client, clock: Clock) -> Client:
        return client_at(down, down.x)

    def local_step(
        self, problem: Problem, down: Tracked, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        lr = at(self.lr, clock)
        x = problem.project_x(plus(client.x, -lr * self.primal_lr, client.momentum_x))
        y = problem.project_y(plus(client.y, lr * self.dual_lr, client.momentum_y))
        grad = gradients(problem, Point(x, y), batch, client.snapshot)
        return Client(
            x=x,
            y=y,
            momentum_x=average(client.momentum_x, grad.x, lr * self.primal_rate),
            momentum_y=average(client.momentum_y, grad.y, lr * self.dual_rate),
            snapshot=client.snapshot,
        )

    def send(self, down: Tracked, client: Client, clock: Clock) -> tuple[Tracked, Client]:
        up = Tracked(
            x=client.x, y=client.y, momentum_x=client.momentum_x, momentum_y=client.momentum_y
        )
        return up, client

    def aggregate(self, problem: Problem, server: Tracked, mean: Tracked, clock: Clock) -> Tracked:
        return mean


def client_at(state: Tracked, snapshot: Tensor) -> Client:
    """A client at the server's point, with its averages and a snapshot."""
    return Client(
        x=state.x,
        y=state.y,
        momentum_x=state.momentum_x,
        momentum_y=state.momentum_y,
        snapshot=snapshot,
    )
