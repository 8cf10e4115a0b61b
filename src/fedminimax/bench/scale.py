"""Many clients, of which a cohort takes part: time and memory."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.bench.measure import Effort, Ratio, Times, times_faster
from fedminimax.bench.table import CannotMeasureError, Found, Row, at_most, milliseconds
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


def rows() -> list[Row]:
    many = f"a round of LocalSGDA, a cohort of {COHORT} of 1,000,000 clients"
    few = "the same with 1,000 clients"
    kept = f"SCAFFOLD, a cohort of {COHORT} of 100,000 clients, states on the disk"
    return [
        Row("scale.time", many, few, at_most(1.2, "x"), _time),
        Row("scale.memory", f"{many}: memory", few, at_most(200, "MB more"), _memory),
        Row("scale.store", f"{kept}: anonymous memory", "-", at_most(1000, "MB"), _store),
    ]


def _time(effort: Effort) -> Found:
    found = _apart("round_times", rounds=_rounds(effort))
    few, many = (Times(tuple(found[name])) for name in ("small", "large"))
    return Found(times_faster(few, many), milliseconds(many.median), milliseconds(few.median))


def _memory(effort: Effort) -> Found:
    return _one(_apart("round_times", rounds=_rounds(effort))["more_megabytes"])


def _store(effort: Effort) -> Found:
    found = _apart("store_on_disk", rounds=4 * _rounds(effort))
    held = f"{found['state_megabytes']:.0f} MB of states on the disk"
    return _one(found["anonymous_megabytes"])._replace(other=held)


def _rounds(effort: Effort) -> int:
    return int(5 * effort.seconds)


def _one(megabytes: float) -> Found:
    return Found(Ratio(megabytes, megabytes, megabytes), f"{megabytes:.0f} MB")


@cache
def _apart(name: str, **settings: int) -> dict[str, Any]:
    """A measurement in a process of its own, whose memory is that of the measurement."""
    code = (
        "import json; from fedminimax.bench import scale; "
        f"print(json.dumps(scale.{name}(**{settings!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise CannotMeasureError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def round_times(
    small: int = 1_000, large: int = 1_000_000, rounds: int = 60, own_rows: int = 0
) -> dict[str, Any]:
    """The times of rounds with few clients and with many, in turn, and how much more memory the
    many take. With `own_rows`, each client has so many rows of its own in a file;
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
    more = memory[large] - memory[small]
    return {"small": times[small], "large": times[large], "more_megabytes": more}


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
