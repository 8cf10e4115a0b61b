"""Which rows a client uses in which step: a pure function of (seed, level, client, iteration).

Sampling "epoch" walks through a keyed permutation of the client's rows, batch by batch, and takes a
new one per pass; rows left over at the end of a pass wait for the next. A client with at most a
batch of rows uses all of them in every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from fedminimax.data.clients import Clients, Shards
from fedminimax.random import key, words
from fedminimax.types import Batch, Draw, batch_of

_POSITIONS = 1 << 30
_LAST = np.iinfo(np.int64).max


class Pool:
    """The rows of one kind (all, the positives, the negatives) of each client, and their
    permutations."""

    def __init__(self, rows: Sequence[np.ndarray] | None, shards: Shards, stream: int):
        self.sizes = shards.sizes if rows is None else np.array([len(r) for r in rows])
        self._rows = rows
        self._starts = shards.starts
        self._stream = stream
        self._cohort: np.ndarray | None = (
            None  # a memo of the permutations in use; results do not depend on it
        )

    def take(self, cohort: np.ndarray, iteration: int, count: int) -> np.ndarray:
        """(clients, count) global row numbers; a pool of fewer rows than `count` is repeated
        cyclically."""
        sizes = self.sizes[cohort]
        passes = np.maximum(sizes // count, 1)
        epoch, slot = iteration // passes, iteration % passes
        order = self._orders(cohort, epoch)
        column = (slot[:, None] * count + np.arange(count)) % sizes[:, None]
        chosen = np.take_along_axis(order, column, axis=1)
        if self._rows is None:
            return self._starts[cohort][:, None] + chosen
        return np.stack([self._rows[k][c] for k, c in zip(cohort, chosen, strict=True)])

    def _orders(self, cohort: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        if self._cohort is None or not np.array_equal(cohort, self._cohort):
            self._cohort = cohort.copy()
            self._epoch = np.full(len(cohort), -1)
            self._order = np.zeros((len(cohort), int(self.sizes[cohort].max())), dtype=np.int64)
        stale = np.flatnonzero(epoch != self._epoch)
        if len(stale):
            sizes = self.sizes[cohort[stale]]
            position = np.arange(int(sizes.max()))
            keys = words(self._stream, cohort[stale, None], epoch[stale, None], position[None, :])
            # The position rides in the low bits: keys never tie, and sorting values beats an
            # argsort.
            # Positions behind a client's last row sort to the end, so one sort serves all sizes.
            keys = np.where(position[None, :] < sizes[:, None], (keys << 30) | position, _LAST)
            keys.sort(axis=1)
            self._order[stale, : len(position)] = keys & (_POSITIONS - 1)
            self._epoch[stale] = epoch[stale]
        return self._order


class Draws:
    """The batches of one phase for a cohort, gathered when asked for: (steps, levels, clients,
    batch) row numbers."""

    def __init__(
        self, shards: Shards, cohort: np.ndarray, index: np.ndarray | None, sizes: np.ndarray
    ):
        self.shards, self.cohort, self._sizes = shards, cohort, sizes
        self._index = None if index is None else torch.from_numpy(index)
        self._short = index is not None and bool((sizes < index.shape[-1]).any())

    def client(self, position: int, step: int, levels: int) -> Draw:
        """The draw of the client at that position of the cohort."""
        if self._index is None:
            return (self.shards.batch(int(self.cohort[position])),) * levels
        real = self._index[step, :, position, : int(self._sizes[position])]
        return tuple(batch_of(*(c[rows] for c in self.shards.columns)) for rows in real)

    def stacked(self, step: int, levels: int) -> Draw:
        """The draws of all clients, stacked and padded."""
        if self._index is None:
            return (self._whole,) * levels
        return tuple(self._gather(rows) for rows in self._index[step])

    def rows_used(self, position: int) -> int:
        return int(self._sizes[position])

    @property
    def numbers_per_step(self) -> int:
        """How many numbers the stacked draws of one step hold; those of all rows are held once."""
        if self._index is None:
            return 0
        each = sum(math.prod(column.shape[1:]) for column in self.shards.columns)
        return math.prod(self._index.shape[1:]) * each

    @cached_property
    def _whole(self) -> Batch:
        longest = int(self._sizes.max())
        starts = self.shards.starts[self.cohort]
        offset = np.minimum(np.arange(longest)[None, :], self._sizes[:, None] - 1)
        self._short = bool((self._sizes < longest).any())
        return self._gather(torch.from_numpy(starts[:, None] + offset))

    def _gather(self, rows: torch.Tensor) -> Batch:
        columns = self.shards.columns
        flat = rows.reshape(-1)
        gathered = tuple(c.index_select(0, flat).unflatten(0, rows.shape) for c in columns)
        dtype = columns[0].dtype if columns[0].is_floating_point() else torch.get_default_dtype()
        if not self._short:
            weight = torch.full(rows.shape, 1.0 / rows.shape[1], dtype=dtype)
            return Batch(gathered, weight, weight[:, :0])
        sizes = torch.from_numpy(np.minimum(self._sizes, rows.shape[1]))[:, None]
        padding = (torch.arange(rows.shape[1])[None, :] >= sizes).to(dtype)
        return Batch(gathered, (1 - padding) / sizes, padding)


class Sampler:
    """Draws the batches of a run."""

    def __init__(
        self, clients: Clients, levels: int, seed: int, purpose: str = "batch", times: int = 1
    ):
        """`times` makes each batch that many times as large."""
        self.clients, self.levels = clients, levels
        self.size = None if clients.batch_size is None else clients.batch_size * times
        shards = clients.train
        self._streams = [key(seed, purpose, level) for level in range(levels)]
        if clients.sampling == "balanced":
            labels = [np.asarray(shards.rows(k)[1]) > 0 for k in range(len(shards.sizes))]
            positive = [s + np.flatnonzero(p) for s, p in zip(shards.starts, labels, strict=True)]
            negative = [s + np.flatnonzero(~p) for s, p in zip(shards.starts, labels, strict=True)]
            self._positive = [Pool(positive, shards, stream) for stream in self._streams]
            other = [key(seed, purpose, level, 1) for level in range(levels)]
            self._negative = [Pool(negative, shards, stream) for stream in other]
        else:
            self._all = [Pool(None, shards, stream) for stream in self._streams]

    def whole(self, cohort: np.ndarray) -> Draws:
        """All rows of each client, at every level."""
        return Draws(self.clients.train, cohort, None, self.clients.train.sizes[cohort])

    def draw(self, cohort: np.ndarray, iteration: int, steps: int) -> Draws:
        """The batches for `steps` local steps from that iteration on."""
        size = self.size
        if size is None:
            return self.whole(cohort)
        index = np.zeros((steps, self.levels, len(cohort), size), dtype=np.int64)
        for step in range(steps):
            for level in range(self.levels):
                index[step, level] = self._rows(cohort, level, iteration + step)
        used = np.full(len(cohort), size)
        if self.clients.sampling == "epoch":
            used = np.minimum(used, self.clients.train.sizes[cohort])
        return Draws(self.clients.train, cohort, index, used)

    def _rows(self, cohort: np.ndarray, level: int, iteration: int) -> np.ndarray:
        size = self.size
        assert size is not None
        if self.clients.sampling == "epoch":
            return self._all[level].take(cohort, iteration, size)
        if self.clients.sampling == "iid":
            shards = self.clients.train
            slot = np.arange(size)[None, :]
            drawn = words(self._streams[level], cohort[:, None], iteration, slot)
            return shards.starts[cohort][:, None] + drawn % shards.sizes[cohort][:, None]
        positives = self.clients.batch_positives * size // (self.clients.batch_size or 1)
        return np.concatenate(
            [
                self._positive[level].take(cohort, iteration, positives),
                self._negative[level].take(cohort, iteration, size - positives),
            ],
            axis=1,
        )
