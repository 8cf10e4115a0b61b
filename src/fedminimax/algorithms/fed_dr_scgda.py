"""Fed-DR-SCGDA: compositional minimax of any depth along doubly recursive estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels, first_estimates
from fedminimax.algorithms._recursive import Projection, check_settings, project
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.storm import storm
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    inner: tuple[Tensor, ...]  # h^(1) ... h^(K-1)
    momentum: tuple[Tensor, ...]  # v^(1) ... v^(K)
    momentum_y: Tensor  # w


Server = Down = Up = Client


@dataclass(frozen=True)
class FedDRSCGDA(Algorithm[Server, Down, Client, Up]):
    """Fed-DR-SCGD with a dual, for min over x, max over y of F_K( ... F_1(x) ... , y).

    No paper has this method. Its support is the derivation and the experiments in this repository:
    there is no convergence proof.

    To the iteration of FedDRSCGD it adds an ascent in y and a recursive estimate of the gradient in
    y, on the rows of level K; a dash marks what is new, a = recursion_rate:

        x' = P_X( x - primal_lr * momentum^1 ),    y' = P_Y( y + dual_lr * momentum_y )
        momentum'^K = Pi( grad_h F_K(h', y') + (1 - a) * ( momentum^K - grad_h F_K(h, y) ) )
        momentum_y' =     grad_y F_K(h', y') + (1 - a) * ( momentum_y - grad_y F_K(h, y) )

    with h = inner^(K-1), after the same sweep up and before the same sweep down. `projection` and
    the other settings are FedDRSCGD's; Pi is not applied to momentum_y.

    It averages as Fed-DR-SCGD does, and keeps the same floor with clients far apart, which
    LevelwiseDRSCGDA removes. With a y of length 0 it is FedDRSCGD. With K = 1 it is FedSGDA-M
    without its exchange of first estimates.

    Up and down: x, y, all inner, all momentum and momentum_y. The first round sends down x and y
    only.

    *Differs from the paper*: there is none.
    """

    primal_lr: Rate = 0.1
    dual_lr: Rate = 0.1
    recursion_rate: Rate = 0.5
    local_steps: int = 4  # p
    first_batches: int = 1  # S, in batches
    projection: Projection = "none"  # Pi
    radius: float = 10.0  # C, for "ball"
    keep: ClassVar[tuple[str, ...]] = ("inner", "momentum", "momentum_y")  # for the first round
    levels: ClassVar[int | None] = None
    reference: ClassVar[str] = "none: a K-level minimax form of Fed-DR-SCGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(type(self).__name__, self.recursion_rate, self.projection, self.radius)

    @property
    def init_batches(self) -> int:  # type: ignore[override]  a setting decides
        return self.first_batches

    def init_server(self, problem: Problem, start: Point) -> Server:
        w = torch.zeros_like(start.y)
        return Server(x=start.x, y=start.y, inner=(), momentum=(), momentum_y=w)

    def init_client(self, problem: Problem, down: Down | Point, batch: Draw | None) -> Client:
        assert batch is not None
        h, v, w = first_estimates(problem, Point(down.x, down.y), batch)
        return Client(x=down.x, y=down.y, inner=h, momentum=v, momentum_y=w)

    def phases(self, round: int) -> tuple[Phase, ...]:
        phase = self.phase(gradients=2)
        first = phase._replace(broadcast=self.broadcast_point, receive=self.receive_point)
        return (phase if round else first,)

    def broadcast_point(self, server: Server, clock: Clock) -> Point:
        """In the first round there are no averages to send down."""
        return Point(server.x, server.y)

    def receive_point(self, down: Point, client: Client, clock: Clock) -> Client:
        """The server's point, and the client's own first estimates."""
        return Client(
            x=down.x,
            y=down.y,
            inner=client.inner,
            momentum=client.momentum,
            momentum_y=client.momentum_y,
        )

    def broadcast(self, server: Server, clock: Clock) -> Down:
        return server

    def receive(self, down: Down, client: Client, clock: Clock) -> Client:
        return down

    def local_step(
        self, problem: Problem, down: Down | Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        F, K, a = SampledLevels(problem, batch), problem.depth, at(self.recursion_rate, clock)
        old_h = dict(enumerate((client.x, *client.inner)))
        old_v = dict(enumerate(client.momentum, start=1))
        h = {0: problem.project_x(client.x - at(self.primal_lr, clock) * old_v[1])}
        y = problem.project_y(client.y + at(self.dual_lr, clock) * client.momentum_y)
        for k in range(1, K):
            h[k] = storm(old_h[k], F.value(k, h[k - 1]), F.value(k, old_h[k - 1]), a)
        new, old = F.slopes(h[K - 1], y), F.slopes(old_h[K - 1], client.y)
        v = {K: self.bound(storm(old_v[K], new.x, old.x, a), 1)}
        w = storm(client.momentum_y, new.y, old.y, a)
        for k in range(K - 1, 0, -1):
            new, old = F.pull(k, h[k - 1], v[k + 1]), F.pull(k, old_h[k - 1], old_v[k + 1])
            v[k] = self.bound(storm(old_v[k], new, old, a), K - k + 1)
        inner, momentum = (h[k] for k in range(1, K)), (v[k] for k in range(1, K + 1))
        return client._replace(
            x=h[0], y=y, inner=tuple(inner), momentum=tuple(momentum), momentum_y=w
        )

    def bound(self, vector: Tensor, power: int) -> Tensor:
        """Pi, for the level whose estimate is bounded by radius^power."""
        return project(self.projection, self.radius**power, vector)

    def send(self, down: Down | Point, client: Client, clock: Clock) -> tuple[Up, Client]:
        return client, client

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        return mean
