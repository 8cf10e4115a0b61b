"""Small experiments between sites, for the tests of every engine, and what they must come to."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import Row
from table import ROWS

from fedminimax.config import Experiment, write_toml
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.simulate import Run
from fedminimax.engine.state.store import Store
from fedminimax.experiment import build, run_experiment
from fedminimax.messages import STAGES
from fedminimax.remote.backend import ReplyTemplate, SiteBackend
from fedminimax.remote.calls import Faults, Sites
from fedminimax.remote.identity import IDENTITY, Identity
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.masking import SentLog, SiteMasks
from fedminimax.remote.server import run_sites
from fedminimax.remote.site import Site
from fedminimax.remote.site_file import Limits, SiteFile
from fedminimax.remote.wire import Message
from fedminimax.remote.worker import Worker
from fedminimax.types import Cost, Point

ROOT = Path(__file__).parents[1]


def stage_of_the_page() -> Any:
    """The stage that docs/adding_a_stage.md writes."""
    page = (ROOT / "docs" / "adding_a_stage.md").read_text()
    names: dict[str, Any] = {"__name__": __name__}
    exec(re.findall(r"```python\n(.*?)\n\n\nproblem = ", page, re.DOTALL)[0], names)
    return names["Grid"]


Grid = stage_of_the_page()
STAGES.setdefault("grid", Grid)
ALLOW = {"stage": {"grid": "deployment:Grid"}}  # as a file of each machine says it
SITES = ("cleveland", "hungary", "switzerland", "va")
HEART = {"name": "heart"}
# The public ranges of its columns of numbers.
RANGES = {
    "age": [20, 90],
    "sex": [0, 1],
    "trestbps": [80, 200],
    "chol": [100, 400],
    "fbs": [0, 1],
    "thalach": [60, 200],
    "exang": [0, 1],
    "oldpeak": [-2, 6],
    "ca": [0, 3],
}
NETWORK = {"name": "mlp", "hidden": [4]}
QUADRATIC = {"name": "quadratic", "clients": 4, "dimension": 3, "noise": 0.5, "rows": 12}
LEVELS = {"name": "levels", "clients": 4, "noise": 0.3, "rows": 12, "dimension": 2, "depth": 2}
TWO_LEVELS = {"name": "levels", "depth": 2}
SHORT = {"local_steps": 2}
RUN = {"batch_size": 4, "dtype": "float64", "executor": "debug", "evaluate_every": 100}


def experiment(
    data: dict,
    problem: str | dict,
    method: dict,
    messages: dict | None = None,
    **run: Any,
) -> Experiment:
    problem = {"name": problem} if isinstance(problem, str) else problem
    table = {"data": data, "problem": problem, "method": method, "run": RUN | run}
    table["messages"] = messages or {}
    if data == HEART:
        table |= {"model": NETWORK, "split": {"positive_share": 0.2}}
    return Experiment.from_table(table)


EXPERIMENTS = {
    "codasca": experiment(
        HEART, "auc", {"name": "codasca", "lr": 0.5, "local_steps": 2, "stage_rounds": 3}, rounds=4
    ),
    "ada_fgda": experiment(QUADRATIC, "quadratic", {"name": "ada_fgda", **SHORT}, rounds=4),
    "fess_gda": experiment(
        QUADRATIC, "quadratic", {"name": "fess_gda", **SHORT}, rounds=5, cohort=2
    ),
    "local_scgdam": experiment(
        HEART, "compositional_auc", {"name": "local_scgdam", **SHORT}, rounds=3
    ),
    "fed_dr_scgd": experiment(LEVELS, TWO_LEVELS, {"name": "fed_dr_scgd", **SHORT}, rounds=4),
    "sagda": experiment(QUADRATIC, "quadratic", {"name": "sagda", **SHORT}, rounds=4, cohort=3),
    # several phases in a round, whose clients carry what they computed from one to the next
    "levelwise": experiment(LEVELS, TWO_LEVELS, {"name": "levelwise_dr_scgd", **SHORT}, rounds=4),
    # what clients keep, on a problem that costs nothing
    "controls": experiment(QUADRATIC, "quadratic", {"name": "codasca", **SHORT}, rounds=5),
    # stages that sites keep something for, and a reducer for which the server does
    "stages": experiment(
        LEVELS,
        TWO_LEVELS,
        {"name": "levelwise_dr_scgd", **SHORT},
        {"clip": 0.5, "grid": 0.001, "reduce": {"name": "centred_clipping", "radius": 0.5}},
        rounds=4,
    ),
    "robust": experiment(
        HEART,
        "auc",
        {"name": "codasca", "lr": 0.5, "local_steps": 2},
        {"clip": {"norm": 1.0, "dual_norm": 0.1}, "reduce": "median"},
        rounds=3,
    ),
    # what sites keep beside the method's states, and messages that are sent in another form
    "compressed": experiment(
        QUADRATIC,
        "quadratic",
        {"name": "codasca", **SHORT},
        {"clip": 5.0, "compress": {"name": "top", "share": 0.3}},
        rounds=5,
    ),
    # sums that the server sees alone, also of chosen coordinates and of a cohort
    "masked": experiment(
        QUADRATIC,
        "quadratic",
        {"name": "codasca", **SHORT},
        {"compress": {"name": "random", "share": 0.5}, "reduce": "masked"},
        rounds=5,
    ),
    "masked_cohort": experiment(
        QUADRATIC, "quadratic", {"name": "sagda", **SHORT}, {"reduce": "masked"}, rounds=4, cohort=3
    ),
    # a cohort that its server draws, perhaps the same site twice, and another in its second phase
    "drfa": experiment(HEART, "cross_entropy", {"name": "drfa", **SHORT}, rounds=4, cohort=3),
}


def site_file(name: str, home: Path, data: dict, **options: Any) -> SiteFile:
    """Rows of public data may be counted one by one."""
    return SiteFile(name, home / name, data, Limits(least_per_bin=1, least_rows=1), **options)


def write_site(folder: Path, data: dict) -> None:
    """The same as the file in a site's folder."""
    others = [key.parent for key in folder.parent.glob(f"*/{IDENTITY}") if key.parent != folder]
    peers = {other.name: Identity.read(other).fingerprint for other in others}
    limits = {"least_per_bin": 1, "least_rows": 1}
    sections = {"data": data, "limits": limits, "allow": ALLOW, "peers": peers}
    (folder / "site.toml").write_text(f'name = "{folder.name}"\n{write_toml(sections)}')


def data_of(which: Experiment) -> dict:
    return {"name": which.data.name, **which.data.options}


def acquainted(home: Path, names: Sequence[str] = SITES) -> dict[str, dict[str, str]]:
    """The peers of each site, in folders of `home`, after all have told their fingerprints."""
    for name in names:
        (home / name).mkdir(exist_ok=True)
    told = {name: Identity.made(home / name).fingerprint for name in names}
    return {name: {n: f for n, f in told.items() if n != name} for name in names}


def in_process(which: Experiment, home: Path) -> InProcess:
    peers = acquainted(home) if which.messages.masked else {}
    files = [site_file(n, home, data_of(which), peers=peers.get(n, {})) for n in SITES]
    return InProcess({file.name: Site(file, log=lambda text: None).handle for file in files})


def deployed(which: Experiment, transport: Any, home: Path, faults: Faults | None = None) -> Run:
    return run_sites(which, transport, SITES, home / "run", faults, log=lambda text: None)


def simulated(which: Experiment) -> Point:
    return run_experiment(which).point


def simulated_without(which: Experiment, absent: dict[int, str]) -> Point:
    """The same run in the simulator, a site left out of each of these rounds."""

    class Thinned(Federation):
        def draw_cohort(self, server: Any, round: int, phase: int) -> np.ndarray:
            cohort = super().draw_cohort(server, round, phase)
            if round not in absent:
                return cohort
            return cohort[cohort != SITES.index(absent[round])]

    made = build(which)
    clients = made.clients.to(torch.float64)
    weights = clients.weight_vector(clients.weights or made.problem.client_weights)
    problem = made.problem.prepare(LocalQuery(made.problem, clients, "train", weights))
    cohort = which.run.cohort or len(clients)
    like = Federation.of(problem, made.algorithm, clients, weights, which.run.seed, cohort)
    federation = Thinned(**vars(like))
    start = Point(*(v.double() for v in problem.start()))
    server = federation.algorithm.init_server(problem, start)
    ask = LocalQuery(problem, clients, "train", weights)
    state, store = State(0, 0, server, ask.cost), Store(federation.algorithm.keep)
    for _ in range(which.run.rounds):
        state = play_round(federation, state, store, Debug())
    return federation.algorithm.point(state.server)


def one_of_each() -> list[Row]:
    """The first row of every method, but those that need rows at the server."""
    found: dict[type, Row] = {}
    for row in ROWS:
        if not row.algorithm.auxiliary:
            found.setdefault(type(row.algorithm), row)
    return [*found.values()]


def at_sites(federation: Federation, home: Path) -> Federation:
    """The same federation, its clients' rows at sites."""
    names = tuple(f"site-{k}" for k in range(len(federation.clients)))
    masked, handlers = federation.messages.masked, {}
    for number, name in enumerate(names):
        rows = [federation.clients.train.rows(number)]
        options = {n: getattr(federation.clients, n) for n in ("sampling", "positive_share")}
        alone = Clients(rows, federation.clients.batch_size, **options).among(names, number)
        seeds = {k: bytes([*sorted((k, number)), *bytes(30)]) for k in range(len(names))}
        masks = SiteMasks(SentLog(home / name), "run", seeds, number, "")
        worker = Worker(
            "run",
            name,
            number,
            _like(federation, alone),
            home / name,
            masks=masks if masked else None,
        )
        handlers[name] = lambda content, worker=worker: worker.phase(
            Message.from_bytes(content)
        ).to_bytes()
    sites = Sites(InProcess(handlers), names, "run", Faults(), log=lambda text: None)
    sizes = {"train": federation.clients.train.sizes.tolist()}
    clients = federation.clients.elsewhere(names, sizes)
    columns = [
        (c.shape[1:], str(c.dtype).removeprefix("torch.")) for c in federation.clients.train.columns
    ]
    backend = SiteBackend(
        sites,
        columns,
        lambda: (federation.problem, Cost()),
        Message({}, {}),
        masked=masked,
    )
    made = _like(federation, clients, backend)
    backend._template = ReplyTemplate.of(made, columns)  # `begin` would also call the sites
    return made


def _like(federation: Federation, clients: Clients, backend: Any = None) -> Federation:
    return Federation.of(
        problem=federation.problem,
        algorithm=federation.algorithm,
        clients=clients,
        weights=federation.weights,
        seed=federation.seed,
        cohort=federation.cohort,
        backend=backend,
        messages=federation.messages,
    )


def make_clone(folder: Path) -> None:
    """What the commands of a page use of a clone in which those that install were done."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "experiments", folder / "experiments")
    bin = folder / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "activate").write_text(f'export PATH="{bin}:$PATH" PYTHONPATH="{ROOT / "src"}"\n')
    (bin / "fedminimax").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedminimax "$@"\n')
    (bin / "pip").write_text("#!/bin/sh\n")
    for name in ("fedminimax", "pip"):
        (bin / name).chmod(0o755)
    (folder / ".venv" / ".ready").touch()


def assert_same(found: Point, expected: Point) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)
