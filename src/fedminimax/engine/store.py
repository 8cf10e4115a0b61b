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
        self._states = dict(states or {})
        # The cohort saved last, still stacked: it is often the next one too.
        self._cohort, self._stacked = np.zeros(0, dtype=np.int64), None

    @property
    def states(self) -> dict[int, Any]:
        self._take_apart()
        return self._states

    def missing(self, cohort: np.ndarray) -> np.ndarray:
        """The clients of the cohort that have not been met before."""
        if not self.fields or self._holds(cohort):
            return cohort[:0]
        states = self.states
        return np.array([k for k in cohort.tolist() if k not in states], dtype=np.int64)

    def load(self, cohort: np.ndarray) -> Any:
        """The states of the cohort, stacked."""
        if not self.fields:
            return kept_type(())()
        if self._holds(cohort):
            return self._stacked
        states = self.states
        return stack([states[client] for client in cohort.tolist()])

    def save(self, cohort: np.ndarray, kept: Any) -> None:
        if not self.fields:
            return
        if not self._holds(cohort):
            self._take_apart()
        self._cohort, self._stacked = cohort, kept

    def _holds(self, cohort: np.ndarray) -> bool:
        return self._stacked is not None and np.array_equal(cohort, self._cohort)

    def _take_apart(self) -> None:
        if self._stacked is None:
            return
        for position, client in enumerate(self._cohort.tolist()):
            # A copy: a view would keep the whole cohort's tensors alive.
            state = tree_map(lambda field, p=position: field[p].clone(), self._stacked)
            self._states[client] = state
        self._stacked = None
