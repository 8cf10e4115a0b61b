"""Which rows a client uses in which step: a pure function of (seed, level, client, iteration).

Sampling "epoch" walks through a keyed permutation of the client's rows, batch by batch, and takes a
new one per pass; rows left over at the end of a pass wait for the next. A client with at most a
batch of rows uses all of them in every step.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.clients import Clients, Shards
from fedminimax.random import key, words
from fedminimax.types import Batch, Draw, batch_of

_POSITIONS = 1 << 30
_LAST = np.iinfo(np.int64).max
MOST_AHEAD = 32_000  # row numbers drawn ahead: enough that a call of numpy is well used
MOST_SHUFFLED = 4_000_000  # row numbers of permutations that are made at once


class Pool:
    """The rows of one kind (all, the positives, the negatives) of each client, and their
    permutations."""

    def __init__(
        self, starts: np.ndarray, sizes: np.ndarray, stream: int, rows: np.ndarray | None = None
    ):
        """Each client has a range of the rows, or of all rows."""
        self.sizes, self._starts = sizes, starts
        self._rows = rows
        self._stream = stream
        # The permutations in use, for each class of sizes; results do not depend on them.
        self._memo: dict[int, Shuffled] = {}

    def take(self, cohort: np.ndarray, iterations: np.ndarray, count: int) -> np.ndarray:
        """(iterations, clients, count) global row numbers of iterations that follow each other; a
        pool of fewer rows than `count` is repeated cyclically."""
        chosen = np.empty((len(iterations), len(cohort), count), dtype=np.int64)
        # Permutations are as long as the longest of those made together.
        kinds = np.frexp(self.sizes[cohort])[1]
        for kind in np.unique(kinds).tolist() if len(iterations) else ():
            among = np.flatnonzero(kinds == kind)
            chosen[:, among] = self._take(kind, cohort[among], iterations, count)
        found = self._starts[cohort][:, None] + chosen
        return found if self._rows is None else self._rows[found]

    def _take(
        self, kind: int, cohort: np.ndarray, iterations: np.ndarray, count: int
    ) -> np.ndarray:
        """Of clients of similar sizes, as numbers among their own rows."""
        sizes = self.sizes[cohort]
        passes = np.maximum(sizes // count, 1)
        epoch, slot = np.divmod(iterations[:, None], passes)
        # Each client's passes, one behind the other: a permutation for each.
        lengths = epoch[-1] - epoch[0] + 1
        ends = np.cumsum(lengths)
        if len(iterations) > 1 and ends[-1] * int(sizes.max()) > MOST_SHUFFLED:
            halves = np.array_split(iterations, 2)
            return np.concatenate([self._take(kind, cohort, half, count) for half in halves])
        starts = ends - lengths
        place = np.repeat(np.arange(len(cohort)), lengths)
        which = epoch[0][place] + np.arange(ends[-1]) - starts[place]
        order = self._orders(kind, cohort, place, which)
        self._memo[kind] = Shuffled(cohort, epoch[-1], order[ends - 1])
        column = slot[..., None] * count + np.arange(count)
        if int(sizes.min()) < count:
            column %= sizes[:, None]
        column += ((starts + epoch - epoch[0]) * order.shape[1])[..., None]
        return order.ravel().take(column)

    def _orders(
        self, kind: int, cohort: np.ndarray, place: np.ndarray, epoch: np.ndarray
    ) -> np.ndarray:
        """A permutation for each pass of the client in that place of the cohort."""
        sizes = self.sizes[cohort[place]]
        position = np.arange(int(sizes.max()))
        known, memo = np.zeros(len(place), dtype=bool), self._memo.get(kind)
        order = np.empty((len(place), len(position)), dtype=np.int32)  # less to copy
        if memo is not None and np.array_equal(cohort, memo.cohort):
            known = epoch == memo.epoch[place]
            order[known] = memo.order[place[known]]
        new = ~known
        if new.any():
            drawn, length = cohort[place[new], None], sizes[new, None]
            keys = words(self._stream, drawn, epoch[new, None], position[None, :])
            # The position rides in the low bits: keys never tie, and sorting values beats an
            # argsort. Positions behind a client's last row sort to the end, so one sort serves all
            # sizes.
            keys <<= 30
            keys |= position
            np.copyto(keys, _LAST, where=position[None, :] >= length)
            keys.sort(axis=1)
            keys &= _POSITIONS - 1
            order[new] = keys
        return order


class Shuffled(NamedTuple):
    """The last permutation that each client of a cohort has used."""

    cohort: np.ndarray
    epoch: np.ndarray
    order: np.ndarray


class Draws:
    """The batches of one phase for a cohort, gathered when asked for: (steps, levels, clients,
    batch) row numbers."""

    def __init__(
        self, shards: Shards, cohort: np.ndarray, index: np.ndarray | None, sizes: np.ndarray
    ):
        self.shards, self.cohort = shards, cohort
        self.sizes = sizes  # the rows that each client uses in a step
        self._index = None if index is None else self._locate(index)

    def client(self, position: int, step: int, levels: int) -> Draw:
        """The draw of the client at that position of the cohort."""
        if self._index is None:
            return (self.shards.batch(int(self.cohort[position])),) * levels
        real = self._index[step, :, position, : int(self.sizes[position])]
        return tuple(batch_of(*(c[rows] for c in self.shards.columns)) for rows in real)

    def stack(self, step: int, levels: int) -> Draw:
        """The draws of all clients, stacked and padded."""
        if self._index is None:
            return (self._whole,) * levels
        return tuple(gather(self.shards.columns, rows, self._filled) for rows in self._index[step])

    @cached_property
    def source(self) -> Source:
        """All that the stacked draws are made of, as tensors."""
        if self._index is not None:
            return Source(self.shards.columns, self._index, self._filled)
        # As wide as the largest of all clients has rows: shapes do not depend on the cohort.
        width = int(self.shards.sizes.max())
        return Source(self.shards.columns, self._rows(width)[None, None], self._real(width))

    @property
    def numbers_per_step(self) -> int:
        """How many numbers the stacked draws of one step hold; those of all rows are held once."""
        return 0 if self._index is None else self.source.numbers_per_step

    @cached_property
    def _whole(self) -> Batch:
        width = int(self.sizes.max())
        return gather(self.shards.columns, self._rows(width), self._real(width))

    def _rows(self, width: int) -> Tensor:
        """All rows of each client, the last one repeated up to that width."""
        starts = self.shards.starts[self.cohort]
        offset = np.minimum(np.arange(width)[None, :], self.sizes[:, None] - 1)
        return self._locate(starts[:, None] + offset)

    @cached_property
    def _filled(self) -> Tensor:
        return self._real(self._index.shape[-1] if self._index is not None else 0)

    def _real(self, width: int) -> Tensor:
        """How many rows of each client are real; of length 0 when all are."""
        short = int(self.sizes.min()) < width
        return self._locate(np.minimum(self.sizes, width) if short else self.sizes[:0])

    def _locate(self, numbers: np.ndarray) -> Tensor:
        """Where the rows are."""
        return torch.from_numpy(numbers).to(self.shards.columns[0].device)


class Source(NamedTuple):
    """Columns, and which of their rows go into which batch."""

    columns: tuple[Tensor, ...]
    # (steps, levels, clients, batch); one step and level if they are always the same
    index: Tensor  # type: ignore[reportIncompatibleMethodOverride]  # nobody searches in this tuple
    filled: Tensor  # as `gather` has it

    @property
    def numbers_per_step(self) -> int:
        each = sum(math.prod(column.shape[1:]) for column in self.columns)
        return math.prod(self.index.shape[1:]) * each

    def rounds(self, count: int) -> Tensor:
        """The row numbers of each of so many rounds with equally many steps."""
        if len(self.index) == 1:
            return self.index.expand(count, *self.index.shape)
        return self.index.unflatten(0, (count, -1))

    def stack(self, step: int, levels: int) -> Draw:
        chosen = self.index[step] if len(self.index) > 1 else self.index[0]
        draws = tuple(gather(self.columns, rows, self.filled) for rows in chosen)
        return draws if len(draws) == levels else draws * levels


def gather(columns: tuple[Tensor, ...], rows: Tensor, filled: Tensor) -> Batch:
    """The batches of all clients from (clients, batch) row numbers, of which the first `filled` of
    each client count; all of them, if it has no entries."""
    flat = rows.reshape(-1)
    gathered = tuple(c.index_select(0, flat).unflatten(0, rows.shape) for c in columns)
    dtype = columns[0].dtype if columns[0].is_floating_point() else torch.get_default_dtype()
    if not len(filled):
        weight = torch.full(rows.shape, 1.0 / rows.shape[1], dtype=dtype, device=rows.device)
        return Batch(gathered, weight, weight[:, :0])
    places = torch.arange(rows.shape[1], device=rows.device)
    padding = (places[None, :] >= filled[:, None]).to(dtype)
    return Batch(gathered, (1 - padding) / filled[:, None], padding)


def all_rows(clients: Clients, cohort: np.ndarray) -> Draws:
    """All rows of each client of the cohort, at every level."""
    return Draws(clients.train, cohort, None, clients.train.sizes[cohort])


def rows_used(clients: Clients, cohort: np.ndarray, size: int) -> np.ndarray:
    """How many different rows are in a batch of that size, client by client."""
    full = np.full(len(cohort), size)
    if clients.sampling != "epoch":
        return full
    return np.minimum(full, clients.train.sizes[cohort])


class Sampler:
    """Draws the batches of a run."""

    def __init__(
        self, clients: Clients, levels: int, seed: int, purpose: str = "batch", times: int = 1
    ):
        """`times` makes each batch that many times as large."""
        self.clients, self.levels = clients, levels
        self.size = None if clients.batch_size is None else clients.batch_size * times
        self._block: Block | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._coming: Future[Block] | None = None
        self._streams = [key(seed, purpose, level) for level in range(levels)]
        self._others = [key(seed, purpose, level, 1) for level in range(levels)]

    @cached_property
    def _all(self) -> list[Pool]:
        shards = self.clients.train
        return [Pool(shards.starts, shards.sizes, stream) for stream in self._streams]

    @cached_property
    def _positive(self) -> list[Pool]:
        rows, starts, sizes = self.clients.train.of_class(True)
        return [Pool(starts, sizes, stream, rows) for stream in self._streams]

    @cached_property
    def _negative(self) -> list[Pool]:
        rows, starts, sizes = self.clients.train.of_class(False)
        return [Pool(starts, sizes, stream, rows) for stream in self._others]

    def draw(self, cohort: np.ndarray, iteration: int, steps: int) -> Draws:
        """The batches for `steps` local steps from that iteration on."""
        size = self.size
        if size is None:
            return all_rows(self.clients, cohort)
        index = self._ahead(cohort, iteration, steps)
        return Draws(self.clients.train, cohort, index, rows_used(self.clients, cohort, size))

    def _ahead(self, cohort: np.ndarray, iteration: int, steps: int) -> np.ndarray:
        """Row numbers of `steps` iterations; if the cohort stays the same, of many at a time."""
        block = self._block
        if block is None or not _equal(block.cohort, cohort):
            self._wait(wanted=False)
            block = self._draw(cohort, iteration, steps)
        elif not block.holds(iteration, steps):
            block = self._next(block, iteration, steps)
        self._block = block
        return block.index[iteration - block.first :][:steps]

    def _next(self, block: Block, iteration: int, steps: int) -> Block:
        """From that iteration on, with what was drawn in the meantime; and while it is used, the
        next is drawn."""
        found, most = block.since(iteration), MOST_AHEAD // max(block.index[:1].size, 1)
        if (ready := self._wait()) is not None:
            found = found.append(ready)
        if not found.holds(iteration, steps):
            # Twice as many each time: a cohort that returns by chance, or a run that is soon over,
            # does not pay for draws that nobody uses.
            more = max(steps, min(2 * len(block.index), most)) - len(found.index)
            found = found.append(self._draw(found.cohort, found.end, more))
        if block.again:  # it is likely to be asked for again
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "batches")
            more = max(steps, min(2 * len(found.index), most))
            self._coming = self._worker.submit(self._draw, found.cohort, found.end, more)
        return found._replace(again=True)

    def settle(self) -> None:
        """Waits until nothing is being drawn."""
        if self._coming is not None:
            wait([self._coming])

    def _wait(self, wanted: bool = True) -> Block | None:
        """What is being drawn; permutations have one user at a time."""
        coming, self._coming = self._coming, None
        if coming is None or (not wanted and coming.cancel()):
            return None
        return coming.result()

    def _draw(self, cohort: np.ndarray, iteration: int, steps: int) -> Block:
        return Block(cohort, iteration, self._index(cohort, iteration, steps))

    def _index(self, cohort: np.ndarray, iteration: int, steps: int) -> np.ndarray:
        iterations = np.arange(iteration, iteration + steps)
        levels = range(self.levels)
        return np.stack([self._rows(cohort, level, iterations) for level in levels], axis=1)

    def _rows(self, cohort: np.ndarray, level: int, iterations: np.ndarray) -> np.ndarray:
        size = self.size
        assert size is not None
        if self.clients.sampling == "epoch":
            return self._all[level].take(cohort, iterations, size)
        if self.clients.sampling == "iid":
            shards = self.clients.train
            slot, time = np.arange(size)[None, None, :], iterations[:, None, None]
            drawn = words(self._streams[level], cohort[None, :, None], time, slot)
            return shards.starts[cohort][:, None] + drawn % shards.sizes[cohort][:, None]
        positives = self.clients.batch_positives * size // (self.clients.batch_size or 1)
        return np.concatenate(
            [
                self._positive[level].take(cohort, iterations, positives),
                self._negative[level].take(cohort, iterations, size - positives),
            ],
            axis=2,
        )


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one is other or np.array_equal(one, other)


class Block(NamedTuple):
    """Row numbers drawn ahead; results do not depend on it."""

    cohort: np.ndarray
    first: int  # iteration
    # (iterations, levels, clients, batch)
    index: np.ndarray  # type: ignore[reportIncompatibleMethodOverride]  # nobody searches in this tuple
    again: bool = False  # has its cohort been asked for more before?

    @property
    def end(self) -> int:
        return self.first + len(self.index)

    def holds(self, iteration: int, steps: int) -> bool:
        return self.first <= iteration and iteration + steps <= self.end

    def since(self, iteration: int) -> Block:
        """What it has of that iteration and later ones; nothing, if it has not that one."""
        if not self.first <= iteration <= self.end:
            return Block(self.cohort, iteration, self.index[:0])
        return Block(self.cohort, iteration, self.index[iteration - self.first :])

    def append(self, other: Block) -> Block:
        if other.first != self.end:
            return self
        return self._replace(index=np.concatenate([self.index, other.index]))
