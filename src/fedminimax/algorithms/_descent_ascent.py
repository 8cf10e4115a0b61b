"""What the methods with a step at the server share: descent ascent at the clients, and a server
that goes on from where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Point, Problem


@dataclass(frozen=True)
class DescentAscent(Algorithm):
    """`local_steps` steps of a client, both players at once on one batch."""

    primal_lr: Rate = 0.1  # eta_x of a client
    dual_lr: Rate = 0.1  # eta_y of a client
    local_steps: int = 8  # K

    def move(self, problem: Problem, client: Any, direction: Point, clock: Clock) -> Any:
        """A client one step down in x and up in y, inside the problem's sets."""
        x = problem.project_x(plus(client.x, -at(self.primal_lr, clock), direction.x))
        y = problem.project_y(plus(client.y, at(self.dual_lr, clock), direction.y))
        return client._replace(x=x, y=y)

    def local_step(
        self, problem: Problem, down: Any, client: Any, batch: Draw, clock: Clock
    ) -> Any:
        return self.move(problem, client, gradients(problem, client, batch), clock)


@dataclass(frozen=True)
class TwoSided(DescentAscent):
    """The server moves both players on towards, or beyond, the clients' means."""

    primal_server_lr: Rate = 1.0  # eta_{x,g}
    dual_server_lr: Rate = 1.0  # eta_{y,g}

    def aggregate(self, problem: Problem, server: Any, mean: Point, clock: Clock) -> Any:
        ahead_x = at(self.primal_server_lr, clock) * (mean.x - server.x)
        ahead_y = at(self.dual_server_lr, clock) * (mean.y - server.y)
        return server._replace(
            x=problem.project_x(server.x + ahead_x), y=problem.project_y(server.y + ahead_y)
        )
