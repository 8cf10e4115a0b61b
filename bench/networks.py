"""Convolutional networks, few clients: a client per core against one core."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from bench.by_hand import fastest
from bench.measure import Effort, alone, in_turn, times_faster
from bench.methods import BATCH, METHODS, STEPS, Method
from bench.ours import CORES, Steady, labelled, seeded
from bench.table import Found, Row, at_least, faster, milliseconds
from fedminimax.data.clients import Clients
from fedminimax.models.cnn import FashionCNN
from fedminimax.models.resnet import ResNet20
from fedminimax.problems.auc import AUC
from fedminimax.problems.network import Network, channels_last, pool_first

CLIENTS = 4
SHAPES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "cnn": (FashionCNN(), (1, 28, 28)),
    "resnet20": (ResNet20(), (3, 32, 32)),
}
LOOP = "a loop over clients on one core, by hand"
EVALUATED = 2_000  # rows


def rows() -> list[Row]:
    found = []
    for network, methods, least in (("cnn", METHODS, 1.9), ("resnet20", METHODS[:1], 1.85)):
        for method in methods:
            what = f"{network}, {CLIENTS} clients, {STEPS} local steps, batch {BATCH}"
            what = f"{what}: {method.name}, executor auto"
            measure = partial(against_loop, network, method)
            name = f"networks.{network}.{method.name}"
            found.append(Row(name, what, LOOP, at_least(least), measure))
    for network in SHAPES:
        what = f"{network}, {CLIENTS} clients: {METHODS[0].name}, executor threads"
        against = f"the loop by hand on {CORES} threads"
        measure = partial(against_threads, network)
        found.append(Row(f"networks.{network}.threads", what, against, at_least(0.9), measure))
    what = f"scores of {EVALUATED:,} rows by the cnn"
    against = "the module in evaluation mode, the best of batches of 32 to 2,048"
    found.append(Row("networks.cnn.evaluation", what, against, at_least(0.9), evaluation))
    return found


def module_of(network: str) -> nn.Module:
    model, shape = SHAPES[network]
    return seeded(lambda: model.build(shape))


def run_of(network: str, method: Method, executor: str) -> Steady:
    rows = labelled([10 * BATCH] * CLIENTS, SHAPES[network][1], torch.float32)
    problem = AUC(module_of(network), positive_share=0.1)
    return Steady(problem, method.algorithm, Clients(rows, batch_size=BATCH), executor)


def against_loop(network: str, method: Method, effort: Effort) -> Found:
    run = run_of(network, method, "auto")
    way, loop = fastest(method.best, run, module_of(network))
    both = method.best(run, module_of(network), CORES, type(loop.workers[0]))
    times = in_turn({"ours": run, "loop": alone(loop), "both": both}, effort)
    limit = times_faster(times["both"], times["loop"]).median

    def why() -> str:
        told = f"the loop by hand on {CORES} threads is {limit:.2f} x as fast as on one"
        return f"{told}; {run.parts()}"

    return faster(times["ours"], times["loop"], why, times["both"], way)


def against_threads(network: str, effort: Effort) -> Found:
    run = run_of(network, METHODS[0], "threads")
    way, loop = fastest(METHODS[0].best, run, module_of(network), CORES)
    times = in_turn({"ours": run, "loop": loop}, effort)
    return faster(times["ours"], times["loop"], run.parts, times["loop"], way)


def evaluation(effort: Effort) -> Found:
    network, module = Network(module_of("cnn")), pool_first(module_of("cnn").eval())
    weights = network.start()
    ((rows, _),) = labelled([EVALUATED], SHAPES["cnn"][1], torch.float32)

    def by_hand(size: int) -> None:
        with torch.inference_mode():
            torch.cat([module(channels_last(chunk)) for chunk in rows.split(size)])

    sizes = (32, 128, 512, 2048)
    calls: dict[str, Any] = {str(size): partial(by_hand, size) for size in sizes}
    times = in_turn({"ours": lambda: network.outputs(weights, rows), **calls}, effort)
    best = min(calls, key=lambda size: times[size].median)

    def why() -> str:
        found = (f"{size} rows {milliseconds(times[size].median)}" for size in calls)
        return f"by hand, in batches of {', '.join(found)}"

    return faster(times["ours"], times[best], why, times[best], f"batches of {best}")
