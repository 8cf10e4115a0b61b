"""The search of `problem.name = "auto"` between sites: each recipe is a run of theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedminimax.config import Experiment
from fedminimax.engine.session import Run
from fedminimax.engine.settings import Callbacks
from fedminimax.experiment import load
from fedminimax.remote.calls import Faults, Transport
from fedminimax.remote.server import run_sites
from fedminimax.tuning.auto import ASKED, begun, recipes_of, search, stopping_at, verdict


def search_sites(
    asked: Experiment,
    transport: Transport,
    names: Sequence[str],
    folder: str | os.PathLike,
    faults: Faults | None = None,
    log: Callable[[str], None] = print,
    **callbacks: Any,
) -> Run:
    """Searches as `run_auto` does, and returns the run that was chosen; a folder that holds an
    unfinished search is gone on with. At the sites, the run of a recipe is called RUN.RECIPE.

    The arguments are those of `run_sites`.
    """
    place = begun(asked, Path(folder), resume=(Path(folder) / ASKED).exists())

    def play(experiment: Experiment, own: Path, until: int) -> None:
        called = f"{place.path.name}.{own.name}"
        with stopping_at(until, Callbacks(**callbacks)) as calls:
            run_sites(experiment, transport, names, own, faults, log, called=called, **calls)

    log(verdict(search(recipes_of(asked), place, play, log)))
    return load(place.path)
