"""FEDNEST for minimax: corrected rounds on the dual, then one on the primal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedminimax.algorithms._corrected import Client, Collecting, Server, since_origin
from fedminimax.blocks.schedules import at
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Primal(NamedTuple):
    x: Tensor


class Dual(NamedTuple):
    y: Tensor


class PrimalControl(NamedTuple):
    control_x: Tensor  # h


class DualControl(NamedTuple):
    control_y: Tensor  # q


@dataclass(frozen=True)
class FedNest(Collecting):
    """FEDNEST, minimax variant (Tarzanagh et al., ICML 2022).

    A round has `inner_rounds` inner rounds on the dual (FedInn) and one on the primal (FedOut),
    each of two exchanges. With the server's (x_t, y_t) and the mean over the cohort of the clients'
    gradients there as control, client k takes `inner_steps` steps

        y <- y + dual_lr / inner_steps * ( grad_y f_k(x_t, y) - grad_y f_k(x_t, y_t) + control_y )

    and the server averages y; after the last inner round, `local_steps` steps

        x <- x - primal_lr / local_steps * ( grad_x f_k(x, y_t) - grad_x f_k(x_t, y_t) + control_x )

    and the server averages x. Both gradients of a step are on the same batch. So the rates are
    those of a whole round. Clients keep nothing between rounds. With T inner rounds, up:
    2 T dy + 2 dx floats; down: (2 T + 1) dy + 2 dx; in 2 T + 2 exchanges.

    *Differs from the paper*: whose text was not at hand; the boxes are reasoned from its bilevel
    method, whose indirect gradient is zero when the inner objective is minus the outer one. The
    control is a mean over all rows (`control_data`), as in the authors' code, or over a batch. One
    cohort serves a whole round. The problem's sets are projected onto after each move.
    """

    inner_rounds: int = 5  # T
    inner_steps: int = 8  # tau of FedInn
    control_data: Literal["whole", "minibatch"] = "whole"
    solves: ClassVar[str] = "minimax: nonconvex-strongly concave"
    reference: ClassVar[str] = (
        "Tarzanagh, Li, Thrampoulidis and Oymak, FedNest: Federated Bilevel, Minimax, and "
        "Compositional Optimization, ICML 2022"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.inner_steps) is not int or self.inner_steps < 1:
            raise ValueError(
                f"FedNest: inner_steps is {self.inner_steps!r}; give a whole number of at least 1"
            )
        if self.control_data not in ("whole", "minibatch"):
            raise ValueError(
                f"FedNest: control_data is {self.control_data!r}; give 'whole' or 'minibatch'"
            )

    def phases(self, round: int) -> tuple[Phase, ...]:
        first = self.collecting(
            send=self.send_dual_control, aggregate=self.set_dual_control, data=self.control_data
        )
        # x is known from the first exchange on: only y travels anew
        again = first._replace(broadcast=self.broadcast_dual, receive=self.receive_dual)
        inner = self.phase(
            broadcast=self.broadcast_dual_control,
            local_step=self.dual_step,
            send=self.send_dual,
            aggregate=self.set_dual,
            steps=self.inner_steps,
            gradients=2,
        )
        collect = again._replace(send=self.send_primal_control, aggregate=self.set_primal_control)
        outer = self.phase(
            broadcast=self.broadcast_primal_control,
            local_step=self.primal_step,
            send=self.send_primal,
            aggregate=self.set_primal,
            gradients=2,
        )
        return first, inner, *(again, inner) * (self.inner_rounds - 1), collect, outer

    # On the dual.

    def broadcast_dual(self, server: Server, clock: Clock) -> Dual:
        return Dual(server.y)

    def receive_dual(self, down: Dual, client: Client, clock: Clock) -> Client:
        return self.receive_point(Point(client.origin_x, down.y), client, clock)

    def send_dual_control(
        self, down: Any, client: Client, clock: Clock
    ) -> tuple[DualControl, Client]:
        return DualControl(client.control_y), client

    def set_dual_control(
        self, problem: Problem, server: Server, mean: DualControl, clock: Clock
    ) -> Server:
        return server._replace(control_y=mean.control_y)

    def broadcast_dual_control(self, server: Server, clock: Clock) -> DualControl:
        return DualControl(server.control_y)

    def dual_step(
        self, problem: Problem, down: DualControl, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        direction = since_origin(problem, client, batch).y + down.control_y
        lr = at(self.dual_lr, clock) / clock.steps  # beta / tau_i
        return client._replace(y=problem.project_y(client.y + lr * direction))

    def send_dual(self, down: Any, client: Client, clock: Clock) -> tuple[Dual, Client]:
        return Dual(client.y), client

    def set_dual(self, problem: Problem, server: Server, mean: Dual, clock: Clock) -> Server:
        return server._replace(y=mean.y)

    # On the primal.

    def send_primal_control(
        self, down: Any, client: Client, clock: Clock
    ) -> tuple[PrimalControl, Client]:
        return PrimalControl(client.control_x), client

    def set_primal_control(
        self, problem: Problem, server: Server, mean: PrimalControl, clock: Clock
    ) -> Server:
        return server._replace(control_x=mean.control_x)

    def broadcast_primal_control(self, server: Server, clock: Clock) -> PrimalControl:
        return PrimalControl(server.control_x)

    def primal_step(
        self, problem: Problem, down: PrimalControl, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        direction = since_origin(problem, client, batch).x + down.control_x
        lr = at(self.primal_lr, clock) / clock.steps  # alpha / tau_i
        return client._replace(x=problem.project_x(client.x - lr * direction))

    def send_primal(self, down: Any, client: Client, clock: Clock) -> tuple[Primal, Client]:
        return Primal(client.x), client

    def set_primal(self, problem: Problem, server: Server, mean: Primal, clock: Clock) -> Server:
        return server._replace(x=mean.x)
