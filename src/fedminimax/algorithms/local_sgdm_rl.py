"""LocalSGDM_RL: LocalSGDM whose server finds out, round by round, which classes fall behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.algorithms.local_sgdm import LocalSGDM, State
from fedminimax.blocks.schedules import at
from fedminimax.problems.gradients import class_slopes
from fedminimax.problems.weighted_cross_entropy import WeightedCrossEntropy
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Up(NamedTuple):
    x: Tensor
    momentum: Tensor


class Copies(NamedTuple):
    """The server's own client: one copy of the model for each class."""

    x: Tensor  # (classes, d)
    momentum: Tensor
    change: Tensor  # what training on a class has done to the last layer; elsewhere 0


class ClassWeights(NamedTuple):
    weights: Tensor  # alpha


@dataclass(frozen=True)
class LocalSGDMRL(LocalSGDM):
    """LocalSGDM with the ratio loss of Wang et al. (AAAI 2021), for one logit per class.

    A row of class c counts y_c in the clients' loss; y is 1 in the first round. The server holds a
    few rows of every class, which are the run's `auxiliary` client. At the end of a round it trains
    a copy of the model on each class c alone, for `auxiliary_steps` full-batch steps of LocalSGDM
    from momentum 0. With change_c what that did to the weights of the last layer, and S_c the
    entries in which change_c is positive and no other class reaches `unique` of it in magnitude:

        R_c = | sum over S_c of change_c |  /  | sum over S_c of the mean of the others' changes |
        y_c = 1 + slope * min(R_c, 5000),        R_c = 10 where the denominator is 0

    Up: 2d floats; down: 2d + C; and one exchange of the server with itself, d + C down and C up.
    A step of all C trainings goes over the auxiliary rows once: it counts as one gradient.

    *Differs from the paper*: whose text was not at hand; the estimate is that of its authors' code,
    where 63 rows a class and batches of 64 make an epoch one full-batch step. The copies are
    trained with this method's lr and heavy_ball, without the code's weight decay. Rows at the
    server are what federated learning does without: the method is for simulations only.
    """

    slope: float = 0.1
    unique: float = 0.8
    auxiliary_steps: int = 2
    auxiliary: ClassVar[bool] = True
    solves: ClassVar[str] = "minimisation with class weights"
    reference: ClassVar[str] = (
        "Wang et al., Addressing Class Imbalance in Federated Learning, AAAI 2021; LocalSGDM_RL of "
        "the LocalSCGDAM paper"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.slope >= 0 or not self.unique > 0:
            raise ValueError(
                f"LocalSGDMRL: slope is {self.slope!r} and unique {self.unique!r}; give a slope of "
                "at least 0 and a share above 0"
            )
        if type(self.auxiliary_steps) is not int or self.auxiliary_steps < 1:
            raise ValueError(
                f"LocalSGDMRL: auxiliary_steps is {self.auxiliary_steps!r}; give a whole number of "
                "at least 1"
            )

    def init_server(self, problem: Problem, start: Point) -> State:
        if not isinstance(problem, WeightedCrossEntropy):
            raise ValueError(
                "LocalSGDMRL estimates the class weights of a network with one logit per class, "
                f"which {type(problem).__name__} has not: use weighted_cross_entropy, or, with a "
                "single logit, the problem ratio_loss and the method local_sgdm"
            )
        return super().init_server(problem, start)

    def phases(self, round: int) -> tuple[Phase, ...]:
        estimate = self.phase(
            broadcast=self.broadcast_point,
            receive=self.receive_copies,
            local_step=self.train_copies,
            send=self.send_weights,
            aggregate=self.set_weights,
            steps=self.auxiliary_steps,
            data="whole",
            cohort="auxiliary",
        )
        return self.phase(), estimate

    # Unchecked: what travels up has more than a State.
    def send(self, down: State, client: State, clock: Clock) -> tuple[Up, State]:  # type: ignore[override]
        return Up(x=client.x, momentum=client.momentum), client

    def aggregate(self, problem: Problem, server: State, mean: Up, clock: Clock) -> State:  # type: ignore[override]
        return server._replace(x=mean.x, momentum=mean.momentum)

    # The server with itself.

    def broadcast_point(self, server: State, clock: Clock) -> Point:
        return Point(server.x, server.y)

    def receive_copies(self, down: Point, client: State, clock: Clock) -> Copies:
        copies = down.x.expand(len(down.y), -1).clone()
        none = torch.zeros_like(copies)
        return Copies(x=copies, momentum=none, change=none)

    def train_copies(
        self, problem: Problem, down: Point, client: Copies, batch: Draw, clock: Clock
    ) -> Copies:
        assert isinstance(problem, WeightedCrossEntropy)
        slopes = class_slopes(problem, client.x, batch[-1])
        momentum = self.heavy_ball * client.momentum + slopes
        x = client.x - at(self.lr, clock) * momentum
        change = (x - down.x) * problem.in_last_layer.to(x)
        return Copies(x=x, momentum=momentum, change=change)

    def send_weights(
        self, down: Point, client: Copies, clock: Clock
    ) -> tuple[ClassWeights, Copies]:
        ratio = torch.clamp(ratios(client.change, self.unique), max=5000.0)
        return ClassWeights(1 + self.slope * ratio), client

    def set_weights(
        self, problem: Problem, server: State, mean: ClassWeights, clock: Clock
    ) -> State:
        return server._replace(y=mean.weights)


def ratios(change: Tensor, unique: float) -> Tensor:
    """R_c of every class c, from the changes that training on each class alone has made.

    >>> ratios(torch.tensor([[2.0, -1.0, 0.0], [0.5, 3.0, 0.0]]), 0.8)
    tensor([4., 3.])
    """
    others = ~torch.eye(len(change), dtype=torch.bool, device=change.device)
    rest = others.to(change.dtype)
    largest = torch.where(others[:, :, None], change.abs()[None], 0.0).amax(1)
    chosen = ((change > 0) & (largest < unique * change)).to(change.dtype)
    own = (chosen * change).sum(1).abs()
    mean = (chosen * (rest @ change)).sum(1).abs() / (len(change) - 1)
    return torch.where(mean > 0, own / torch.where(mean > 0, mean, 1.0), 10.0)
