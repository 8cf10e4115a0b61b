"""A consortium on this machine, with NVIDIA FLARE's processes: started, killed and stopped here."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deployment import ALLOW, SITES, data_of, write_site

from fedminimax.config import Experiment, write_toml
from fedminimax.experiment import load
from fedminimax.remote.consortium import Consortium, enrol, init
from fedminimax.remote.served import Served
from fedminimax.types import Point

LONG = 1200.0  # seconds; nothing is waited for that long unless it is broken


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until(true: Callable[[], object], what: str, seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All processes below that one, the nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Behind the name, in brackets, stand the state and the parent's number.
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    found, level = [], [pid]
    while level:
        level = [child for parent in level for child in parents.get(parent, [])]
        found += level
    return found


class Flare:
    """The consortium in `folder`, whose sites are folders in `home`."""

    def __init__(self, home: Path, folder: Path):
        self.home, self.folder = home, folder
        self.processes: dict[str, subprocess.Popen] = {}

    @property
    def known(self) -> Consortium:
        return Consortium.read(self.folder)

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "fedminimax", "deploy", *map(str, arguments)]

    def start(self, name: str) -> None:
        """The server, or a site."""
        place = ("server", self.folder) if name == "server" else ("site", self.home / name)
        self.processes[name] = self._popen(name, self.command(*place))

    def _popen(self, name: str, command: list[str]) -> subprocess.Popen:
        # The processes of a test compete for few cores.
        told = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.home / f"{name}.out", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=told)

    def hold(self, data: dict) -> None:
        """What every site says of its rows."""
        for name in SITES:
            write_site(self.home / name, data)
        (self.folder / "allow.toml").write_text(write_toml(ALLOW))

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)
        self.processes = {}

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> list[int]:
        """FLARE's processes of the server or of a site, the job's too; not what starts them."""
        struck = descendants(self.processes[name].pid)
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return struck

    def begin(self, which: Experiment, name: str, *options: object) -> subprocess.Popen:
        self.hold(data_of(which))
        file = self.home / f"{name}.toml"
        file.write_text(write_toml(which.to_table()))
        command = self.command("run", self.folder, file, "--name", name, *options)
        return self._popen(name, command)

    def said(self, name: str) -> str:
        return (self.home / f"{name}.out").read_text()

    def run(self, which: Experiment, name: str, *options: object) -> Point:
        process = self.begin(which, name, *options)
        assert process.wait(LONG) == 0, self.said(name)
        return self.point(name)

    def point(self, name: str) -> Point:
        return load(self.served(name).path).point

    def served(self, name: str) -> Served:
        return Served(self.folder, name)

    def reached(self, name: str, round: int) -> None:
        until(lambda: self.served(name).beat().get("round", -1) >= round, f"round {round}")


def provisioned(home: Path) -> Flare:
    """A consortium with keys that were made where they are used."""
    folder = home / "consortium"
    init(folder, SITES, port=free_port())
    for name in SITES:
        enrol(folder, home / name, name)
    return Flare(home, folder)


@contextlib.contextmanager
def running(home: Path) -> Iterator[Flare]:
    flare = provisioned(home)
    flare.hold({"name": "heart"})
    try:
        for name in ("server", *SITES):
            flare.start(name)
        yield flare
    finally:
        flare.stop()
