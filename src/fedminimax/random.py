"""Randomness as a pure function of (seed, purpose, numbers): no generator has a state to save or to
share.

`words` is an integer hash in tensor operations: the same bits eager, under vmap, compiled and at a
deployed site. `generator` gives a numpy generator keyed in the same way, for work done once on the
host (splits, partitions).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_MASK = 0xFFFFFFFF


def key(seed: int, purpose: str, *numbers: int) -> int:
    """A 32-bit key for one use of randomness; different purposes never share a stream."""
    text = "/".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=4).digest(), "little")


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A numpy generator for (seed, purpose, numbers).

    >>> int(generator(0, "split", 3).integers(100)) == int(generator(0, "split", 3).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *numbers)))


def _times(h: Any, odd: int) -> Any:
    # The product modulo 2^32 in 16-bit halves: 64-bit overflow is undefined in compiled code.
    return (((h * (odd >> 16) & 0xFFFF) << 16) + h * (odd & 0xFFFF)) & _MASK


def _mix(h: Any) -> Any:
    h = _times(h ^ (h >> 16), 0x7FEB352D)
    h = _times(h ^ (h >> 15), 0x846CA68B)
    return h ^ (h >> 16)


def words(key: int, *numbers: Any) -> Any:
    """Hash of integers, or of broadcastable int64 tensors or numpy arrays, to 32-bit words.

    All three give the same bits.

    >>> import torch
    >>> words(7, torch.arange(3)).tolist() == words(7, np.arange(3)).tolist()
    True
    """
    if any(isinstance(number, np.ndarray) for number in numbers):
        return _words_of_arrays(key, numbers)
    h = key
    for number in numbers:
        # 0x9E3779B9 (the golden ratio) keeps neighbouring numbers, and the zero, apart before
        # mixing.
        h = _mix((h + 0x9E3779B9 + number) & _MASK)
    return h


def _words_of_arrays(key: int, numbers: tuple[Any, ...]) -> np.ndarray:
    """The same in 32 bits, in which products of numpy have their modulus by themselves: a fifth of
    the passes, each over half the bytes."""
    h = np.array([key & _MASK], dtype=np.uint32)
    for number in numbers:
        own = np.atleast_1d(np.asarray(number)).astype(np.uint32)
        h = h + (own + np.uint32(0x9E3779B9))
        h ^= h >> 16
        h *= np.uint32(0x7FEB352D)
        h ^= h >> 15
        h *= np.uint32(0x846CA68B)
        h ^= h >> 16
    return h.astype(np.int64).reshape(np.broadcast_shapes(*map(np.shape, numbers)))


def distinct(key: int, count: int, below: int) -> np.ndarray:
    """`count` different integers in [0, below), ascending; the cost grows with `count`, not with
    `below`."""
    if count == below:
        return np.arange(below)
    if 2 * count > below:
        return np.sort(np.argsort(words(key, np.arange(below)), kind="stable")[:count])
    found: dict[int, None] = {}
    start = 0
    while len(found) < count:
        # 64 bits from two words: the modulo's bias stays below 2^-40 for a million clients.
        index = np.arange(start, start + 2 * count + 16)
        high, low = words(key, index, 0), words(key, index, 1)
        for value in (((high << 31) | (low >> 1)) % below).tolist():
            found.setdefault(value)
        start += len(index)
    return np.array(sorted(list(found)[:count]))
