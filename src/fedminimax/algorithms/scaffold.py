"""SCAFFOLD: FedAvg with control variates against client drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus, plus_difference
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    control: Tensor  # c


Down = Server


class Control(NamedTuple):
    control: Tensor


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    control: Tensor  # c_i
    new_control: Tensor  # c_i^+


class Up(NamedTuple):
    x: Tensor
    change: Tensor  # c_i^+ - c_i


class Nothing(NamedTuple):
    pass


@dataclass(frozen=True)
class Scaffold(Algorithm[Server, Down, Client, Up]):
    """SCAFFOLD (Karimireddy et al., ICML 2020, Alg. 1); for minimisation.

    All controls begin at 0. Each client that takes part, `local_steps` times:

        x <- P_X( x - lr * ( grad f_i(x) - control_i + control ) )

    then sets its new control to the gradient of all its rows at the server's point (option "I"),
    or to the average of the gradients that it has just used (option "II"). With S the clients that
    took part, of weight `share` in all, the server sets

        x <- P_X( x + server_lr * ( mean_S x_i - x ) )
        control <- control + share * mean_S ( new control_i - control_i )

    so that its control stays the mean of all clients' controls, present or not. Up and down: 2d
    floats; option I also passes over all rows of a client once a round.

    *Differs from the paper*: its text was not at hand. Option II is printed as control_i - control
    + (x_0 - x_i) / (local_steps * lr), which is that average for a constant rate and no sets; the
    average stays right otherwise. The |S|/N of the paper is the share of the clients' weights.
    Option I is simulated as two phases (x down, then the control down and all up), which are
    counted as two exchanges though one suffices. Projections are ours.
    """

    lr: Rate = 0.1  # eta_l
    server_lr: Rate = 1.0  # eta_g
    local_steps: int = 8  # K
    option: Literal["I", "II"] = "II"
    keep: ClassVar[tuple[str, ...]] = ("control",)
    carry: ClassVar[tuple[str, ...]] = ("x", "y", "new_control")
    partial: ClassVar[bool] = True
    maximises: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, "
        "ICML 2020, Alg. 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.option not in ("I", "II"):
            raise ValueError(f'Scaffold: option is {self.option!r}; give "I" or "II"')

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(x=start.x, y=start.y, control=torch.zeros_like(start.x))

    def init_client(self, problem: Problem, down: Point | Down, batch: Draw | None) -> Client:
        none = torch.zeros_like(down.x)
        return Client(x=down.x, y=down.y, control=none, new_control=none)

    def phases(self, round: int) -> tuple[Phase, ...]:
        if self.option == "II":
            return (self.phase(local_step=self.step_and_add),)
        first = self.phase(
            broadcast=super().broadcast,
            local_step=self.whole_gradient,
            send=self.send_nothing,
            aggregate=self.wait,
            steps=1,
            data="whole",
        )
        return first, self.phase(broadcast=self.broadcast_control, receive=self.receive_control)

    def broadcast(self, server: Server, clock: Clock) -> Down:
        return server

    def broadcast_control(self, server: Server, clock: Clock) -> Control:
        return Control(server.control)

    def receive(self, down: Point | Down, client: Client, clock: Clock) -> Client:
        none = torch.zeros_like(down.x)
        return Client(x=down.x, y=down.y, control=client.control, new_control=none)

    def receive_control(self, down: Control, client: Client, clock: Clock) -> Client:
        return Client(
            x=client.x, y=client.y, control=client.control, new_control=client.new_control
        )

    def whole_gradient(
        self, problem: Problem, down: Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = gradients(problem, Point(client.x, client.y), batch)
        return client._replace(new_control=grad.x)  # line 12, (i)

    def local_step(
        self, problem: Problem, down: Down | Control, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = gradients(problem, Point(client.x, client.y), batch)
        return self.correct(problem, down, client, grad.x, clock)

    def step_and_add(
        self, problem: Problem, down: Down, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = gradients(problem, Point(client.x, client.y), batch)
        moved = self.correct(problem, down, client, grad.x, clock)
        return moved._replace(new_control=client.new_control + grad.x / clock.steps)  # 12, (ii)

    def correct(
        self,
        problem: Problem,
        down: Down | Control,
        client: Client,
        grad: Tensor,
        clock: Clock,
    ) -> Client:
        direction = plus_difference(grad, 1.0, down.control, client.control)
        x = problem.project_x(plus(client.x, -at(self.lr, clock), direction))  # line 10
        return client._replace(x=x)

    def send_nothing(self, down: Point, client: Client, clock: Clock) -> tuple[Nothing, Client]:
        return Nothing(), client

    def send(self, down: Down | Control, client: Client, clock: Clock) -> tuple[Up, Client]:
        up = Up(x=client.x, change=client.new_control - client.control)  # line 13
        return up, client._replace(control=client.new_control)  # line 14

    def wait(self, problem: Problem, server: Server, mean: Nothing, clock: Clock) -> Server:
        return server

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        x = problem.project_x(server.x + at(self.server_lr, clock) * (mean.x - server.x))  # 16, 17
        return server._replace(x=x, control=server.control + clock.share * mean.change)  # line 17
