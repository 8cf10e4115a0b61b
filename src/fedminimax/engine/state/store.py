"""What clients keep between rounds: made at their first round, loaded for the cohort only."""

# torch gives `from_numpy` no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.trees import build_tree, form_of, leaves, tree_map
from fedminimax.engine.job import MESSAGES, kept_type, row_of, stack


class ClientStore(ABC):
    """Client states: client number -> the fields of `keep`, as a NamedTuple.

    The cohort saved last stays as it came, stacked: it is often the next one too. The back-end gets
    of it what the next cohort leaves behind, and all of it at a checkpoint.
    """

    def __init__(self, fields: tuple[str, ...]):
        self.fields = fields
        # What clients keep for message stages, by kind of message; None: it is not here.
        self.stages: dict[str, ClientStore] | None = {}
        self._cohort, self._stacked = np.zeros(0, dtype=np.int64), None
        self._ahead = False  # of the back-end, which then has older states of that cohort

    @property
    def states(self) -> dict[int, Any]:
        self.settle()
        return self._all()

    def missing(self, cohort: np.ndarray) -> np.ndarray:
        """The clients of the cohort that have not been met before."""
        if not self.fields or self._holds(cohort):
            return cohort[:0]
        return cohort[~(self._known(cohort) | _among(cohort, self._cohort))]

    def load(self, cohort: np.ndarray) -> Any:
        """The states of the cohort, stacked."""
        if not self.fields:
            return kept_type(())()
        if self._holds(cohort):
            return self._stacked
        held = _among(cohort, self._cohort)
        if not held.any():
            return self._read(cohort)
        # Numbers ascend; of a client that was there twice, the last state counts.
        places = np.searchsorted(self._cohort, cohort[held], side="right") - 1
        if held.all():
            return rows_of(self._stacked, places)
        return self._read_some(cohort, held, places)

    def save(self, cohort: np.ndarray, kept: Any) -> None:
        if not self.fields:
            return
        if not self._holds(cohort):
            self._put_away(~_among(self._cohort, cohort))
        self._cohort, self._stacked, self._ahead = cohort, kept, True

    def settle(self) -> None:
        """The back-end has all states."""
        self._put_away(np.ones(len(self._cohort), dtype=bool))
        self._ahead = False

    def stage(self, kind: str) -> ClientStore:
        """What clients keep for message stages, in messages of that kind."""
        assert self.stages is not None
        if kind not in self.stages:
            self.stages[kind] = self._new_stage(kind)
        return self.stages[kind]

    def checkpoint(self) -> tuple[dict[str, Tensor], Any]:
        """What a checkpoint holds of the clients, and what it says about the rest of them."""
        tensors: dict[str, Tensor] = {}
        for client, kept in self.states.items():
            tensors |= leaves(kept, f"client.{client}")
        return tensors | self._stage_tensors(), None

    def _stage_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for kind, own in (self.stages or {}).items():
            for client, kept in own.states.items():
                tensors |= leaves(kept.messages, f"client.{client}.{MESSAGES}.{kind}")
        return tensors

    @property
    def stage_forms(self) -> dict[str, Any]:
        """How what clients keep for stages is built, for a checkpoint."""
        stores = (self.stages or {}).items()
        return {
            kind: form_of(next(iter(own.states.values())).messages)
            for kind, own in stores
            if own.states
        }

    def restore_stages(
        self, round: int, forms: dict[str, Any], states: dict[int, dict[str, Tensor]]
    ) -> None:
        """From the tensors of each client that a checkpoint names after `messages`."""
        if self.stages is None:
            return
        for name, form in forms.items():
            prefix = f"{name}."
            named = {
                client: {n.removeprefix(prefix): v for n, v in own.items() if n.startswith(prefix)}
                for client, own in states.items()
            }
            kind = kept_type((MESSAGES,))
            built_states = {c: kind(build_tree(form, own)) for c, own in named.items() if own}
            self.stage(name).restore(round, built_states)

    def checkpointed(self, round: int) -> None:  # noqa: B027
        """Called when the checkpoint of that round is on the disk."""

    def restore(self, round: int, states: dict[int, Any]) -> None:
        """From a checkpoint of that round that holds the states, or from the beginning."""
        self._cohort, self._stacked, self._ahead = self._cohort[:0], None, False
        if self.stages is not None:
            self.stages = {}
        self._replace(round, states)

    def close(self) -> None:  # noqa: B027
        """Gives back what the store holds, if anything."""

    @abstractmethod
    def _new_stage(self, kind: str) -> ClientStore:
        """An empty store of the same sort for what clients keep for message stages."""

    @abstractmethod
    def _known(self, cohort: np.ndarray) -> np.ndarray:
        """Which of these clients the back-end has."""

    @abstractmethod
    def _read(self, cohort: np.ndarray) -> Any: ...

    @abstractmethod
    def _read_some(self, cohort: np.ndarray, held: np.ndarray, places: np.ndarray) -> Any:
        """The states of a cohort of which some, those that are held, are in these places of the
        stacked one."""

    @abstractmethod
    def _write(self, clients: np.ndarray, places: np.ndarray, stacked: Any) -> None:
        """The states of the clients are in these places."""

    @abstractmethod
    def _all(self) -> dict[int, Any]: ...

    @abstractmethod
    def _replace(self, round: int, states: dict[int, Any]) -> None: ...

    def _holds(self, cohort: np.ndarray) -> bool:
        if self._stacked is None:
            return False
        return cohort is self._cohort or np.array_equal(cohort, self._cohort)

    def _put_away(self, which: np.ndarray) -> None:
        if not self._ahead or not which.any():
            return
        self._write(self._cohort[which], np.flatnonzero(which), self._stacked)


class Store(ClientStore):
    """Client states in memory."""

    def __init__(self, fields: tuple[str, ...], states: dict[int, Any] | None = None):
        super().__init__(fields)
        self._states = dict(states or {})

    def _new_stage(self, kind: str) -> ClientStore:
        return Store((MESSAGES,))

    def _known(self, cohort: np.ndarray) -> np.ndarray:
        return np.array([client in self._states for client in cohort.tolist()], dtype=bool)

    def _read(self, cohort: np.ndarray) -> Any:
        return stack([self._states[client] for client in cohort.tolist()])

    def _read_some(self, cohort: np.ndarray, held: np.ndarray, places: np.ndarray) -> Any:
        own = dict(zip(cohort[held].tolist(), places.tolist(), strict=True))
        return stack(
            [
                row_of(self._stacked, own[client]) if client in own else self._states[client]
                for client in cohort.tolist()
            ]
        )

    def _write(self, clients: np.ndarray, places: np.ndarray, stacked: Any) -> None:
        for client, place in zip(clients.tolist(), places.tolist(), strict=True):
            # A copy: a view would keep the whole cohort's tensors alive.
            self._states[client] = tree_map(torch.clone, row_of(stacked, place))

    def _all(self) -> dict[int, Any]:
        return self._states

    def _replace(self, round: int, states: dict[int, Any]) -> None:
        self._states = dict(states)


def rows_of(stacked: Any, places: np.ndarray) -> Any:
    """The states of some clients, from those of a cohort."""
    index = torch.from_numpy(places)

    def some(field: Tensor) -> Tensor:
        return field[index]

    return tree_map(some, stacked)


def _among(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of some numbers are among others that ascend; np.isin takes ten times as long.

    >>> _among(np.array([1, 4, 9]), np.array([2, 4, 4])).tolist()
    [False, True, False]
    """
    if not len(others):
        return np.zeros(len(some), dtype=bool)
    places = np.searchsorted(others, some)
    return others[np.minimum(places, len(others) - 1)] == some
