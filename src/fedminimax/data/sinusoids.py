"""Regression tasks for meta-learning: sine waves that differ in amplitude and phase."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedminimax.random import generator

Rows = list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class SinusoidData:
    """Rows (input, target, task, query) of sine waves, spread over clients (Finn et al. 2017,
    Section 5.1).

    A task is target = amplitude * sin(input - phase), amplitude uniform in [0.1, 5], phase in
    [0, pi], inputs in [-5, 5]; with `noise`, targets are normal around it. A client holds
    `tasks_per_client` tasks of the `tasks`, the next client those that begin one further: with all
    of them, clients are alike; with 1, every client has a task of its own, or shares it with few.
    With 1 and no more clients than tasks no task has rows at two clients: the objective is a plain
    mean of the clients' own, and nothing is composed across clients.
    Of each task it holds a client has `support` rows, to adapt on, and `query` rows, to be judged
    by. The test rows are of as many new tasks.
    """

    clients: int = 10
    tasks: int = 5
    tasks_per_client: int = 2
    support: int = 10
    query: int = 10
    noise: float = 0.0
    seed: int = 0
    shape: ClassVar[tuple[int, ...]] = (1,)  # of an input

    def __post_init__(self) -> None:
        for name in ("clients", "tasks", "tasks_per_client", "support", "query"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"noise is {self.noise}; give a number of at least 0")
        if self.tasks_per_client > self.tasks:
            raise ValueError(
                f"tasks_per_client is {self.tasks_per_client}, but there are {self.tasks} tasks: "
                "give no more than that"
            )
        if self.clients + self.tasks_per_client - 1 < self.tasks:
            raise ValueError(
                f"{self.clients} clients with {self.tasks_per_client} tasks each do not hold all "
                f"{self.tasks} tasks: give more clients, more tasks per client, or fewer tasks"
            )

    def client_rows(self) -> Rows:
        return self._rows("train")

    def test_rows(self) -> Rows:
        """The same number of rows, of new tasks."""
        return self._rows("test")

    def _rows(self, split: str) -> Rows:
        random = generator(self.seed, f"sinusoids {split}")
        amplitude = random.uniform(0.1, 5.0, self.tasks)
        phase = random.uniform(0.0, math.pi, self.tasks)
        each = self.support + self.query
        query = np.tile(np.arange(each) >= self.support, self.tasks_per_client).astype(np.int64)
        clients = []
        for client in range(self.clients):
            held = (client + np.arange(self.tasks_per_client)) % self.tasks
            task = np.repeat(held, each)
            inputs = random.uniform(-5.0, 5.0, len(task))
            target = amplitude[task] * np.sin(inputs - phase[task])
            target += self.noise * random.standard_normal(len(task))
            clients.append((inputs[:, None], target, task, query))
        return clients
