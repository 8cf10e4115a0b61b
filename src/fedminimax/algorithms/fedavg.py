"""FedAvg (local SGD): the baseline that everything else is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Point, Problem


@dataclass(frozen=True)
class FedAvg(Algorithm[Point, Point, Point, Point]):
    """Federated averaging (McMahan et al., AISTATS 2017), also called local SGD; for minimisation.

    Each client, `local_steps` times:    x <- P_X( x - lr * grad f_k(x) )
    The server averages x. Up and down: d floats.

    *Differs from the paper*: a client takes a number of steps, not of epochs, so that all clients
    do the same work. Its weighting by client size is the run's `weights = "size"`.
    """

    lr: Rate = 0.1
    local_steps: int = 8
    partial: ClassVar[bool] = True
    maximises: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
        "Data, AISTATS 2017"
    )

    def local_step(
        self, problem: Problem, down: Point, client: Point, batch: Draw, clock: Clock
    ) -> Point:
        grad = gradients(problem, client, batch)
        x = problem.project_x(plus(client.x, -at(self.lr, clock), grad.x))
        return Point(x, client.y)
