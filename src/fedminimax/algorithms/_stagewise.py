"""What the CODA family shares: stages, and a proximal term towards the point where the stage
began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.schedules import Rate, Stagewise, at
from fedminimax.blocks.stages import grown, stage_of
from fedminimax.blocks.vectors import chosen, plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


@dataclass(frozen=True)
class StagewiseProximal(Algorithm):
    """Stages of `stage_rounds` rounds (times `stage_growth` per stage) of `local_steps` steps
    (likewise)."""

    lr: Rate = Stagewise(0.1, factor=3.0)  # eta_s
    proximal: Rate = 2e-3  # gamma, as the coefficient of x - x_0
    local_steps: int = 8  # I
    stage_rounds: int = 100  # T_s / I
    stage_growth: float = 1.0
    local_steps_growth: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("stage_growth", "local_steps_growth"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; give a factor above 0 (1: no growth)"
                )

    def stage(self, round: int) -> int:
        return stage_of(round, self.stage_rounds, self.stage_growth).number

    def steps(self, round: int, client: int) -> int:
        return grown(self.local_steps, self.local_steps_growth, self.stage(round))

    def ends(self, round: int) -> bool:
        return round == stage_of(round, self.stage_rounds, self.stage_growth).last_round

    def proximal_gradients(self, problem: Problem, client: Any, batch: Draw, clock: Clock) -> Point:
        """The gradients of F_k + proximal / 2 |x - center|^2; x's is a new vector."""
        grad = gradients(problem, Point(client.x, client.y), batch)
        rate, away = at(self.proximal, clock), plus(client.x, -1.0, client.center)
        return grad._replace(x=plus(grad.x, rate, away, spent=True))


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    # v_0: every client got it as the first point of the stage, so it never travels again
    center: Tensor
    sum_x: Tensor
    sum_y: Tensor
    count: Tensor
    stage: Tensor  # that the fields above belong to


@dataclass(frozen=True)
class StageAveraged(StagewiseProximal):
    """DSG+ (papers: CODA+, Alg. 2), the inner routine of CODA, CODA+ and NPA."""

    stage_output: Literal["average", "last"] = "average"
    keep: ClassVar[tuple[str, ...]] = ("center", "sum_x", "sum_y", "count", "stage")

    def init_client(self, problem: Problem, down: Point, batch: Draw | None) -> Client:
        none = Point(torch.zeros_like(down.x), torch.zeros_like(down.y))
        count = torch.zeros((), dtype=down.x.dtype, device=down.x.device)
        stage = torch.tensor(-1, device=down.x.device)
        return Client(down.x, down.y, down.x, none.x, none.y, count, stage)

    def phases(self, round: int) -> tuple[Phase, ...]:
        if self.ends(round) and self.stage_output == "average":
            return (self.phase(send=self.send_average),)
        return (self.phase(),)

    def receive(self, down: Point, client: Any, clock: Clock) -> Client:
        # In its first round of a stage a client has a new centre, and has summed nothing yet.
        new = client.stage != clock.stage
        center = chosen(new, down.x, client.center)
        return Client(
            down.x,
            down.y,
            center,
            torch.where(new, 0.0, client.sum_x),
            torch.where(new, 0.0, client.sum_y),
            torch.where(new, 0.0, client.count),
            clock.stage,
        )

    def local_step(
        self, problem: Problem, down: Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        lr = at(self.lr, clock)
        grad = self.proximal_gradients(problem, client, batch, clock)
        x = problem.project_x(plus(client.x, -lr, grad.x, spent=True))  # Alg. 2: v_{t+1}
        y = problem.project_y(plus(client.y, lr, grad.y))  # Alg. 2: alpha_{t+1}
        sums = (client.sum_x + x, client.sum_y + y, client.count + 1)
        return Client(x, y, client.center, *sums, client.stage)

    def send_average(self, down: Point, client: Client, clock: Clock) -> tuple[Point, Client]:
        """At the end of a stage its average travels in the place of the last point."""
        average = Point(client.sum_x / client.count, client.sum_y / client.count)  # Alg. 2: Return
        return average, client
