"""FedProx: FedAvg whose clients are pulled back to the server's point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus, plus_difference
from fedminimax.problems.gradients import gradients
from fedminimax.types import Clock, Draw, Point, Problem


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx (Li et al., MLSys 2020, Alg. 2); for minimisation.

    With x_0 the server's point, each client, `local_steps` times:

        x <- P_X( x - lr * ( grad f_k(x) + proximal * (x - x_0) ) )

    The server averages x. Up and down: d floats.

    *Differs from the paper*: its text was not at hand. A client's inexact minimisation of
    f_k + proximal/2 |x - x_0|^2 is `local_steps` gradient steps, where the paper leaves the solver
    open. Clients are drawn evenly and weighted as the run says; the paper draws them in proportion
    to their size and averages evenly. The projection, if the problem has a set, is ours.
    """

    proximal: Rate = 0.01  # mu
    reference: ClassVar[str] = (
        "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Alg. 2"
    )

    def local_step(
        self, problem: Problem, down: Point, client: Point, batch: Draw, clock: Clock
    ) -> Point:
        grad = gradients(problem, client, batch).x
        # with that of mu/2 |w - w^t|^2
        grad = plus_difference(grad, at(self.proximal, clock), client.x, down.x)
        x = problem.project_x(plus(client.x, -at(self.lr, clock), grad))
        return Point(x, client.y)
