"""CODA+: stage-wise local descent ascent with a proximal term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.schedules import Rate, Stagewise, at
from fedminimax.blocks.stages import check_growth, grow, stage_of
from fedminimax.blocks.vectors import choose, plus, plus_difference
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    # v_0: every client got it as the first point of the stage, so it never travels again
    center: Tensor
    sum_x: Tensor  # over the steps of the stage so far
    sum_y: Tensor
    taken: Tensor  # how many steps these are
    stage: Tensor  # that the fields above belong to


@dataclass(frozen=True)
class CodaPlus(Algorithm[Point, Point, Client, Point]):
    """CODA+ (Yuan, Guo et al., Federated Deep AUC Maximization, ICML 2021, Algorithms 1 and 2).

    Stage s starts at (x_0, y_0), what the stage before returned. Client k takes steps

        x <- x - lr_s * ( grad_x f_k(x, y) + proximal * (x - x_0) )
        y <- y + lr_s * grad_y f_k(x, y)

    with both gradients at the old point and on one batch, and every `local_steps` the server
    averages x and y. The stage returns the average over its steps and clients. Up and down:
    dx + dy floats per round; x_0 is the first point a client receives in a stage, so it travels
    once.

    *Differs from the paper*: `proximal` is the coefficient itself (the paper writes it as gamma,
    1/gamma and 1/(2 gamma) in turn; its experiments use 1/500 to 1/1000). `stage_output = "last"`
    continues from the last point as the authors' code does; there the centre is each client's own
    average, here it is the common last point. The lengths are given in rounds: the paper's I_s is
    local_steps * local_steps_growth^s, and its T_s, in iterations, is that times stage_rounds *
    stage_growth^s, so that T_s grows by stage_growth times local_steps_growth from stage to stage.
    By default nothing grows, as in the experiments. The sets of the problem, if any, are
    projected onto after each move. Means over clients are weighted as the run says (AUC: by size);
    the paper's are even. A run that ends inside a stage returns the last average, not the stage's.
    """

    lr: Rate = Stagewise(0.1, factor=3.0)  # eta_s
    proximal: Rate = 2e-3  # gamma, as the coefficient of x - x_0
    local_steps: int = 8  # I
    stage_rounds: int = 100  # T_s / I_s
    stage_growth: float = 1.0
    local_steps_growth: float = 1.0
    stage_output: Literal["average", "last"] = "average"
    keep: ClassVar[tuple[str, ...]] = ("center", "sum_x", "sum_y", "taken", "stage")
    solves: ClassVar[str] = "minimax: PL-strongly concave"
    reference: ClassVar[str] = (
        "Yuan et al., Federated Deep AUC Maximization for Heterogeneous Data, ICML 2021, Alg. 1-2"
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

    def init_client(self, problem: Problem, down: Point, batch: Draw | None) -> Client:
        return Client(
            x=down.x,
            y=down.y,
            center=down.x,
            sum_x=torch.zeros_like(down.x),
            sum_y=torch.zeros_like(down.y),
            taken=down.x.new_zeros(()),
            stage=torch.tensor(-1, device=down.x.device),
        )

    def phases(self, round: int) -> tuple[Phase, ...]:
        if self.ends(round) and self.stage_output == "average":
            return (self.phase(send=self.send_average),)
        return (self.phase(),)

    def receive(self, down: Point, client: Client, clock: Clock) -> Client:
        new = client.stage != clock.stage  # the client's first round of a stage
        return Client(
            x=down.x,
            y=down.y,
            center=choose(new, down.x, client.center),
            sum_x=torch.where(new, 0.0, client.sum_x),
            sum_y=torch.where(new, 0.0, client.sum_y),
            taken=torch.where(new, 0.0, client.taken),
            stage=clock.stage,
        )

    def local_step(
        self, problem: Problem, down: Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        lr, gamma = at(self.lr, clock), at(self.proximal, clock)
        grad = gradients(problem, Point(client.x, client.y), batch)
        grad = Point(plus_difference(grad.x, gamma, client.x, client.center), grad.y)  # of eq. (5)
        x = problem.project_x(plus(client.x, -lr, grad.x))  # Alg. 2: v_{t+1}
        y = problem.project_y(plus(client.y, lr, grad.y))  # Alg. 2: alpha_{t+1}
        return client._replace(
            x=x,
            y=y,
            sum_x=client.sum_x + x,
            sum_y=client.sum_y + y,
            taken=client.taken + 1,
        )

    def send_average(self, down: Point, client: Client, clock: Clock) -> tuple[Point, Client]:
        """At the end of a stage its average travels in the place of the last point."""
        x, y = client.sum_x / client.taken, client.sum_y / client.taken  # Alg. 2: Return
        return Point(x, y), client
