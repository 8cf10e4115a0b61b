"""What a round costs beside its arithmetic."""

from __future__ import annotations

from functools import partial

import torch

from bench.measure import Effort, in_turn, spread
from bench.ours import Steady
from bench.table import Found, Row, at_most
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.data.clients import Clients
from fedminimax.problems.functions import Minimax
from fedminimax.types import Batch

CLIENTS, NUMBERS = 10, 1_000
ROUNDS = 50  # between two looks of a run at anything else


def rows() -> list[Row]:
    what = f"a round of FedAvg on an empty problem, {CLIENTS} clients, {4 * NUMBERS // 1000} kB"
    return [
        Row(
            f"overhead.{executor}",
            f"{what}, {executor}",
            "-",
            at_most(most, "microseconds"),
            partial(overhead, executor),
        )
        for executor, most in (("compiled", 100.0), ("vectorised", 1_000.0))
    ]


def nothing(x: torch.Tensor, y: torch.Tensor, batch: Batch) -> torch.Tensor:
    return 0 * x.sum()


def overhead(executor: str, effort: Effort) -> Found:
    problem = Minimax(nothing, torch.zeros(NUMBERS))
    clients = Clients([(torch.zeros(8, 1),)] * CLIENTS, batch_size=4)
    run = Steady(problem, FedAvg(local_steps=1), clients, executor, 1, None, "vectorised", ROUNDS)
    found = spread([1e6 * s for s in in_turn({"ours": run}, effort)["ours"].turns])
    return Found(found, f"{found.median:.0f} microseconds", run.parts)
