"""CDMA: cross-device minimax averaging, with no, one or an adaptive control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._corrected import Client, Control, Corrected, Server, since_origin
from fedminimax.algorithms._descent_ascent import DescentAscent
from fedminimax.blocks.schedules import InverseRoot, Rate, at
from fedminimax.problems.gradients import gradients
from fedminimax.types import Clock, Draw, Phase, Point, Problem

REFERENCE = (
    "Xie, Zhang, Shen, Liu and Qian, CDMA: A Practical Cross-Device Federated Learning Algorithm "
    "for General Minimax Problems, AAAI 2023"
)


@dataclass(frozen=True)
class CDMANC(DescentAscent):
    """CDMA without control (CDMA-NC): LocalSGDA on a cohort drawn anew in every round.

        x <- x - primal_lr * grad_x f_k(x, y),    y <- y + dual_lr * grad_y f_k(x, y)

    `local_steps` times, then the mean over the cohort. Up and down: dx + dy floats.

    *Differs from the paper*: whose text was not at hand; the update is that of the authors' code.
    The problem's sets are projected onto after each move.
    """

    partial: ClassVar[bool] = True
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = REFERENCE


@dataclass(frozen=True)
class Collected(Corrected):
    """The control is a mean of whole-data gradients; local steps compute theirs at both points."""

    redraw: bool = False  # the local steps are taken by a cohort of their own

    def collecting(self, **changes: Any) -> Phase:
        return super().collecting(**{"data": "whole", **changes})

    def correcting(self) -> Phase:
        if not self.redraw:
            return self.phase(broadcast=self.broadcast_control, gradients=2)
        return self.phase(
            broadcast=self.broadcast_all, receive=self.receive_point, cohort="redraw", gradients=2
        )

    def broadcast_all(self, server: Any, clock: Clock) -> Server:
        return Server(
            x=server.x, y=server.y, control_x=server.control_x, control_y=server.control_y
        )

    def direction(
        self, problem: Problem, down: Control | Server, client: Client, batch: Draw
    ) -> Point:
        change = since_origin(problem, client, batch)
        return Point(change.x + down.control_x, change.y + down.control_y)


@dataclass(frozen=True)
class CDMAONE(Collected):
    """CDMA with the control of one round (CDMA-ONE).

    First exchange: the clients of the cohort send their gradients at the server's point (x_t, y_t)
    over all their rows; the control is the mean. Second exchange: `local_steps` times, both
    gradients on the same batch,

        x <- x - primal_lr * ( grad_x f_k(x, y) - grad_x f_k(x_t, y_t) + control_x )
        y <- y + dual_lr   * ( grad_y f_k(x, y) - grad_y f_k(x_t, y_t) + control_y )

    then the mean. With `redraw` the second exchange is with a cohort drawn anew. Two gradients per
    step and one pass over all rows per round. Clients keep nothing between rounds. Up and down:
    2 (dx + dy) floats in two exchanges; with `redraw` 3 (dx + dy) down.

    *Differs from the paper*: whose text was not at hand; the update is that of the authors' code,
    which draws both cohorts from the same candidates and so, with no client lost, has the same one
    twice. A single local step would need no second exchange; it takes place all the same. The
    problem's sets are projected onto after each move.
    """

    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = REFERENCE


class AdaServer(NamedTuple):
    x: Tensor
    y: Tensor
    control_x: Tensor  # u_t
    control_y: Tensor
    previous_x: Tensor  # z_{t-1}
    previous_y: Tensor


class Points(NamedTuple):
    x: Tensor
    y: Tensor
    previous_x: Tensor
    previous_y: Tensor


@dataclass(frozen=True)
class CDMAADA(Collected):
    """CDMA with a control that goes on from round to round (CDMA-ADA).

    As CDMA-ONE, but from the second round on the control is a recursive (STORM) estimate, with
    a = momentum_rate, at most 1:

        control <- mean_k[ grad f_k(x_t, y_t) - (1 - a) grad f_k(x_{t-1}, y_{t-1}) ]
                   + (1 - a) control

    each gradient over all rows. So a cohort's control remembers the clients of earlier rounds. Up:
    2 (dx + dy) floats; down: 3 (dx + dy), as the point before travels too (2 (dx + dy) in the
    first round); with `redraw` dx + dy more down.

    *Differs from the paper*: whose text was not at hand; the update is that of the authors' code.
    One momentum_rate serves both players, where the code has a factor for each. The defaults are
    the theory's exponents, 1/3 for the step sizes and 2/3 for the momentum; the code's best runs
    have 0.2 and 0.4.
    """

    primal_lr: Rate = InverseRoot(0.1, power=1 / 3, unit="round")  # eta_t
    dual_lr: Rate = InverseRoot(0.1, power=1 / 3, unit="round")
    momentum_rate: Rate = InverseRoot(1.0, power=2 / 3, unit="round")  # a_t
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = REFERENCE

    def init_server(self, problem: Problem, start: Point) -> AdaServer:
        return AdaServer(
            x=start.x,
            y=start.y,
            control_x=torch.zeros_like(start.x),
            control_y=torch.zeros_like(start.y),
            previous_x=start.x,
            previous_y=start.y,
        )

    def phases(self, round: int) -> tuple[Phase, ...]:
        if round == 0:
            return self.collecting(), self.correcting()
        collecting = self.collecting(
            broadcast=self.broadcast_points,
            local_step=self.collect_change,
            aggregate=self.track_control,
            gradients=2,
        )
        return collecting, self.correcting()

    def memory(self, clock: Clock) -> Tensor | float:
        """1 - a_t, the weight of the past."""
        rate = at(self.momentum_rate, clock)
        return 1 - (rate.clamp(max=1.0) if isinstance(rate, Tensor) else min(rate, 1.0))

    def broadcast_points(self, server: AdaServer, clock: Clock) -> Points:
        return Points(
            x=server.x,
            y=server.y,
            previous_x=server.previous_x,
            previous_y=server.previous_y,
        )

    def collect_change(
        self, problem: Problem, down: Points, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        now = gradients(problem, Point(down.x, down.y), batch)
        before = gradients(problem, Point(down.previous_x, down.previous_y), batch)
        past = self.memory(clock)
        return client._replace(control_x=now.x - past * before.x, control_y=now.y - past * before.y)

    def track_control(
        self, problem: Problem, server: AdaServer, mean: Control, clock: Clock
    ) -> AdaServer:
        past = self.memory(clock)
        control_x = mean.control_x + past * server.control_x
        control_y = mean.control_y + past * server.control_y
        return server._replace(control_x=control_x, control_y=control_y)

    def aggregate(
        self, problem: Problem, server: AdaServer, mean: Point, clock: Clock
    ) -> AdaServer:
        return server._replace(x=mean.x, y=mean.y, previous_x=server.x, previous_y=server.y)
