"""A site's part in masked sums: its key for a run, the keys of the others, and what it has sent.

A mask hides one message. So a site writes down what it was called for, and a digest of what it
sends, before it sends it; called again in the same way it sends the same, and called in another way
within one phase it refuses. The key of a run is in the same file: who deletes one has lost both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedminimax.config import ConfigError, Table
from fedminimax.messages.secure.fixed_point import WIDE, Format, RangeError, Words, answer_words
from fedminimax.messages.secure.masked import LEAST_CLIENTS, Masked
from fedminimax.messages.secure.masks import Masks, Pair, pair_seed, public_key
from fedminimax.remote.identity import Identity, fingerprint_of, is_signed, spoken
from fedminimax.remote.site_file import SiteFile
from fedminimax.remote.wire import quoted

SENT = "masks.sqlite"
RUN_ID = re.compile(r"[0-9a-f]{32}")
HEX = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
PARTS = ("key", "identity", "signature")  # of what a site offers to the others


class MaskError(ConfigError):
    """What a site does not do under masks, in a sentence that the server may read."""


def wrong_offer(offer: Any) -> str | None:
    """What of a site's offer of a key, from whomever it comes, is none."""
    good = isinstance(offer, dict) and set(offer) == set(PARTS)
    if good and all(isinstance(part, str) and HEX.fullmatch(part) for part in offer.values()):
        return None
    return "it offers no key for masks"


class SentLog:
    """What a site has sent under masks in the runs of one name, with its keys for them, on disk."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / SENT

    def secret(self, run: str) -> bytes:
        """This site's key for a run with that id: made once."""
        (found,) = self._written(
            "INSERT OR IGNORE INTO keys VALUES (?, ?)",
            (run, os.urandom(32)),
            "SELECT secret FROM keys WHERE run = ?",
            (run,),
        )
        return found

    def call(self, run: str, at: str, call: str) -> None:
        """Notes that the site is called; another call for the same is refused."""
        (found,) = self._written(
            "INSERT OR IGNORE INTO sent VALUES (?, ?, ?, NULL)",
            (run, at, call),
            "SELECT call FROM sent WHERE run = ? AND at = ?",
            (run, at),
        )
        if found != call:
            raise MaskError(
                f"{at} was called for before, with another model, another state or another time: "
                "under masks a site answers one call for each phase"
            )

    def send(self, run: str, at: str, digest: str) -> None:
        """Notes what is sent; something else in its place is refused."""
        (found,) = self._written(
            "UPDATE sent SET digest = ? WHERE run = ? AND at = ? AND digest IS NULL",
            (digest, run, at),
            "SELECT digest FROM sent WHERE run = ? AND at = ?",
            (run, at),
        )
        if found != digest:
            raise MaskError(
                f"{at} was answered before, and the same call has now come to other numbers: under "
                "one mask a site sends one message. Begin a new run, if its rows or its machine "
                "have changed"
            )

    def _written(self, change: str, values: Sequence[Any], ask: str, told: Sequence[Any]) -> Any:
        """Changes the file, which is on the disk then, and returns the row that is asked for."""
        try:
            os.close(os.open(self.file, os.O_WRONLY | os.O_CREAT, 0o600))
            with closing(sqlite3.connect(self.file, timeout=30.0)) as file, file:
                file.execute("PRAGMA synchronous = EXTRA")
                file.execute("CREATE TABLE IF NOT EXISTS keys (run PRIMARY KEY, secret)")
                file.execute(
                    "CREATE TABLE IF NOT EXISTS sent (run, at, call, digest, PRIMARY KEY (run, at))"
                )
                file.execute(change, values)
                return file.execute(ask, told).fetchone()
        except (sqlite3.Error, OSError) as error:
            raise MaskError(
                f"what is sent under masks cannot be written down ({error}): nothing is sent"
            ) from error


class SiteMasks:
    """The masks of one site in one run."""

    def __init__(self, log: SentLog, run: str, seeds: dict[int, bytes], number: int, bound: str):
        """run: its id. seeds: those shared with the clients of these numbers. number: this site's.
        bound: what all calls of the run have in common."""
        self.log, self.run, self.seeds, self.number, self.bound = log, run, seeds, number, bound

    def answer(self, call: str, answers: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
        """An answer to a question in words, times a weight, under masks of all others. `call` is a
        digest of the question, with all that the answer depends on but rows."""
        at = f"the question {call}"
        self.log.call(self.run, at, call)
        masks = self._masks([*self.seeds], call)
        sent: dict[str, Tensor] = {}
        for name, answer in answers.items():
            words = _in_range(lambda n=name, a=answer: answer_words(n, a, weight))
            hidden = masks.hide(words.numpy().view(WIDE.dtype), WIDE)
            sent[name] = torch.from_numpy(hidden.view(np.int64))
        self.log.send(self.run, at, digest_of(sent))
        return sent

    def begin(self, round: int, phase: int, call: str) -> None:
        """Refuses a second call for a phase, before anything is computed."""
        self.log.call(self.run, _phase(round, phase), call)

    def reply(
        self,
        at: tuple[int, int],
        call: str,
        cohort: Sequence[int],
        fields: dict[str, Tensor],
        weight: float,
        reducer: Masked,
    ) -> dict[str, Tensor]:
        """The fields of a reply in words, times a weight, under masks.

        Arguments:
            at: the round and the number of the phase, for which `begin` was called.
            call: a digest of the call, the same at all sites.
            cohort: the numbers of the clients that reply, this one among them.
            fields: what is sent.
            weight: this client's.
            reducer: which says how numbers are written.
        """
        if self.number not in cohort or len(set(cohort)) < max(LEAST_CLIENTS, len(cohort)):
            raise MaskError(
                f"the clients of {_phase(*at)} are {sorted(cohort)}, and this one is "
                f"{self.number}: masks need it and at least two others, each once"
            )
        masks = self._masks([k for k in cohort if k != self.number], call)
        sent: dict[str, Tensor] = {}
        for name, field in fields.items():
            form = reducer.form(field)
            words = _in_range(lambda n=name, f=field: reducer.words(n, f, weight))
            sent[name] = as_tensor(masks.hide(words, form), form).reshape(field.shape)
        self.log.send(self.run, _phase(*at), digest_of(sent))
        return sent

    def _masks(self, others: Sequence[int], call: str) -> Masks:
        pairs = [Pair(self.seeds[k], self.number < k) for k in others]
        return Masks(pairs, f"{self.bound} {call}".encode())


def as_tensor(words: Words, form: Format) -> Tensor:
    """Words of one limb as they travel."""
    return torch.from_numpy(words[0].view(f"i{form.bits // 8}"))


def digest_of(sent: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for name, words in sent.items():
        digest.update(f"{name} {words.dtype} {tuple(words.shape)} ".encode())
        digest.update(words.numpy().tobytes())
    return digest.hexdigest()


def _phase(round: int, phase: int) -> str:
    return f"round {round}, phase {phase}"


def _in_range(function: Any) -> Any:
    try:
        return function()
    except RangeError as error:
        # The sentence itself tells a number of this site; it is the cause, for the log.
        raise MaskError(
            "a number is not finite, or too large for a masked sum; the site's log says which: "
            "lower the learning rates, clip the messages, or rescale what is large"
        ) from error


# How sites come to shared seeds


def offered(site: SiteFile, folder: Path, run: str, setup: Table) -> dict[str, str]:
    """A key for the run, signed by this site's identity, for the other sites."""
    check_members(site, setup)
    identity, id = Identity.read(site.folder), _id(setup)
    key = public_key(SentLog(folder).secret(id)).hex()
    signature = identity.sign(_statement(run, setup, site.name, key))
    return {"key": key, "identity": identity.public.hex(), "signature": signature.hex()}


def masks_of(site: SiteFile, folder: Path, run: str, setup: Table, bound: str = "") -> SiteMasks:
    """The masks of a site, once the keys of all others have been checked."""
    check_members(site, setup)
    log, id, names = SentLog(folder), _id(setup), setup["names"]
    secret, offers = log.secret(id), setup.get("keys")
    if not isinstance(offers, dict) or any(wrong_offer(offers.get(name)) for name in names):
        raise MaskError("a masked run tells a key of each site, and this one does not")
    if offers[site.name]["key"] != public_key(secret).hex():
        raise MaskError(
            f"the key that the server tells of site {site.name!r} is not the one that it has made "
            "for this run: begin a new run"
        )
    public = {name: offers[name]["key"] for name in names}
    context = json.dumps(["fedminimax masks", run, id, public], sort_keys=True).encode()
    seeds: dict[int, bytes] = {}
    for number, name in enumerate(names):
        if name != site.name:
            _check_offer(site, run, setup, name)
            seeds[number] = _seed(secret, name, bytes.fromhex(public[name]), context)
    return SiteMasks(log, id, seeds, names.index(site.name), bound)


def _seed(secret: bytes, name: str, key: bytes, context: bytes) -> bytes:
    try:
        return pair_seed(secret, key, context)
    except ValueError as error:
        raise MaskError(f"the key of site {name!r} is no key for masks: {error}") from error


def _check_offer(site: SiteFile, run: str, setup: Table, name: str) -> None:
    offer, pinned = setup["keys"][name], site.peers[name]
    identity = bytes.fromhex(offer["identity"])
    if fingerprint_of(identity) != pinned:
        raise MaskError(
            f"who signs as site {name!r} has the fingerprint {spoken(fingerprint_of(identity))}, "
            f"and the site file of {site.name!r} pins {spoken(pinned)}: compare by telephone, and "
            "take part only if both are told the same"
        )
    statement = _statement(run, setup, name, offer["key"])
    if not is_signed(identity, bytes.fromhex(offer["signature"]), statement):
        raise MaskError(
            f"the key of site {name!r} is not signed for this run by its identity: it is of "
            "another run, or somebody has changed it"
        )


def check_members(site: SiteFile, setup: Table) -> None:
    """A run is of all sites that this one has pinned: of any fewer, the server could learn the
    difference."""
    names, known = setup.get("names"), {*site.peers, site.name}
    if not isinstance(names, list) or sorted(map(str, names)) != sorted(known):
        raise MaskError(
            f"a masked run is of {quoted(names)}, and the site file of {site.name!r} pins "
            f"{', '.join(site.peers) or 'nobody'} in [peers]: all who are pinned take part, and "
            "nobody else (fedminimax deploy peers)"
        )
    if len(names) < LEAST_CLIENTS:
        raise MaskError(
            f"a masked run is of {quoted(names)}, and needs at least {LEAST_CLIENTS} sites"
        )


def _id(setup: Table) -> str:
    if not RUN_ID.fullmatch(str(setup.get("id"))):
        raise MaskError(f"the run has the id {quoted(setup.get('id'))}, which is none")
    return setup["id"]


def _statement(run: str, setup: Table, name: str, key: str) -> bytes:
    """What a signature is of: a key of one site for one run, and what the run is."""
    told = [setup["id"], setup["names"], setup["experiment"], setup.get("version")]
    return json.dumps(["fedminimax key for masks", run, name, key, told], sort_keys=True).encode()
