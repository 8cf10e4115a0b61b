"""Made-up rows for the small GAN and for the PL-PL function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedminimax.random import generator


@dataclass(frozen=True)
class GaussianData:
    """Rows (z, mu + sigma z) with standard normal z, for the one-dimensional Wasserstein GAN.

    The defaults are those of the FESS-GDA paper: 10 clients with 1000 rows each. With `spread`,
    each client has its own mu, normal around the given one, centred over clients.
    """

    clients: int = 10
    rows: int = 1000
    mu: float = 0.0
    sigma: float = 0.1
    spread: float = 0.0
    seed: int = 0
    dimension: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_counts(clients=self.clients, rows=self.rows)

    def client_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        random = generator(self.seed, "gaussian")
        z = random.standard_normal((self.clients, self.rows))
        mu = self.spread * random.standard_normal((self.clients, 1))
        mu += self.mu - mu.mean()
        return list(zip(z, mu + self.sigma * z, strict=True))


@dataclass(frozen=True)
class TiltData:
    """Rows (s, t) of tilts for the PL-PL function, normal with standard deviation `spread`.

    They are centred over clients; with `noise`, a client's rows scatter around its own tilt with
    mean zero.
    """

    clients: int = 10
    dimension: int = 1
    spread: float = 1.0
    noise: float = 0.0
    rows: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_counts(clients=self.clients, dimension=self.dimension, rows=self.rows)

    def client_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        random = generator(self.seed, "tilt")
        own = self.spread * random.standard_normal((2, self.clients, 1, self.dimension))
        own -= own.mean(1, keepdims=True)
        shape = (2, self.clients, self.rows, self.dimension)
        scatter = self.noise * random.standard_normal(shape)
        scatter -= scatter.mean(2, keepdims=True)
        s, t = own + scatter
        return list(zip(s, t, strict=True))


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; give at least 1")
