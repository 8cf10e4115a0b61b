"""The same job in other libraries, each in an environment of its own; their start-up is not
counted."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

from torch.nn.utils import vector_to_parameters

from bench.by_hand import FedAvgLoop, Loop, fastest
from bench.environments import FEDLAB, FLOWER, JOBS, LIBAUC, PFL, Folder, Peer, talking
from bench.measure import Effort, in_turn, times_faster
from bench.ours import CORES, Steady
from bench.table import Found, Row, at_least, faster
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.data.clients import Clients
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy

AGAINST = {
    FLOWER: "Flower 1.41, simulation (Ray)",
    PFL: "pfl 0.6.0",
    FEDLAB: "FedLab 1.3.0",
}


def rows(folder: Folder) -> list[Row]:
    found = []
    for kind, least in (("mlp", 5.0), ("cnn", 1.5)):
        what = f"FedAvg, cross-entropy, {kind}, 10 of 100 clients, 4 local steps, batch 32"
        for peer, against in AGAINST.items():
            measure = partial(against_peer, kind, peer, folder)
            name = f"peers.{peer.name}.{kind}"
            found.append(Row(name, f"{what}, executor auto", against, at_least(least), measure))
    what = "AUC margin loss and a step of descent ascent, one client, cnn, batch 32, executor auto"
    libauc = "LibAUC 2.0.1, AUCMLoss and PESG"
    measure = partial(against_libauc, folder)
    return [*found, Row("peers.libauc", what, libauc, at_least(1.0), measure)]


def the_job() -> ModuleType:
    """What the peers' scripts share, which has to be readable without this package."""
    spec = importlib.util.spec_from_file_location("fedminimax_bench_job", JOBS / "job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def against_peer(kind: str, peer: Peer, folder: Folder, effort: Effort) -> Found:
    job = the_job()
    clients = Clients(job.rows(kind), batch_size=job.BATCH)
    problem = CrossEntropy(job.network(kind))
    method = FedAvg(lr=job.LR, local_steps=job.STEPS)
    run = Steady(problem, method, clients, "auto", cohort=job.COHORT)
    # Flower has a client per core; the others' choice is ours, and the better one counts.
    cores = [1] if peer is FLOWER else [1, CORES]

    def loss(at: Any) -> float:
        model = job.network(kind)
        vector_to_parameters(at.x, model.parameters())
        return job.level(model, kind)

    # For the MLP ours is far ahead of any loop over clients.
    loop = fastest(FedAvgLoop, run, job.network(kind), CORES)[1] if kind == "cnn" else None
    return _best_of(run, peer, folder, kind, cores, loss, effort, loop)


def against_libauc(folder: Folder, effort: Effort) -> Found:
    job = the_job()
    clients = Clients(job.rows("cnn")[:1], batch_size=job.BATCH)
    problem = AUC(job.network("cnn"), positive_share=0.5, form="margin")
    method = LocalSGDA(job.LR, job.LR, local_steps=job.STEPS)
    run = Steady(problem, method, clients, "auto")

    def loss(at: Any) -> float:
        return float(problem.outer(at.x, at.y, clients.train.batch(0)))

    return _best_of(run, LIBAUC, folder, "cnn", [1, CORES], loss, effort)


def _best_of(
    run: Steady,
    peer: Peer,
    folder: Folder,
    kind: str,
    cores: list[int],
    loss: Callable[[Any], float],
    effort: Effort,
    by_hand: Loop | None = None,
) -> Found:
    hand = {} if by_hand is None else {"by hand": by_hand}
    with ExitStack() as stack:
        calls = {str(n): stack.enter_context(talking(peer, folder, kind, str(n))) for n in cores}
        about = {name: talk.compared(run, loss) for name, talk in calls.items()}
        times = in_turn({"ours": run, **hand, **calls}, effort)
    best, limit = min(calls, key=lambda n: times[n].median), times.get("by hand")

    def why() -> str:
        if limit is None:
            return run.parts()
        most = times_faster(limit, times[best]).median
        told = f"the loop by hand on {CORES} threads is {most:.2f} x as fast as the other"
        return f"{told}; {run.parts()}"

    return faster(times["ours"], times[best], why, limit, about[best])
