"""NVIDIA FLARE's processes: one at the server, one at each site, and a supervisor for each run."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedminimax.config import ConfigError
from fedminimax.engine.state.lock import BusyError, locked
from fedminimax.remote.consortium import (
    ADMIN,
    CONSORTIUM_VARIABLE,
    HOME_VARIABLE,
    INVITATION,
    SITE_VARIABLE,
    Consortium,
    check_certificate,
    check_date,
    flare_missing,
)
from fedminimax.remote.served import LOG, SILENT, STOPPED, Served
from fedminimax.remote.site import SETUP

PATIENCE = 180.0  # seconds for a submitted run to begin
TRIES = 3  # sessions without a new round, after which a run is given up
PID = "pid"
SOON = 60.0  # seconds; a FLARE that ends before has not really begun
LONGEST_PAUSE = 120.0  # seconds, before one that ends soon is started again
SETTINGS = ("secure_train=true", "org=consortium", "config_folder=")


def keep_server(folder: Path, stopping: threading.Event | None = None) -> None:
    """FLARE's server, started again whenever it dies, until this process is asked to stop."""
    _need_flare()
    known = Consortium.read(folder)
    for file in ("server/startup/server.crt", "admin/startup/client.crt"):
        check_date(folder / file, "make a new consortium, and move the folder runs there")
    part = ("nvflare.private.fed.app.server.server_train", "-s", "fed_server.json", "--set")
    with _only_one(folder) as lock:
        check_free(known)
        _keep(folder, "server", (*part, *SETTINGS), CONSORTIUM_VARIABLE, lock, stopping)


def _need_flare() -> None:
    if missing := flare_missing():
        raise ConfigError(missing)


def check_free(known: Consortium) -> None:
    """Can the server listen where it is to?"""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("localhost" if known.host == "localhost" else "", known.port))
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen at port {known.port}: {error.strerror}. End what uses "
                f"it (ss -tlnp 'sport = :{known.port}'), or make a consortium with another --port"
            ) from error


def keep_site(folder: Path, name: str, stopping: threading.Event | None = None) -> None:
    """The same for FLARE's client at a site."""
    _need_flare()
    if not (folder / "kit").exists():
        raise ConfigError(
            f"there is no kit in {folder}: join a consortium first, and install what it sends back "
            f"(fedminimax deploy join {folder} --approved {name}.signed.zip)"
        )
    known = Consortium.read(folder, INVITATION)
    check_certificate(folder, known, name)
    look_for(known)
    part = ("nvflare.private.fed.app.client.client_train", "-s", "fed_client.json", "--set")
    with _only_one(folder) as lock:
        _keep(folder, "kit", (*part, f"uid={name}", *SETTINGS), SITE_VARIABLE, lock, stopping)


def look_for(known: Consortium) -> None:
    """FLARE looks for a server that is not there for ever, and does not say so."""
    try:
        socket.create_connection((known.host, known.port), timeout=10.0).close()
    except OSError as error:
        print(
            f"note: there is no server at {known.host}:{known.port} yet ({error}); it is looked "
            "for until it is there",
            file=sys.stderr,
            flush=True,
        )


def _keep(
    folder: Path,
    place: str,
    part: tuple[str, ...],
    variable: str,
    lock: int,
    stopping: threading.Event | None,
) -> None:
    """`variable` tells the jobs of this process which folder is theirs; FLARE inherits the lock."""
    over, home, kit = stopping or threading.Event(), folder.resolve(), folder.resolve() / place
    command = [sys.executable, "-u", "-m", part[0], "-m", str(kit), *part[1:]]
    told = {variable: str(home), "HOME": str(home / "records")}
    told[HOME_VARIABLE] = str(Path.home())
    # One thread per process: several sites may share a machine, and a small network needs no more.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **told}
    with open(folder / f"{place}.log", "ab") as log:
        pause, soon = 1.0, 0
        while not over.is_set():
            begun = time.monotonic()
            process = subprocess.Popen(
                command, cwd=kit, env=environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, pass_fds=(lock,),
            )  # fmt: skip
            (folder / PID).write_text(f"{os.getpid()}\n{process.pid}\n")
            while process.poll() is None and not over.wait(0.2):
                pass
            if over.is_set():
                _end(process)
                return
            # What dies at once, dies again.
            soon = 0 if time.monotonic() - begun > SOON else soon + 1
            pause = min(2 * pause, LONGEST_PAUSE) if soon else 1.0
            often = f" for the {soon}th time in a row" if soon > TRIES else ""
            print(
                f"FLARE ended with code {process.returncode}{often}; started again in {pause:g} s "
                f"({folder / place}.log says more)",
                file=sys.stderr,
                flush=True,
            )
            over.wait(pause)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[int]:
    """The lock of the process that keeps FLARE running here, for FLARE to inherit: if it outlives
    its keeper, no second one is started beside it. Their numbers are in a file, for `kill`."""
    file = folder / PID
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context(locked(folder, seconds=0.0))
        except BusyError as busy:
            raise ConfigError(f"{busy} (kill $(cat {file}))") from None
        try:
            yield lock
        finally:
            file.unlink(missing_ok=True)


class Supervisor:
    """Submits a run, watches its heartbeat, and submits it again when that stops.

    FLARE's own word on a job is not asked for: of a job whose server was killed it says RUNNING
    for ever.
    """

    def __init__(
        self,
        consortium: Path,
        served: Served,
        say: Callable[[str], None],
        look: Callable[[], Any] = lambda: None,
    ):
        """`look` is called while the run goes on."""
        _need_flare()
        self.consortium, self.served, self.say, self.look = consortium, served, say, look
        self.sites = Consortium.read(consortium).sites
        self.job = ""

    def watch(self) -> dict[str, Any]:
        """Until the run has ended; returns how."""
        tries, vain, reached = 0, 0, self.served.beat().get("round", 0)
        while True:
            # Somebody's watch over it may have ended.
            at_work = self.served.at_work()
            session = self.served.session() - at_work
            if not at_work and not self._submitted():
                if self.served.stopping():
                    return STOPPED
                tries += 1
                time.sleep(min(2.0 * tries, 20.0))
                continue
            tries = 0
            ended = self._followed(session)
            if ended is not None and not ended["again"]:
                return ended
            reason = ended["outcome"] if ended else self._silence(session)
            now = self.served.beat().get("round", 0)
            # One that did not begin waits for sites, for as long as it takes.
            vain = 0 if now > reached else vain + (self.served.session() > session)
            reached = max(reached, now)
            self._abort()
            if vain == TRIES:
                return {"outcome": self._given_up(reason), "good": False, "again": False}
            self.say(f"{reason}; the run is submitted again")

    def _given_up(self, reason: str) -> str:
        return (
            f"{reason}. The run was started {TRIES} times without a new round, and is given up; "
            f"{self.served.path / LOG} and the logs in {self.consortium / 'server'} say more. Run "
            "it again to go on from the last complete round"
        )

    def _followed(self, session: int) -> dict[str, Any] | None:
        """The end of the session after that one; None if it fell silent, or never began. A run that
        is finished is not begun again."""
        submitted = time.monotonic()
        while True:
            time.sleep(0.2)
            self.look()
            begun = self.served.session() > session
            ended = self.served.ended()
            if ended.get("good") or ended.get("session", 0) > session:
                return ended
            if begun and self.served.silent_for() > SILENT:
                return None
            if not begun and self.served.stopping():
                self._abort()
                return STOPPED
            if not begun and time.monotonic() - submitted > PATIENCE:
                return None

    def _silence(self, session: int) -> str:
        if self.served.session() > session:
            return "the server of the run is silent"
        logs = self.consortium / "server"
        return (
            f"the run did not begin within {PATIENCE:g} s (the logs in {logs} and in the sites' "
            "kits say why)"
        )

    def _submitted(self) -> bool:
        folder = self.served.path / "job"
        shutil.rmtree(folder, ignore_errors=True)
        write_job(folder, self.served.name, self._least())
        try:
            with flare_session(self.consortium) as session:
                self.job = session.submit_job(str(folder.resolve()))
        except Exception as error:
            self.say(f"the server did not take the run: {error}; it is tried again")
            return False
        self.say(f"submitted as FLARE's job {self.job}")
        return True

    def _least(self) -> int:
        """How many sites must be there: all, unless the run has begun and may skip some."""
        _, faults, _ = self.served.request()
        if faults.policy == "skip" and (self.served.path / SETUP).exists():
            return faults.least_replies
        return len(self.sites)

    def _abort(self) -> None:
        # It may be dead, or alive and deaf; either way it is not to write any more.
        with contextlib.suppress(Exception), flare_session(self.consortium) as session:
            session.abort_job(self.job)
        try:
            with locked(self.served.path, seconds=20.0):
                return
        except BusyError:
            # Who holds the lock is alive and the only one that beats, so the number is its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.served.beat()["pid"], signal.SIGKILL)


@contextlib.contextmanager
def flare_session(consortium: Path):
    """A session of the one who submits runs; what FLARE prints about it is not for the user."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            session = new_secure_session(ADMIN, str((consortium / "admin").resolve()))
            try:
                yield session
            finally:
                session.close()
    finally:
        logging.disable(level)


def write_job(folder: Path, run: str, least: int, pings: int = 0) -> None:
    """A job without code: it names the classes that server and sites have installed."""
    config = folder / "app" / "config"
    config.mkdir(parents=True)

    def component(path: str, **arguments: Any) -> dict[str, Any]:
        return {"path": path, "args": arguments}

    controller = component(
        "nvflare.collab.runtime.controller.CollabController", server_obj_id="run"
    )
    server = component("fedminimax.remote.flare.job.RunServer", run=run, pings=pings)
    executor = component("nvflare.collab.runtime.executor.CollabExecutor", client_obj_id="site")
    site = component("fedminimax.remote.flare.job.RunSite")
    files = {
        folder / "meta.json": {
            "name": run,
            "min_clients": least,
            "resource_spec": {},
            "deploy_map": {"app": ["@ALL"]},
        },
        config / "config_fed_server.json": {
            "format_version": 2,
            "workflows": [{"id": "controller", **controller}],
            "components": [{"id": "run", **server}],
        },
        config / "config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "site", **site}],
        },
    }
    for file, content in files.items():
        file.write_text(json.dumps(content, indent=2), encoding="utf-8")
