"""Small networks, many clients: compiled rounds against a loop over clients."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import torch

from fedminimax.bench.batched import given_by, products, vmapped, written_out
from fedminimax.bench.measure import Call, Effort, alone, in_turn
from fedminimax.bench.methods import BATCH, METHODS, STEPS, Method
from fedminimax.bench.ours import CORES, Steady, labelled, mlp
from fedminimax.bench.table import CannotMeasureError, Found, Row, at_least, faster, sentence
from fedminimax.data.clients import Clients
from fedminimax.problems.auc import AUC

WHAT = f"MLP 64-32-1, {{}} clients, {STEPS} local steps, batch {BATCH}: {{}}"
SGDA = METHODS[0]


def rows() -> list[Row]:
    found = []
    for clients, least in ((100, 60.0), (1_000, 30.0)):
        for method in METHODS:
            name, what = f"mlp.{clients}.{method.name}", WHAT.format(f"{clients:,}", method.name)
            measure = partial(against_loop, clients, method)
            found.append(Row(name, what, "a plain loop over clients", at_least(least), measure))
    written = "the same round with its derivatives written out, in torch.compile"
    for clients in (100, 1_000):
        what = f"{WHAT.format(f'{clients:,}', SGDA.name)}, compiled"
        measure = partial(compiled_by_hand, clients)
        found.append(Row(f"mlp.{clients}.compiled", what, written, at_least(0.9), measure))
    what = f"{WHAT.format(100, SGDA.name)}, vectorised"
    by_vmap = "the same round under vmap, by hand"
    found.append(Row("mlp.100.vectorised", what, by_vmap, at_least(0.9), vectorised_by_hand))
    return found


def run_of(clients: int, method: Method, executor: str, threads: int = 1) -> Steady:
    sizes = np.random.default_rng(0).integers(200, 400, clients).tolist()
    data = Clients(labelled(sizes, (64,), torch.float32), batch_size=BATCH)
    problem = AUC(mlp(), positive_share=0.1)
    # As many as a run plays together, which is what fits into 0.05 s.
    together = 10 if executor == "compiled" and clients <= 100 else 1
    common = (problem, method.algorithm, data, executor, threads)
    return Steady(*common, first="vectorised", rounds=together)


def against_loop(clients: int, method: Method, effort: Effort) -> Found:
    cores = threads_for(clients)
    run = run_of(clients, method, "compiled", cores)
    loop = method.plain(run, mlp())
    limit = alone(products(run, method.gradients), cores)
    times = in_turn({"ours": run, "loop": alone(loop), "limit": limit}, effort)
    return faster(times["ours"], times["loop"], run.parts, times["limit"])


def threads_for(clients: int) -> int:
    """Cores for the operations of a round: what "auto" would try and find."""
    return CORES if clients >= 1_000 else 1


def compiled_by_hand(clients: int, effort: Effort) -> Found:
    cores = threads_for(clients)
    run = run_of(clients, SGDA, "compiled", cores)
    return best_possible(run, torch_compiled(run, cores), effort)


def best_possible(run: Steady, by_hand: Call, effort: Effort) -> Found:
    times = in_turn({"ours": run, "other": by_hand}, effort)
    return faster(times["ours"], times["other"], run.parts, times["other"])


def torch_compiled(run: Steady, cores: int) -> Call:
    given = given_by(run)
    call = torch.compile(written_out, fullgraph=True, dynamic=False)

    def played() -> None:
        with torch.no_grad():
            call(given)

    by_hand = alone(played, cores)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        try:
            by_hand()
        except Exception as error:
            raise CannotMeasureError(f"not compiled by hand: {sentence(error)}") from error
    return by_hand


def vectorised_by_hand(effort: Effort) -> Found:
    run = run_of(100, SGDA, "vectorised")
    given = given_by(run)
    return best_possible(run, alone(lambda: vmapped(given)), effort)
