"""What the snapshot methods share: the dual's gradient is taken at an x that stands still.

The snapshot is the x that the server broadcasts at a refresh. A client keeps it, so it never
travels on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    snapshot: Tensor  # x~


@dataclass(frozen=True)
class SnapshotAscent(Algorithm[Point, Point, Client, Point]):
    """Local descent ascent whose dual ascends at the snapshot."""

    primal_lr: Rate = 0.1  # eta_x
    dual_lr: Rate = 0.1  # eta_y
    local_steps: int = 8  # tau
    keep: ClassVar[tuple[str, ...]] = ("snapshot",)

    def refreshes(self, round: int) -> bool:
        """Does this round begin with a new snapshot?"""
        raise TypeError(f"{type(self).__name__} does not say when it refreshes its snapshot")

    def init_client(self, problem: Problem, down: Point, batch: Draw | None) -> Client:
        return Client(x=down.x, y=down.y, snapshot=down.x)

    def phases(self, round: int) -> tuple[Phase, ...]:
        receive = self.receive_snapshot if self.refreshes(round) else self.receive
        return (self.phase(receive=receive),)

    def receive(self, down: Point, client: Client, clock: Clock) -> Client:
        return Client(x=down.x, y=down.y, snapshot=client.snapshot)

    def receive_snapshot(self, down: Point, client: Client, clock: Clock) -> Client:
        return Client(x=down.x, y=down.y, snapshot=down.x)

    def local_step(
        self, problem: Problem, down: Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = gradients(problem, Point(client.x, client.y), batch, client.snapshot)
        x = problem.project_x(plus(client.x, -at(self.primal_lr, clock), grad.x))
        y = problem.project_y(plus(client.y, at(self.dual_lr, clock), grad.y))
        return Client(x=x, y=y, snapshot=client.snapshot)


def rounds_between(owner: str, snapshot_every: int | None, local_steps: int) -> int:
    """The rounds from one snapshot to the next, when they are `snapshot_every` steps apart."""
    if snapshot_every is None:
        return local_steps
    whole = type(snapshot_every) is int and snapshot_every >= 1
    if not whole or snapshot_every % local_steps:
        raise ValueError(
            f"{owner}: snapshot_every is {snapshot_every!r}, but a snapshot is an average, of "
            f"which there is one every {local_steps} local steps; give a multiple of that"
        )
    return snapshot_every // local_steps
