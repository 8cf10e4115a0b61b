"""A step of LocalSCGDAM against what it is made of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.bench.measure import Effort, in_turn
from fedminimax.bench.methods import BATCH, STEPS
from fedminimax.bench.networks import SHAPES, module_of
from fedminimax.bench.ours import CORES, Steady, labelled
from fedminimax.bench.table import Found, Row, at_least, faster, milliseconds
from fedminimax.data.clients import Clients
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.gradients import outer_gradients
from fedminimax.types import batch_of

CLIENTS = 4


def rows() -> list[Row]:
    what = f"cnn, {CLIENTS} clients, {STEPS} local steps, batch {BATCH}: local_scgdam"
    against = (
        "as many gradients of AUC and Hessian products of cross-entropy (which compute its "
        f"gradient on the way) on {CORES} threads"
    )
    return [Row("compositional.step", what, against, at_least(0.87), against_parts)]


def against_parts(effort: Effort) -> Found:
    data = labelled([10 * BATCH] * CLIENTS, SHAPES["cnn"][1], torch.float32)
    problem = CompositionalAUC(module_of("cnn"), positive_share=0.1)
    method = LocalSCGDAM(local_steps=STEPS)
    run = Steady(problem, method, Clients(data, batch_size=BATCH), "threads")
    point, batch = problem.start(), batch_of(*(column[:BATCH] for column in data[0]))
    weights = problem.network_weights(point.x)

    def product() -> None:
        """By autograd alone, which is faster than torch.func outside vmap."""
        leaf = weights.clone().requires_grad_()
        loss = problem.cross_entropy(leaf, batch)
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        torch.autograd.grad(slope, leaf, weights)

    def slope() -> None:
        outer_gradients(problem, *point, batch)

    def spread_out(work: Any) -> Any:
        return lambda: list(pool.map(lambda _: [work() for _ in range(STEPS)], range(CLIENTS)))

    def both() -> None:
        product()
        slope()

    with ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        calls = {"limit": spread_out(both), "product": spread_out(product)}
        times = in_turn({"ours": run, **calls, "gradient": spread_out(slope)}, effort)
    told = ", ".join(f"{n} {milliseconds(times[n].median)}" for n in ("product", "gradient"))
    return faster(times["ours"], times["limit"], f"its parts alone: {told}")
