"""CODA: CODA+ that computes the dual anew from the primal at the end of every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedminimax.algorithms.coda_plus import Client, CodaPlus
from fedminimax.problems.gradients import dual_statistics
from fedminimax.types import Clock, Draw, Phase, Point, Problem


class Primal(NamedTuple):
    x: Tensor


class Estimate(NamedTuple):
    """A client in the exchange that ends a stage: what it keeps, and its statistics."""

    center: Tensor
    sum_x: Tensor
    sum_y: Tensor
    taken: Tensor
    stage: Tensor
    statistics: Tensor


class Statistics(NamedTuple):
    statistics: Tensor


@dataclass(frozen=True)
class Coda(CodaPlus):
    """CODA (Guo et al., ICML 2020), as described by Yuan et al., ICML 2021, Section 4.

    CODA+ and, after each stage, one more exchange: every client draws `dual_batches` batches and
    sends what the best dual for the new primal is computed from. For AUC, y = mean score of
    negatives - mean score of positives. Up and down: dx + dy floats per round; at the end of a
    stage dx more down and the statistics up (4 for AUC).

    *Differs from the paper*: a client sends sums and counts per class, not the difference of its
    class means: equal when the clients' samples have the same class shares, and defined when a
    client's sample lacks a class. The ICML 2021 paper says that CODA computes the dual from the
    primal and a large batch after each stage, and gives no formula. The rule here is the dual that
    maximises the objective for given weights, in closed form (Ying, Wen and Lyu, Stochastic Online
    AUC Maximization, NeurIPS 2016).
    """

    dual_batches: int = 8
    solves: ClassVar[str] = "minimax: PL-strongly concave"
    reference: ClassVar[str] = (
        "Guo et al., Communication-Efficient Distributed Stochastic AUC Maximization, ICML 2020"
    )

    def init_server(self, problem: Problem, start: Point) -> Point:
        if problem.dual_statistics is None:
            raise ValueError(
                "CODA needs a problem whose best dual follows from means over rows; "
                f"{type(problem).__name__} has none: use CODA+"
            )
        return start

    def phases(self, round: int) -> tuple[Phase, ...]:
        phases = super().phases(round)
        if not self.ends(round):
            return phases
        return (
            *phases,
            Phase(
                broadcast=self.broadcast_primal,
                receive=self.receive_primal,
                local_step=self.add_statistics,
                send=self.send_statistics,
                aggregate=self.restart_dual,
                steps=self.dual_batches,
                gradients=0,
            ),
        )

    def broadcast_primal(self, server: Point, clock: Clock) -> Primal:
        return Primal(server.x)

    def receive_primal(self, down: Primal, client: Client, clock: Clock) -> Estimate:
        return Estimate(
            center=client.center,
            sum_x=client.sum_x,
            sum_y=client.sum_y,
            taken=client.taken,
            stage=client.stage,
            statistics=down.x.new_zeros(()),
        )

    def add_statistics(
        self, problem: Problem, down: Primal, client: Estimate, batch: Draw, clock: Clock
    ) -> Estimate:
        """One more batch of what the best dual is computed from."""
        new = dual_statistics(problem, down.x, batch[-1]) / clock.steps
        return client._replace(statistics=client.statistics + new)

    def send_statistics(
        self, down: Primal, client: Estimate, clock: Clock
    ) -> tuple[Statistics, Estimate]:
        return Statistics(client.statistics), client

    def restart_dual(
        self, problem: Problem, server: Point, mean: Statistics, clock: Clock
    ) -> Point:
        """The best dual for the new primal."""
        return server._replace(y=problem.project_y(problem.dual_from(mean.statistics)))
