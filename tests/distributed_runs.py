"""What tests/engine/test_distributed.py starts with torchrun.

distributed_runs.py rows FOLDER              a run of every kind of method, each in its folder
distributed_runs.py cli FAULT ARGUMENTS...   the command line, with a fault in process 1
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import table
import torch
from deployment import Grid
from rows import Row, labelled, labelled_rows
from torch import nn

from fedminimax import cli
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.data.clients import Clients
from fedminimax.engine import round as round_module
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.backends.torchrun import join_processes, leave, rank
from fedminimax.engine.simulate import Run, simulate
from fedminimax.messages import CentredClipping, Clip, EightBit, Masked
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy

FAULTY_ROUND = 7


def normalised() -> CrossEntropy:
    torch.manual_seed(0)
    return CrossEntropy(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def several() -> AUC:
    torch.manual_seed(0)
    return AUC(nn.Linear(3, 2), labels=("one", "other"))


def marked() -> Clients:
    """Rows with a second label, which the first client does not know."""
    rows = []
    for number, (features, labels) in enumerate(labelled_rows()):
        second = (features[:, 0] > 0) * 1.0 if number else np.full(len(features), -1.0)
        rows.append((features, np.stack([labels, second], axis=1)))
    return Clients(rows, batch_size=4)


MESSAGES = {
    "stages": [Clip(0.5), Grid(0.001), CentredClipping(1.0)],
    "compressed": [EightBit()],
    "masked": [Clip(0.5), Masked()],
}
STAGED = [Row(name, Codasca(lr=0.1, local_steps=2)) for name in MESSAGES]
ROWS = (
    *{type(row.algorithm): row for row in reversed(table.ROWS)}.values(),
    *(row for row in table.ROWS if row.name in ("codasca-growth", "scgdam-auc", "scgdam-levels-3")),
    Row("batch-norm", FedAvg(lr=0.1), normalised, labelled),
    Row("labels", Codasca(lr=0.1, local_steps=2), several, marked),
    *STAGED,
    Row("diverging", LocalSGDA(1e200, 1e200, local_steps=3)),
)


def options_of(row: Row) -> dict[str, Any]:
    """Some clients only, where the method allows it; whatever else is shared is in some row."""
    options: dict[str, Any] = {"rounds": min(row.rounds, 4), "dtype": torch.float64}
    if row.algorithm.partial:
        options["cohort"] = 2
    depth = row.problem().depth
    if row.name in MESSAGES:
        return {**options, "messages": MESSAGES[row.name], "measures": ("grad_x",)}
    return {**options, "measures": ("grad_x", "drift") if depth == 1 else ("drift",)}


def play(row: Row, folder: Path, backend: Backend | None = None) -> Run:
    return simulate(
        row.problem(),
        row.algorithm,
        row.clients(),
        executor="vectorised",
        evaluate_every=2,
        folder=folder / row.name,
        backend=backend,
        **options_of(row),
    )


def play_all(folder: Path) -> None:
    with join_processes(timeout=120) as backend:
        for row in ROWS:
            play(row, folder, backend)


def with_fault(fault: str, arguments: list[str]) -> int:
    """Process 1 dies, hangs or fails in the middle of a run."""
    usual = round_module.play_round

    def play_round(federation, state, *rest):
        if rank() == 1 and state.round == FAULTY_ROUND:
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                time.sleep(600)
            if fault == "fails":
                raise ValueError("the rows of this machine cannot be read")
        return usual(federation, state, *rest)

    round_module.play_round = play_round
    return cli.main(arguments)


if __name__ == "__main__":
    what, first, *rest = sys.argv[1:]
    if what == "rows":
        play_all(Path(first))
        leave(0)
    leave(with_fault(first, rest))
