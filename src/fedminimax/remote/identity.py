"""Who a site is to other sites: a key of its own, made where it is used, whose fingerprint the
others pin in their site files. The authority of a consortium is at the server's operator, who could
make certificates for sites that do not exist; so masks do not rely on it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from fedminimax.config import ConfigError
from fedminimax.engine.state.checkpoint import write_bytes

IDENTITY = "identity.key"
FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
NEEDED = "masked messages need the package cryptography: pip install 'fedminimax[nvflare]'"


class Identity:
    """The Ed25519 key in a site's folder."""

    def __init__(self, secret: bytes):
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError as error:
            raise ConfigError(NEEDED) from error
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    @staticmethod
    def made(folder: Path) -> Identity:
        """That of a folder; a new one, if it has none."""
        if not (folder / IDENTITY).exists():
            made = Identity(secret := os.urandom(32))
            handle = os.open(folder / IDENTITY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secret)
                file.flush()
                os.fsync(file.fileno())
            return made
        return Identity.read(folder)

    @staticmethod
    def read(folder: Path) -> Identity:
        """That of a folder, which must have one."""
        try:
            secret = (folder / IDENTITY).read_bytes()
        except FileNotFoundError:
            raise ConfigError(
                "this site has no identity, which masked messages are signed with: make it with "
                "fedminimax deploy peers, and tell the other sites its fingerprint"
            ) from None
        if len(secret) != 32:
            raise ConfigError(
                f"{folder / IDENTITY} has {len(secret)} bytes, and a key has 32: put it back from "
                "a copy, or delete it, make a new one with fedminimax deploy peers, and tell the "
                "other sites its fingerprint"
            )
        return Identity(secret)

    @property
    def fingerprint(self) -> str:
        """What other sites pin."""
        return fingerprint_of(self.public)

    def sign(self, statement: bytes) -> bytes:
        """The signature of 64 bytes."""
        return self._key.sign(statement)


def is_signed(public: bytes, signature: bytes, statement: bytes) -> bool:
    """Did the holder of that identity sign the statement?"""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint_of(public: bytes) -> str:
    """A hash of a public key, as site files hold it.

    >>> fingerprint_of(bytes(32))[:23]
    'sha256:66687aadf862bd77'
    """
    return f"sha256:{hashlib.sha256(public).hexdigest()}"


def spoken(fingerprint: str) -> str:
    """In groups, as it is read out over the telephone.

    >>> spoken("sha256:" + 16 * "1f2e")[:19]
    'sha256:1f2e 1f2e 1f'
    """
    kind, _, digits = fingerprint.partition(":")
    return f"{kind}:{' '.join(digits[i : i + 4] for i in range(0, len(digits), 4))}"


def checked_peers(file: Path, name: str, given: Mapping[str, object]) -> dict[str, str]:
    """The [peers] of a site file: the fingerprint of each other site, spaces left out."""
    peers: dict[str, str] = {}
    for peer, value in given.items():
        text = "".join(str(value).lower().split())
        if not FINGERPRINT.fullmatch(text):
            raise ConfigError(
                f"{file}: the fingerprint of {peer!r} in [peers] is {value!r}; it is sha256: and "
                "64 digits from 0 to f, as fedminimax deploy peers prints it there"
            )
        if peer == name:
            raise ConfigError(f"{file}: [peers] names {peer!r}, which is this site: leave it out")
        if text in peers.values():
            same = next(other for other, known in peers.items() if known == text)
            raise ConfigError(
                f"{file}: {same!r} and {peer!r} have the same fingerprint in [peers]: each site "
                "has its own; ask both again"
            )
        peers[peer] = text
    return peers


def pin(file: Path, peer: str, fingerprint: str) -> None:
    """Writes a fingerprint into [peers] of a site file; the rest of its text stays as it is."""
    text, line = file.read_text(encoding="utf-8"), f'{peer} = "{fingerprint}"'
    heading = re.search(r"^\[peers\][^\n]*$", text, re.MULTILINE)
    if heading is None:
        changed = f"{text.rstrip()}\n\n[peers]\n{line}\n"
    else:
        changed = f"{text[: heading.end()]}\n{line}{text[heading.end() :]}"
    write_bytes(file, changed.encode())
