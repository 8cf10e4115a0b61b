"""What a round between sites costs: seconds and bytes, beside what the accounting predicts.

Two runs of different length are compared, so that set-up and evaluations fall out.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from fedminimax.config import ConfigError, Experiment
from fedminimax.engine.state.folder import RunFolder
from fedminimax.remote.calls import Faults
from fedminimax.remote.consortium import enrol, init
from fedminimax.remote.flare.processes import Supervisor, flare_session, write_job
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.served import PINGS, Served
from fedminimax.remote.server import TRAFFIC, run_sites
from fedminimax.remote.site import Site

SITES = ("cleveland", "hungary", "switzerland", "va")
SHORT, LONG = 10, 110  # rounds
CALLS = 100  # in which nothing is computed
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CODASCA": ({"name": "auc"}, {"name": "codasca", "lr": 0.1}),
    "LocalSCGDAM": ({"name": "compositional_auc"}, {"name": "local_scgdam"}),
}


HEAD = (
    "| method | seconds | calls without work | in one process | vectors, predicted | messages "
    "| encrypted links |\n"
)


class Spent(NamedTuple):
    seconds: float
    predicted: int  # bytes of vectors, up and down
    messages: int  # bytes handed to the engine
    wire: int  # bytes of the encrypted links
    calls: int

    def per_round(self, longer: Spent) -> Spent:
        # Unchecked: fields are int or float.
        return Spent(*((b - a) / (LONG - SHORT) for a, b in zip(self, longer, strict=True)))  # type: ignore[arg-type]


def measure(folder: Path) -> str:
    """A page of Markdown."""
    port = _free_port()
    init(folder / "consortium", SITES, port=port)
    for name in SITES:
        enrol(folder / "consortium", folder / name, name)
        (folder / name / "site.toml").write_text(
            f'name = "{name}"\n[data]\nname = "heart"\n'
            "[limits]\nleast_per_bin = 1\nleast_rows = 1\n"
        )
    places = [("server", folder / "consortium"), *(("site", folder / n) for n in SITES)]
    kept = [_started(kind, place) for kind, place in places]
    try:
        spent = {name: _on_flare_per_round(folder, port, name) for name in METHODS}
        ping = _seconds_per_ping(folder)
    finally:
        for process in kept:
            process.terminate()
        for process in kept:
            process.wait()
    rows = [row(name, spent[name], ping, _alone_per_round(folder, name)) for name in METHODS]
    return HEAD + "|---" * (HEAD.count("|") - 1) + "|\n" + "".join(rows)


def _alone_per_round(folder: Path, method: str) -> float:
    short, long = (_in_process(folder, method, rounds) for rounds in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


def row(method: str, spent: Spent, ping: float, alone: float) -> str:
    """A line of the table of what exchanges cost."""
    seconds = " | ".join(f"{s:.3f} s" for s in (spent.seconds, spent.calls * ping, alone))
    sizes = f"{spent.predicted:,.0f} B | {spent.messages:,.0f} B | {spent.wire:,.0f} B"
    return f"| {method} | {seconds} | {sizes} |\n"


def _on_flare_per_round(folder: Path, port: int, method: str) -> Spent:
    short, long = (_on_flare(folder, port, method, rounds) for rounds in (SHORT, LONG))
    return short.per_round(long)


def _seconds_per_ping(folder: Path) -> float:
    """What FLARE alone costs: all sites are called at once, and answer at once."""
    consortium, job = folder / "consortium", folder / "pings"
    write_job(job, "pings", len(SITES), pings=CALLS)
    with flare_session(consortium) as session:
        session.monitor_job(session.submit_job(str(job.resolve())))
    try:
        found = json.loads((Served(consortium, "pings").path / PINGS).read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"the sites did not answer {CALLS} calls; the logs in {consortium / 'server'} say why"
        ) from None
    return found["seconds"] / found["count"]


def _experiment(method: str, rounds: int) -> Experiment:
    problem, options = METHODS[method]
    return Experiment.from_table(
        {
            "data": {"name": "heart"},
            "model": {"name": "mlp", "hidden": [16]},
            "problem": problem,
            "method": options | {"local_steps": 8},
            "run": {"rounds": rounds, "evaluate_every": 10 * LONG, "dtype": "float64"},
        }
    )


def _on_flare(folder: Path, port: int, method: str, rounds: int) -> Spent:
    served = Served(folder / "consortium", f"{method}-{rounds}")
    served.ask_for(_experiment(method, rounds), Faults(), SITES)
    links = _Links(port)
    before = links.carried()
    ended = Supervisor(
        folder / "consortium", served, lambda text: print(text, file=sys.stderr), links.carried
    ).watch()
    if not ended["good"]:
        raise ConfigError(ended["outcome"])
    place = RunFolder(served.path)
    last, traffic = place.read_history()[-1], place.read_json(TRAFFIC)
    predicted = last["bytes_up"] + last["bytes_down"]
    messages = traffic["up"] + traffic["down"]
    wire = links.carried() - before
    return Spent(last["seconds"], predicted, messages, wire, traffic["calls"])


def _in_process(folder: Path, method: str, rounds: int) -> float:
    """Seconds of the same messages between sites in this process, one after the other."""
    sites = {name: Site.open(folder / name).handle for name in SITES}
    place = folder / "here" / f"{method}-{rounds}-here"
    begun = time.perf_counter()
    run_sites(_experiment(method, rounds), InProcess(sites), SITES, place, log=lambda text: None)
    return time.perf_counter() - begun


class _Links:
    """Bytes that the links of a server have carried, as the kernel counts them."""

    def __init__(self, port: int):
        self.port = port
        self._seen: dict[str, int] = {}  # a job's links close with it: what was last seen counts

    def carried(self) -> int:
        found = subprocess.run(
            ["ss", "-tinOH", f"sport = :{self.port}"], capture_output=True, text=True, check=True
        )
        for line in found.stdout.splitlines():
            counts = re.findall(r"\bbytes_(?:sent|received):(\d+)", line)
            self._seen[line.split()[4]] = sum(map(int, counts))
        return sum(self._seen.values())


def _started(kind: str, place: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "fedminimax", "deploy", kind, str(place)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
