"""LocalSCGDM: local descent on a composition, along a momentum, with averages of the inner
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
    y: Tensor  # that of the problem, which stays
    inner: tuple[Tensor, ...]  # h: of the value of each level but the last
    momentum_x: Tensor  # v


Server = Down = Up = Client


@dataclass(frozen=True, kw_only=True)
class LocalSCGDM(Algorithm[Server, Down, Client, Up]):
    """LocalSCGDM (Gao, Li and Huang, ICML 2022), for F_K( ... F_1(x)).

    LocalSCGDAM without a dual: a client, `local_steps` times, on one fresh batch per level,

        x <- P_X( x - lr * primal_lr * momentum_x )
        inner^k <- (1 - lr * inner_rate) * inner^k + lr * inner_rate * F_k(inner^(k-1))
        momentum_x <- (1 - lr * primal_rate) * momentum_x
                      + lr * primal_rate * J_1^T ... J_(K-1)^T grad F_K(inner^(K-1))

    in that order, k = 1 .. K-1, with inner^0 = x and J_k the Jacobian of F_k at inner^(k-1). The
    estimates begin on one batch; the server averages x, all inner and momentum_x. `output` and the
    rates are LocalSCGDAM's.

    Values are averaged over clients, Jacobians are not: a floor stays when both the Jacobians and
    the gradients that they multiply differ between clients (Gao, ICML 2024, Theorem 3.5).
    LevelwiseSCGDM removes it.

    Up and down: 2 dx and all inner; the first round sends down x only.

    *Differs from the paper*: the text of Gao et al. was not at hand; the box is Algorithm 2 of Gao,
    A Doubly Recursive Stochastic Compositional Gradient Descent Method, ICML 2024, which has two
    levels and whose first inner value lacks the client's index. Its alpha is the rate of the
    momentum and its beta that of the inner value, the reverse of LocalSCGDAM's. The default rates
    are those of the LocalSCGDAM paper. More than two levels are ours, as are the projections onto
    the problem's set.
    """

    lr: Rate = 0.3  # eta
    primal_lr: Rate = 0.33  # gamma
    primal_rate: Rate = 3.3  # alpha
    inner_rate: Rate = 3.0  # beta
    local_steps: int = 8  # p
    output: Output = "x"
    keep: ClassVar[tuple[str, ...]] = ("inner", "momentum_x")  # for the first round
    init_batches: ClassVar[int] = 1
    maximises: ClassVar[bool] = False
    levels: ClassVar[int | None] = None
    reference: ClassVar[str] = (
        "Gao, Li and Huang, On the Convergence of Local Stochastic Compositional Gradient Descent "
        "with Momentum, ICML 2022, as Algorithm 2 of Gao, ICML 2024, prints it"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for rate in ("primal_rate", "inner_rate"):
            check_weight(name, f"lr * {rate}", self.lr, getattr(self, rate))
        if self.output not in get_args(Output):
            raise ValueError(f"{name}: output is {self.output!r}; give x or inner")

    def init_server(self, problem: Problem, start: Point) -> Server:
        check_output(type(self).__name__, self.output, problem)
        return Server(x=start.x, y=start.y, inner=(), momentum_x=torch.zeros_like(start.x))

    def init_client(self, problem: Problem, down: Down | Point, batch: Draw | None) -> Client:
        assert batch is not None
        h, (v, *_), _ = first_estimates(problem, Point(down.x, down.y), batch)  # 1
        return Client(x=down.x, y=down.y, inner=h, momentum_x=v)

    def phases(self, round: int) -> tuple[Phase, ...]:
        first = self.phase(broadcast=self.broadcast_point, receive=self.receive_point)
        return (self.phase() if round else first,)

    def broadcast_point(self, server: Server, clock: Clock) -> Point:
        """In the first round there are no averages to send down."""
        return Point(server.x, server.y)

    def receive_point(self, down: Point, client: Client, clock: Clock) -> Client:
        """The server's point, and the client's own first estimates."""
        return Client(x=down.x, y=down.y, inner=client.inner, momentum_x=client.momentum_x)

    def broadcast(self, server: Server, clock: Clock) -> Down:
        return server

    def receive(self, down: Down, client: Client, clock: Clock) -> Client:
        return down

    def local_step(
        self, problem: Problem, down: Down | Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        lr, F = at(self.lr, clock), SampledLevels(problem, batch)
        v = client.momentum_x
        x = problem.project_x(plus(client.x, -lr * at(self.primal_lr, clock), v))  # 3
        h = [x]
        pulls: list[Pull] = []
        for k, old in enumerate(client.inner, start=1):
            value, pull = F.value_and_pull(k, h[k - 1])
            h.append(average(old, value, lr * at(self.inner_rate, clock)))  # 4
            pulls.append(pull)
        grad = pull_back(pulls, F.slopes(h[-1], client.y).x)
        v = average(v, grad, lr * at(self.primal_rate, clock))  # 5
        return client._replace(x=x, inner=tuple(h[1:]), momentum_x=v)

    def send(self, down: Down | Point, client: Client, clock: Clock) -> tuple[Up, Client]:
        return client, client

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        return mean  # 7-9

    def point(self, server: Server) -> Point:
        return output_point(type(self).__name__, self.output, server)
