"""Small experiments between sites, for the tests of every engine, and what they must come to."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedminimax.config import Experiment, write_toml
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.simulate import Run
from fedminimax.engine.state.store import Store
from fedminimax.experiment import build, run_experiment
from fedminimax.messages import STAGES
from fedminimax.remote.calls import Faults
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.server import run_sites
from fedminimax.remote.site import Site
from fedminimax.remote.site_file import Limits, SiteFile
from fedminimax.types import Point

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
    # a cohort that its server draws, perhaps the same site twice, and another in its second phase
    "drfa": experiment(HEART, "cross_entropy", {"name": "drfa", **SHORT}, rounds=4, cohort=3),
}


def site_file(name: str, home: Path, data: dict, **options: Any) -> SiteFile:
    """Rows of public data may be counted one by one."""
    return SiteFile(name, home / name, data, Limits(least_per_bin=1, least_rows=1), **options)


def write_site(folder: Path, data: dict) -> None:
    """The same as the file in a site's folder."""
    sections = {"data": data, "limits": {"least_per_bin": 1, "least_rows": 1}, "allow": ALLOW}
    (folder / "site.toml").write_text(f'name = "{folder.name}"\n{write_toml(sections)}')


def data_of(which: Experiment) -> dict:
    return {"name": which.data.name, **which.data.options}


def in_process(which: Experiment, home: Path) -> InProcess:
    files = [site_file(name, home, data_of(which)) for name in SITES]
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
