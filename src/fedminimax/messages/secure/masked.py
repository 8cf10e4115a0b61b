"""The weighted mean as a sum of whole numbers, so that sites can mask what they send."""

# A value from a file may be of another type than its annotation says.
# pyright: reportUnnecessaryIsInstance=false

# numpy's words have no types that torch names.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.trees import leaves, rebuild, tree_map
from fedminimax.messages.secure.fixed_point import (
    LONG,
    SHORT,
    Format,
    RangeError,
    Words,
    add,
    check,
    decode,
    encode,
)
from fedminimax.messages.stage import Message, Reducer
from fedminimax.types import Clock

LEAST_CLIENTS = 3  # of two, each knows what the other has sent
_AT_ONCE = 4_000_000  # numbers


@dataclass(frozen=True)
class Masked(Reducer):
    """The weighted mean in fixed point, which sites send under masks that cancel in the sum.

    A client multiplies its reply by its weight and rounds it to whole multiples of 2^-40, or of
    2^-25 in 32 bits; their sum modulo 2^64 or 2^32 is exact. A simulation computes the same sums,
    and masks nothing; sites do.

    bits: of a number on its way: 64, or 32; if left out, 32 in single precision.
    """

    bits: int | None = None

    linear: ClassVar[bool] = True
    masked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (None, 32, 64):
            raise ValueError(f"Masked: bits is {self.bits!r}; give 32 or 64, or leave it out")

    def form(self, field: Tensor) -> Format:
        """How the numbers of a field are written."""
        single = field.is_floating_point() and field.element_size() <= 4
        return SHORT if (self.bits or (32 if single else 64)) == 32 else LONG

    def travels(self, field: Tensor) -> torch.dtype:
        """The type of the tensors in which words of a field travel."""
        return torch.int32 if self.form(field) is SHORT else torch.int64

    def part(self, ups: Message, weights: Tensor) -> Message:
        """The words of a sum over these clients; what is not finite, which ends a run, counts as
        nothing."""
        weights = weights.to("cpu", torch.float64)
        found: list[Tensor] = []
        for name, rows in leaves(ups):
            there = torch.where(rows.isfinite(), rows, torch.zeros_like(rows))
            self.check(name, there)
            found.append(self._summed(there, weights).to(rows.device))
        return rebuild(ups, found)

    def finish(self, total: Message, like: Message) -> Message:
        """The mean that a sum of words stands for; `like` has its form."""
        return tree_map(self._mean, total, like)

    def reduce(
        self, state: Any, down: Message, ups: Message, weights: Tensor, clock: Clock
    ) -> tuple[Message, Any]:
        return self.finish(self.part(ups, weights), tree_map(_first, ups)), state

    def check(self, name: str, field: Tensor) -> None:
        """Refuses what is out of range."""
        try:
            check(name, field, self.form(field))
        except RangeError as error:
            more = '; reduce = {name = "masked", bits = 64} has room up to 4.2e6'
            room = more if self.form(field) is SHORT and "up to" in str(error) else ""
            raise RangeError(
                f"{error}: lower the learning rates, clip the messages, or rescale what is large"
                f"{room}"
            ) from error

    def words(self, name: str, field: Tensor, weight: float) -> Words:
        """What one client adds to the sum."""
        self.check(name, field)
        return encode(weight * _numbers(field).reshape(-1), self.form(field))

    def _summed(self, rows: Tensor, weights: Tensor) -> Tensor:
        form, size = self.form(rows), rows[0].numel()
        together, total = max(1, _AT_ONCE // max(1, size)), np.zeros((1, size), form.dtype)
        for first in range(0, len(rows), together):
            own = weights[first : first + together, None].numpy()
            numbers = own * _numbers(rows[first : first + together]).reshape(len(own), size)
            words = encode(numbers.reshape(-1), form).reshape(len(own), size)
            total = add(total, words.sum(0, dtype=form.dtype)[None])
        return torch.from_numpy(total[0].view(f"i{form.bits // 8}")).reshape(rows.shape[1:])

    def _mean(self, total: Tensor, like: Tensor) -> Tensor:
        form = self.form(like)
        words = total.cpu().contiguous().reshape(1, -1).numpy().view(form.dtype)
        return torch.from_numpy(decode(words, form)).reshape(like.shape).to(like.device, like.dtype)


def _first(field: Tensor) -> Tensor:
    return field[0]


def _numbers(field: Tensor) -> Any:
    return field.detach().to("cpu", torch.float64).numpy()
