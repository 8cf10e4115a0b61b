"""Many clients, of which a cohort takes part: time and memory."""

from __future__ import annotations

import gc
import os
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

from bench.children import gone, told
from bench.measure import Effort, Times, spread, times_faster
from bench.table import Found, Row, at_most, milliseconds
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.data.clients import Clients, Ranges
from fedminimax.engine.executors.vectorised import Vectorised
from fedminimax.engine.job import Executor
from fedminimax.engine.profile import Profile
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.simulate import simulate
from fedminimax.engine.state.store import Store
from fedminimax.problems.auc import AUC
from fedminimax.problems.functions import Minimax
from fedminimax.random import words
from fedminimax.types import Batch, Cost

ROOT = Path(__file__).resolve().parents[1]  # where `bench` is found
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
    found = _apart("round_times", 0, rounds=_rounds(effort))
    few, many = (Times(tuple(found[name])) for name in ("small", "large"))

    def why() -> str:
        parts = (f"{name} {milliseconds(s)}" for name, s in found["parts"].items())
        return f"a round with the many clients is {', '.join(parts)}"

    figure = times_faster(few, many)
    return Found(figure, milliseconds(many.median), why, milliseconds(few.median))


def _memory(effort: Effort) -> Found:
    found = _repeated("round_times", effort, _rounds(effort))
    made = found[0]["more_to_begin_with"]
    why = f"{made:.0f} MB of it are there before the first round"
    return _megabytes([one["more_megabytes"] for one in found], why)


def _store(effort: Effort) -> Found:
    found = _repeated("store_on_disk", effort, 4 * _rounds(effort))
    why = f"{found[0]['first_megabytes']:.0f} MB of it are there after the first round"
    states, seconds = found[0]["state_megabytes"], found[0]["seconds"]
    held = f"{states:.0f} MB of states on the disk, a round of {milliseconds(seconds)}"
    return _megabytes([one["anonymous_megabytes"] for one in found], why)._replace(other=held)


def _rounds(effort: Effort) -> int:
    return int(5 * effort.seconds)


def _megabytes(values: list[float], why: str) -> Found:
    figure = spread(values)
    return Found(figure, f"{figure.median:.0f} MB", lambda: why)


def _repeated(name: str, effort: Effort, rounds: int) -> list[dict[str, Any]]:
    """In a new process each time: one that has run holds memory."""
    return [_apart(name, turn, rounds=rounds) for turn in range(max(2, effort.turns // 3))]


@cache
def _apart(name: str, turn: int, **settings: int) -> dict[str, Any]:
    """A measurement in a process of its own, whose memory is that of the measurement; the row of
    the time and that of the memory share one."""
    code = f"import json; from bench import scale; print(json.dumps(scale.{name}(**{settings!r})))"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    who = f"the process that measures {name}"
    if done.returncode or not done.stdout:
        raise gone(who, done.stderr, done.returncode)
    return told(who, done.stdout)


def round_times(
    small: int = 1_000, large: int = 1_000_000, rounds: int = 60, own_rows: int = 0
) -> dict[str, Any]:
    """The times of rounds with few clients and with many, in turn, the parts of the latter, and how
    much more memory the many take. With `own_rows`, each client has so many rows of its own in a
    file; without, all clients share a data set."""
    with tempfile.TemporaryDirectory(prefix="fedminimax-") as folder:
        players: dict[int, Callable[[int], Any]] = {}
        begun: dict[int, float] = {}
        memory: dict[int, float] = {}
        executor = Vectorised()
        for count in (small, large):
            players[count] = _player(_ranges(count, Path(folder), own_rows), executor)
            begun[count] = resident()["VmRSS"]
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
        profile = Profile()
        executor.part = profile.part
        for i in range(rounds):
            players[large](2 * rounds + i)
        parts = {name: seconds / rounds for name, (_, seconds) in profile.parts().items()}
    return {
        "small": times[small],
        "large": times[large],
        "parts": parts,
        "more_to_begin_with": begun[large] - memory[small],
        "more_megabytes": memory[large] - memory[small],
    }


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
        met = int(np.count_nonzero(np.load(Path(folder) / "run" / "clients" / "sums.npy")))
    between = np.diff(ended)
    return {
        "anonymous_megabytes": max(seen),
        "first_megabytes": seen[0],
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


def _player(rows: Ranges, executor: Executor) -> Callable[[int], Any]:
    clients = Clients(rows, batch_size=BATCH)
    module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    problem = AUC(module, positive_share=0.1)
    weights = clients.weight_vector("size")
    method = LocalSGDA(local_steps=STEPS)
    federation = Federation.of(problem, method, clients, weights, 0, COHORT)
    state, store = State(0, 0, problem.start(), Cost()), Store(())
    return lambda i: play_round(federation, state._replace(round=i), store, executor)
