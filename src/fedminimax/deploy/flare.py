"""NVIDIA FLARE's processes: one at the server, one at each site, and a supervisor for each run."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedminimax.config import ConfigError
from fedminimax.deploy.consortium import (
    ADMIN,
    CONSORTIUM_VARIABLE,
    INVITATION,
    SITE_VARIABLE,
    Consortium,
    check_certificate,
    flare_missing,
)
from fedminimax.deploy.served import Served
from fedminimax.deploy.server import alone
from fedminimax.deploy.site import SETUP

SILENT = 15.0  # seconds without a beat after which a server is taken for dead
PATIENCE = 180.0  # seconds for a submitted run to begin
PID = "pid"
SETTINGS = ("secure_train=true", "org=consortium", "config_folder=")


def keep_server(folder: Path, stopping: threading.Event | None = None) -> None:
    """FLARE's server, started again whenever it dies, until this process is asked to stop."""
    Consortium.read(folder)
    part = ("nvflare.private.fed.app.server.server_train", "-s", "fed_server.json", "--set")
    _keep(folder, "server", (*part, *SETTINGS), CONSORTIUM_VARIABLE, stopping)


def keep_site(folder: Path, name: str, stopping: threading.Event | None = None) -> None:
    """The same for FLARE's client at a site."""
    if not (folder / "kit").exists():
        raise ConfigError(
            f"there is no kit in {folder}: join a consortium first, and install what it sends back "
            f"(fedminimax deploy join {folder} --approved {name}.signed.zip)"
        )
    check_certificate(folder, Consortium.read(folder, INVITATION))
    part = ("nvflare.private.fed.app.client.client_train", "-s", "fed_client.json", "--set")
    _keep(folder, "kit", (*part, f"uid={name}", *SETTINGS), SITE_VARIABLE, stopping)


def _keep(
    folder: Path,
    place: str,
    part: tuple[str, ...],
    variable: str,
    stopping: threading.Event | None,
) -> None:
    """`variable` tells the jobs of this process which folder is theirs."""
    if missing := flare_missing():
        raise ConfigError(missing)
    over, home, kit = stopping or threading.Event(), folder.resolve(), folder.resolve() / place
    command = [sys.executable, "-u", "-m", part[0], "-m", str(kit), *part[1:]]
    told = {variable: str(home), "HOME": str(home / "records")}
    # One thread per process: several sites may share a machine, and a small network needs no more.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **told}
    with _only_one(folder / PID), open(folder / f"{place}.log", "ab") as log:
        pause = 1.0
        while not over.is_set():
            begun = time.monotonic()
            process = subprocess.Popen(
                command, cwd=kit, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
            while process.poll() is None and not over.wait(0.2):
                pass
            if process.poll() is None:
                _end(process)
                return
            # What dies at once, dies again: a port in use, say.
            pause = 1.0 if time.monotonic() - begun > 60 else min(2 * pause, 30.0)
            print(
                f"FLARE ended with code {process.returncode}; started again in {pause:g} s "
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
def _only_one(file: Path):
    """The process that keeps FLARE running here, by its number."""
    if file.exists() and alive(int(file.read_text() or 0)):
        raise ConfigError(f"process {file.read_text().strip()} runs here already: stop it first")
    file.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return pid > 0
    except OSError:
        return False


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
        self.consortium, self.served, self.say, self.look = consortium, served, say, look
        self.sites = Consortium.read(consortium).sites
        self.job = ""

    def watch(self) -> dict[str, Any]:
        """Until the run has ended; returns how."""
        tries, session = 0, self.served.session()
        if self._alive():
            session -= 1  # it is at work already: somebody's watch over it has ended
        while True:
            if not self._alive() and not self._submitted():
                tries += 1
                time.sleep(min(2.0 * tries, 20.0))
                continue
            tries = 0
            ended = self._followed(session)
            if ended is not None and not ended["again"]:
                return ended
            reason = ended["outcome"] if ended else self._silence(session)
            self.say(f"{reason}; the run is submitted again")
            self._abort()
            session = self.served.session()

    def _alive(self) -> bool:
        ended = self.served.ended().get("session", 0) >= self.served.session()
        return not ended and self.served.silent_for() < SILENT

    def _followed(self, session: int) -> dict[str, Any] | None:
        """The end of the session after that one; None if it fell silent, or never began."""
        submitted = time.monotonic()
        while True:
            time.sleep(0.2)
            self.look()
            begun = self.served.session() > session
            ended = self.served.ended()
            if begun and ended.get("session", 0) > session:
                return ended
            if begun and self.served.silent_for() > SILENT:
                return None
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
        folder = self.consortium / "job"
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
            with alone(self.served.path, seconds=20.0):
                return
        except ConfigError:
            # Who holds the lock is alive, so the number is its own.
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


def write_job(folder: Path, run: str, least: int) -> None:
    """A job without code: it names the two classes that server and sites have installed."""
    config = folder / "app" / "config"
    config.mkdir(parents=True)

    def component(path: str, **arguments: Any) -> dict[str, Any]:
        return {"path": path, "args": arguments}

    controller = component(
        "nvflare.collab.runtime.controller.CollabController", server_obj_id="run"
    )
    server = component("fedminimax.deploy.job.RunServer", run=run)
    executor = component("nvflare.collab.runtime.executor.CollabExecutor", client_obj_id="site")
    site = component("fedminimax.deploy.job.RunSite")
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
