"""`fedminimax bench --scale`: many clients, of which a cohort takes part: time and memory."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.data.clients import Clients, Ranges
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.simulate import simulate
from fedminimax.engine.store import Store
from fedminimax.engine.vectorised import Vectorised
from fedminimax.problems.auc import AUC
from fedminimax.problems.functions import Minimax
from fedminimax.random import words
from fedminimax.types import Batch, Cost

FEATURES, HIDDEN, COHORT, BATCH, STEPS = 64, 32, 100, 32, 4
ROWS = 50_000  # that all clients share
SIZES = (HIDDEN * FEATURES, HIDDEN, HIDDEN, 1)  # of the weights of the MLP


def main() -> int:
    rounds, store = round_times(), store_on_disk()
    title = f"A cohort of {COHORT}, MLP 64-32-1, batch 32, 4 steps"
    table = Table("what", "found", "at most", title=title, title_justify="left")
    for what, found, most in (
        ("a round of LocalSGDA, 1,000 clients, ms", 1e3 * rounds["small"], ""),
        ("the same, 1,000,000 clients, ms", 1e3 * rounds["large"], ""),
        ("the second over the first", rounds["ratio"], "1.2"),
        ("memory that the second takes more, MB", rounds["more_megabytes"], "200"),
        ("SCAFFOLD, 100,000 clients, store on disk, a round, ms", 1e3 * store["seconds"], ""),
        ("its anonymous memory, MB", store["anonymous_megabytes"], "1000"),
        ("what the clients that it met would take in memory, MB", store["state_megabytes"], ""),
    ):
        table.add_row(what, f"{found:.2f}" if found < 10 else f"{found:.0f}", most)
    Console().print(table)
    return 0


def round_times(
    small: int = 1_000, large: int = 1_000_000, rounds: int = 60, own_rows: int = 0
) -> dict[str, float]:
    """The time of a round with few clients and with many, round by round in turn, and how much
    more memory the many take. With `own_rows`, each client has so many rows of its own in a file;
    without, all clients share a data set."""
    with tempfile.TemporaryDirectory(prefix="fedminimax-") as folder:
        players: dict[int, Callable[[int], Any]] = {}
        memory: dict[int, float] = {}
        for count in (small, large):
            players[count] = _player(_ranges(count, Path(folder), own_rows))
            for i in range(rounds):
                players[count](i)
            gc.collect()
            memory[count] = resident()["VmRSS"]
        times: dict[int, list[float]] = {count: [] for count in players}
        for i in range(rounds):
            for count, play in players.items():
                start = time.perf_counter()
                play(rounds + i)
                times[count].append(time.perf_counter() - start)
    few, many = (statistics.median(times[count]) for count in (small, large))
    more = memory[large] - memory[small]
    return {"small": few, "large": many, "ratio": many / few, "more_megabytes": more}


def store_on_disk(clients: int = 100_000, rounds: int = 200) -> dict[str, float]:
    """SCAFFOLD on cross-entropy with its clients' states in files."""
    seen: list[float] = []
    ended: list[float] = []

    def on_round(round: int) -> None:
        seen.append(resident()["RssAnon"])
        ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory(prefix="fedminimax-") as folder:
        rows = _ranges(clients, Path(folder), 0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            start = 0.1 * torch.randn(sum(SIZES))
        simulate(
            Minimax(cross_entropy, start),
            Scaffold(lr=0.1, local_steps=STEPS),
            Clients(rows, batch_size=BATCH),
            rounds=rounds,
            cohort=COHORT,
            executor="vectorised",
            evaluate_every=rounds,
            evaluate_clients=min(100, clients),
            checkpoint_every=max(1, rounds // 4),
            folder=Path(folder) / "run",
            store="disk",
            on_round=on_round,
        )
        bits = np.load(Path(folder) / "run" / "clients" / "met.npy")
        met = int(np.unpackbits(bits).sum())
    between = np.diff(ended)
    return {
        "anonymous_megabytes": max(seen),
        "seconds": float(np.median(between)),
        "clients_met": met,
        "state_megabytes": met * sum(SIZES) * 4 / 1e6,
    }


def cross_entropy(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """Of an MLP 64-32-1 with the weights x."""
    first, shift, second, last = x.split(SIZES)
    hidden = torch.relu(batch.features @ first.view(FEATURES, HIDDEN) + shift)
    outputs = hidden @ second + last
    return batch.mean(F.binary_cross_entropy_with_logits(outputs, batch.labels, reduction="none"))


def resident() -> dict[str, float]:
    """The memory of this process, in megabytes: all of it (VmRSS), and what no file backs
    (RssAnon)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        raise ValueError("memory is measured by /proc/self/status, which is Linux's") from None
    named = dict(line.split(":", 1) for line in lines)
    return {name: int(named[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon")}


def _ranges(count: int, folder: Path, own_rows: int) -> Ranges:
    """Clients whose columns are files."""
    rows = count * own_rows or ROWS
    paths = [folder / f"{rows}-{name}.npy" for name in ("features", "labels")]
    if not paths[0].exists():
        random = np.random.default_rng(0)
        features = np.lib.format.open_memmap(paths[0], "w+", np.float32, (rows, FEATURES))
        for first in range(0, rows, 10_000):
            part = features[first : first + 10_000]
            part[:] = random.standard_normal(part.shape, dtype=np.float32)
        np.save(paths[1], (np.arange(rows) % 10 == 0).astype(np.float32))
    if own_rows:
        return Ranges(paths, np.full(count, own_rows))
    return Ranges(paths, np.full(count, 2 * BATCH), words(1, np.arange(count)) % (rows - 2 * BATCH))


def _player(rows: Ranges) -> Callable[[int], Any]:
    clients = Clients(rows, batch_size=BATCH)
    module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    problem = AUC(module, positive_share=0.1)
    weights = clients.weight_vector("size")
    method = LocalSGDA(local_steps=STEPS)
    federation = Federation.of(problem, method, clients, weights, 0, COHORT)
    state, store, executor = State(0, 0, problem.start(), Cost()), Store(()), Vectorised()
    return lambda i: play_round(federation, state._replace(round=i), store, executor)
