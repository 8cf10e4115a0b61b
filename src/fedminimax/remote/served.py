"""The folder of a run between sites, through which the one who asks for it and the engine's process
that serves it speak: a request goes in, a heartbeat and a result come out."""

from __future__ import annotations

import os
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedminimax.config import ConfigError, Experiment, options_for, write_toml
from fedminimax.engine.job import ClientError
from fedminimax.engine.state.checkpoint import CheckpointError, write_bytes
from fedminimax.engine.state.folder import RunFolder, json_text, read_json
from fedminimax.engine.state.lock import BusyError, locked
from fedminimax.engine.trainer import Interrupted, succeeded
from fedminimax.remote.calls import Faults, SiteFailedError, SitesLostError, Transport
from fedminimax.remote.consortium import Consortium
from fedminimax.remote.search import search_sites
from fedminimax.remote.server import SESSION, check_experiment, count_session, run_sites
from fedminimax.remote.site_file import register_allowed
from fedminimax.remote.wire import Message
from fedminimax.tuning.auto import is_auto

REQUEST, BEAT, ENDED, STOP, LOG = "request.json", "beat.json", "ended.json", "stop", "sites.log"
PINGS, RESERVE = "pings.json", "reserve"
SECONDS = 1.0  # between two beats
SILENT = 15.0  # seconds without a beat after which a server is taken for dead
STOPPED = {"outcome": "stopped before it began", "good": False, "again": False}


class Served:
    """One run's folder."""

    def __init__(self, consortium: Path, name: str):
        self.consortium, self.name = consortium, name
        self.path = consortium / "runs" / name

    def ask_for(self, experiment: Experiment, faults: Faults, sites: Sequence[str]) -> None:
        """The request, in place of the one before. Of a run at work it cannot be another; whether
        it fits a run that was begun before is found out when it is served."""
        check_experiment(experiment, sites, faults)
        self.path.mkdir(parents=True, exist_ok=True)
        text = write_toml(experiment.to_table())
        content = {"experiment": text, "faults": asdict(faults), "sites": list(sites)}
        if self.at_work() and content != _read(self.path / REQUEST):
            raise ConfigError(
                f"the run in {self.path} is at work with other settings: stop it first, or give "
                "another --name"
            )
        _write(self.path / REQUEST, content)
        (self.path / STOP).unlink(missing_ok=True)

    def request(self) -> tuple[Experiment, Faults, list[str]]:
        register_allowed(self.consortium)
        content = _read(self.path / REQUEST)
        faults = Faults(**options_for(Faults, content["faults"], "faults"))
        return Experiment.from_table(tomllib.loads(content["experiment"])), faults, content["sites"]

    def check_unfinished(self) -> None:
        if self.ended().get("good"):
            raise ConfigError(f"the run in {self.path} is finished: give another --name")

    def beat(self) -> dict[str, Any]:
        return _read(self.path / BEAT)

    def ended(self) -> dict[str, Any]:
        return _read(self.path / ENDED)

    def over(self) -> bool:
        """Whether the last session has said how it ended."""
        ended = self.ended()
        return bool(ended) and ended["session"] >= self.session()

    def at_work(self) -> bool:
        return not self.over() and self.silent_for() < SILENT

    def state(self) -> str:
        """Where the run stands, in words."""
        where = f"round {self.beat().get('round', 0)}/{self.request()[0].run.rounds}"
        if self.over():
            return f"{where}, {self.ended()['outcome']}"
        if self.at_work():
            return f"{where}, running"
        return f"{where}, silent: run it again to go on with it"

    def heard(self) -> dict[str, float]:
        """How many seconds ago each site has answered last, by the last beat."""
        beat = self.beat()
        since = time.monotonic() - beat["clock"] if self.at_work() else 0.0
        return {
            name: beat["clock"] - clock + since for name, clock in beat.get("heard", {}).items()
        }

    def faults(self) -> list[str]:
        """What the log says of sites that were away or answered wrongly."""
        path = self.path / LOG
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def session(self) -> int:
        return _read(self.path / SESSION).get("session", 0)

    def stop(self) -> None:
        (self.path / STOP).touch()

    def stopping(self) -> bool:
        return (self.path / STOP).exists()

    def log(self, text: str) -> None:
        with suppress(OSError), open(self.path / LOG, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")

    def silent_for(self) -> float:
        """Seconds since the last beat, by a clock that all processes of this machine share and
        nobody can set; a beat that is ahead of it is of a time before the machine started."""
        since = time.monotonic() - self.beat().get("clock", float("inf"))
        return since if since >= 0 else float("inf")


def serve(
    consortium: Path,
    name: str,
    transport: Transport,
    on_record: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Serves a run until it ends, and returns how. One that is finished, or that another process
    serves, is left alone: nothing is written."""
    served = Served(consortium, name)
    try:
        # The server of a run that has lost its engine ends before long.
        with locked(served.path):
            if served.ended().get("good"):
                return served.ended()
            return _serve(served, transport, on_record)
    except BusyError as busy:
        return {"outcome": str(busy), "good": False, "again": False}


def _serve(
    served: Served, transport: Transport, on_record: Callable[[dict[str, Any]], None] | None
) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    heard: dict[str, float] = {}
    state = {"round": served.beat().get("round", 0), "pid": os.getpid(), "heard": heard}
    transport = _Listening(transport, heard)
    with _Beating(served, state):
        # Room to say how the run ended, on a disk that is full by then.
        write_bytes(served.path / RESERVE, bytes(16_384))
        # Before anything can fail: who watches waits for the end of a session that was counted.
        session = count_session(RunFolder(served.path))
        try:
            ended = _run(served, session, transport, state, on_record)
        except Interrupted as stopped:
            ended = {"outcome": f"stopped: {stopped}", "good": False, "again": False}
        except (ValueError, ClientError, SiteFailedError) as error:  # a sentence for the user
            ended = {"outcome": str(error), "good": False, "again": False}
        except Exception as error:  # a fault of this machine or of the engine: it may pass
            traceback.print_exc()
            told = f"the server of the run failed with {type(error).__name__}: {error}"
            ended = {"outcome": told, "good": False, "again": True}
            served.log(told)
        finally:
            if ended:
                (served.path / RESERVE).unlink(missing_ok=True)
                _write(served.path / ENDED, {**ended, "session": session})
    return ended


def _run(
    served: Served,
    session: int,
    transport: Transport,
    state: dict[str, Any],
    on_record: Callable[[dict[str, Any]], None] | None,
) -> dict[str, Any]:
    if served.stopping():
        return STOPPED
    experiment, faults, names = served.request()
    calls: dict[str, Any] = {
        "log": served.log,
        "on_record": on_record,
        "on_round": lambda round: state.update(round=round),
        "interrupted": served.stopping,
    }
    asked = (experiment, transport, names, served.path, faults)
    try:
        if is_auto(experiment):
            run = search_sites(*asked, **calls)
        else:
            run = run_sites(*asked, **calls, session=session)
    except SitesLostError as error:
        lost = (
            f"{error}. If its sites are at work and need longer than {faults.timeout:g} s for an "
            "answer, raise --timeout"
        )
        served.log(f"{error}; the run is started again")
        return {"outcome": lost, "good": False, "again": True}
    good = succeeded(run.outcome)
    return {"outcome": run.outcome, "rounds": run.rounds, "good": good, "again": False}


def ping(consortium: Path, name: str, transport: Transport, count: int) -> None:
    """Calls all sites that often, one call after the other, for nothing but a sign of life; the
    seconds are written to the folder of that name."""
    served, sites = Served(consortium, name), Consortium.read(consortium).sites
    content = Message({"kind": "ping", "run": name}, {}).to_bytes()
    begun = time.perf_counter()
    for _ in range(count):
        _, failures = transport.call(sites, content, 60.0)
        if failures:
            raise SiteFailedError("; ".join(failures.values()))
    served.path.mkdir(parents=True, exist_ok=True)
    _write(served.path / PINGS, {"count": count, "seconds": time.perf_counter() - begun})


def line_of(record: dict[str, Any], rounds: int) -> str:
    """An evaluation, for who watches."""
    split = next(s for s in ("validation", "test", "train") if s in record)
    told = {k: v for k, v in record[split].items() if isinstance(v, float)}
    text = ", ".join(f"{key} {value:.4f}" for key, value in list(told.items())[:3])
    return f"round {record['round']}/{rounds}  {split} {text}"


class _Listening:
    """A transport that notes when each site has answered last."""

    def __init__(self, inner: Transport, heard: dict[str, float]):
        self.inner, self.heard, self.rejoins = inner, heard, inner.rejoins

    def call(
        self, sites: Sequence[str], message: bytes, timeout: float
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        replies, failures = self.inner.call(sites, message, timeout)
        self.heard.update(dict.fromkeys(replies, time.monotonic()))
        return replies, failures


class _Beating:
    """A beat a second, for as long as the process lives, whatever it waits for."""

    def __init__(self, served: Served, state: dict[str, Any]):
        self.served, self.state = served, state
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        while not self._over.wait(SECONDS):
            with suppress(CheckpointError):  # the disk may have room again at the next one
                self._once()

    def _once(self) -> None:
        heard = dict(self.state.get("heard", {}))
        _write(self.served.path / BEAT, {**self.state, "heard": heard, "clock": time.monotonic()})

    def __enter__(self) -> None:
        self._once()
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        with suppress(CheckpointError):
            self._once()


def _write(path: Path, content: dict[str, Any]) -> None:
    write_bytes(path, json_text(content).encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
