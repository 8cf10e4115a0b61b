"""Made-up rows for a composition of K levels whose minimum is known, however the clients differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedminimax.random import generator


@dataclass(frozen=True)
class LevelsData:
    """Rows (matrices, offsets) for the problem `levels`: how a client's levels differ from the
    mean ones.

    The dials are root mean squares over clients, at the solution, so they are the delta of
    the Fed-DR-SCGD paper (Assumption 3.3), split in two:

    - value_spread: the length of F_n^(k) - F^(k) for the inner levels, and of the same tilt of the
      last level's gradient;
    - jacobian_spread: the spectral norm of J_n^(k) - J^(k) for the inner levels.

    Client n has one number z_n, with mean 0 and variance 1 over the clients, and deviates by
    z_n * jacobian_spread * (a rotation) and by z_n * value_spread * (a unit vector), drawn per
    level. So the covariance over clients of the Jacobian of one level and the value of the level
    before it has the length value_spread * jacobian_spread, for any number of clients above 1: one
    number drives all, and that is the largest bias that the two dials allow. `independent` draws a
    number per client for every level and either dial instead; then the covariances are those of
    independent draws, about 1 / sqrt(clients) of that.

    With `noise`, a client's rows scatter around its own with mean zero: root mean squares again, of
    the length of an offset and of the Frobenius norm of a matrix (Assumption 3.2's sigma). What is
    built in: the rows of a client are centred, so without replacement the noise of an epoch cancels
    within it; and an offset's noise is additive, so it cancels in every difference of a level at
    two points on the same rows, which is what recursive (STORM) estimates are made of.
    """

    clients: int = 10
    depth: int = 3
    dimension: int = 5
    value_spread: float = 0.5
    jacobian_spread: float = 0.5
    noise: float = 0.0
    rows: int = 1
    independent: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "depth", "dimension", "rows"):
            given = getattr(self, name)
            if type(given) is not int or given < 1:
                raise ValueError(f"{name} is {given!r}; give a whole number of at least 1")
        for name in ("value_spread", "jacobian_spread", "noise"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}; give a number of at least 0")
        if self.noise and self.rows == 1:
            raise ValueError(
                f"noise is {self.noise}, but the rows of a client are centred and there is 1: give "
                "more rows"
            )

    def client_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per client, matrices of shape (rows, depth - 1, d + 1, d + 1) and offsets of shape
        (rows, depth, d + 1)."""
        size = self.dimension + 1
        common = generator(self.seed, "levels")
        # The levels are drawn one after another, so that a deeper problem begins with the same.
        turns, shifts = np.zeros((self.depth - 1, size, size)), np.zeros((self.depth, size))
        for level in range(self.depth):
            shift = common.standard_normal(size)
            shifts[level] = self.value_spread * shift / np.linalg.norm(shift)
            turn = np.linalg.qr(common.standard_normal((size, size)))[0]
            turns[level : level + 1] = self.jacobian_spread * turn
        return [
            (turn[:, None, None] * turns + matrices, shift[:, None] * shifts + offsets)
            for turn, shift, matrices, offsets in zip(
                self._factors("turn")[:, 1:],
                self._factors("shift"),
                self._scatter("matrices", turns.shape, size),
                self._scatter("offsets", shifts.shape, math.sqrt(size)),
                strict=True,
            )
        ]

    def _factors(self, dial: str) -> np.ndarray:
        """z, a row for each client and a column for each level."""
        if self.clients == 1:
            return np.zeros((1, self.depth))
        named = [f"levels clients {dial} {k}" for k in range(self.depth)]
        if not self.independent:
            named = ["levels clients"] * self.depth
        z = np.stack([generator(self.seed, n).standard_normal(self.clients) for n in named], 1)
        z -= z.mean(0)
        return z / np.sqrt((z**2).mean(0))

    def _scatter(self, what: str, shape: tuple[int, ...], scale: float) -> list[np.ndarray]:
        """Per client, so that a client's noise does not depend on how many there are."""
        scatter = []
        for client in range(self.clients):
            random = generator(self.seed, f"levels {what}", client)
            drawn = self.noise / scale * random.standard_normal((self.rows, *shape))
            scatter.append(drawn - drawn.mean(0))
        return scatter
