"""Gaussian noise as a pure function of what it is for: nothing is stored, and the same call gets
the same noise again, however often it is repeated."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.precision import counting
from fedminimax.random import key, words
from fedminimax.types import Clock

# The number of a release within a step, and a tensor of the form of the noise -> the noise.
Normal = Callable[[int, Tensor], Tensor]


class Noise(Protocol):
    """Where noise comes from. `begins` is true for the first state of a client, which is made
    outside the steps."""

    def at(self, clock: Clock, begins: bool) -> Normal: ...


@dataclass(frozen=True)
class Seeded:
    """Noise of a simulation, from the seed of the run: whoever knows the seed can take it away.

    >>> normal = Seeded(0).at(Clock.at(client=3), begins=False)
    >>> torch.equal(normal(1, torch.zeros(4)), normal(1, torch.zeros(4)))
    True
    """

    seed: int

    def at(self, clock: Clock, begins: bool) -> Normal:
        stream = key(self.seed, "privacy noise", int(begins))
        when = clock.client.long(), clock.round.long(), clock.phase.long(), clock.step.long()

        def normal(call: int, like: Tensor) -> Tensor:
            places = torch.arange(like.numel(), device=like.device)
            one, two = (words(stream, *when, call, places, half) for half in (0, 1))
            kind = counting(like.device)
            # Box and Muller; half a step keeps the logarithm away from 0.
            length = (-2 * torch.log((one.to(kind) + 0.5) / 2**32)).sqrt()
            found = length * torch.cos(2 * math.pi * ((two.to(kind) + 0.5) / 2**32))
            return found.to(like.dtype).reshape(like.shape)

        return normal


@dataclass(frozen=True, repr=False)
class Secret:
    """Noise of a site, from a secret that never leaves it, and a digest of the call that the noise
    is for: a call with another model or another cohort has other noise, and cannot cancel it."""

    secret: bytes
    digest: str

    def at(self, clock: Clock, begins: bool) -> Normal:
        when = (int(clock.round), int(clock.phase), int(clock.step), int(begins))

        def normal(call: int, like: Tensor) -> Tensor:
            text = f"{self.digest}/{'/'.join(map(str, when))}/{call}".encode()
            count = like.numel()
            keyed = hashlib.blake2b(text, key=self.secret, digest_size=32).digest()
            drawn = np.frombuffer(hashlib.shake_256(keyed).digest(16 * count), dtype="<u8")
            # 53 bits each, in (0, 1].
            one, two = ((drawn.reshape(2, count) >> np.uint64(11)) + 1.0) * 2.0**-53
            found = np.sqrt(-2 * np.log(one)) * np.cos(2 * math.pi * two)
            return torch.from_numpy(found).to(like).reshape(like.shape)

        return normal


class Without:
    """No noise: for counting releases."""

    def at(self, clock: Clock, begins: bool) -> Normal:
        return lambda call, like: torch.zeros_like(like)
