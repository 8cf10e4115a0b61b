"""Clients in groups, of which each goes through a whole phase while its numbers are in the cache of
one core. All clients at once would write every step's numbers to memory, and read them again; and
several cores at the same operation wait for each other, and for each other's numbers, at every
one."""

from __future__ import annotations

import math
from threading import Lock
from typing import NamedTuple

from torch import Tensor

HELD = 4 << 20  # bytes of a group's clients, not all of which are in use at once
FEW = 16 << 20  # bytes of all clients: of no more, further groups take as long as they save
ALONE = 1 << 21  # bytes of all clients: of no more, a second core takes longer to ask than to do it
LEAST = 8  # clients in a group: with fewer, calls take longer than memory


class Group(NamedTuple):
    """Clients that follow each other in the cohort."""

    number: int
    first: int
    size: int
    again: int = 0  # how many of them, at the beginning, are also in the group before

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.size)


def groups(count: int, each: int, cores: int) -> list[Group]:
    """So many clients of so many bytes, in groups of equal size: one graph serves all. The cores
    have as many groups each, up to rounding, if there are clients enough. None, if the clients are
    better off together.

    >>> groups(100, 100_000, cores=1)
    []
    >>> [(group.first, group.size, group.again) for group in groups(100, 50_000, cores=2)]
    [(0, 50, 0), (50, 50, 0)]
    >>> [(group.first, group.size, group.again) for group in groups(1000, 20_000, cores=1)]
    [(0, 200, 0), (200, 200, 0), (400, 200, 0), (600, 200, 0), (800, 200, 0)]
    >>> [(group.first, group.size, group.again) for group in groups(43, 400_000, cores=1)]
    [(0, 9, 0), (9, 9, 0), (18, 9, 0), (27, 9, 0), (34, 9, 2)]
    """
    whole = count * each
    least = math.ceil(whole / HELD) if whole > FEW else 1
    for parts in (cores * math.ceil(least / cores), least):
        size = math.ceil(count / parts)
        if whole > ALONE and LEAST <= size < count:
            return _cut(count, size)
    return []


def _cut(count: int, size: int) -> list[Group]:
    found = []
    for number, start in enumerate(range(0, count, size)):
        first = min(start, count - size)
        found.append(Group(number, first, size, start - first))
    return found


class Whole:
    """Tensors of all clients, which the groups fill while their own are in the cache."""

    def __init__(self, clients: int):
        self._clients = clients
        self.tensors: list[Tensor] = []
        self._lock = Lock()

    def put(self, group: Group, found: list[Tensor]) -> None:
        with self._lock:
            if not self.tensors:
                self.tensors = [v.new_empty((self._clients, *v.shape[1:])) for v in found]
        rows = slice(group.first + group.again, group.first + group.size)
        for held, own in zip(self.tensors, found, strict=True):
            held[rows].copy_(own[group.again :])
