"""What clients keep between rounds: made at their first round, loaded for the cohort only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class Store:
    """Client states in memory: client number -> the tensors of its `keep` fields."""

    def __init__(
        self, fields: tuple[str, ...], states: dict[int, tuple[Tensor, ...]] | None = None
    ):
        self.fields = fields
        self.states = dict(states or {})

    def load(
        self, cohort: np.ndarray, make: Callable[[np.ndarray], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """The stacked states of the cohort; `make` gives those of clients met for the first
        time."""
        if not self.fields:
            return ()
        new = np.array([k for k in cohort.tolist() if k not in self.states], dtype=np.int64)
        if len(new):
            self.save(new, make(new))
        return tuple(
            torch.stack(field)
            for field in zip(*(self.states[k] for k in cohort.tolist()), strict=True)
        )

    def save(self, cohort: np.ndarray, kept: tuple[Tensor, ...]) -> None:
        for position, client in enumerate(cohort.tolist() if self.fields else ()):
            self.states[client] = tuple(field[position] for field in kept)
