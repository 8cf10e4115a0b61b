"""What clients keep between rounds: made at their first round, loaded for the cohort only."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedminimax.engine.trees import tree_map
from fedminimax.engine.work import kept_type, stack


class Store:
    """Client states in memory: client number -> the fields of `keep`, as a NamedTuple."""

    def __init__(self, fields: tuple[str, ...], states: dict[int, Any] | None = None):
        self.fields = fields
        self.states = dict(states or {})

    def missing(self, cohort: np.ndarray) -> np.ndarray:
        """The clients of the cohort that have not been met before."""
        new = [k for k in cohort.tolist() if k not in self.states] if self.fields else []
        return np.array(new, dtype=np.int64)

    def load(self, cohort: np.ndarray) -> Any:
        """The states of the cohort, stacked."""
        if not self.fields:
            return kept_type(())()
        return stack([self.states[client] for client in cohort.tolist()])

    def save(self, cohort: np.ndarray, kept: Any) -> None:
        for position, client in enumerate(cohort.tolist() if self.fields else ()):
            # A copy: a view would keep the whole cohort's tensors alive.
            self.states[client] = tree_map(lambda field, p=position: field[p].clone(), kept)
