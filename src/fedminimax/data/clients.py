"""The rows of all clients, held once: a client is a range of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedminimax.types import HOST, Batch, Weights, batch_of

Rows = Sequence[Any]
Sampling = Literal["epoch", "iid", "balanced"]
AUXILIARY = "auxiliary"
_CHECKED = 1 << 22  # numbers of a column that are looked at together


@dataclass(frozen=True)
class Ranges:
    """The rows of many clients: columns that all of them share, and the range that each has.

    A column is a tensor, an array, a memory map, or the path of an npy file, which stays on the
    disk if its type is the run's. Without `starts` the clients' rows lie one behind the other; with
    them, clients may also share rows.

    >>> clients = Clients(Ranges([torch.arange(6.0)], sizes=[1, 2, 3]), batch_size=1)
    >>> len(clients), clients.train.rows(2), clients.names[2]
    (3, (tensor([3., 4., 5.]),), '2')
    """

    columns: Sequence[Any]
    sizes: Any
    starts: Any = None

    def __len__(self) -> int:
        return len(self.sizes)


class Numbers(Sequence[str]):
    """The names of clients that have none: their numbers, made when they are asked for.

    >>> Numbers(1_000_000)[999], list(Numbers(2))
    ('999', ['0', '1'])
    """

    def __init__(self, count: int):
        self._range = range(count)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, number: Any) -> Any:
        found = self._range[number]
        return tuple(map(str, found)) if isinstance(found, range) else str(found)


class Shards:
    """One split (training, validation or test) of every client: shared columns and where each
    client's rows begin."""

    def __init__(self, clients: Sequence[Rows] | Ranges, names: Sequence[str]):
        if isinstance(clients, Ranges):
            self.columns, self.sizes, self.starts = _open_columns(clients)
            return
        converted = [_columns(rows, name) for rows, name in zip(clients, names, strict=True)]
        _check_alike(converted, names)
        self.columns = tuple(_join(parts) for parts in zip(*converted, strict=True))
        self.sizes = np.array([len(rows[0]) for rows in converted], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    @staticmethod
    def of(columns: tuple[Tensor, ...], sizes: np.ndarray, starts: np.ndarray) -> Shards:
        """Columns of which it is known already where each client's rows begin."""
        made = object.__new__(Shards)
        made.columns, made.sizes, made.starts = columns, sizes, starts
        return made

    def rows(self, client: int) -> tuple[Tensor, ...]:
        start = int(self.starts[client])
        return tuple(column[start : start + int(self.sizes[client])] for column in self.columns)

    def batch(self, client: int) -> Batch:
        """All rows of a client."""
        return batch_of(*self.rows(client))

    def of_class(self, positive: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows with labels of that class; where among them each client's begin, and how many
        these are."""
        chosen = (np.asarray(self.columns[1].cpu()).reshape(-1) > 0) == positive
        before = np.concatenate([[0], np.cumsum(chosen)])
        starts = before[self.starts]
        return np.flatnonzero(chosen), starts, before[self.starts + self.sizes] - starts

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Shards:
        """The same rows with floating columns in another precision, perhaps on another device."""
        columns = tuple(
            c.to(device or c.device, dtype if c.is_floating_point() else c.dtype)
            for c in self.columns
        )
        return Shards.of(columns, self.sizes, self.starts)


class Clients:
    """The clients of a run: their training rows, and perhaps validation and test rows.

    >>> one, two = (torch.randn(8, 3), torch.ones(8)), (torch.randn(5, 3), torch.zeros(5))
    >>> clients = Clients([one, two], batch_size=4)
    >>> len(clients), clients.train.sizes.tolist()
    (2, [8, 5])
    """

    def __init__(
        self,
        train: Sequence[Rows] | Ranges,
        batch_size: int | None = 32,
        validation: Sequence[Rows] | Ranges | None = None,
        test: Sequence[Rows] | Ranges | None = None,
        weights: Weights | None = None,
        names: Sequence[str] | None = None,
        sampling: Sampling = "epoch",
        positive_share: float = 0.5,
        auxiliary: Rows | None = None,
    ):
        """`auxiliary`: rows that the server itself holds, as an extra client of that name. It
        takes part in nothing but what a method asks it for."""
        if len(train) == 0:
            raise ValueError("no clients were given: give one tuple of arrays per client")
        self.names = Numbers(len(train)) if names is None else tuple(names)
        if names is not None and not len(self.names) == len(train) == len(set(self.names)):
            raise ValueError(
                f"{len(train)} clients need as many different names, not {list(self.names)}"
            )
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise ValueError(
                f"batch_size is {batch_size!r}; give at least 1, or None for all rows of a client"
            )
        if weights not in (None, "uniform", "size"):
            raise ValueError(f'weights is {weights!r}; give "uniform" or "size"')
        if sampling not in ("epoch", "iid", "balanced"):
            raise ValueError(f'sampling is {sampling!r}; give "epoch", "iid" or "balanced"')
        if auxiliary is None:
            self.train, self.auxiliary = Shards(train, self.names), None
        elif isinstance(train, Ranges):
            raise ValueError("auxiliary rows go with clients given one by one, not with Ranges")
        else:
            self.train = Shards([*train, auxiliary], [*self.names, AUXILIARY])
            self.auxiliary = len(train)  # its number
        self.splits = {"train": self.train}
        for split, rows in (("validation", validation), ("test", test)):
            if rows is not None:
                if len(rows) != len(train):
                    raise ValueError(
                        f"{split} rows for {len(rows)} clients, but there are {len(train)}"
                    )
                self.splits[split] = Shards(rows, self.names)
        self.batch_size = batch_size
        self.weights: Weights | None = weights
        self.sampling, self.positive_share = sampling, positive_share
        if sampling == "balanced":
            self._check_both_classes()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def batch_positives(self) -> int:
        """How many positives a class-balanced batch holds."""
        size = self.batch_size or 0
        return max(1, min(round(self.positive_share * size), size - 1))

    @property
    def sampled_positive_share(self) -> float | None:
        """The share of positives in every batch, if batches are class-balanced."""
        if self.sampling != "balanced" or self.batch_size is None:
            return None
        return self.batch_positives / self.batch_size

    def weight_vector(self, kind: Weights) -> Tensor:
        """One weight per client, summing to one."""
        sizes = torch.from_numpy(self.train.sizes[: len(self)]).to(torch.float64)
        raw = torch.ones_like(sizes) if kind == "uniform" else sizes
        return raw / raw.sum()

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        columns = self.train.columns
        return columns[0].device if columns else HOST

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Clients:
        """The same clients with floating columns in this precision, and on this device."""
        moved = {name: shards.to(dtype, device) for name, shards in self.splits.items()}
        return self._with(moved)

    def among(self, names: Sequence[str], number: int) -> Clients:
        """The one client that is here, as that of this number; the rows of the others, who have
        these names, are elsewhere.

        >>> here = Clients([(torch.ones(8, 3), torch.ones(8))]).among(["a", "b"], 1)
        >>> here.train.sizes.tolist(), len(here.train.batch(1).features)
        ([0, 8], 8)
        """
        starts = np.zeros(len(names), dtype=np.int64)
        sizes = {split: starts.copy() for split in self.splits}
        for split, own in sizes.items():
            own[number] = self.splits[split].sizes[0]
        splits = {s: Shards.of(self.splits[s].columns, sizes[s], starts) for s in self.splits}
        placed = self._with(splits)
        placed.names = tuple(names)
        return placed

    def elsewhere(self, names: Sequence[str], sizes: dict[str, Sequence[int]]) -> Clients:
        """Clients with these names and numbers of rows, none of which is here; they draw batches
        as this one does."""
        splits = {}
        for split, counts in sizes.items():
            rows = np.array(counts, dtype=np.int64)
            splits[split] = Shards.of((), rows, np.concatenate([[0], np.cumsum(rows)[:-1]]))
        away = self._with(splits)
        away.names = tuple(names)
        return away

    def _with(self, splits: dict[str, Shards]) -> Clients:
        made = object.__new__(Clients)
        made.__dict__.update(self.__dict__)
        made.splits, made.train = splits, splits["train"]
        return made

    def _check_both_classes(self) -> None:
        if not 0 < self.positive_share < 1:
            raise ValueError(
                f"positive_share is {self.positive_share}; give a share between 0 and 1"
            )
        if self.batch_size is None or self.batch_size < 2:
            raise ValueError(
                f'sampling "balanced" needs a batch_size of at least 2, not {self.batch_size}'
            )
        if len(self.train.columns) < 2:
            raise ValueError('sampling "balanced" needs a column of labels beside the features')
        if self.train.columns[1].dim() > 1:
            raise ValueError(
                'sampling "balanced" knows one label, but rows have several: use sampling "epoch"'
            )
        sizes = self.train.sizes[: len(self)]
        positives = self.train.of_class(True)[2][: len(self)]
        if len(bad := np.flatnonzero((positives == 0) | (positives == sizes))):
            raise ValueError(
                f"client {self.names[int(bad[0])]} has rows of one class only, so it cannot draw "
                'class-balanced batches: use sampling "epoch"'
            )


def _join(parts: tuple[Tensor, ...]) -> Tensor:
    """All rows in one tensor: without a copy where they lie in one already, client after client."""
    first, end = parts[0], 0
    for part in parts:
        start = part.data_ptr() - first.data_ptr()
        held = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not held or not part.is_contiguous() or start != end:
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _columns(rows: Rows, name: str) -> tuple[Tensor, ...]:
    if isinstance(rows, Tensor | np.ndarray):
        raise ValueError(
            f"client {name}: give a tuple of arrays, such as (features, labels), not one array"
        )
    columns = tuple(
        torch.as_tensor(np.asarray(r) if not isinstance(r, Tensor) else r) for r in rows
    )
    if not columns or any(c.dim() == 0 for c in columns):
        raise ValueError(
            f"client {name}: give a tuple of arrays whose first dimension counts the rows"
        )
    lengths = [len(c) for c in columns]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"client {name}: the arrays have {lengths} rows; they must have the same number"
        )
    if lengths[0] == 0:
        raise ValueError(f"client {name} has no rows: leave it out, or give it some")
    _check_finite(columns, f"client {name}: ")
    return columns


def _open_columns(given: Ranges) -> tuple[tuple[Tensor, ...], np.ndarray, np.ndarray]:
    """Columns, sizes and starts, after a look at them."""
    columns = tuple(_column(column) for column in given.columns)
    if not columns or any(c.dim() == 0 or len(c) != len(columns[0]) for c in columns):
        raise ValueError(
            f"the columns have the shapes {[tuple(c.shape) for c in columns]}; give at least one, "
            "and all with the same number of rows"
        )
    rows, sizes = len(columns[0]), np.asarray(given.sizes, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    if given.starts is not None:
        starts = np.asarray(given.starts, dtype=np.int64)
    elif sizes.sum() != rows:
        raise ValueError(
            f"the sizes add up to {sizes.sum()}, but the columns have {rows} rows: give the sizes "
            "of all clients, or starts too"
        )
    if starts.shape != sizes.shape or sizes.ndim != 1:
        raise ValueError(f"there are {sizes.shape} sizes and {starts.shape} starts: give as many")
    if len(bad := np.flatnonzero((sizes < 1) | (starts < 0) | (starts + sizes > rows))):
        k = int(bad[0])
        raise ValueError(
            f"client {k} has {sizes[k]} rows from row {starts[k]} on; give each client at least "
            f"one of the {rows} rows"
        )
    # Maps of their own, gone after the look: files stay out of this process's memory.
    _check_finite(tuple(_column(column) for column in given.columns))
    return columns, sizes, starts


def _column(given: Any) -> Tensor:
    if isinstance(given, str | os.PathLike):
        # A private map: torch asks for one that may be written to, and nothing reaches the file.
        try:
            given = np.lib.format.open_memmap(given, "c")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{given} could not be read as a column ({error}): give a file of numpy.save"
            ) from error
    if isinstance(given, Tensor):
        return given
    with warnings.catch_warnings():
        # Nothing here writes to a column.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(np.asarray(given))
        except TypeError as error:
            raise ValueError(f"a column cannot be used: {error}") from error


def _check_finite(columns: tuple[Tensor, ...], where: str = "") -> None:
    for number, column in enumerate(columns):
        for first, part in _looked_at(column) if column.is_floating_point() else ():
            if bool(torch.isfinite(part).all()):
                continue
            row = first + int((~torch.isfinite(part.reshape(len(part), -1))).any(1).nonzero()[0])
            raise ValueError(
                f"{where}array {number} has a NaN or an infinity in row {row}; impute or drop such "
                "rows first"
            )


def _looked_at(column: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Parts of a column, each with the number of its first row: one that is on the disk is never
    in memory as a whole."""
    step = max(1, _CHECKED // max(1, column[:1].numel()))
    for first in range(0, len(column), step):
        yield first, column[first : first + step]


def _check_alike(clients: list[tuple[Tensor, ...]], names: Sequence[str]) -> None:
    def shape(rows: tuple[Tensor, ...]) -> list[tuple]:
        return [(tuple(c.shape[1:]), c.dtype) for c in rows]

    for rows, name in zip(clients, names, strict=True):
        if shape(rows) != shape(clients[0]):
            raise ValueError(
                f"client {name} has columns of shape and type {shape(rows)}, client {names[0]} "
                f"has {shape(clients[0])}; "
                "all clients must have the same"
            )
