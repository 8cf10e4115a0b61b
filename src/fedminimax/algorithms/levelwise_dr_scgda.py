"""LevelwiseDRSCGDA: Fed-DR-SCGDA, averaged level by level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._levelwise import Exchange, OfDepth, Part, level_by_level, unknown
from fedminimax.algorithms._recursive import track_pull, track_value
from fedminimax.algorithms.fed_dr_scgda import FedDRSCGDA, Server
from fedminimax.blocks.schedules import at
from fedminimax.blocks.storm import storm
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    inner: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    momentum_y: Tensor
    old_x: Tensor  # from before the move of the iteration that is averaged
    old_y: Tensor
    old_inner: tuple[Tensor, ...]
    old_momentum: tuple[Tensor, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the levels are evaluated at: inner^0 = x, inner^1, ..."""
        return (self.x, *self.inner)

    @property
    def old_inputs(self) -> tuple[Tensor, ...]:
        return (self.old_x, *self.old_inner)


@dataclass(frozen=True)
class LevelwiseDRSCGDA(OfDepth, FedDRSCGDA):
    """Fed-DR-SCGDA whose every `local_steps`-th iteration is averaged level by level.

    No paper has this method. Its support is the derivation and the experiments in this repository:
    there is no convergence proof.

    The iteration is FedDRSCGDA's. Every `local_steps`-th time

        x and y, inner^1, ..., inner^(K-1), momentum^K and momentum_y, ..., momentum^1

    are averaged one after another, each before the next is computed from it; what is old is the
    client's own. Exact functions and one local step give the exact gradients in x and y from the
    first synchronisation on, however far apart the clients are. The sweeps through the levels are
    made in the round after the move, and a schedule in rounds gives them that round's rate.

    With a y of length 0 it is LevelwiseDRSCGD. With K = 1 it is FGDA with sync "reaverage" and
    lr 1.

    Up and down: x, y, all inner, all momentum and momentum_y, in 2 K exchanges. The first round
    sends x and y only, both ways.

    *Differs from the paper*: there is none. The move is projected at the server, after its mean,
    and the run ends with it, before the sweeps.
    """

    keep: ClassVar[tuple[str, ...]] = Server._fields
    carry: ClassVar[tuple[str, ...]] = ("old_x", "old_y", "old_inner", "old_momentum")
    reference: ClassVar[str] = "none: Fed-DR-SCGDA with another synchronisation"

    def init_server(self, problem: Problem, start: Point) -> Server:
        inner, momentum = unknown(start, problem.depth - 1), unknown(start, problem.depth)
        w = torch.zeros_like(start.y)
        return Server(x=start.x, y=start.y, inner=inner, momentum=momentum, momentum_y=w)

    def phases(self, round: int) -> tuple[Phase, ...]:
        return level_by_level(self, round, self.exchanges, Client, gradients=2)

    def exchanges(self, K: int) -> tuple[Exchange, ...]:
        """What is averaged before the next is computed from it, in order."""
        up, down = range(1, K), range(K - 1, 0, -1)
        return (
            *(Exchange((Part("inner", k),), partial(track_value, self, k)) for k in up),
            Exchange((Part("momentum", K), Part("momentum_y")), self.track_slopes, gradients=2),
            *(Exchange((Part("momentum", k),), partial(track_pull, self, k)) for k in down),
        )

    def receive_point(self, down: Point, client: Any, clock: Clock) -> Any:
        """The server's point is the client's new one."""
        return Client(
            x=down.x,
            y=down.y,
            inner=client.inner,
            momentum=client.momentum,
            momentum_y=client.momentum_y,
            old_x=client.x,
            old_y=client.y,
            old_inner=client.inner,
            old_momentum=client.momentum,
        )

    def track_slopes(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        F, a = SampledLevels(problem, batch), at(self.recursion_rate, clock)
        part = Part("momentum", problem.depth)
        new = F.slopes(client.inputs[-1], client.y)
        old = F.slopes(client.old_inputs[-1], client.old_y)
        v = self.bound(storm(part.of(client), new.x, old.x, a), 1)
        w = storm(client.momentum_y, new.y, old.y, a)
        return part.put(client._replace(momentum_y=w), v)

    def send_moved(self, down: Any, client: Client, clock: Clock) -> tuple[Point, Client]:
        x = client.x - at(self.primal_lr, clock) * client.momentum[0]
        y = client.y + at(self.dual_lr, clock) * client.momentum_y
        return Point(x, y), client

    def aggregate_moved(
        self, problem: Problem, server: Server, mean: Point, clock: Clock
    ) -> Server:
        return server._replace(x=problem.project_x(mean.x), y=problem.project_y(mean.y))
