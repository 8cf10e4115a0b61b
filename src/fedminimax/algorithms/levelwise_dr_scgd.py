"""LevelwiseDRSCGD: Fed-DR-SCGD, averaged level by level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._levelwise import Exchange, OfDepth, Part, level_by_level, unknown
from fedminimax.algorithms._recursive import track_pull, track_value
from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD, Server
from fedminimax.blocks.schedules import at
from fedminimax.blocks.storm import storm
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    inner: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    old_x: Tensor  # from before the move of the iteration that is averaged
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
class LevelwiseDRSCGD(OfDepth, FedDRSCGD):
    """Fed-DR-SCGD whose every `local_steps`-th iteration is averaged level by level.

    No paper has this method. The iteration is FedDRSCGD's. Every `local_steps`-th time

        x, inner^1, ..., inner^(K-1), momentum^K, ..., momentum^1

    are averaged one after another, each before the next is computed from it; what is old is the
    client's own. With `local_steps` 1, full batches and no projection, the mean of momentum^1 is
    the gradient from the first synchronisation on, however far apart the clients are; with more
    local steps the floor falls with the rate. The sweeps through the levels are made in the round
    after the move, and a schedule in rounds gives them that round's rate.

    Up and down: x, all inner and all momentum, in 2 K exchanges. The first round sends x only, both
    ways.

    *Differs from the paper*: there is none. The move is projected at the server, after its mean,
    and the run ends with it, before the sweeps.
    """

    keep: ClassVar[tuple[str, ...]] = Server._fields
    carry: ClassVar[tuple[str, ...]] = ("old_x", "old_inner", "old_momentum")
    reference: ClassVar[str] = "none: Fed-DR-SCGD with another synchronisation"

    def init_server(self, problem: Problem, start: Point) -> Server:
        inner, momentum = unknown(start, problem.depth - 1), unknown(start, problem.depth)
        return Server(x=start.x, y=start.y, inner=inner, momentum=momentum)

    def phases(self, round: int) -> tuple[Phase, ...]:
        return level_by_level(self, round, self.exchanges, Client, gradients=2)

    def exchanges(self, K: int) -> tuple[Exchange, ...]:
        """What is averaged before the next is computed from it, in order."""
        up, down = range(1, K), range(K - 1, 0, -1)
        return (
            *(Exchange((Part("inner", k),), partial(track_value, self, k)) for k in up),
            Exchange((Part("momentum", K),), self.track_slope, gradients=2),
            *(Exchange((Part("momentum", k),), partial(track_pull, self, k)) for k in down),
        )

    def receive_point(self, down: Point, client: Any, clock: Clock) -> Any:
        """The server's point is the client's new one."""
        return Client(
            x=down.x,
            y=down.y,
            inner=client.inner,
            momentum=client.momentum,
            old_x=client.x,
            old_inner=client.inner,
            old_momentum=client.momentum,
        )

    def track_slope(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        F, part = SampledLevels(problem, batch), Part("momentum", problem.depth)
        new, old = (F.slopes(h[-1], client.y).x for h in (client.inputs, client.old_inputs))
        v = storm(part.of(client), new, old, at(self.recursion_rate, clock))
        return part.put(client, self.bound(v, 1))

    def send_moved(self, down: Any, client: Client, clock: Clock) -> tuple[Point, Client]:
        x = client.x - at(self.lr, clock) * client.momentum[0]
        return Point(x, client.y), client

    def aggregate_moved(
        self, problem: Problem, server: Server, mean: Point, clock: Clock
    ) -> Server:
        return server._replace(x=problem.project_x(mean.x), y=mean.y)
