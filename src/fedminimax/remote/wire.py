"""What travels between a server and its sites: a JSON text and named vectors, as one safetensors
message. Nothing in it can be run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedminimax.engine.state.checkpoint import pack, unpack

DIGEST = re.compile(r"[0-9a-f]{32}")
# Of a call, what is of the server's own order: the same call may come again with others.
ORDER = ("call", "again", "accepted", "complete")


class Message(NamedTuple):
    about: dict[str, Any]
    vectors: dict[str, Tensor]

    def to_bytes(self) -> bytes:
        return pack(self.vectors, self.about)

    @staticmethod
    def from_bytes(content: bytes) -> Message:
        """A message from whomever it comes; what is none is refused with a CheckpointError."""
        vectors, about = unpack(content)
        return Message(about, vectors)

    def digest(self) -> str:
        """The same for the same content, and for no other."""
        return hashlib.blake2s(self.to_bytes(), digest_size=16).hexdigest()

    def asked(self) -> str:
        """The digest of a call without the server's order: the same, however often it is sent."""
        about = {name: value for name, value in self.about.items() if name not in ORDER}
        return self._replace(about=about).digest()


def numbered(vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Vectors by their numbers, as a message names them."""
    return {str(number): vector for number, vector in enumerate(vectors)}


def in_order(vectors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What `numbered` numbered.

    >>> import torch
    >>> in_order(numbered([torch.zeros(1), torch.ones(1)]))
    (tensor([0.]), tensor([1.]))
    """
    return tuple(vectors[str(number)] for number in range(len(vectors)))


def grouped(keys: Mapping[str, Sequence[Any]], names: Sequence[str]) -> list[list[Any]]:
    """The keys of sites, each once, with a number whose bits are the sites that have it: sites that
    were in the same rounds have the same key, however many they are.

    >>> grouped({"a": [3, 0, "f0"], "c": [3, 0, "f0"]}, ("a", "b", "c"))
    [[3, 0, 'f0', '5']]
    """
    masks: dict[tuple[Any, ...], int] = {}
    for number, name in enumerate(names):
        if name in keys:
            key = tuple(keys[name])
            masks[key] = masks.get(key, 0) | 1 << number
    return [[*key, f"{mask:x}"] for key, mask in masks.items()]


def key_of(groups: Sequence[Sequence[Any]], number: int) -> list[Any] | None:
    """The key of a site, from what `grouped` made.

    >>> key_of([[3, 0, "f0", "5"]], 2), key_of([[3, 0, "f0", "5"]], 1)
    ([3, 0, 'f0'], None)
    """
    return next((key for *key, mask in groups if int(mask, 16) >> number & 1), None)


def busy(run: Any, site: str) -> bytes:
    """What a site sends that is still at work on an earlier call: no reply, and no refusal."""
    return Message({"kind": "busy", "run": run, "site": site}, {}).to_bytes()


def quoted(text: object) -> str:
    """What somebody else has written, as a log can take it.

    >>> quoted("round\\x1b[31m 3\\n")
    'round?[31m 3?'
    """
    cut = str(text)[:500]
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def as_json(value: Any) -> Any:
    """A table as JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(value))
