"""AdaFGDA: FGDA whose steps are divided by adaptive scales that all clients share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._tracked import Momenta, Tracked, state_at
from fedminimax.algorithms.fgda import FGDA
from fedminimax.blocks.adaptive import SCALES, Scale
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    momentum_x: Tensor  # w
    momentum_y: Tensor  # v
    memory_x: Tensor  # a, what the scale is computed from
    memory_y: Tensor  # b


class Down(NamedTuple):
    x: Tensor
    y: Tensor
    momentum_x: Tensor
    momentum_y: Tensor
    scale_x: Tensor  # the diagonal of A
    scale_y: Tensor  # the diagonal of B


class Scales(NamedTuple):
    scale_x: Tensor
    scale_y: Tensor


@dataclass(frozen=True)
class AdaFGDA(FGDA[Server, Down]):
    """AdaFGDA (Huang et al., AISTATS 2024, Algorithm 1).

    FGDA, with its three readings of `sync`, whose moves are divided by scales: a client takes

        x' = P_X( x - lr * primal_lr * momentum_x / scale_x )
        y' = P_Y( y + lr * dual_lr   * momentum_y / scale_y )
        momentum_x <- grad_x f_k(x', y') + (1 - primal_rate) * ( momentum_x - grad_x f_k(x, y) )
        momentum_y <- grad_y f_k(x', y') + (1 - dual_rate)   * ( momentum_y - grad_y f_k(x, y) )

    The server makes the scales anew at every synchronisation from the averages m of momentum_x and
    momentum_y, entry by entry, with rate = `scale_rate` and floor = `scale_floor`:

        "adam"          a <- (1 - rate) a + rate m^2,                 scale = sqrt(a) + floor
        "adabelief"     a <- (1 - rate) a + rate (m - last m)^2,      scale = sqrt(a) + floor
        "amsgrad"       adam's a, and its largest value so far,       scale = sqrt(largest) + floor
        "adagrad_norm"  b <- b + |m|^2,                               scale = sqrt(b) + floor
        "identity"      scale = 1: FGDA

    `first_scale` says what A_1 and B_1 are, by which the first round's moves are divided: with
    "rule" (default) they follow from the averages of the first estimates, as line 6 makes the later
    ones, and the first moves are as long as the later ones; with "identity" they are 1, the first
    round moves as FGDA does, and line 6 begins at the first synchronisation.

    Up: 2 (dx + dy) floats. Down: 3 (dx + dy); where a scale is one number, 2 (dx + dy) + 2. With
    "reaverage" dx + dy more each way, in two exchanges. In the first round no averages go down;
    with "rule" it has one more exchange, dx + dy more up; with "identity" no scales go down.

    *Differs from the paper*: as FGDA does. "Generate A_1, B_1" is left open there. The paper gives
    no values for the average's factor and the floor, and one letter for both in its AdaBelief rule;
    they are two numbers here. Its runs have lr = 0.001; 0.01 is our default. AMSGrad and
    AdaGrad-norm are ours, among the "many other" matrices it allows. The clients could make the
    scales themselves from what they get, for dx + dy floats less; they do not, so that a client
    that was away needs no past.
    """

    lr: Rate = 0.01  # eta_t; scaled steps are of order 1, whatever the gradients
    scale: Literal["adam", "adabelief", "amsgrad", "adagrad_norm", "identity"] = "adam"
    scale_rate: float = 0.1  # 1 - varrho
    scale_floor: float = 0.01  # rho
    first_scale: Literal["rule", "identity"] = "rule"
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Huang et al., Adaptive Federated Minimax Optimization with Lower Complexities, AISTATS "
        "2024, Alg. 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in SCALES:
            raise ValueError(f"AdaFGDA: scale is {self.scale!r}; give one of {', '.join(SCALES)}")
        if self.first_scale not in ("rule", "identity"):
            raise ValueError(
                f"AdaFGDA: first_scale is {self.first_scale!r}; give 'rule' or 'identity'"
            )
        _ = self.rule

    @property
    def rule(self) -> Scale:
        """How the scales follow from the averages: line 6."""
        return SCALES[self.scale](self.scale_rate, self.scale_floor)

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(
            x=start.x,
            y=start.y,
            momentum_x=torch.zeros_like(start.x),
            momentum_y=torch.zeros_like(start.y),
            memory_x=self.rule.start(start.x),  # a_0
            memory_y=self.rule.start(start.y),  # b_0
        )

    def phases(self, round: int) -> tuple[Phase, ...]:
        local = self.phase(gradients=2)
        if round:
            return self.add_synchronisation(local)
        if self.first_scale == "identity":
            return self.add_synchronisation(
                self.first_phase(local_step=super().local_step, gradients=2)  # that of FGDA
            )
        first = self.first_phase(send=self.send_momenta, aggregate=self.remember, steps=0)
        local = local._replace(broadcast=self.scales, receive=self.receive_scales)
        return first, *self.add_synchronisation(local)

    def broadcast(self, server: Server, clock: Clock) -> Down:
        scales = self.scales(server, clock)
        return Down(
            x=server.x,
            y=server.y,
            momentum_x=server.momentum_x,
            momentum_y=server.momentum_y,
            scale_x=scales.scale_x,
            scale_y=scales.scale_y,
        )

    def scales(self, server: Server, clock: Clock) -> Scales:
        """The diagonals of A and B."""
        rule = self.rule
        return Scales(
            scale_x=rule.diagonal(server.memory_x),  # A
            scale_y=rule.diagonal(server.memory_y),  # B
        )

    def receive_scales(self, down: Scales, client: Tracked, clock: Clock) -> Tracked:
        return state_at(Point(client.x, client.y), client)

    def local_step(
        self, problem: Problem, down: Down | Scales, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        clock = self.clock_of(clock)
        new = self.scaled_move(problem, client, down, clock)  # lines 11-12
        return self.track(problem, client, new, batch, clock)  # lines 14-16: FGDA's

    def scaled_move(
        self, problem: Problem, state: Tracked, scales: Down | Scales, clock: Clock
    ) -> Point:
        """The point after one step along the estimates, divided by the scales."""
        lr = at(self.lr, clock)
        primal_lr, dual_lr = lr * at(self.primal_lr, clock), lr * at(self.dual_lr, clock)
        x = problem.project_x(plus(state.x, -primal_lr, state.momentum_x / scales.scale_x))
        y = problem.project_y(plus(state.y, dual_lr, state.momentum_y / scales.scale_y))
        return Point(x, y)

    def aggregate(self, problem: Problem, server: Server, mean: Tracked, clock: Clock) -> Server:
        server = super().aggregate(problem, server, mean, clock)  # line 5
        return self.remember(problem, server, mean, clock)

    def remember(
        self, problem: Problem, server: Server, mean: Tracked | Momenta, clock: Clock
    ) -> Server:
        """The server with what the next scales are computed from."""
        a = self.rule.update(server.memory_x, mean.momentum_x)  # line 6
        b = self.rule.update(server.memory_y, mean.momentum_y)
        return server._replace(memory_x=a, memory_y=b)

    def synchronise(self, problem: Problem, server: Server, mean: Tracked, clock: Clock) -> Server:
        """The averages, the scales, and the move from them, which is the same for all clients."""
        server = self.aggregate(problem, server, mean, clock)  # lines 5-6
        scales = self.scales(server, clock)
        new = self.scaled_move(problem, mean, scales, self.last_clock(clock))  # lines 7-8
        return server._replace(x=new.x, y=new.y)
