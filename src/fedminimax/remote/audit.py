"""A site's audit log: a line for each call, on the disk before its answer is sent.

Each line holds a digest of the line before. A second file holds the number of lines and the last
digest, so that a log that was cut or edited is noticed; then nothing is answered before a person
has looked. The budgets in a site's limits are of what the log counts.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedminimax.config import ConfigError
from fedminimax.engine.state.lock import locked
from fedminimax.remote.ledger import START, WAIT, link, lock_folder, read_chain

FILE, HEAD = "audit.jsonl", "audit.head"


class AuditError(ConfigError):
    """A log that cannot be relied on, or that cannot be written."""


class AuditLog:
    """The audit log in a site's folder."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.head = folder, folder / FILE, folder / HEAD
        self._own = threading.Lock()
        self._size, self._lines, self._last = -1, 0, START
        self._answered: Counter[tuple[Any, ...]] = Counter()

    def answered(self, run: str, kind: str, question: str | None = None) -> int:
        """How many calls of a kind this site has answered in a run."""
        with self._own:
            self._look()
            return self._answered[run, kind, question]

    def runs(self) -> set[str]:
        """The runs in which this site has answered more than a ping."""
        with self._own:
            self._look()
            return {run for run, kind, _ in self._answered if kind != "ping"}

    def append(self, entry: dict[str, Any]) -> None:
        """Writes a line down; it is on the disk when this returns."""
        try:
            with self._own, locked(lock_folder(self.folder), WAIT):
                self._look()
                self._write(entry)
        except OSError as error:
            raise AuditError(
                f"the audit log {self.file} cannot be written ({error.strerror}): nothing is sent"
            ) from error

    def entries(self) -> list[dict[str, Any]]:
        """All lines, checked."""
        if not self.file.exists() and not self.head.exists():
            return []
        found, last = read_chain(self.file)
        # Without a head, the process was killed after the first line.
        told = {"lines": 0, "hash": START}
        try:
            if len(found) != 1 or self.head.exists():
                told = json.loads(self.head.read_text(encoding="utf-8"))
            hashes = [START, *(entry["hash"] for entry in found)]
            # One line more than told: the process was killed between the two files.
            whole = last is not None and hashes[told["lines"]] == told["hash"]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            whole = False
        if not whole:
            raise AuditError(
                f"the audit log {self.file} was edited or cut: nothing is answered before a person "
                f"has found out why, and has moved it and {HEAD} away"
            )
        return found

    def _look(self) -> None:
        """Reads the log, if another process has written to it."""
        size = self.file.stat().st_size if self.file.exists() else 0
        if size == self._size:
            return
        found = self.entries()
        self._answered = Counter(_key(entry) for entry in found if entry.get("answered"))
        self._lines, self._last = len(found), found[-1]["hash"] if found else START
        self._size = size

    def _write(self, entry: dict[str, Any]) -> None:
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **entry}
        line["hash"] = link(self._last, line)
        size = max(0, self._size)
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            beside = self.head.with_name(f".{HEAD}.partial")
            beside.write_text(json.dumps({"lines": self._lines + 1, "hash": line["hash"]}))
            beside.replace(self.head)
        except OSError:
            if self.file.exists():
                os.truncate(self.file, size)  # half a line would look like an edit
            raise
        self._lines, self._last = self._lines + 1, line["hash"]
        self._size = self.file.stat().st_size
        if line.get("answered"):
            self._answered[_key(line)] += 1


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry.get("run"), entry.get("kind"), entry.get("question")


def summary(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Lines for a person: each run, what was asked how often, and what was refused."""
    by_run: dict[Any, list[dict[str, Any]]] = {}
    for entry in entries:
        by_run.setdefault(entry.get("run"), []).append(entry)
    lines: list[str] = []
    for run, own in by_run.items():
        sent = sum(entry["bytes"] for entry in own)
        lines.append(f"{run}: {own[0]['time']} to {own[-1]['time']}, {sent} bytes sent")
        asked = Counter(_name(entry) for entry in own if entry["answered"])
        lines += [f"  {count} x {name}" for name, count in asked.items()]
        refused = Counter((_name(e), e["why"]) for e in own if not e["answered"])
        lines += [f"  refused {n} x {name}: {why}" for (name, why), n in refused.items()]
    return lines


def _name(entry: dict[str, Any]) -> str:
    parts = [entry.get("kind"), entry.get("question"), entry.get("split")]
    rows = f" (of {entry['rows']} rows)" if entry.get("rows") else ""
    return " ".join(str(part) for part in parts if part) + rows
