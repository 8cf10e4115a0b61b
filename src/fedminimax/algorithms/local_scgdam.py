"""LocalSCGDAM: local descent ascent on a composition, along momenta, with averages of the inner
values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, get_args

import torch
from torch import Tensor

from fedminimax.algorithms._compositions import Pull, SampledLevels, first_estimates, pull_back
from fedminimax.algorithms._moving_average import Output, check_output, output_point
from fedminimax.algorithms._tracked import check_weight
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import average, plus
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    inner: tuple[Tensor, ...]  # h: of the value of each level but the last
    momentum_x: Tensor  # u
    momentum_y: Tensor  # v


Server = Down = Up = Client  # all five are averaged


@dataclass(frozen=True, kw_only=True)
class LocalSCGDAM(Algorithm[Server, Down, Client, Up]):
    """LocalSCGDAM (Zhang et al., NeurIPS 2023, Algorithm 1), for F_K( ... F_1(x) ..., y).

    A client holds an estimate `inner` of the value of each level but the last, with inner^0 = x,
    and a momentum for each player. They begin as values and gradients on one batch. Each client,
    `local_steps` times, on one fresh batch per level,

        x <- P_X( x - lr * primal_lr * momentum_x )
        y <- P_Y( y + lr * dual_lr   * momentum_y )
        inner^k <- (1 - lr * inner_rate) * inner^k + lr * inner_rate * F_k(inner^(k-1))
        momentum_x <- (1 - lr * primal_rate) * momentum_x
                      + lr * primal_rate * J_1^T ... J_(K-1)^T grad_z F_K(inner^(K-1), y)
        momentum_y <- (1 - lr * dual_rate) * momentum_y
                      + lr * dual_rate * grad_y F_K(inner^(K-1), y)

    in that order, k = 1 .. K-1, with J_k the Jacobian of F_k at inner^(k-1). Value and Jacobian of
    a level share their rows, and so do the two gradients. The server averages all five. A schedule
    for `lr` changes steps and weights together; schedules for `primal_lr` and `dual_lr` leave the
    weights alone.

    With clients far apart this keeps a floor at every rate, because the mean of J^T grad is not
    the product of the means. LevelwiseSCGDAM removes it.

    `output` "inner" returns and measures inner^(K-1) instead of x, where it is of the same length
    (compositional AUC): the scores are those of the weights h after the inner step, but the logged
    loss is that of the composition at h, F_2(F_1(h), y), one inner step further. It needs a problem
    that measures x.

    Up and down: 2 (dx + dy) and all inner, 3d + 8 floats for the AUC of d weights; the first round
    sends down x and y only.

    *Differs from the paper*: which has two levels, uses every client with the same weight, does
    not say which rates fall when "the learning rate" is divided by 10, and does not say whether x,
    inner or the value of F_1(x) is tested; here x, unless told otherwise. The first estimates are
    not averaged before the first step, as in the paper. The projections onto the problem's sets are
    ours.
    """

    lr: Rate = 0.3  # eta
    primal_lr: Rate = 0.33  # gamma_x
    dual_lr: Rate = 0.33  # gamma_y
    primal_rate: Rate = 3.3  # beta_x
    dual_rate: Rate = 3.3  # beta_y
    inner_rate: Rate = 3.0  # alpha
    local_steps: int = 8  # p
    output: Output = "x"
    keep: ClassVar[tuple[str, ...]] = ("inner", "momentum_x", "momentum_y")  # for the first round
    init_batches: ClassVar[int] = 1
    levels: ClassVar[int | None] = None
    solves: ClassVar[str] = "compositional minimax: nonconvex-strongly concave"
    reference: ClassVar[str] = (
        "Zhang et al., Federated Compositional Deep AUC Maximization, NeurIPS 2023, Alg. 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for rate in ("primal_rate", "dual_rate", "inner_rate"):
            check_weight(name, f"lr * {rate}", self.lr, getattr(self, rate))
        if self.output not in get_args(Output):
            raise ValueError(f"{name}: output is {self.output!r}; give x or inner")

    def init_server(self, problem: Problem, start: Point) -> Server:
        check_output(type(self).__name__, self.output, problem)
        u, v = torch.zeros_like(start.x), torch.zeros_like(start.y)
        return Server(x=start.x, y=start.y, inner=(), momentum_x=u, momentum_y=v)

    def init_client(self, problem: Problem, down: Down | Point, batch: Draw | None) -> Client:
        assert batch is not None
        # h_0, u_0 and v_0 of the box
        h, (u, *_), v = first_estimates(problem, Point(down.x, down.y), batch)
        return Client(x=down.x, y=down.y, inner=h, momentum_x=u, momentum_y=v)

    def phases(self, round: int) -> tuple[Phase, ...]:
        first = self.phase(broadcast=self.broadcast_point, receive=self.receive_point)
        return (self.phase() if round else first,)

    def broadcast_point(self, server: Server, clock: Clock) -> Point:
        """In the first round there are no averages to send down."""
        return Point(server.x, server.y)

    def receive_point(self, down: Point, client: Client, clock: Clock) -> Client:
        """The server's point, and the client's own first estimates."""
        return Client(
            x=down.x,
            y=down.y,
            inner=client.inner,
            momentum_x=client.momentum_x,
            momentum_y=client.momentum_y,
        )

    def broadcast(self, server: Server, clock: Clock) -> Down:
        return server

    def receive(self, down: Down, client: Client, clock: Clock) -> Client:
        return down

    def local_step(
        self, problem: Problem, down: Down | Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        lr, F = at(self.lr, clock), SampledLevels(problem, batch)
        u, v = client.momentum_x, client.momentum_y
        x = problem.project_x(plus(client.x, -lr * at(self.primal_lr, clock), u))  # 2
        y = problem.project_y(plus(client.y, lr * at(self.dual_lr, clock), v))
        h = [x]
        pulls: list[Pull] = []
        for k, old in enumerate(client.inner, start=1):
            value, pull = F.value_and_pull(k, h[k - 1])
            h.append(average(old, value, lr * at(self.inner_rate, clock)))  # 3
            pulls.append(pull)
        slope = F.slopes(h[-1], y)
        u = average(u, pull_back(pulls, slope.x), lr * at(self.primal_rate, clock))  # 4
        v = average(v, slope.y, lr * at(self.dual_rate, clock))
        return client._replace(x=x, y=y, inner=tuple(h[1:]), momentum_x=u, momentum_y=v)

    def send(self, down: Down | Point, client: Client, clock: Clock) -> tuple[Up, Client]:
        return client, client

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        return mean  # 6

    def point(self, server: Server) -> Point:
        return output_point(type(self).__name__, self.output, server)
