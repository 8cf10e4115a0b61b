"""CODASCA: CODA+ with control variates for both players."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.schedules import Rate, Stagewise, at
from fedminimax.blocks.stages import check_growth, grow, stage_of
from fedminimax.blocks.vectors import average, choose, plus, plus_difference
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


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
class Codasca(Algorithm[Server, Down, Client, Up]):
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

    lr: Rate = Stagewise(0.1, factor=3.0)  # eta_l
    proximal: Rate = 2e-3  # gamma, as the coefficient of x - x_0
    local_steps: int = 8  # I
    stage_rounds: int = 100  # R_s
    stage_growth: float = 1.0
    local_steps_growth: float = 1.0
    server_lr: Rate = 1.0  # eta_g
    keep: ClassVar[tuple[str, ...]] = ("center", "control_x", "control_y", "stage")
    solves: ClassVar[str] = "minimax: PL-strongly concave"
    reference: ClassVar[str] = (
        "Yuan et al., Federated Deep AUC Maximization for Heterogeneous Data, ICML 2021, Alg. 3-4"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_growth(self.stage_growth, self.local_steps_growth)

    def stage(self, round: int) -> int:
        return stage_of(round, self.stage_rounds, self.stage_growth).number

    def steps(self, round: int, client: int) -> int:
        return grow(self.local_steps, self.local_steps_growth, self.stage(round))

    def ends(self, round: int) -> bool:
        """Is this the last round of a stage?"""
        return round == stage_of(round, self.stage_rounds, self.stage_growth).last_round

    def init_server(self, problem: Problem, start: Point) -> Server:
        none = Point(torch.zeros_like(start.x), torch.zeros_like(start.y))
        return Server(x=start.x, y=start.y, control_x=none.x, control_y=none.y)

    def init_client(self, problem: Problem, down: Down, batch: Draw | None) -> Client:
        none_x, none_y = torch.zeros_like(down.x), torch.zeros_like(down.y)
        return Client(
            x=down.x,
            y=down.y,
            center=down.x,
            control_x=none_x,
            control_y=none_y,
            stage=torch.tensor(-1, device=down.x.device),
            ahead_x=none_x,
            ahead_y=none_y,
            sum_x=none_x,
            sum_y=none_y,
        )

    def broadcast(self, server: Server, clock: Clock) -> Down:
        return server

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(aggregate=self.end_stage if self.ends(round) else self.aggregate),)

    def receive(self, down: Down, client: Client, clock: Clock) -> Client:
        # In its first round of a stage a client has a new centre and no controls (Alg. 4).
        new = client.stage != clock.stage
        none_x, none_y = torch.zeros_like(down.x), torch.zeros_like(down.y)
        less = -(~new).to(down.x)  # -1, or 0 where there are no controls
        return Client(
            x=down.x,
            y=down.y,
            center=choose(new, down.x, client.center),
            control_x=client.control_x,
            control_y=client.control_y,
            stage=clock.stage,
            ahead_x=plus(down.control_x, less, client.control_x),
            ahead_y=plus(down.control_y, less, client.control_y),
            sum_x=none_x,
            sum_y=none_y,
        )

    def local_step(
        self, problem: Problem, down: Down, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        lr, gamma = at(self.lr, clock), at(self.proximal, clock)
        grad = gradients(problem, Point(client.x, client.y), batch)
        grad = Point(plus_difference(grad.x, gamma, client.x, client.center), grad.y)  # of F_k^s
        sum_x, sum_y = plus(client.sum_x, 1.0, grad.x), plus(client.sum_y, 1.0, grad.y)
        grad = Point(plus(grad.x, 1.0, client.ahead_x), plus(grad.y, 1.0, client.ahead_y))
        return client._replace(
            x=problem.project_x(plus(client.x, -lr, grad.x)),  # v^k_{r,t+1}
            y=problem.project_y(plus(client.y, lr, grad.y)),  # alpha^k_{r,t+1}
            sum_x=sum_x,
            sum_y=sum_y,
        )

    def send(self, down: Down, client: Client, clock: Clock) -> tuple[Up, Client]:
        control_x, control_y = client.sum_x / clock.steps, client.sum_y / clock.steps  # eq. (7)
        up = Up(x=client.x, y=client.y, control_x=control_x, control_y=control_y)
        return up, client._replace(control_x=control_x, control_y=control_y)

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        lr = at(self.server_lr, clock)
        return Server(
            x=problem.project_x(average(server.x, mean.x, lr)),  # v_r
            y=problem.project_y(average(server.y, mean.y, lr)),  # alpha_r
            # With all clients the share is 1, and the controls are the paper's mean.
            control_x=average(server.control_x, mean.control_x, clock.share),
            control_y=average(server.control_y, mean.control_y, clock.share),
        )

    def end_stage(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        """The next stage starts at the last point, with controls of 0."""
        moved = self.aggregate(problem, server, mean, clock)
        return self.init_server(problem, Point(moved.x, moved.y))
