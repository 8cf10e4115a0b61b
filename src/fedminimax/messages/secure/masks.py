"""Masks that cancel: random words that one of a pair of clients adds, and the other subtracts.

Each pair has a seed that nobody else knows. Every call gets words of its own from it, so that what
a client sends is uniform to whoever lacks one of its seeds, and the sum over all clients is exact.
It needs the package cryptography (extras `nvflare` and `flower`).
"""

# numpy's words have no types that torch names.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedminimax.messages.secure.fixed_point import Format, Words, add, negate

BLOCK = 16_384  # numbers that are masked at once, in the cache of a core; all clients have the same


class Pair(NamedTuple):
    """What a client shares with another one."""

    seed: bytes
    adds: bool  # of the two, is it the one that adds?


def public_key(secret: bytes) -> bytes:
    """The X25519 key that belongs to a secret of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def pair_seed(secret: bytes, other: bytes, context: bytes) -> bytes:
    """The seed that the holders of two X25519 keys have in common, for one context.

    Arguments:
        secret: one's own.
        other: the public key of the other.
        context: what the seed is for, in the same bytes at both.

    Returns 32 bytes. A key that is none is refused with a ValueError.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    shared = X25519PrivateKey.from_private_bytes(secret).exchange(
        X25519PublicKey.from_public_bytes(other)
    )
    return HKDF(SHA256(), 32, salt=None, info=context).derive(shared)


class Masks:
    """A client's masks for one call, field after field.

    >>> from fedminimax.messages.secure.fixed_point import LONG, decode, encode
    >>> one, other = (Masks([Pair(bytes(32), adds)], b"call") for adds in (True, False))
    >>> sent = [one.hide(encode(np.array([1.5]), LONG), LONG),
    ...         other.hide(encode(np.array([-4.0]), LONG), LONG)]
    >>> decode(add(*sent), LONG).tolist()
    [-2.5]
    """

    def __init__(self, pairs: Sequence[Pair], call: bytes):
        """`call` tells this call from all others; the same bytes at all clients."""
        self._streams = [(_Stream(pair.seed, call), pair.adds) for pair in pairs]

    def hide(self, words: Words, form: Format) -> Words:
        """The words of the next field under their masks."""
        hidden = words.copy()
        nothing = memoryview(bytes(min(BLOCK, words.shape[1]) * form.limbs * form.bits // 8))
        drawn = bytearray(len(nothing) + 15)
        for first in range(0, words.shape[1], BLOCK):
            own = hidden[:, first : first + BLOCK]
            for stream, adds in self._streams:
                mask = stream.words(own.shape, form, nothing, drawn)
                if form.limbs == 1:
                    (np.add if adds else np.subtract)(own, mask, out=own)
                else:
                    own[:] = add(own, mask if adds else negate(mask))
        return hidden


class _Stream:
    """The keystream of AES-256 in counter mode, under a key for one call alone."""

    def __init__(self, seed: bytes, call: bytes):
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

        key = HKDFExpand(SHA256(), 32, info=call).derive(seed)
        self._cipher = Cipher(AES(key), CTR(bytes(16))).encryptor()

    def words(
        self, shape: tuple[int, ...], form: Format, nothing: memoryview, drawn: bytearray
    ) -> Words:
        """The next words of that shape, in `drawn`; `nothing` is as many zeros, or more."""
        count = int(np.prod(shape))
        self._cipher.update_into(nothing[: count * form.bits // 8], drawn)
        # The same words on machines of either byte order.
        found = np.frombuffer(drawn, form.dtype.newbyteorder("<"), count)
        return found.astype(form.dtype, copy=False).reshape(shape)
