"""LevelwiseSCGDM: LocalSCGDM, averaged level by level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._levelwise import Exchange, OfDepth, Part, level_by_level, unknown
from fedminimax.algorithms._moving_average import average_value, pull_slope, slope_in, with_slope
from fedminimax.algorithms.local_scgdm import LocalSCGDM
from fedminimax.blocks.schedules import at
from fedminimax.blocks.vectors import plus
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    inner: tuple[Tensor, ...]
    momentum_x: Tensor
    slopes: tuple[Tensor, ...]  # the gradient in each inner value

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the levels are evaluated at: inner^0 = x, inner^1, ..."""
        return (self.x, *self.inner)


Server = Client


@dataclass(frozen=True, kw_only=True)
class LevelwiseSCGDM(OfDepth, LocalSCGDM):
    """LocalSCGDM whose every `local_steps`-th iteration is averaged level by level.

    No paper has this method. The other iterations are LocalSCGDM's, at each client. That one is

        x             moved along the momentum
        inner^k       moved towards F_k(inner^(k-1)),            k = 1 .. K-1
        slope^(K-1) = grad F_K(inner^(K-1))
        slope^(k-1) = J_k^T slope^k,                             k = K-1 .. 2
        momentum_x    moved towards J_1^T slope^1

    each averaged before the next is computed from it, on the same rows. With one local step and
    exact functions nothing is left of LocalSCGDM's floor; the local iterations between two
    synchronisations keep the client's own products, and their part of it. The sweeps through the
    levels are made in the round after the move, and a schedule in rounds gives them that round's
    rate.

    Up and down: 2 dx and all inner twice, in 2 K exchanges; the first round only x, both ways.
    `output` has to be "x": inner values are made a round after the x that they belong to.

    *Differs from the paper*: there is none. The run ends with the move, which is projected at the
    server.
    """

    carry: ClassVar[tuple[str, ...]] = ("x", "y", "slopes")
    reference: ClassVar[str] = "none: LocalSCGDM with another synchronisation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output != "x":
            raise ValueError(
                f"{type(self).__name__}: output is {self.output!r}, but inner values are made a "
                "round after the x that they belong to: give x"
            )

    def init_server(self, problem: Problem, start: Point) -> Any:
        return Server(
            x=start.x,
            y=start.y,
            inner=unknown(start, problem.depth - 1),
            momentum_x=torch.zeros_like(start.x),
            slopes=unknown(start, problem.depth - 1),
        )

    def phases(self, round: int) -> tuple[Phase, ...]:
        return level_by_level(self, round, self.exchanges, Client)

    def exchanges(self, K: int) -> tuple[Exchange, ...]:
        """What is averaged before the next is computed from it, in order."""
        up, down = range(1, K), range(K - 1, 0, -1)
        return (
            *(Exchange((Part("inner", k),), partial(average_value, self, k)) for k in up),
            Exchange((slope_in(K - 1),), self.average_slope, gradients=1),
            *(Exchange((slope_in(k - 1),), partial(pull_slope, self, k)) for k in down),
        )

    def receive_point(self, down: Point, client: Any, clock: Clock) -> Any:
        return Client(
            x=down.x,
            y=down.y,
            inner=client.inner,
            momentum_x=client.momentum_x,
            slopes=unknown(down, len(client.inner)),
        )

    def average_slope(
        self, problem: Problem, down: Any, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        slope = SampledLevels(problem, batch).slopes(client.inputs[-1], client.y)
        return with_slope(self, problem.depth - 1, client, slope.x, clock)

    def send_moved(self, down: Any, client: Client, clock: Clock) -> tuple[Point, Client]:
        rate = at(self.lr, clock) * at(self.primal_lr, clock)
        return Point(plus(client.x, -rate, client.momentum_x), client.y), client

    def aggregate_moved(
        self, problem: Problem, server: Server, mean: Point, clock: Clock
    ) -> Server:
        return server._replace(x=problem.project_x(mean.x), y=mean.y)
