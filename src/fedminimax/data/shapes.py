"""Small pictures made from a seed: image problems without a download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedminimax.random import generator

Rows = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Shapes:
    """Pictures of a bright bar on dark ground, level (class 0) or upright (class 1).

    Pixels are in [-1, 1]. The bar lies at a random place near the client's own, which is in the
    middle of the picture for all clients when `spread` is 0, and far off it when it is 1. With
    `noise`, pixels scatter. Every client has as many test rows, drawn apart.
    """

    clients: int = 5
    rows: int = 40
    side: int = 8
    spread: float = 0.5
    noise: float = 0.1
    seed: int = 0
    classes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        for name, least in (("clients", 1), ("rows", 2), ("side", 4)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least {least}")
        if not 0 <= self.spread <= 1 or not 0 <= self.noise < np.inf:
            raise ValueError(
                f"spread is {self.spread} and noise {self.noise}; give a share between 0 and 1, "
                "and a number of at least 0"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        return (1, self.side, self.side)

    def client_rows(self) -> Rows:
        return [self._draw(client, 0) for client in range(self.clients)]

    def test_rows(self) -> Rows:
        return [self._draw(client, 1) for client in range(self.clients)]

    def _draw(self, client: int, draw: int) -> tuple[np.ndarray, np.ndarray]:
        own = generator(self.seed, "place", client).uniform(-1, 1, 2)
        random = generator(self.seed, "shapes", client, draw)
        labels = random.permutation(np.arange(self.rows) % 2)
        # A bar is wide along one axis and narrow along the other; classes swap the two.
        place = 0.5 + 0.3 * (self.spread * own + 0.3 * random.uniform(-1, 1, (self.rows, 2)))
        width = np.where(labels[:, None] == [1, 0], 0.3, 0.1)
        axis = (np.arange(self.side) + 0.5) / self.side
        away = ((axis - place[..., None]) / width[..., None]) ** 2
        bright = np.exp(-(away[:, 0, :, None] + away[:, 1, None, :]))
        scatter = self.noise * random.standard_normal(bright.shape)
        return np.clip(2 * bright - 1 + scatter, -1, 1)[:, None], labels
