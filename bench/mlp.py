"""Small networks, many clients: compiled rounds against a loop over clients."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from bench.batched import (
    Given,
    added,
    given_by,
    in_groups,
    machine_code,
    products,
    vmapped,
)
from bench.measure import Call, Effort, alone, in_turn
from bench.methods import BATCH, METHODS, STEPS, Method
from bench.ours import CORES, Steady, labelled, mlp
from bench.table import CannotMeasureError, Found, Row, at_least, faster, sentence
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients
from fedminimax.engine.device import threads
from fedminimax.problems.auc import AUC

WHAT = f"MLP 64-32-1, {{}} clients, {STEPS} local steps, batch {BATCH}: {{}}"
SGDA = METHODS[0]
GROUP = 50  # clients whose numbers stay in the cache of a core


def rows() -> list[Row]:
    found = []
    for clients, least in ((100, 60.0), (1_000, 30.0)):
        for method in METHODS:
            name, what = f"mlp.{clients}.{method.name}", WHAT.format(f"{clients:,}", method.name)
            measure = partial(against_loop, clients, method)
            found.append(Row(name, what, "a plain loop over clients", at_least(least), measure))
    written = "the same round with its derivatives written out, as machine code"
    for clients in (100, 1_000):
        what = f"{WHAT.format(f'{clients:,}', SGDA.name)}, compiled"
        measure = partial(compiled_by_hand, clients)
        found.append(Row(f"mlp.{clients}.compiled", what, written, at_least(0.9), measure))
    what = f"{WHAT.format(100, SGDA.name)}, vectorised"
    by_vmap = "the same round under vmap, by hand"
    found.append(Row("mlp.100.vectorised", what, by_vmap, at_least(0.9), vectorised_by_hand))
    return found


def run_of(clients: int, method: Method, executor: str) -> Steady:
    sizes = np.random.default_rng(0).integers(200, 400, clients).tolist()
    data = Clients(labelled(sizes, (64,), torch.float32), batch_size=BATCH)
    problem = AUC(mlp(), positive_share=0.1)
    # About as many as a run plays together, which is what fits into 0.1 to 0.2 s.
    together = 5_000 // clients if executor == "compiled" else 1
    threads = CORES if executor == "compiled" else 1
    common = (problem, method.algorithm, data, executor, threads)
    return Steady(*common, first="vectorised", rounds=together)


def against_loop(clients: int, method: Method, effort: Effort) -> Found:
    run = run_of(clients, method, "compiled")
    loop = method.plain(run, mlp())
    limit = alone(products(run, method.gradients), CORES)
    times = in_turn({"ours": run, "loop": alone(loop), "limit": limit}, effort)
    return faster(times["ours"], times["loop"], run.parts, times["limit"])


def compiled_by_hand(clients: int, effort: Effort) -> Found:
    run = run_of(clients, SGDA, "compiled")
    with ThreadPoolExecutor(CORES, initializer=_begin) as pool:
        ways = by_hand(run, pool)
        times = in_turn({"ours": run, **ways}, effort)
    best = min(ways, key=lambda way: times[way].median)
    return faster(times["ours"], times[best], run.parts, times[best], best)


def by_hand(run: Steady, pool: Executor) -> dict[str, Call]:
    """The round as machine code, for all clients at once, and group by group, each on a core: the
    numbers of a group stay in its cache. Each call has batches of its own, drawn as ours are."""
    drawing = Drawing(run)
    given = drawing.next()
    try:
        with threads(CORES):
            code = machine_code(given)
        with threads(1):
            of_group = machine_code(in_groups(given, GROUP)[0])
    except Exception as error:
        raise CannotMeasureError(f"not compiled by hand: {sentence(error)}") from error
    mapped = pool.map if CORES > 1 else map
    ways = {
        "all clients at once": alone(lambda: code(drawing.next()), CORES),
        f"groups of {GROUP}": alone(
            lambda: added(mapped(of_group, in_groups(drawing.next(), GROUP)))
        ),
    }
    return {way: partial(drawing.settled, call) for way, call in ways.items()}


class Drawing:
    """What a round by hand starts from, round after round."""

    def __init__(self, run: Steady):
        self.given, self.everyone = given_by(run), run.federation.everyone
        self.sampler = Sampler(run.federation.clients, levels=1, seed=0)
        self.iteration = 0

    def next(self) -> Given:
        draws = self.sampler.draw(self.everyone, self.iteration, STEPS)
        self.iteration += STEPS
        return self.given._replace(index=draws.source.index[:, 0])

    def settled(self, call: Call) -> None:
        """The call, and what it has left a thread to do."""
        call()
        self.sampler.settle()


def _begin() -> None:
    torch.set_num_threads(1)


def vectorised_by_hand(effort: Effort) -> Found:
    run = run_of(100, SGDA, "vectorised")
    given = given_by(run)
    times = in_turn({"ours": run, "other": alone(lambda: vmapped(given))}, effort)
    return faster(times["ours"], times["other"], run.parts, times["other"])
