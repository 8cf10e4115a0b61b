"""Data made up so that the right answer is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedminimax.random import generator


@dataclass(frozen=True)
class QuadraticData:
    """Rows (t, b) for the quadratic saddle of the AdaFGDA paper, with a dial for heterogeneity.

    t_k is uniform in [0, coupling]; b_k is normal with standard deviation `spread`, centred over
    clients. With `noise`, a client's rows scatter around its b_k with mean zero.
    """

    clients: int = 10
    dimension: int = 10
    spread: float = 1.0
    noise: float = 0.0
    rows: int = 1
    coupling: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "dimension", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")

    def client_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        random = generator(self.seed, "quadratic")
        t = random.uniform(0, self.coupling, self.clients)
        b = self.spread * random.standard_normal((self.clients, self.dimension))
        b -= b.mean(0)
        scatter = self.noise * random.standard_normal((self.clients, self.rows, self.dimension))
        scatter -= scatter.mean(1, keepdims=True)
        return [(np.full(self.rows, t[k]), b[k] + scatter[k]) for k in range(self.clients)]
