"""The one table that drives the tests common to all methods, and the small problems they run on.

A new method adds a line to ROWS (and, if it is a new kind, a line to FLOATS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedminimax.algorithms.coda import Coda
from fedminimax.algorithms.coda_plus import CodaPlus
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.npa import NPA
from fedminimax.blocks.projections import ball, simplex
from fedminimax.blocks.schedules import InverseRoot, Stagewise, StepDecay
from fedminimax.data.clients import Clients
from fedminimax.data.synthetic import QuadraticData
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.state.store import Store
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.functions import Minimax
from fedminimax.problems.gradients import value_and_pull
from fedminimax.problems.quadratic import Quadratic
from fedminimax.random import generator
from fedminimax.types import Algorithm, Batch, Cost, Draw, Point, Problem

SIZES = (7, 3, 12, 1, 6)  # rows per client: one batch is four, so two of the five are padded


def labelled_rows(sizes: tuple[int, ...] = SIZES, width: int = 3, seed: int = 0) -> list[tuple]:
    """Rows (features, label 0 or 1) whose priors and centres differ from client to client."""
    random = generator(seed, "labelled")
    rows = []
    for number, size in enumerate(sizes):
        labels = (np.arange(size) % (number + 2) == 0).astype(np.float64)
        features = random.standard_normal((size, width)) + 0.7 * labels[:, None] + 0.3 * number
        rows.append((features, labels))
    return rows


def noisy_rows(sizes: tuple[int, ...] = SIZES, spread: float = 2.0) -> list[tuple]:
    """Rows (t, b) of the quadratic, unequally many per client."""
    full = QuadraticData(len(sizes), 3, spread, noise=1.0, rows=max(sizes), coupling=0.5)
    return [(t[:n], b[:n]) for (t, b), n in zip(full.client_rows(), sizes, strict=True)]


def value_and_pullback(
    problem: Problem, level: int, value: Tensor, vector: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """F_level(value), and the transposed Jacobian there times `vector`."""
    found, pull = value_and_pull(problem, level, value, batch)
    return found, pull(vector)


def composed_gradients(problem: Problem, point: Point, batch: Draw) -> Point:
    """The gradients of the composition of one client's own levels."""

    def objective(x: Tensor, y: Tensor) -> Tensor:
        for level in range(1, problem.depth):
            x = problem.inner(level, x, batch[level - 1])
        return problem.outer(x, y, batch[-1])

    return Point(*torch.func.grad(objective, argnums=(0, 1))(*point))


def labelled() -> Clients:
    return Clients(labelled_rows(), batch_size=4)


def labelled_by_size() -> Clients:
    return Clients(labelled_rows(), batch_size=4, weights="size")


def noisy() -> Clients:
    return Clients(noisy_rows(), batch_size=4)


def noisy_by_size() -> Clients:
    return Clients(noisy_rows(), batch_size=4, weights="size")


def noisy_whole() -> Clients:
    return Clients(noisy_rows(), batch_size=None)


def noise_free() -> Clients:
    """Ten clients far apart, each with its exact objective: what local steps lose can be seen."""
    # Moved off the origin: nothing arrives at the saddle only because it shrinks.
    rows = [(t, b + 3.0) for t, b in QuadraticData(spread=10.0).client_rows()]
    return Clients(rows, batch_size=None)


def quadratic() -> Quadratic:
    return Quadratic(3, tau=2.0)


def wide_quadratic() -> Quadratic:
    return Quadratic(10)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def linear() -> nn.Module:
    return seeded(lambda: nn.Linear(3, 1))


def mlp() -> nn.Module:
    # Smooth, so that executors agree to rounding and not only up to a kink.
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))


def auc() -> AUC:
    return AUC(mlp())


def linear_auc() -> AUC:
    return AUC(linear())


def margin_auc() -> AUC:
    return AUC(linear(), form="margin", margin=0.5)


def cross_entropy() -> CrossEntropy:
    return CrossEntropy(linear())


def _squares(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    return batch.mean((batch.features @ x - batch.labels) ** 2)


def least_squares() -> Minimax:
    return Minimax(_squares, torch.zeros(3))


def _worst_of_two(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    error = batch.features @ x - batch.labels
    return y @ torch.stack([batch.mean(error**2), batch.mean((error + 1) ** 2)])


def robust_least_squares() -> Minimax:
    """A player y in the simplex, an x in a ball that it wants to leave: both projections bind."""
    return Minimax(_worst_of_two, torch.zeros(3), torch.full((2,), 0.5), ball(0.05), simplex)


@dataclass(frozen=True)
class Row:
    """A method with hyper-parameters, what it runs on, and what is expected of it there."""

    name: str
    algorithm: Algorithm
    problem: Callable[[], Problem] = quadratic
    clients: Callable[[], Clients] = noisy
    # The distance to the saddle after `rounds`: (at least, at most); None where none is promised.
    distance: tuple[float, float] | None = None
    rounds: int = 5  # enough to cross a stage


STAGES = {"lr": Stagewise(0.1, 3.0), "proximal": 0.1, "local_steps": 3, "stage_rounds": 2}
FAST = {**STAGES, "lr": 1.0}  # so that the server would leave the dual's set
GROWTH = {**STAGES, "stage_growth": 1.5, "local_steps_growth": 1.5}
ONE = {"lr": 0.01, "proximal": 0.0, "stage_rounds": 1000, "local_steps": 32}
FAR = {"problem": wide_quadratic, "clients": noise_free, "rounds": 100}
EXACT, STALLS = {**FAR, "distance": (0.0, 1e-10)}, {**FAR, "distance": (1e-3, 1e-1)}

# fmt: off
ROWS = (
    Row("fedavg", FedAvg(lr=0.1, local_steps=3), cross_entropy, labelled),
    Row("fedavg-size", FedAvg(lr=0.1, local_steps=2), cross_entropy, labelled_by_size),
    Row("fedavg-schedule", FedAvg(lr=InverseRoot(0.1), local_steps=3), least_squares, labelled),
    Row("sgda", LocalSGDA(0.1, 0.2, local_steps=3)),
    Row("sgda-auc", LocalSGDA(StepDecay(0.3, at=(1, 3)), 0.1, local_steps=2), auc, labelled),
    Row("sgda-sets", LocalSGDA(0.2, 0.2, local_steps=3), robust_least_squares, labelled),
    Row("sgda-far", LocalSGDA(0.01, 0.01, local_steps=32), **STALLS),
    Row("sgda-far-1", LocalSGDA(0.1, 0.3, local_steps=1), **EXACT),
    Row("coda+", CodaPlus(**STAGES)),
    Row("coda+-last", CodaPlus(**STAGES, stage_output="last"), clients=noisy_by_size),
    Row("coda+-growth", CodaPlus(**GROWTH), auc, labelled),
    Row("coda+-margin", CodaPlus(**STAGES), margin_auc, labelled),
    Row("coda+-sets", CodaPlus(**STAGES), robust_least_squares, labelled),
    Row("coda+-far", CodaPlus(**ONE), **STALLS),
    Row("coda", Coda(**STAGES, dual_batches=2)),
    Row("coda-last", Coda(**STAGES, dual_batches=1, stage_output="last"), linear_auc, labelled),
    Row("coda-growth", Coda(**GROWTH, dual_batches=3), auc, labelled),
    Row("codasca", Codasca(**STAGES)),
    Row("codasca-server", Codasca(**STAGES, server_lr=1.3), clients=noisy_by_size),
    Row("codasca-growth", Codasca(**GROWTH), auc, labelled),
    Row("codasca-margin", Codasca(**STAGES, server_lr=1.1), margin_auc, labelled),
    Row("codasca-sets", Codasca(**FAST, server_lr=2.5), robust_least_squares, labelled),
    Row("codasca-schedule", Codasca(lr=InverseRoot(0.1), local_steps=3, stage_rounds=3)),
    Row("codasca-whole", Codasca(**STAGES), clients=noisy_whole),
    Row("codasca-far", Codasca(**ONE), **EXACT),
    Row("npa", NPA(lr=0.1, proximal=0.1, stage_rounds=2)),
    Row("npa-auc", NPA(lr=Stagewise(0.2), proximal=0.01, stage_rounds=3), auc, labelled),
    Row("npa-far", NPA(lr=0.1, proximal=0.0, stage_rounds=1000), **{**EXACT, "rounds": 250}),
)
# fmt: on

# Floats per client and round, up and down, by the lengths of x and y (of AUC: d + 3 together).
FLOATS: dict[type[Algorithm], Callable[[int, int], tuple[int, int]]] = {
    FedAvg: lambda x, y: (x, x),
    LocalSGDA: lambda x, y: (x + y, x + y),
    CodaPlus: lambda x, y: (x + y, x + y),
    Coda: lambda x, y: (x + y, x + y),
    Codasca: lambda x, y: (2 * (x + y), 2 * (x + y)),
    NPA: lambda x, y: (x + y, x + y),
}


def federation_of(
    problem: Problem,
    algorithm: Algorithm,
    clients: Clients,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    cohort: int | None = None,
) -> tuple[Federation, State, Store]:
    """What `simulate` sets up, opened up for tests that look inside a run."""
    start = Point(*(v.to(dtype) for v in problem.start()))
    clients = clients.to(dtype)
    weights = clients.weight_vector(clients.weights or problem.client_weights)  # type: ignore[arg-type]
    problem = problem.prepare(LocalQuery(problem, clients, "train", weights))
    federation = Federation.of(
        problem, algorithm, clients, weights, seed, len(clients) if cohort is None else cohort
    )
    state = State(0, 0, federation.algorithm.init_server(problem, start), Cost())
    return federation, state, Store(algorithm.keep)


def play(
    problem: Problem, algorithm: Algorithm, clients: Clients, rounds: int, seed: int = 0
) -> Iterator[tuple[State, Store]]:
    """State and client store after each round, clients one by one in float64."""
    federation, state, store = federation_of(problem, algorithm, clients, seed)
    for _ in range(rounds):
        state = play_round(federation, state, store, Debug())
        yield state, store


def extra_floats(row: Row, round: int) -> tuple[int, int]:
    """What a round sends beside FLOATS: CODA's exchange at the end of a stage (its docstring)."""
    if not (isinstance(row.algorithm, Coda) and row.algorithm.ends(round)):
        return 0, 0
    problem = row.problem()
    numbers = 4 if isinstance(problem, AUC) else problem.start().y.numel()
    return numbers, problem.start().x.numel()
