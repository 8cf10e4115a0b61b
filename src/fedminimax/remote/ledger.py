"""A site's ledger: what has been spent of the privacy of its rows, over all runs.

Each line is a release, on disk before anything is sent, and holds a digest of the line before. A
second file holds the number of lines and the last digest, so that a ledger that was cut, edited or
deleted is noticed; then nothing is released until a person has confirmed it. Times are told and
decide nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedminimax.config import ConfigError
from fedminimax.engine.state.lock import locked

FILE, HEAD, SECRET = "ledger.jsonl", "ledger.head", "ledger.secret"
START = "0" * 64
WAIT = 30.0  # seconds for another process of this site


class LedgerError(ConfigError):
    """A ledger that cannot be relied on, or that cannot be written."""


@dataclass(frozen=True)
class Release:
    """What one call releases about the rows of this site.

    data: the name of the rows in the site file. call: a digest of the call and of the secret that
    its noise is from. noise: the multiplier. passes: batches of different rows in a pass. whole:
    releases on all rows. first, steps, each: from that iteration on, so many steps release so much
    of each level on a batch.
    """

    data: str
    run: str
    round: int
    phase: int
    call: str
    noise: float
    passes: int = 1
    whole: int = 0
    first: int = 0
    steps: int = 0
    each: tuple[int, ...] = ()


class Spent(NamedTuple):
    """What the rows of one name have spent, as a sum of 1 / noise^2."""

    data: str
    mu2: float
    calls: int
    runs: int


class Ledger:
    """The ledger in a site's folder."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.head = folder, folder / FILE, folder / HEAD

    def secret(self) -> bytes:
        """The secret that noise comes from: 32 bytes, made once, which never leave this folder."""
        path = self.folder / SECRET
        if not path.exists():
            if self.file.exists():
                raise LedgerError(
                    f"there is a ledger in {self.folder}, but no {SECRET}: {_CONFIRM}"
                )
            self._begin()
        return path.read_bytes()

    def charge(self, release: Release, limit: float | None = None) -> float:
        """Writes a release down, unless the same call is there already, and returns what the rows
        have spent. With more than `limit`, nothing is written or released."""
        with locked(lock_folder(self.folder), WAIT):
            entries = self.entries()
            known = [e for e in entries if e.get("data") == release.data]
            before = _mu2(known)
            if any((e.get("run"), e.get("call")) == (release.run, release.call) for e in known):
                return before
            after = _mu2([*known, asdict(release)])
            if limit is not None and after > limit * (1 + 1e-9):
                raise LedgerError(
                    f"the rows {release.data!r} would spend more than the limit of this site "
                    "(epsilon and delta in [limits] of its site file): nothing is released"
                )
            self._append(entries, {**asdict(release), "mu2": after - before})
            return after

    def entries(self) -> list[dict[str, Any]]:
        """All lines, checked."""
        if not self.file.exists() and not self.head.exists():
            if (self.folder / SECRET).exists():
                raise LedgerError(f"the ledger of {self.folder} is gone: {_CONFIRM}")
            return []
        found, last = read_chain(self.file)
        if last is None:
            raise LedgerError(f"the ledger {self.file} was edited or cut: {_CONFIRM}")
        told = self._told()
        # One line more than told: the process was killed between the two files.
        hashes = [START, *(entry["hash"] for entry in found)]
        if told is None or told["lines"] > len(found) or hashes[told["lines"]] != told["hash"]:
            raise LedgerError(f"the ledger {self.file} has lost lines: {_CONFIRM}")
        return found

    def spent(self) -> list[Spent]:
        """What has been spent, by the name of the rows."""
        entries = self.entries()
        names = dict.fromkeys(str(entry["data"]) for entry in entries)
        return [_spent(name, [e for e in entries if e["data"] == name]) for name in names]

    def confirm(self, reason: str) -> None:
        """Begins a ledger anew after a person has looked: with what can still be read of the old
        one, or with what its head tells, if that is more. The old files are kept beside it."""
        with locked(lock_folder(self.folder), WAIT):
            found, _ = read_chain(self.file)
            told = self._told() or {"spent": {}}
            spent = {name: _mu2([e for e in found if e["data"] == name]) for name in _names(found)}
            for name, mu2 in told["spent"].items():
                spent[name] = max(spent.get(name, 0.0), float(mu2))
            stamp = time.strftime("%Y%m%d-%H%M%S")
            for path in (self.file, self.head):
                if path.exists():
                    path.rename(path.with_name(f"{path.name}.before-{stamp}"))
            if not (self.folder / SECRET).exists():
                self._begin()
            entries: list[dict[str, Any]] = []
            for name, mu2 in (spent or {"": 0.0}).items():
                carried = {"data": name, "run": "", "call": "", "carried": mu2, "mu2": mu2}
                entries.append(self._append(entries, {**carried, "confirmed": reason}))

    def _begin(self) -> None:
        descriptor = os.open(self.folder / SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32))
            file.flush()
            os.fsync(file.fileno())
        if not self.file.exists():
            self.file.touch(mode=0o600)
            self._tell([])

    def _append(self, entries: list[dict[str, Any]], entry: dict[str, Any]) -> dict[str, Any]:
        before = entries[-1]["hash"] if entries else START
        line = {**entry, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        line["hash"] = link(before, line)
        try:
            size = self.file.stat().st_size if self.file.exists() else 0
            try:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                os.truncate(self.file, size)  # half a line would look like an edit
                raise
            self._tell([*entries, line])
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.file} cannot be written ({error.strerror}): nothing is released"
            ) from error
        return line

    def _tell(self, entries: list[dict[str, Any]]) -> None:
        spent = {name: _mu2([e for e in entries if e["data"] == name]) for name in _names(entries)}
        last = entries[-1]["hash"] if entries else START
        beside = self.head.with_name(f".{HEAD}.partial")
        with beside.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"lines": len(entries), "hash": last, "spent": spent}))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.head)

    def _told(self) -> dict[str, Any] | None:
        try:
            told = json.loads(self.head.read_text(encoding="utf-8"))
            return told if {"lines", "hash", "spent"} <= set(told) else None
        except (OSError, ValueError):
            return None


_CONFIRM = (
    "nothing is released before a person has found out why and says so with "
    'fedminimax deploy ledger SITE --confirm "REASON"'
)


def lock_folder(site: Path) -> Path:
    """Where processes of a site lock what they write: the lock of its own folder is held for as
    long as its engine runs."""
    (site / "runs").mkdir(parents=True, exist_ok=True)
    return site / "runs"


def link(before: str, line: dict[str, Any]) -> str:
    """The digest of a line and of the line before, whose digest is `before`."""
    own = {name: value for name, value in line.items() if name != "hash"}
    return hashlib.sha256((before + json.dumps(own, sort_keys=True)).encode()).hexdigest()


def read_chain(file: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The lines up to the first that is not as it was written, and the last digest if all are."""
    found: list[dict[str, Any]] = []
    before = START
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        for text in lines:
            line = json.loads(text)
            if line["hash"] != link(before, line):
                return found, None
            before = line["hash"]
            found.append(line)
    except (OSError, ValueError, KeyError, TypeError):
        return found, None
    return found, before


def _names(entries: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(entry["data"]) for entry in entries))


def _spent(name: str, entries: list[dict[str, Any]]) -> Spent:
    runs = {entry["run"] for entry in entries if entry["run"]}
    calls = sum("noise" in entry for entry in entries)
    return Spent(name, _mu2(entries), calls, len(runs))


def _mu2(entries: Iterable[dict[str, Any]]) -> float:
    """What releases on the same rows add up to. Within a run, batches of one pass are of different
    rows: the one that was used most counts."""
    total = 0.0
    used: dict[tuple[Any, ...], dict[int, int]] = {}  # run, passes, noise, level -> by iteration
    for entry in entries:
        total += float(entry.get("carried", 0.0))
        if "noise" not in entry:
            continue
        total += entry["whole"] / entry["noise"] ** 2
        for level, count in enumerate(entry["each"]):
            own = used.setdefault((entry["run"], entry["passes"], entry["noise"], level), {})
            for step in range(entry["first"], entry["first"] + entry["steps"]):
                own[step] = own.get(step, 0) + count
    for (_, passes, noise, _), own in used.items():
        by_pass: dict[int, int] = {}
        for step, count in own.items():
            by_pass[step // passes] = max(by_pass.get(step // passes, 0), count)
        total += int(np.sum(list(by_pass.values()))) / noise**2
    return total
