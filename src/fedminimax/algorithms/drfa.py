"""DRFA: federated averaging for the worst mixture of the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.algorithms._client_weights import ClientWeights
from fedminimax.blocks.chance import by_weight, common_number, stream_of
from fedminimax.blocks.schedules import Rate, at
from fedminimax.problems.gradients import gradients, outer_value
from fedminimax.types import Clock, Draw, Phase, Point, Problem

_SNAPSHOTS = stream_of("DRFA snapshot")


class Server(NamedTuple):
    x: Tensor
    y: Tensor
    weights: Tensor  # lambda
    snapshot: Tensor  # w^(t')


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    snapshot: Tensor


class Up(NamedTuple):
    x: Tensor
    snapshot: Tensor


class Snapshot(NamedTuple):
    snapshot: Tensor


class Losses(NamedTuple):
    losses: Tensor


@dataclass(frozen=True)
class DRFA(ClientWeights[Server, Point, Client, Up]):
    """Distributionally robust federated averaging (Deng, Kamani, Mahdavi, NeurIPS 2020, Alg. 1).

    The server holds weights on the simplex over the N clients, and in each round

    1. draws m clients in proportion to the weights. Each takes `local_steps` steps
       x <- P_X( x - lr * grad f_k(x) ). The server averages, evenly, their last points and their
       points after a step t', drawn from 1 .. local_steps and common to all: the snapshot;
    2. draws m clients evenly, asks each for the loss of a batch at the snapshot, and moves

        weights <- P( weights + local_steps * weights_lr * (N/m) * losses of those asked, else 0 )

    Up: 2d + N floats; down: 2d.

    *Differs from the paper*: its text was not at hand. The m clients of the first draw may repeat,
    as an even average needs, and a client drawn twice walks through the same batches twice. The
    weights begin even. t' is a hash of the round, so it does not travel; it does not depend on the
    run's seed. Its last point is returned, not an average. The server learns the N losses from one
    vector per client with a single entry; a deployment with secure aggregation sends no less.
    """

    lr: Rate = 0.1  # eta
    weights_lr: Rate = 0.01  # gamma
    local_steps: int = 8  # tau
    reference: ClassVar[str] = (
        "Deng, Kamani and Mahdavi, Distributionally Robust Federated Averaging, NeurIPS 2020, "
        "Alg. 1"
    )

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(x=start.x, y=start.y, weights=self.even(start.x), snapshot=start.x)

    def draw_cohort(self, server: Server, phase: int, uniform: np.ndarray) -> np.ndarray | None:
        if phase == 1:
            return None  # line 13: evenly, without repetition
        return by_weight(server.weights.cpu().double().numpy(), uniform)  # line 2

    def phases(self, round: int) -> tuple[Phase, ...]:
        return self.phase(weights="uniform"), Phase(
            broadcast=self.broadcast_snapshot,
            receive=self.receive_snapshot,
            local_step=self.evaluate,
            send=self.send_loss,
            aggregate=self.reweigh,
            steps=1,
            cohort="redraw",
            weights="uniform",
            gradients=0,
        )

    def receive(self, down: Point, client: Client, clock: Clock) -> Client:
        return Client(x=down.x, y=down.y, snapshot=down.x)

    def local_step(
        self, problem: Problem, down: Point, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        grad = gradients(problem, Point(client.x, client.y), batch)
        x = problem.project_x(client.x - at(self.lr, clock) * grad.x)  # line 8
        chosen = common_number(_SNAPSHOTS, clock.round, self.local_steps)  # line 3: t' - 1
        snapshot = torch.where(clock.step == chosen, x, client.snapshot)
        return Client(x=x, y=client.y, snapshot=snapshot)

    def send(self, down: Point, client: Client, clock: Clock) -> tuple[Up, Client]:
        return Up(x=client.x, snapshot=client.snapshot), client

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        return server._replace(x=mean.x, snapshot=mean.snapshot)  # lines 11 and 12

    def broadcast_snapshot(self, server: Server, clock: Clock) -> Snapshot:
        return Snapshot(server.snapshot)

    def receive_snapshot(self, down: Snapshot, client: Client, clock: Clock) -> Losses:
        return Losses(down.snapshot.new_zeros(self.count))

    def evaluate(
        self, problem: Problem, down: Snapshot, client: Losses, batch: Draw, clock: Clock
    ) -> Losses:
        loss = outer_value(problem, down.snapshot, down.snapshot[:0], batch[-1])
        return Losses(self.own_entry(loss, clock))

    def send_loss(self, down: Snapshot, client: Losses, clock: Clock) -> tuple[Losses, Losses]:
        return client, client

    def reweigh(self, problem: Problem, server: Server, mean: Losses, clock: Clock) -> Server:
        lr = self.local_steps * at(self.weights_lr, clock)
        losses = self.count * mean.losses  # line 15: v, which is (N/m) f_i where asked
        return server._replace(weights=self.ascend(server.weights, lr, losses))  # line 16
