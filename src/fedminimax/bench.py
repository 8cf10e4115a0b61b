"""`fedminimax bench`: where a simulated round's time goes, as ratios within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.executors import make
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.store import Store
from fedminimax.problems.auc import AUC
from fedminimax.types import Cost

CLIENTS, STEPS, BATCH, REPEATS = 100, 4, 32, 50


def bench() -> int:
    """A round of LocalSGDA on AUC with an MLP 64-32-1, 100 clients, 4 steps, batch 32."""
    sizes = np.random.default_rng(0).integers(200, 400, CLIENTS).tolist()
    rows = [(torch.randn(n, 64), (torch.arange(n) % 10 == 0).float()) for n in sizes]
    clients = Clients(rows, batch_size=BATCH)
    problem = AUC(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)), positive_share=0.1)
    method = LocalSGDA(local_steps=STEPS)
    federation = Federation.of(problem, method, clients, clients.weight_vector("size"), 0, CLIENTS)
    sampler, cohort = Sampler(clients, 1, 0), np.arange(CLIENTS)
    state = State(0, 0, problem.start(), Cost())

    def one_round(executor: str) -> Callable[[int], Any]:
        mapped, store = make(executor), Store(())
        return lambda i: play_round(federation, state._replace(round=i), store, mapped)

    timed = {
        "draw the batches of 4 steps": _median(lambda i: sampler.draw(cohort, STEPS * i, STEPS)),
        "a round, vectorised": _median(one_round("vectorised"), 10),
        "a round, client by client": _median(one_round("debug"), 3),
    }
    slowest = timed["a round, client by client"]
    table = Table(title=bench.__doc__, title_justify="left")
    for heading in ("what", "milliseconds", "times faster than client by client"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, seconds in timed.items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{slowest / seconds:.1f}")
    Console().print(table)
    return 0


def _median(call: Callable[[int], Any], repeats: int = REPEATS) -> float:
    call(0)
    times = []
    for i in range(1, repeats + 1):
        start = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
