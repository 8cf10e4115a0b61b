"""CODASCA: CODA+ with control variates for both players."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._stagewise import StagewiseProximal
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import average, chosen, plus
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    control_x: Tensor  # c_v
    control_y: Tensor  # c_alpha


Down = Server


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    center: Tensor  # v_0 of the stage
    control_x: Tensor  # c_v^k
    control_y: Tensor  # c_alpha^k
    stage: Tensor  # that the three belong to
    ahead_x: Tensor  # c_v - c_v^k
    ahead_y: Tensor
    sum_x: Tensor  # of the gradients used in this round
    sum_y: Tensor


class Up(NamedTuple):
    x: Tensor
    y: Tensor
    control_x: Tensor
    control_y: Tensor


@dataclass(frozen=True)
class Codasca(StagewiseProximal):
    """CODASCA (Yuan, Guo et al., Federated Deep AUC Maximization, ICML 2021, Algorithms 3 and 4).

    A stage starts at x_0 with all controls 0. With g the gradients of f_k + proximal/2 |x - x_0|^2,
    client k takes

        x <- x - lr * ( g_x - control_x^k + control_x )
        y <- y + lr * ( g_y - control_y^k + control_y )

    `local_steps` times, then sets its controls to the averages of the gradients that it used. The
    server averages the controls and moves both players on from where they were:

        x <- x + server_lr * ( mean_k x^k - x ),    y <- y + server_lr * ( mean_k y^k - y )

    Up and down: 2 (dx + dy) floats.

    *Differs from the paper*: the controls are computed by eq. (7), which equals the box's (6) for a
    constant rate and no sets, and stays right otherwise. Alg. 4 does not say that a round begins at
    the server's point; it does here. A stage returns its last point, not that of a random round.
    `proximal` is the coefficient itself. The problem's sets, if any, are projected onto after each
    move and after the server's. Means over clients are weighted as the run says (AUC: by size); the
    paper's are even. With some clients away (allow_partial), the server's controls move by the
    share that took part, and a client's centre is the first point that it gets in a stage.
    """

    server_lr: Rate = 1.0  # eta_g
    keep: ClassVar[tuple[str, ...]] = ("center", "control_x", "control_y", "stage")
    solves: ClassVar[str] = "minimax: PL-strongly concave"
    reference: ClassVar[str] = (
        "Yuan et al., Federated Deep AUC Maximization for Heterogeneous Data, ICML 2021, Alg. 3-4"
    )

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(*start, torch.zeros_like(start.x), torch.zeros_like(start.y))

    def init_client(self, problem: Problem, down: Down, batch: Draw | None) -> Client:
        none = Point(torch.zeros_like(down.x), torch.zeros_like(down.y))
        stage = torch.tensor(-1, device=down.x.device)
        return Client(down.x, down.y, down.x, *none, stage, *none, *none)

    def broadcast(self, server: Server, clock: Clock) -> Down:
        return server

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(aggregate=self.end_stage if self.ends(round) else self.aggregate),)

    def receive(self, down: Down, client: Any, clock: Clock) -> Client:
        # In its first round of a stage a client has a new centre and no controls (Alg. 4).
        new = client.stage != clock.stage
        center = chosen(new, down.x, client.center)
        control = Point(client.control_x, client.control_y)
        less = -(~new).to(down.x)  # -1, or 0 where there are none: a pass less than `where`
        ahead = plus(down.control_x, less, control.x), plus(down.control_y, less, control.y)
        none = Point(torch.zeros_like(down.x), torch.zeros_like(down.y))
        return Client(down.x, down.y, center, *control, clock.stage, *ahead, *none)

    def local_step(
        self, problem: Problem, down: Down, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        lr, g = at(self.lr, clock), self.proximal_gradients(problem, client, batch, clock)
        sums = {"sum_x": plus(client.sum_x, 1.0, g.x), "sum_y": client.sum_y + g.y}
        # g - c^k + c, where g was.
        g = Point(plus(client.ahead_x, 1.0, g.x, spent=True), g.y + client.ahead_y)
        x = problem.project_x(plus(client.x, -lr, g.x, spent=True))  # v^k_{r,t+1}
        y = problem.project_y(plus(client.y, lr, g.y))  # alpha^k_{r,t+1}
        return client._replace(x=x, y=y, **sums)

    def send(self, down: Down, client: Client, clock: Clock) -> tuple[Up, Client]:
        control = Point(client.sum_x / clock.steps, client.sum_y / clock.steps)  # eq. (7)
        client = client._replace(control_x=control.x, control_y=control.y)
        return Up(client.x, client.y, *control), client

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        lr = at(self.server_lr, clock)
        x = problem.project_x(average(server.x, mean.x, lr))  # v_r
        y = problem.project_y(average(server.y, mean.y, lr))  # alpha_r
        # With all clients the share is 1, and the controls are the paper's mean.
        old, new = (server.control_x, server.control_y), (mean.control_x, mean.control_y)
        controls = [average(c, m, clock.share) for c, m in zip(old, new, strict=True)]
        return Server(x, y, *controls)

    def end_stage(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        moved = self.aggregate(problem, server, mean, clock)
        return self.init_server(problem, Point(moved.x, moved.y))
