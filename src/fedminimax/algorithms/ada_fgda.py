"""AdaFGDA: FGDA whose steps are divided by adaptive scales that all clients share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedminimax.algorithms._fgda import FederatedDescentAscent
from fedminimax.algorithms._tracked import Momenta
from fedminimax.blocks.adaptive import SCALES, Scale
from fedminimax.blocks.schedules import Rate
from fedminimax.types import Clock, Phase, Point, Problem


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    momentum_x: Tensor  # w
    momentum_y: Tensor  # v
    memory_x: Tensor  # a, what the scale is computed from
    memory_y: Tensor  # b


class Scales(NamedTuple):
    scale_x: Tensor  # the diagonal of A
    scale_y: Tensor  # the diagonal of B


class Down(NamedTuple):
    x: Tensor
    y: Tensor
    momentum_x: Tensor
    momentum_y: Tensor
    scale_x: Tensor
    scale_y: Tensor


@dataclass(frozen=True)
class AdaFGDA(FederatedDescentAscent):
    """AdaFGDA (Huang et al., AISTATS 2024, Algorithm 1).

    FGDA, with its choices of `sync` and its rates, that moves by

        x' = P_X( x - lr * primal_lr * momentum_x / scale_x )
        y' = P_Y( y + lr * dual_lr   * momentum_y / scale_y )

    The server makes the scales anew at every synchronisation from the averages m of momentum_x and
    momentum_y, entry by entry, with rate = `scale_rate` and floor = `scale_floor`:

        "adam"          a <- (1 - rate) a + rate m^2,                 scale = sqrt(a) + floor
        "adabelief"     a <- (1 - rate) a + rate (m - last m)^2,      scale = sqrt(a) + floor
        "amsgrad"       adam's a, and its largest value so far,       scale = sqrt(largest) + floor
        "adagrad_norm"  b <- b + |m|^2,                               scale = sqrt(b) + floor
        "identity"      scale = 1: FGDA

    Up: 2 (dx + dy) floats. Down: 3 (dx + dy); where a scale is one number, 2 (dx + dy) + 2. With
    "reaverage" dx + dy more each way, in two exchanges. For the first scales the first round has
    one more exchange: dx + dy more up; down go the point, then the scales, and no averages.

    *Differs from the paper*: as FGDA does, and: "generate A_1, B_1" is read as line 6 on the
    averages of the first estimates, which stay each client's own. The paper gives no values for the
    average's factor and the floor, and one letter for both in its AdaBelief rule; they are two
    numbers here. Its runs have lr = 0.001; 0.01 is our default. AMSGrad and AdaGrad-norm are ours,
    among the "many other" matrices it allows. The clients could make the scales themselves from
    what they get, for dx + dy floats less; they do not, so that a client that was away needs no
    past.
    """

    lr: Rate = 0.01  # scaled steps are of order 1, whatever the gradients
    scale: Literal["adam", "adabelief", "amsgrad", "adagrad_norm", "identity"] = "adam"
    scale_rate: float = 0.1  # 1 - varrho
    scale_floor: float = 0.01  # rho
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Huang et al., Adaptive Federated Minimax Optimization with Lower Complexities, AISTATS "
        "2024, Alg. 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in SCALES:
            raise ValueError(f"AdaFGDA: scale is {self.scale!r}; give one of {', '.join(SCALES)}")
        _ = self.rule

    @property
    def rule(self) -> Scale:
        return SCALES[self.scale](self.scale_rate, self.scale_floor)

    def init_server(self, problem: Problem, start: Point) -> Server:
        tracked, rule = super().init_server(problem, start), self.rule
        return Server(*tracked, memory_x=rule.start(start.x), memory_y=rule.start(start.y))

    def local_phases(self, round: int) -> tuple[Phase, ...]:
        if round:
            return super().local_phases(round)
        first = self.first_phase(send=self.send_momenta, aggregate=self.remember, steps=0)
        own = {"broadcast": self.broadcast_scales, "receive": self.receive_own}
        return first, self.phase(**own, gradients=2)

    def broadcast_scales(self, server: Server, clock: Clock) -> Scales:
        rule = self.rule
        return Scales(rule.diagonal(server.memory_x), rule.diagonal(server.memory_y))

    def broadcast(self, server: Server, clock: Clock) -> Down:
        return Down(*server[:4], *self.broadcast_scales(server, clock))

    def direction(self, state: Any, down: Any) -> Point:
        return Point(state.momentum_x / down.scale_x, state.momentum_y / down.scale_y)

    def remember(self, problem: Problem, server: Server, mean: Momenta, clock: Clock) -> Server:
        rule = self.rule  # line 6
        return server._replace(
            memory_x=rule.update(server.memory_x, mean.momentum_x),
            memory_y=rule.update(server.memory_y, mean.momentum_y),
        )

    def aggregate(self, problem: Problem, server: Server, mean: Any, clock: Clock) -> Server:
        server = super().aggregate(problem, server, mean, clock)  # line 5
        return self.remember(problem, server, mean, clock)
