"""NLASG: every level's value averaged with a linear correction, and an average of directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._jacobians import JacobianMethod, Levels, product
from fedminimax.blocks.schedules import Rate, at
from fedminimax.types import Clock, Draw, Problem


class Client(NamedTuple):
    x: Tensor
    inner: tuple[Tensor, ...]  # w_i
    jacobians: tuple[Tensor, ...]
    momentum: Tensor  # z
    last_rate: Tensor  # tau of the step that made the Jacobians


@dataclass(frozen=True)
class NLASG(JacobianMethod):
    """Nested linearised averaging (Balasubramanian et al., SIAM J. Optim. 2022), at every client.

    With h_0 = x, every level k has an inner value h_k and the Jacobian J_k of the last step, which
    for the last level is a gradient. A client, `local_steps` times, averages directions, moves, and
    goes through the levels from the first to the last, with one batch per level:

        momentum <- (1 - averaging_rate) * momentum + averaging_rate * J_1' J_2' ... J_K'
        x   <- P_X( x - lr * momentum )
        J_k <- the Jacobian of F_k at h_{k-1} old
        h_k <- (1 - averaging_rate) * h_k + averaging_rate * F_k(h_{k-1} old)
                                          + J_k (h_{k-1} new - h_{k-1} old)

    The server averages x, all h_k and all J_k; the momentum stays at its client, and the first step
    of a round adds the product of the averaged Jacobians to it. All of it begins on one batch. With
    d_k the length of h_k, up and down: sum_{k<K} d_k + sum_k d_k d_{k-1} floats, where d_K = 1; the
    first round sends only x down. `sent` = "structured" sends only
    those entries of a Jacobian that rows or points can change, where the problem says which.

    *Differs from the paper*: whose text was not at hand; the update is reasoned from the algorithm
    sheet, without a set: lr is its tau / beta. The momentum begins as the first product, not as 0.
    What is averaged, and lr and averaging_rate, are as in the experiments of the Fed-DR-SCGD paper,
    which names values, Jacobians and x: not the momentum. That the next direction uses the averaged
    Jacobians is our reading; it is weighted, as in the sheet, with the rate of the step that made
    them. The projection of x is ours.
    """

    lr: Rate = 1e-6
    keep: ClassVar[tuple[str, ...]] = ("inner", "jacobians", "momentum", "last_rate")
    reference: ClassVar[str] = (
        "Balasubramanian, Ghadimi and Nguyen, Stochastic Multilevel Composition Optimization "
        "Algorithms with Level-Independent Convergence Rates, SIAM J. Optim. 32(2), 2022, NLASG"
    )

    def init_client(self, problem: Problem, down: Levels, batch: Draw | None) -> Client:
        first = super().init_client(problem, down, batch)
        momentum = product(self.unpack(problem, first.jacobians))
        # The average of the first product with itself is the same at any rate.
        rate = momentum.new_zeros(())
        return client_at(first, momentum, rate)

    def receive_first(self, down: Levels, client: Any, clock: Clock) -> Client:
        own = Levels(x=down.x, inner=client.inner, jacobians=client.jacobians)
        return client_at(own, client.momentum, client.last_rate)

    def receive(self, down: Levels, client: Any, clock: Clock) -> Client:
        return client_at(down, client.momentum, client.last_rate)

    def local_step(
        self, problem: Problem, down: Levels, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        F, rate = SampledLevels(problem, batch), at(self.averaging_rate, clock)
        direction = product(self.unpack(problem, client.jacobians))
        z = (1 - client.last_rate) * client.momentum + client.last_rate * direction
        x = problem.project_x(client.x - at(self.lr, clock) * z)
        old, h, jacobians = (client.x, *client.inner), [x], ()
        for k in range(1, problem.depth):
            value, jacobian = F.value_and_jacobian(k, old[k - 1])
            moved = jacobian @ (h[k - 1] - old[k - 1])
            h.append((1 - rate) * old[k] + rate * value + moved)
            jacobians = (*jacobians, jacobian)
        jacobians = self.pack(problem, (*jacobians, F.slope(old[-1])))
        return Client(
            x=x,
            inner=tuple(h[1:]),
            jacobians=jacobians,
            momentum=z,
            last_rate=torch.as_tensor(rate, dtype=z.dtype, device=z.device),
        )


def client_at(state: Levels, momentum: Tensor, last_rate: Tensor) -> Client:
    """A client with the estimates of `state`."""
    return Client(
        x=state.x,
        inner=state.inner,
        jacobians=state.jacobians,
        momentum=momentum,
        last_rate=last_rate,
    )
