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

from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.executors import make
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.store import Store
from fedminimax.problems.auc import AUC
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.gradients import outer_gradients
from fedminimax.types import Clock, Cost, batch_of

CLIENTS, STEPS, BATCH, REPEATS = 100, 4, 32, 50


def bench() -> int:
    for table in (one_round(), compositional_step()):
        Console().print(table)
    return 0


def one_round() -> Table:
    """A round of LocalSGDA on AUC with an MLP 64-32-1, 100 clients, 4 steps, batch 32."""
    sizes = np.random.default_rng(0).integers(200, 400, CLIENTS).tolist()
    rows = [(torch.randn(n, 64), (torch.arange(n) % 10 == 0).float()) for n in sizes]
    clients = Clients(rows, batch_size=BATCH)
    problem = AUC(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)), positive_share=0.1)
    method = LocalSGDA(local_steps=STEPS)
    federation = Federation.of(problem, method, clients, clients.weight_vector("size"), 0, CLIENTS)
    sampler, cohort = Sampler(clients, 1, 0), np.arange(CLIENTS)
    state = State(0, 0, problem.start(), Cost())

    def played(executor: str) -> Callable[[int], Any]:
        mapped, store = make(executor), Store(())
        return lambda i: play_round(federation, state._replace(round=i), store, mapped)

    timed = {
        "draw the batches of 4 steps": _median(lambda i: sampler.draw(cohort, STEPS * i, STEPS)),
        "a round, compiled": _median(played("compiled"), 20),
        "a round, vectorised": _median(played("vectorised"), 10),
        "a round, client by client": _median(played("debug"), 3),
    }
    slowest = timed["a round, client by client"]
    table = Table(title=one_round.__doc__, title_justify="left")
    for heading in ("what", "milliseconds", "times faster than client by client"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, seconds in timed.items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{slowest / seconds:.1f}")
    return table


def compositional_step() -> Table:
    """A local step of LocalSCGDAM on compositional AUC: a CNN 32-64-600-120-1 on 28 x 28 images,
    batch 32, one thread."""
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ELU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(32, 64, 3), nn.ELU(), nn.MaxPool2d(2), nn.Flatten()]
    layers = [nn.Linear(2304, 600), nn.ELU(), nn.Linear(600, 120), nn.ELU(), nn.Linear(120, 1)]
    problem = CompositionalAUC(nn.Sequential(*convolutions, *layers), positive_share=0.1)
    method = LocalSCGDAM()
    rows = [batch_of(torch.randn(BATCH, 1, 28, 28), (torch.arange(BATCH) % 4 == 0).float())] * 2
    point, draw = problem.start(), tuple(rows)
    client = method.init_client(problem, point, draw)
    slope = torch.func.grad(lambda w: problem.cross_entropy(w, draw[0]))
    weights = problem.network_weights(point.x)

    def product(_: int) -> Any:
        return torch.func.vjp(slope, weights)[1](weights)

    parts = {
        "gradient of cross-entropy": lambda _: slope(weights),
        "Hessian of cross-entropy times a vector": product,
        "gradient of AUC": lambda _: outer_gradients(problem, *point, draw[1]),
        "a step": lambda i: method.local_step(problem, None, client, draw, Clock.at(iteration=i)),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timed = _medians(parts)
    finally:
        torch.set_num_threads(threads)
    step = timed.pop("a step")
    table = Table(title=compositional_step.__doc__, title_justify="left")
    for heading in ("what", "milliseconds", "of the sum of the parts"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    whole = sum(timed.values())
    for name, seconds in {**timed, "the sum of these": whole, "the step": step}.items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / whole:.2f}")
    # The product is a derivative of the gradient, and so computes it on the way.
    least = whole - timed["gradient of cross-entropy"]
    name = "without the first part, which the second computes too: the other two"
    table.add_row(name, f"{1e3 * least:.2f}", f"{least / whole:.2f}")
    table.add_row("the step, in units of these two", "", f"{step / least:.2f}")
    return table


def _medians(calls: dict[str, Callable[[int], Any]], repeats: int = REPEATS) -> dict[str, float]:
    """All in turn, over and over: what slows the machine down slows all of them down."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call(i)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def _median(call: Callable[[int], Any], repeats: int = REPEATS) -> float:
    return _medians({"": call}, repeats)[""]
