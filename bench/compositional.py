"""A step of LocalSCGDAM against what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.measure import Effort, in_turn
from bench.methods import BATCH, STEPS
from bench.networks import SHAPES, module_of
from bench.ours import CORES, Steady, labelled
from bench.table import Found, Row, at_least, faster, milliseconds
from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.data.clients import Clients
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.gradients import gradients
from fedminimax.problems.twice import DifferentiatedTwice
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

    def by_autograd(leaf: Tensor) -> Tensor:
        with DifferentiatedTwice():
            loss = problem.cross_entropy(leaf, batch)
        return torch.autograd.grad(loss, leaf, create_graph=True)[0]

    def by_func(leaf: Tensor) -> Tensor:
        return torch.func.grad(problem.cross_entropy)(leaf, batch)

    def product(first: Callable[[Tensor], Tensor]) -> None:
        leaf = weights.clone().requires_grad_()
        torch.autograd.grad(first(leaf), leaf, weights)

    def gradient() -> None:
        gradients(problem, point, (batch,))

    def spread_out(work: Any) -> Any:
        return lambda: list(pool.map(lambda _: [work() for _ in range(STEPS)], range(CLIENTS)))

    def both(first: Callable[[Tensor], Tensor]) -> None:
        product(first)
        gradient()

    with ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        ways = {"autograd": by_autograd, "torch.func": by_func}
        calls = {way: spread_out(partial(both, first)) for way, first in ways.items()}
        calls |= {"gradients": spread_out(gradient)}
        times = in_turn({"ours": run, **calls}, effort)
    way = min(ways, key=lambda way: times[way].median)
    told = f"the gradients alone take {milliseconds(times['gradients'].median)}"
    about = f"the first derivative by {way}"
    return faster(times["ours"], times[way], lambda: f"{told}; {run.parts()}", times[way], about)
