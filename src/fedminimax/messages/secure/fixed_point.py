"""Numbers as whole numbers modulo a power of two, whose sums are exact: a mask that is added to one
of them cancels without a trace, and no order of adding changes a bit.

A number is a row of limbs, the lowest first, modulo 2^bits each and 2^(bits * limbs) together. What
is out of range is refused, never wrapped.
"""

# numpy's words have no types that torch names.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[Any]  # unsigned, of shape (limbs, numbers)


class RangeError(ValueError):
    """A number that has no place in a format; the sentence says which."""


class Format(NamedTuple):
    """How a number x is written: as rint(2^exponent x)."""

    bits: int
    limbs: int
    exponent: int
    limit: float  # of one number; the rest of the range is left to the sum

    @property
    def dtype(self) -> Any:
        return np.dtype(f"u{self.bits // 8}")


# Of messages, whose weights sum to one: a step of 2^-25 or 2^-40.
SHORT = Format(bits=32, limbs=1, exponent=25, limit=2.0**5)
LONG = Format(bits=64, limbs=1, exponent=40, limit=2.0**22)
# Of answers, which are summed as they are, over up to 2^12 clients: a square of 1e12, and one of
# 1e-12, have their place.
WIDE = Format(bits=64, limbs=3, exponent=96, limit=2.0**82)


def encode(numbers: NDArray[np.float64], form: Format) -> Words:
    """The words of finite numbers within the range, which the caller has checked.

    >>> encode(np.array([1.0, -1.0]), Format(32, 1, 4, 2.0)).tolist()
    [[16, 4294967280]]
    >>> encode(np.array([-1.0]), Format(32, 2, 0, 2.0)).tolist()
    [[4294967295], [4294967295]]
    """
    scaled = np.rint(numbers * 2.0**form.exponent)
    if form.limbs == 1:
        return scaled.astype(f"i{form.bits // 8}").view(form.dtype)[None]
    rest, words = np.abs(scaled), np.empty((form.limbs, len(numbers)), form.dtype)
    for limb in reversed(range(form.limbs)):
        unit = 2.0 ** (form.bits * limb)
        own = np.floor(rest / unit)
        rest = rest - own * unit  # exact: it is the lower bits of a double
        words[limb] = own.astype(form.dtype)
    return np.where(scaled < 0, negate(words), words)


def decode(words: Words, form: Format) -> NDArray[np.float64]:
    """The numbers that the words of a sum stand for.

    >>> decode(encode(np.array([0.5, -0.75]), WIDE), WIDE).tolist()
    [0.5, -0.75]
    """
    if form.limbs == 1:
        signed: NDArray[Any] = words[0].view(f"i{form.bits // 8}")
        return signed * 2.0**-form.exponent
    below = words[-1] >> np.array(form.bits - 1, form.dtype) == 1
    size = np.where(below, negate(words), words)
    parts = [own * 2.0 ** (form.bits * limb - form.exponent) for limb, own in enumerate(size)]
    total = np.sum(parts[::-1], axis=0)
    return np.where(below, -total, total)


def add(one: Words, other: Words) -> Words:
    """The sum, with carries from limb to limb.

    >>> a = encode(np.array([1.5]), WIDE)
    >>> decode(add(a, encode(np.array([-4.0]), WIDE)), WIDE).tolist()
    [-2.5]
    """
    if len(one) == 1:
        return one + other
    total, carry = np.empty_like(one), np.zeros(one.shape[1:], one.dtype)
    for limb, (a, b) in enumerate(zip(one, other, strict=True)):
        own = a + b
        total[limb] = own + carry
        carry = ((own < a) | (total[limb] < own)).astype(one.dtype)
    return total


def negate(words: Words) -> Words:
    """What is to be added to these words to give zero."""
    ones = np.zeros_like(words)
    ones[0] = 1
    return add(~words, ones)


def check(name: str, tensor: Tensor, form: Format) -> None:
    """Refuses what has no place in the format, by the name of the field."""
    if not tensor.numel():
        return
    largest = float(tensor.abs().max())
    if not largest < float("inf"):
        raise RangeError(f"{name} has a NaN or an infinity")
    if largest > form.limit:
        raise RangeError(
            f"{name} has a number of size {largest:.4g}, and a masked sum of {form.bits} bits "
            f"takes numbers up to {form.limit:.4g}"
        )


def answer_words(name: str, answer: Tensor, weight: float = 1.0) -> Tensor:
    """An answer to a question, times a weight, as words that can be added and masked."""
    numbers = answer.detach().to("cpu", torch.float64).reshape(-1)
    check(name, numbers, WIDE)
    return torch.from_numpy(encode(weight * numbers.numpy(), WIDE).view(np.int64))


def added_answers(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two answers in words."""
    parts = (words.numpy().view(WIDE.dtype) for words in (one, other))
    return torch.from_numpy(add(*parts).view(np.int64))


def answer_total(answers: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The sum of answers of one shape, by their words.

    >>> answer_total([np.array([[1e15, 1e-15]]), np.array([[1.0, 2e-15]])]).tolist()
    [[1000000000000001.0, 3e-15]]
    """
    tensors = [torch.from_numpy(answer) for answer in answers]
    total = answer_words("the answer", tensors[0])
    for own in tensors[1:]:
        total = added_answers(total, answer_words("the answer", own))
    return answer_of(total, tensors[0], weighted=False).numpy()


def answer_of(words: Tensor, like: Tensor, weighted: bool) -> Tensor:
    """The answer that a sum of words stands for, with the shape of `like`, and its type unless that
    has no fractions and the sum is weighted."""
    numbers = torch.from_numpy(decode(words.numpy().view(WIDE.dtype), WIDE)).reshape(like.shape)
    if like.is_floating_point() or not weighted:
        return numbers.to(like.device, like.dtype)
    return numbers.to(like.device, torch.get_default_dtype())


def words_like(answer: Tensor) -> Tensor:
    """Words of zeros, for an answer of this shape."""
    return torch.zeros(WIDE.limbs, answer.numel(), dtype=torch.int64)


def answer_bytes(answer: Tensor) -> int:
    """The bytes of an answer in words."""
    return answer.numel() * WIDE.limbs * WIDE.bits // 8
