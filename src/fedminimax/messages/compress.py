"""Compressed messages: a client sends what is new in its reply, in fewer bytes.

All three compressors follow EF21 (Richtarik, Sokolov and Fatkhullin, EF21: A New, Simpler,
Theoretically Better, and Practically Faster Error Feedback, NeurIPS 2021, Algorithm 2). Client k
keeps an estimate g_k of its reply u_k, and the server keeps the weighted mean g of them:

    c_k <- C( u_k - g_k )        what travels
    g_k <- g_k + c_k             at the client
    g   <- g + mean of c_k       at the server, which uses g as the mean of the replies

The estimates begin at what the server sent down under the same name, and at zero for other fields.
As the replies settle, what is left to send goes to zero, and with it the error of the compression.
The server's mean is that of the clients only if all of them take part, so cohorts are refused.
"""

# A value from a file may be of another type than its annotation says.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedminimax.blocks.trees import leaves, tree_map
from fedminimax.messages.stage import Message, Stage, add_update
from fedminimax.random import key, words
from fedminimax.types import Clock

Packed = tuple[Tensor, ...]  # the tensors that travel for one field


class Estimate(NamedTuple):
    """Of a reply: a client's own, or the mean at the server."""

    begun: Tensor  # 0 before the first message, then 1
    reply: Message


def expect(estimate: Estimate, down: Message) -> Message:
    """The reply that is expected: what was sent down, before the first message."""
    begun, reply = estimate
    first = add_update(down, tree_map(torch.zeros_like, reply))

    def chosen(own: Tensor, start: Tensor) -> Tensor:
        return torch.where(begun > 0, own, start)

    return tree_map(chosen, reply, first)


@dataclass(frozen=True)
class Compressor(Stage):
    """EF21 with a compressor C of single fields, which `pack`, `unpack` and `size` describe.

    A field that would not become smaller travels as it is.
    """

    everyone: ClassVar[bool] = True
    last: ClassVar[bool] = True

    def pack(self, field: Tensor, clock: Clock) -> Packed:
        """C(field), as the tensors that travel; of C(field), they are the same ones."""
        raise NotImplementedError

    def unpack(self, packed: Packed, like: Tensor, clock: Clock) -> Tensor:
        """C(field) as a tensor like the field."""
        raise NotImplementedError

    def size(self, field: Tensor) -> int:
        """The bytes of what travels for a field."""
        raise NotImplementedError

    def init_client(self, up: Message) -> Estimate:
        return Estimate(torch.zeros(()), up)

    def init_server(self, up: Message) -> Estimate:
        return Estimate(torch.zeros(()), up)

    def at_client(
        self, down: Message, client: Message, up: Message, kept: Estimate, clock: Clock
    ) -> tuple[Message, Estimate]:
        expected = expect(kept, down)
        # Of replies, not of updates: the server would apply old updates again and again, and
        # methods with control variates diverge by that.
        left = tree_map(torch.sub, up, expected)
        sent = self.decode(self.encode(left, clock), left, clock)
        return sent, Estimate(torch.ones_like(kept[0]), tree_map(torch.add, expected, sent))

    def at_server(
        self, state: Estimate, down: Message, mean: Message, clock: Clock
    ) -> tuple[Message, Estimate]:
        reply = tree_map(torch.add, expect(state, down), mean)
        return reply, Estimate(torch.ones_like(state[0]), reply)

    def encode(self, sent: Message, clock: Clock) -> Message:
        def packed(field: Tensor) -> Tensor | Packed:
            return self.pack(field, clock) if self._shrinks(field) else field

        return tree_map(packed, sent)

    def decode(self, encoded: Message, like: Message, clock: Clock) -> Message:
        def whole(field: Tensor, packed: Tensor | Packed) -> Tensor:
            return packed if isinstance(packed, Tensor) else self.unpack(packed, field, clock)

        return tree_map(whole, like, encoded)

    def bytes(self, up: Message) -> int:
        return sum(
            self.size(f) if self._shrinks(f) else f.numel() * f.element_size()
            for _, f in leaves(up)
        )

    def _shrinks(self, field: Tensor) -> bool:
        plain = field.numel() * field.element_size()
        return field.is_floating_point() and self.size(field) < plain


@dataclass(frozen=True)
class EightBit(Compressor):
    """Each number as a whole number from -127 to 127 times a scale.

    `bucket` numbers that follow each other share a scale: a 127th of the largest of them. The scale
    is rounded to 16 bits, so that its multiples are exact. Sent are a byte per number and four per
    bucket.
    """

    bucket: int = 1024

    def __post_init__(self) -> None:
        if not isinstance(self.bucket, int) or not 1 <= self.bucket <= 32768:
            raise ValueError(
                f"EightBit: bucket is {self.bucket!r}; give a whole number from 1 to 32768"
            )

    def size(self, field: Tensor) -> int:
        return field.numel() + 4 * math.ceil(field.numel() / self.bucket)

    def pack(self, field: Tensor, clock: Clock) -> Packed:
        rows = self._buckets(field.flatten())
        scale = _sixteen_bits(rows.abs().amax(1) / 127)
        divisor = torch.where(scale == 0, torch.ones_like(scale), scale).to(field)
        whole = (rows / divisor[:, None]).round().clamp(-127, 127)
        return whole.to(torch.int8).flatten()[: field.numel()], scale

    def unpack(self, packed: Packed, like: Tensor, clock: Clock) -> Tensor:
        numbers, scale = (part.to(like.dtype) for part in packed)
        rows = self._buckets(numbers) * scale[:, None]
        return rows.flatten()[: like.numel()].reshape(like.shape)

    def _buckets(self, numbers: Tensor) -> Tensor:
        width = min(self.bucket, numbers.numel())
        rest = -numbers.numel() % width
        return torch.cat([numbers, numbers.new_zeros(rest)]).reshape(-1, width)


def _sixteen_bits(scale: Tensor) -> Tensor:
    """In float32, with the last eight bits of the mantissa zero: times 127 it is still exact."""
    bits = scale.to(torch.float32).view(torch.int32)
    return ((bits + 128) & -256).view(torch.float32)


def check_share(owner: str, share: float) -> None:
    """Refuses a share of coordinates that is not above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ValueError(f"{owner}: share is {share!r}; give a number above 0 and at most 1")


@dataclass(frozen=True)
class TopK(Compressor):
    """The largest numbers of each field: `share` of them, with their places (four bytes each)."""

    share: float = 0.1

    def __post_init__(self) -> None:
        check_share("TopK", self.share)

    def size(self, field: Tensor) -> int:
        return self._count(field) * (field.element_size() + 4)

    def pack(self, field: Tensor, clock: Clock) -> Packed:
        numbers = field.flatten()
        places = numbers.abs().topk(self._count(field)).indices
        return numbers[places], places.to(torch.int32)

    def unpack(self, packed: Packed, like: Tensor, clock: Clock) -> Tensor:
        numbers, places = packed
        return _place(numbers, places.long(), like)

    def check(self, encoded: Message, like: Message) -> str | None:
        """What is wrong with a message that came from outside."""
        found = dict(leaves(encoded))
        for name, field in leaves(like):
            places = found.get(f"{name}.1")
            if places is not None and not bool(((places >= 0) & (places < field.numel())).all()):
                return f"{name} has a place outside its {field.numel()} numbers"
        return None

    def _count(self, field: Tensor) -> int:
        return math.ceil(self.share * field.numel())


@dataclass(frozen=True)
class RandomCoordinates(Compressor):
    """Random numbers of each field: `share` of them.

    The coordinates follow from `seed`, the round, the phase and the length of the field. So they
    need not travel, they are the same at all clients, and fields that belong together (x and its
    control variate, say) share them. Nothing is scaled: EF21 needs no unbiased compressor.
    """

    share: float = 0.1
    seed: int = 0

    adds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("RandomCoordinates", self.share)
        if not isinstance(self.seed, int):
            raise ValueError(f"RandomCoordinates: seed is {self.seed!r}; give a whole number")

    def size(self, field: Tensor) -> int:
        return self._count(field) * field.element_size()

    def pack(self, field: Tensor, clock: Clock) -> Packed:
        return (field.flatten()[self._places(field, clock)],)

    def unpack(self, packed: Packed, like: Tensor, clock: Clock) -> Tensor:
        return _place(packed[0], self._places(like, clock), like)

    def _places(self, field: Tensor, clock: Clock) -> Tensor:
        every = torch.arange(field.numel(), device=field.device)
        drawn = words(key(self.seed, "coordinates"), clock.round, clock.phase, every)
        # The place stands in the low bits, so that no two are equal.
        chosen = (drawn << 31 | every).topk(self._count(field), largest=False).values
        return chosen & (2**31 - 1)

    def _count(self, field: Tensor) -> int:
        return math.ceil(self.share * field.numel())


def _place(numbers: Tensor, places: Tensor, like: Tensor) -> Tensor:
    whole = torch.zeros_like(like).flatten().scatter(0, places, numbers)
    return whole.reshape(like.shape)
