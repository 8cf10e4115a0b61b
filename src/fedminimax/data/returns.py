"""Made-up returns of assets, and how days are dealt out to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fedminimax.data.sites import DataError
from fedminimax.random import generator

Partition = Literal["contiguous", "iid"]


@dataclass(frozen=True)
class Returns:
    """Made-up daily returns in percent, from a factor model, with a dial for heterogeneity.

    r = mu + B f + e, with `factors` standard normal factors f, loadings B around 0.8 for the first
    factor (the market) and around 0 for the others, and means mu that grow with the loadings. With
    `spread`, each client's mu and B are its own: those of all, plus normal numbers of that standard
    deviation, relative to the entries', which sum to 0 over clients. `missing` is the share of
    returns that are missing; then rows are (returns, present), as those of the Fama-French data.
    """

    clients: int = 8
    assets: int = 20
    rows: int = 500
    factors: int = 3
    spread: float = 0.0
    missing: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "assets", "rows", "factors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if not self.spread >= 0:
            raise ValueError(f"spread is {self.spread}; give a number of at least 0")
        if not 0 <= self.missing < 1:
            raise ValueError(f"missing is {self.missing}; give a share of at least 0 and below 1")

    @property
    def dimension(self) -> int:
        return self.assets

    def client_rows(self) -> list[tuple[np.ndarray, ...]]:
        random = generator(self.seed, "returns")
        n, d, f = self.clients, self.assets, self.factors
        market = np.arange(f) == 0
        loadings = 0.8 * market + 0.3 * random.standard_normal((d, f))
        mu = 0.04 + 0.03 * loadings[:, 0] + 0.02 * random.standard_normal(d)
        own_mu = mu + 0.04 * self.spread * _centre(random, n, d)
        own_loadings = loadings + 0.5 * self.spread * _centre(random, n, d, f)
        noise = random.uniform(0.3, 0.9, d) * random.standard_normal((n, self.rows, d))
        moves = random.standard_normal((n, self.rows, f)) @ own_loadings.transpose(0, 2, 1)
        returns = own_mu[:, None, :] + moves + noise
        if not self.missing:
            return [(own,) for own in returns]
        present = (random.uniform(size=returns.shape) >= self.missing).astype(np.float64)
        return list(zip(returns * present, present, strict=True))


def dealt(
    days: int, clients: int, partition: Partition, random: np.random.Generator
) -> list[np.ndarray]:
    """The days of each client, in order: as many as the others have, or one more."""
    if days < clients:
        raise DataError(f"{days} days are too few for {clients} clients; lower clients.")
    order = np.arange(days) if partition == "contiguous" else random.permutation(days)
    return [np.sort(part) for part in np.array_split(order, clients)]


def check_partition(partition: str, clients: int) -> None:
    """Refuses a way to deal out days that is not known, or a number of clients below 1."""
    if partition not in get_args(Partition):
        known = " or ".join(map(repr, get_args(Partition)))
        raise DataError(f"partition is {partition!r}; use {known}.")
    if clients < 1:
        raise DataError(f"clients is {clients}; give at least 1.")


def _centre(random: np.random.Generator, clients: int, *shape: int) -> np.ndarray:
    values = random.standard_normal((clients, *shape))
    return values - values.mean(0)
