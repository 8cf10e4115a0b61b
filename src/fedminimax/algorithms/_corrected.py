"""What SAGDA, CDMA and FEDNEST share: a first exchange collects gradients at the server's point,
and their mean corrects the local steps of a second."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._descent_ascent import DescentAscent
from fedminimax.problems.gradients import gradients
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    control_x: Tensor  # the mean of the clients' controls
    control_y: Tensor


class Control(NamedTuple):
    """Up in the first exchange, down in the second."""

    control_x: Tensor
    control_y: Tensor


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    origin_x: Tensor  # the server's point, from which the local steps start
    origin_y: Tensor
    control_x: Tensor  # the client's own gradient there
    control_y: Tensor


@dataclass(frozen=True)
class Collecting(DescentAscent):
    """The exchange that collects a control, and a client that begins the next one knowing it."""

    carry: ClassVar[tuple[str, ...]] = ("origin_x", "origin_y", "control_x", "control_y")
    partial: ClassVar[bool] = True

    def init_server(self, problem: Problem, start: Point) -> Any:
        none_x, none_y = torch.zeros_like(start.x), torch.zeros_like(start.y)
        return Server(x=start.x, y=start.y, control_x=none_x, control_y=none_y)

    def collecting(self, **changes: Any) -> Phase:
        hooks: dict[str, Any] = {
            "receive": self.receive_point,
            "local_step": self.collect,
            "send": self.send_control,
            "aggregate": self.set_control,
            "steps": 1,
        }
        return self.phase(**{**hooks, **changes})

    def receive_point(self, down: Point | Server, client: Client, clock: Clock) -> Client:
        return Client(
            x=down.x,
            y=down.y,
            origin_x=down.x,
            origin_y=down.y,
            control_x=torch.zeros_like(down.x),
            control_y=torch.zeros_like(down.y),
        )

    def collect(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = gradients(problem, Point(client.x, client.y), batch)
        return client._replace(control_x=grad.x, control_y=grad.y)

    def send_control(self, down: Any, client: Client, clock: Clock) -> tuple[Control, Client]:
        return Control(control_x=client.control_x, control_y=client.control_y), client

    def set_control(self, problem: Problem, server: Any, mean: Control, clock: Clock) -> Any:
        return server._replace(control_x=mean.control_x, control_y=mean.control_y)

    def receive(self, down: Any, client: Client, clock: Clock) -> Client:
        return Client(
            x=client.origin_x,
            y=client.origin_y,
            origin_x=client.origin_x,
            origin_y=client.origin_y,
            control_x=client.control_x,
            control_y=client.control_y,
        )


@dataclass(frozen=True)
class Corrected(Collecting):
    """Two exchanges: collect the control, then take local steps in corrected directions."""

    @abstractmethod
    def direction(self, problem: Problem, down: Any, client: Client, batch: Draw) -> Point:
        """The client's gradient, corrected by the common control."""

    def phases(self, round: int) -> tuple[Phase, ...]:
        return self.collecting(), self.correcting()

    def correcting(self) -> Phase:
        return self.phase(broadcast=self.broadcast_control)

    def broadcast_control(self, server: Any, clock: Clock) -> Control:
        return Control(control_x=server.control_x, control_y=server.control_y)

    def local_step(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        return self.move(problem, client, self.direction(problem, down, client, batch), clock)


def since_origin(problem: Problem, client: Client, batch: Draw) -> Point:
    """What the gradient has changed by since the server's point, on the same rows."""
    here = gradients(problem, Point(client.x, client.y), batch)
    there = gradients(problem, Point(client.origin_x, client.origin_y), batch)
    return Point(here.x - there.x, here.y - there.y)
