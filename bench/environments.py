"""The peers' virtual environments, and a job that runs in one of them, turn by turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from bench.children import LONGEST, gone, told
from bench.ours import Steady
from bench.table import CannotMeasureError

JOBS = Path(__file__).parent / "jobs"
# The same torch everywhere, and installed first: what a peer asks for may be another one, with
# several GB of CUDA packages.
TORCH = f"torch=={torch.__version__.partition('+')[0]}"


class Peer(NamedTuple):
    name: str
    packages: tuple[str, ...]  # as pip takes them
    torch: bool = True


FLOWER = Peer("flower", ("flwr[simulation]==1.41.0",))
PFL = Peer("pfl", ("pfl==0.6.0",))
FEDLAB = Peer("fedlab", ("fedlab==1.3.0",))
LIBAUC = Peer("libauc", ("--no-deps", "libauc==2.0.1", "tqdm"))
JAX = Peer("jax", ("jax==0.10.2",), torch=False)


class Folder:
    """Where the environments are; one that is there is used as it is."""

    def __init__(self, path: Path):
        self.path = path

    def python(self, peer: Peer) -> Path:
        """The interpreter of the peer's environment, which is made if need be."""
        place = self.path / peer.name
        # Installed one after the other: what comes first is not replaced.
        wanted = ((TORCH, "numpy"),) * peer.torch + (peer.packages,)
        done, mark = place / "ready", "\n".join(map(" ".join, wanted))
        python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
        if done.exists() and done.read_text() == mark:
            return python
        print(f"setting up {peer.name} in {place}", file=sys.stderr, flush=True)
        venv.create(place, clear=True, with_pip=True)
        limits = place / "limits.txt"
        limits.write_text(TORCH + "\n")
        for packages in wanted:
            _install(python, peer, packages, limits)
        done.write_text(mark)
        return python


def _install(python: Path, peer: Peer, packages: tuple[str, ...], limits: Path) -> None:
    quiet = ("-q", "--disable-pip-version-check")
    command = [str(python), "-m", "pip", "install", *quiet, "-c", str(limits), *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = " ".join(said) or done.stderr.strip()[-300:] or "pip does not say why"
        raise CannotMeasureError(f"{peer.name} could not be installed: {reason}")


@contextmanager
def talking(peer: Peer, folder: Folder, *arguments: str) -> Iterator[Talk]:
    """The peer's job, set up and warm; a call is a turn, and returns the seconds of a round."""
    python = folder.python(peer)
    log = folder.path / f"{peer.name}.log"
    command = [str(python), str(JOBS / f"{peer.name}_job.py"), *arguments]
    ours = ("PYTHONPATH", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    with log.open("w") as told:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            yield Talk(peer, process, log)
        finally:
            _end(process)


class Talk:
    def __init__(self, peer: Peer, process: subprocess.Popen, log: Path):
        self.peer, self.process, self.log = peer, process, log
        self.ready = self.heard()

    def compared(self, run: Steady, loss: Callable[[Any], float]) -> str:
        """The loss after the peer's first rounds beside ours, which plays as many, in a sentence.
        Both begin with the same weights and rows, and draw cohorts and batches of their own: they
        must not be further apart than half of the way that ours has gone."""
        begun, rounds = loss(run.federation.problem.start()), self.ready["rounds"]
        run.play(rounds - run.state.round)
        ours, theirs = loss(run.state.server), self.ready["loss"]
        said = f"loss after {rounds} rounds {theirs:.4f}, ours {ours:.4f}"
        if not abs(theirs - ours) <= abs(begun - ours) / 2:
            raise RuntimeError(f"{self.peer.name} did another job: {said}, from {begun:.4f}")
        return said

    def __call__(self) -> float:
        given: IO[str] | None = self.process.stdin
        assert given is not None
        try:
            given.write("\n")
            given.flush()
        except OSError:
            pass  # it has ended, and `heard` says how
        return self.heard()["seconds"]

    def heard(self) -> dict[str, Any]:
        said: IO[str] | None = self.process.stdout
        assert said is not None
        line = said.readline(LONGEST)
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            errors = self.log.read_text(errors="replace")
            raise gone(self.peer.name, errors, self.process.poll())
        return told(self.peer.name, line)


def _end(process: subprocess.Popen) -> None:
    """It ends when there are no more turns; if not, it and what it started are stopped."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
