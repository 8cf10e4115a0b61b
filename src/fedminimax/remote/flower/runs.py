"""Runs on Flower, for those who have it at work: an app for `flwr run`, and what its halves do.

An app is a folder of settings. Its code is that of the fedminimax which server and sites have
installed. A SuperNode starts a process for every message, so all that a site knows is on its disk.
"""

from __future__ import annotations

import sys
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedminimax import __version__
from fedminimax.config import (
    CHOICES,
    NEEDED,
    ConfigError,
    Experiment,
    Table,
    options_for,
    options_of,
    write_toml,
)
from fedminimax.engine.state.lock import locked
from fedminimax.remote.calls import Faults, Transport
from fedminimax.remote.served import Served, line_of, serve
from fedminimax.remote.server import check_experiment
from fedminimax.remote.site import Site, refusal
from fedminimax.remote.site_file import register_allowed

FAULTS = "faults."  # how Flower writes the section of a setting


class NotFinishedError(RuntimeError):
    """A run that did not end well: Flower marks it as failed, with this sentence."""


def write_app(
    folder: Path, experiment: Experiment, faults: Faults, sites: Sequence[str], home: Path, run: str
) -> None:
    """`home` is a folder at the server, in which the run's own will be."""
    file = folder / "pyproject.toml"
    if file.exists():
        raise ConfigError(f"there is a {file} already: give another folder")
    check_experiment(experiment, sites, faults)
    settings = {
        "home": str(home),
        "run": run,
        "sites": ",".join(sites),
        "experiment": write_toml(_sent(experiment)),
    }
    app = {
        "project": {
            "name": "fedminimax-run",
            "version": __version__,
            "description": f"The run {run} of fedminimax",
            "license": "Apache-2.0",
            "dependencies": [f"fedminimax[flower]=={__version__}"],
        },
        "tool.flwr.app": {"publisher": "fedminimax"},
        "tool.flwr.app.components": {
            "serverapp": "fedminimax.remote.flower.app:server",
            "clientapp": "fedminimax.remote.flower.app:client",
        },
        "tool.flwr.app.config": settings,
        "tool.flwr.app.config.faults": asdict(faults),
    }
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(write_toml(app), encoding="utf-8")


def _sent(experiment: Experiment) -> Table:
    """The settings without those of the data, which all sites could read; what a data set cannot be
    named without is left empty."""
    name = experiment.data.name
    needed = [k for k, v in options_of(CHOICES["data"][name], "data").items() if v == NEEDED]
    return experiment.to_table() | {"data": {"name": name, **dict.fromkeys(needed, "")}}


def serve_app(settings: Mapping[str, Any], transport: Transport) -> None:
    """The server's half; a run of that name that was begun before goes on."""
    told = {key.removeprefix(FAULTS): settings[key] for key in settings if key.startswith(FAULTS)}
    faults = Faults(**options_for(Faults, told, "faults"))
    register_allowed(Path(settings["home"]))
    experiment = Experiment.from_table(tomllib.loads(settings["experiment"]))
    served = Served(Path(settings["home"]), settings["run"])
    served.check_unfinished()
    served.path.mkdir(parents=True, exist_ok=True)
    # The server of a run that was killed may still be on its way out.
    with locked(served.path):
        served.ask_for(experiment, faults, settings["sites"].split(","))

    def say(record: dict[str, Any]) -> None:
        print(line_of(record, experiment.run.rounds), flush=True)

    ended = serve(served.consortium, served.name, transport, say)
    print(f"{ended['outcome']}\nrun folder: {served.path}", flush=True)
    if not ended["good"]:
        raise NotFinishedError(ended["outcome"])


def answered(node: Mapping[str, Any], content: bytes) -> bytes:
    """A site's half. Nothing is raised: Flower would tell the server the text of an error, in which
    there may be rows or paths."""
    if "site" not in node:
        return refusal(
            "its SuperNode names no site folder: start it with --node-config "
            "'site=\"/path/of/folder\"'"
        )
    folder = Path(str(node["site"])).expanduser()
    try:
        return Site.open(folder).handle(content)
    except (ConfigError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    return refusal("it cannot open its site folder; the log of its SuperNode says more")
