"""Fed-DR-SCGD: compositional descent of any depth along doubly recursive estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels, first_estimates
from fedminimax.algorithms._recursive import Projection, check_settings, project
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.storm import storm
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem


class Client(NamedTuple):
    x: Tensor
    y: Tensor  # that of the problem, which stays
    inner: tuple[Tensor, ...]  # h^(1) ... h^(K-1)
    momentum: tuple[Tensor, ...]  # v^(1) ... v^(K)


Server = Down = Up = Client


@dataclass(frozen=True)
class FedDRSCGD(Algorithm[Server, Down, Client, Up]):
    """Fed-DR-SCGD (Gao, ICML 2024, Algorithm 1), for F_K( ... F_1(x)) of any depth K.

    A client estimates the value of each level but the last, inner^k, with inner^0 = x, and the
    gradient in what each level is given, momentum^k. They begin on `first_batches` batches, as
    values and gradients at the client's own estimates. An iteration, on one fresh batch per level,
    is a move, a sweep up and a sweep down; a dash marks what is new, a = recursion_rate:

        x' = P_X( x - lr * momentum^1 )
        inner'^k    = F_k(inner'^(k-1)) + (1 - a) * ( inner^k - F_k(inner^(k-1)) )    k = 1 .. K-1
        momentum'^K = Pi( grad F_K(inner'^(K-1))
                          + (1 - a) * ( momentum^K - grad F_K(inner^(K-1)) ) )
        momentum'^k = Pi( J_k(inner'^(k-1))^T momentum'^(k+1)
                          + (1 - a) * ( momentum^k - J_k(inner^(k-1))^T momentum^(k+1) ) )

    Old and new point share a level's rows, and so do its value and its Jacobian. After
    `local_steps` iterations x and all estimates are averaged.

    With clients far apart this keeps a floor that depends on neither rate: a level has been
    evaluated at the client's own inner^(k-1), and the jump to its mean enters no estimate, so that
    the covariance over clients of a level's Jacobian with the value below it (or the gradient
    above it) stays. LevelwiseDRSCGD removes it.

    `projection` is Pi: "none"; "ball", onto the ball of radius^(K-k+1) for level k, the bound of
    Lemma C.1 if every Jacobian's norm is at most `radius`; or "third", v / 3, the operator of
    Lemma C.21, which is linear but no projection: at a fixed x it makes momentum^k converge to
    (a / (2 + a))^(K-k+1) times its value, and shrinks the steps by the factor of momentum^1.

    Up and down: x, all inner and all momentum. The first round sends down x only.

    *Differs from the paper*: whose theory needs "third" but which gives no bound to project onto;
    the default is "none", because a radius that is too small biases every step unseen, and "third"
    does so always. The projection of x onto the problem's set is ours. The last point is returned,
    not that of a random iteration.
    """

    lr: Rate = 0.1  # gamma * eta
    recursion_rate: Rate = 0.5  # alpha * eta^2
    local_steps: int = 4  # p
    first_batches: int = 1  # S, in batches
    projection: Projection = "none"  # Pi
    radius: float = 10.0  # C, for "ball"
    keep: ClassVar[tuple[str, ...]] = ("inner", "momentum")  # for the first round
    maximises: ClassVar[bool] = False
    levels: ClassVar[int | None] = None
    reference: ClassVar[str] = (
        "Gao, A Doubly Recursive Stochastic Compositional Gradient Descent Method for Federated "
        "Multi-Level Compositional Optimization, ICML 2024, Alg. 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(type(self).__name__, self.recursion_rate, self.projection, self.radius)

    @property
    def init_batches(self) -> int:  # type: ignore[override]  a setting decides
        return self.first_batches

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(x=start.x, y=start.y, inner=(), momentum=())

    def init_client(self, problem: Problem, down: Down | Point, batch: Draw | None) -> Client:
        assert batch is not None
        h, v, _ = first_estimates(problem, Point(down.x, down.y), batch)  # 1
        return Client(x=down.x, y=down.y, inner=h, momentum=v)

    def phases(self, round: int) -> tuple[Phase, ...]:
        phase = self.phase(gradients=2)
        first = phase._replace(broadcast=self.broadcast_point, receive=self.receive_point)
        return (phase if round else first,)

    def broadcast_point(self, server: Server, clock: Clock) -> Point:
        """In the first round there are no averages to send down."""
        return Point(server.x, server.y)

    def receive_point(self, down: Point, client: Client, clock: Clock) -> Client:
        """The server's point, and the client's own first estimates."""
        return Client(x=down.x, y=down.y, inner=client.inner, momentum=client.momentum)

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
        h = {0: problem.project_x(client.x - at(self.lr, clock) * old_v[1])}  # 3, 5
        for k in range(1, K):  # 6
            h[k] = storm(old_h[k], F.value(k, h[k - 1]), F.value(k, old_h[k - 1]), a)  # 7
        new, old = F.slopes(h[K - 1], client.y), F.slopes(old_h[K - 1], client.y)
        v = {K: self.bound(storm(old_v[K], new.x, old.x, a), 1)}  # 10
        for k in range(K - 1, 0, -1):  # 11
            new, old = F.pull(k, h[k - 1], v[k + 1]), F.pull(k, old_h[k - 1], old_v[k + 1])
            v[k] = self.bound(storm(old_v[k], new, old, a), K - k + 1)  # 12
        inner, momentum = (h[k] for k in range(1, K)), (v[k] for k in range(1, K + 1))
        return client._replace(x=h[0], inner=tuple(inner), momentum=tuple(momentum))

    def bound(self, vector: Tensor, power: int) -> Tensor:
        """Pi, for the level whose estimate is bounded by radius^power."""
        return project(self.projection, self.radius**power, vector)

    def send(self, down: Down | Point, client: Client, clock: Clock) -> tuple[Up, Client]:
        return client, client

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        return mean  # 16-18
