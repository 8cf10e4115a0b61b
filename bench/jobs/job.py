"""The job that all peers do, in plain torch: this file is also read in their environments, which
have no fedminimax.

FedAvg on binary cross-entropy, 10 of 100 clients in a round. A client has as many rows as its steps
use, so that an epoch of the peers is our number of steps. No batch-norm: they treat it differently.
All begin with the same weights and rows, and say the loss after their first rounds: cohorts and the
order of rows are each library's own, so the losses are near each other and not the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TextIO

CLIENTS, COHORT, STEPS, BATCH, LR = 100, 10, 4, 32, 0.05
WARM = 10  # rounds before the first turn
SHAPES = {"mlp": (64,), "cnn": (1, 28, 28)}


def network(kind: str) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2304, 600), nn.Linear(600, 120), nn.Linear(120, 1)),
    )


@cache
def kept_network(kind: str) -> Any:
    """One for all rounds of a process, for those who load their weights into it."""
    return network(kind)


@cache
def rows(kind: str) -> list[tuple[Any, Any]]:
    """Features and labels of each client."""
    import torch

    chance, count = torch.Generator().manual_seed(1), STEPS * BATCH
    labels = (torch.arange(count) % 2).float()
    return [(torch.randn(count, *SHAPES[kind], generator=chance), labels) for _ in range(CLIENTS)]


def loss(outputs: Any, labels: Any) -> Any:
    from torch.nn.functional import binary_cross_entropy_with_logits

    return binary_cross_entropy_with_logits(outputs.reshape(-1), labels)


def level(model: Any, kind: str) -> float:
    """The loss of a network on all rows of all clients."""
    import torch

    with torch.no_grad():
        losses = [loss(model(features), labels) for features, labels in rows(kind)]
    return float(torch.stack(losses).mean())


class Turns:
    """The other end of the pipe: a line comes in for each turn, the turn's seconds go out."""

    def __init__(self) -> None:
        # Whatever else prints goes to the error stream.
        self.out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **told: Any) -> None:
        print(json.dumps(told), file=self.out, flush=True)

    def wait(self) -> bool:
        """Until the next turn; false when there is none."""
        return bool(sys.stdin.readline())

    def serve(self, play: Callable[[], Any], loss: Callable[[], float]) -> None:
        """`play` plays a round."""
        for _ in range(WARM):
            play()
        self.say(rounds=WARM, loss=loss())
        self.time(play)

    def time(self, play: Callable[[], Any], rounds: int = 1) -> None:
        """`play` plays so many rounds, in each turn."""
        while self.wait():
            start = time.perf_counter()
            play()
            self.say(seconds=(time.perf_counter() - start) / rounds)


def threads() -> int:
    """The second argument: cores for each operation."""
    import torch

    count = int(sys.argv[2])
    torch.set_num_threads(count)
    return count
