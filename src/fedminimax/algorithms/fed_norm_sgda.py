"""Fed-Norm-SGDA and Fed-Norm-SGDA+: clients that take unequally many steps, made equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._descent_ascent import DescentAscent
from fedminimax.blocks.schedules import Rate, at
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    sum_x: Tensor  # of the gradients used in this round
    sum_y: Tensor


class Up(NamedTuple):
    direction_x: Tensor  # g_{x,i}: the mean gradient along the way
    direction_y: Tensor
    steps: Tensor  # tau_i


@dataclass(frozen=True)
class Normalised(DescentAscent):
    """Who takes how many steps, and what the server makes of it."""

    primal_server_lr: Rate = 0.1  # gamma_x^s: the step size itself, not a factor
    dual_server_lr: Rate = 0.1  # gamma_y^s
    client_steps: tuple[int, ...] = ()  # tau_i of client 0, 1, ...; empty: local_steps for all
    least_steps: int | None = None  # clients take by turns least_steps .. local_steps
    partial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if any(type(steps) is not int or steps < 1 for steps in self.client_steps):
            raise ValueError(
                f"{name}: client_steps is {self.client_steps!r}; give whole numbers of at least 1"
            )
        least = self.least_steps
        if least is not None and (type(least) is not int or not 1 <= least <= self.local_steps):
            raise ValueError(
                f"{name}: least_steps is {least!r}; give a whole number from 1 to local_steps, "
                f"which is {self.local_steps}"
            )
        if least is not None and self.client_steps:
            raise ValueError(
                f"{name}: client_steps and least_steps were both given; leave out one of them"
            )

    def for_clients(self, count: int) -> Algorithm:
        if 0 < len(self.client_steps) < count:
            raise ValueError(
                f"{type(self).__name__}: client_steps has {len(self.client_steps)} numbers, but "
                f"there are {count} clients: give one for every client"
            )
        return self

    def steps(self, round: int, client: int) -> int:
        if self.client_steps:
            return self.client_steps[client]
        if self.least_steps is None:
            return self.local_steps
        return self.least_steps + (client + round) % (self.local_steps - self.least_steps + 1)

    def slope(self, problem: Problem, down: Any, client: Client, batch: Draw) -> Point:
        return gradients(problem, Point(client.x, client.y), batch)

    def receive(self, down: Any, client: Client, clock: Clock) -> Client:
        none_x, none_y = torch.zeros_like(down.x), torch.zeros_like(down.y)
        return Client(x=down.x, y=down.y, sum_x=none_x, sum_y=none_y)

    def local_step(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = self.slope(problem, down, client, batch)
        client = self.move(problem, client, grad, clock)
        return client._replace(sum_x=client.sum_x + grad.x, sum_y=client.sum_y + grad.y)

    def send(self, down: Any, client: Client, clock: Clock) -> tuple[Up, Client]:
        steps = clock.steps.to(client.x.dtype)
        x, y = client.sum_x / steps, client.sum_y / steps
        return Up(direction_x=x, direction_y=y, steps=steps), client

    def aggregate(self, problem: Problem, server: Any, mean: Up, clock: Clock) -> Any:
        primal = mean.steps * at(self.primal_server_lr, clock)  # tau_eff gamma_x^s
        dual = mean.steps * at(self.dual_server_lr, clock)
        x = problem.project_x(server.x - primal * mean.direction_x)
        y = problem.project_y(server.y + dual * mean.direction_y)
        return server._replace(x=x, y=y)


@dataclass(frozen=True)
class FedNormSGDA(Normalised):
    """Normalised federated gradient descent ascent (Sharma, Panda and Joshi, 2023).

    Client k takes its own number of steps, steps^k,

        x <- x - primal_lr * grad_x f_k(x, y),    y <- y + dual_lr * grad_y f_k(x, y)

    and sends the mean of the gradients that it used, direction^k. The server steps along the mean
    over clients, as far as they went on average:

        x <- x - mean_k steps^k * primal_server_lr * mean_k direction_x^k,    y likewise upwards

    So a client with many steps weighs no more than one with few. steps^k is client_steps[k]; or,
    with `least_steps`, least_steps + (k + round) mod (local_steps - least_steps + 1); or
    `local_steps`. Up: dx + dy + 1 floats; down: dx + dy.

    *Differs from the paper*: whose text was not at hand. All step weights a_k are 1, and tau_eff is
    the mean of the steps taken. A cohort's weights are scaled to sum to one: the paper's unbiased
    weights when all clients weigh the same. Numbers of steps that differ between rounds go in
    turns, not by chance. The problem's sets are projected onto after each move and after the
    server's; the directions are the gradients, also where a set cut a move short.
    """

    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Sharma, Panda and Joshi, Federated Minimax Optimization with Client Heterogeneity, TMLR "
        "2023"
    )


class PlusServer(NamedTuple):
    x: Tensor
    y: Tensor
    snapshot: Tensor  # x^(s)


Down = PlusServer


class Renewed(NamedTuple):
    """The point that is also the new snapshot: it travels once."""

    x: Tensor
    y: Tensor

    @property
    def snapshot(self) -> Tensor:
        return self.x


@dataclass(frozen=True)
class FedNormSGDAPlus(Normalised):
    """Fed-Norm-SGDA+, for duals without strong concavity (Sharma, Panda and Joshi, 2023).

    As Fed-Norm-SGDA, but the dual's gradient is taken at a snapshot of the server's x, on the same
    batch:

        y <- y + dual_lr * grad_y f_k(snapshot, y)

    The snapshot is renewed every `snapshot_rounds` rounds. Up: dx + dy + 1 floats; down: dx + dy in
    a round that renews the snapshot, 2 dx + dy in the others.

    *Differs from the paper*: as Fed-Norm-SGDA. Clients keep nothing, so that one that was away when
    the snapshot was renewed has the right one: it travels in every round in which it is not the
    point itself.
    """

    snapshot_rounds: int = 10  # S
    solves: ClassVar[str] = "minimax: nonconvex-concave"
    reference: ClassVar[str] = FedNormSGDA.reference

    def init_server(self, problem: Problem, start: Point) -> PlusServer:
        return PlusServer(x=start.x, y=start.y, snapshot=start.x)

    def phases(self, round: int) -> tuple[Phase, ...]:
        if round % self.snapshot_rounds == 0:
            return (self.phase(broadcast=self.broadcast_renewed, aggregate=self.renew),)
        return (self.phase(),)

    def broadcast(self, server: PlusServer, clock: Clock) -> Down:
        return server

    def broadcast_renewed(self, server: PlusServer, clock: Clock) -> Renewed:
        return Renewed(server.x, server.y)

    def slope(self, problem: Problem, down: Down | Renewed, client: Client, batch: Draw) -> Point:
        return gradients(problem, Point(client.x, client.y), batch, down.snapshot)

    def renew(self, problem: Problem, server: PlusServer, mean: Up, clock: Clock) -> PlusServer:
        return self.aggregate(problem, server._replace(snapshot=server.x), mean, clock)
