"""A run from its server's side: set-up, rounds, result; from a checkpoint, if there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedminimax import __version__
from fedminimax.config import CHOICES, ConfigError, Experiment, write_toml
from fedminimax.data.imbalance import check_share
from fedminimax.data.split import check_fractions
from fedminimax.engine.session import Run, Session, check_masked, check_messages
from fedminimax.engine.settings import Callbacks, Settings, check_settings
from fedminimax.engine.state.checkpoint import read, write
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import PREPARATION, SPLITS, make_problem
from fedminimax.metrics.optimality import DRIFT
from fedminimax.remote.backend import SiteBackend
from fedminimax.remote.calls import Faults, Sites, Transport
from fedminimax.remote.setup import (
    Setup,
    absent_clients,
    prepared,
    problem_of,
    sent_experiment,
    set_up,
)
from fedminimax.remote.site import SETUP
from fedminimax.tuning.auto import is_auto, recipes_of
from fedminimax.types import Cost

SESSION, TRAFFIC = "session.json", "traffic.json"


def run_sites(
    experiment: Experiment,
    transport: Transport,
    names: Sequence[str],
    folder: str | os.PathLike,
    faults: Faults | None = None,
    log: Callable[[str], None] = print,
    session: int | None = None,
    called: str | None = None,
    **callbacks: Any,
) -> Run:
    """Runs an experiment at sites. A folder that holds an unfinished run of it is gone on with.

    The folder's name is the run's, if it is not `called` otherwise. It holds what that of a
    simulated run holds, and the set-up. Two servers of one run would undo each other's work: the
    caller sees to it that there is one.

    - names: those of the sites. faults: what is done about one that is away or answers wrongly.
    - log: told, in sentences, of what goes wrong at sites.
    - session: the number of this start of the run, if the caller has counted it.
    - callbacks: those of `simulate`: on_record, on_round, interrupted, profile.
    """
    faults, calls = faults or Faults(), Callbacks(**callbacks)
    check_experiment(experiment, names, faults)
    place = RunFolder(folder)
    place.path.mkdir(parents=True, exist_ok=True)
    session = count_session(place) if session is None else session
    stopping = calls.interrupted or (lambda: False)
    called = called or place.path.name
    sites = Sites(transport, tuple(names), called, faults, log, session, stopping)
    setup, cost = _set_up(experiment, sites, place)
    run = Session(
        problem=problem_of(experiment, setup.about),
        algorithm=experiment.make("method"),
        clients=absent_clients(experiment, setup.about),
        settings=_settings(experiment),
        messages=experiment.messages,
        privacy=experiment.privacy,
        folder=folder,
        resume=True,
        backend=SiteBackend(
            sites=sites,
            columns=setup.about["columns"],
            prepared=lambda: (prepared(experiment, setup), cost),
            set_up=setup.message,
            asked_rows=bool(setup.about["record"]),
            masked=experiment.messages.masked,
        ),
        callbacks=calls,
    ).run()
    place.write_json(TRAFFIC, asdict(sites.traffic))
    return run


def _settings(experiment: Experiment) -> Settings:
    """Those of a run between sites, which keep their states themselves. There is a checkpoint after
    every round: nothing is lost but the unfinished one."""
    return replace(experiment.run, checkpoint_every=1, store="memory")


def count_session(place: RunFolder) -> int:
    """How often the run was started, this time included."""
    session = place.read_json(SESSION, missing={"session": 0})["session"] + 1
    place.write_json(SESSION, {"session": session})
    return session


def check_experiment(experiment: Experiment, names: Sequence[str], faults: Faults) -> None:
    """Refuses what no run between sites can do, before any of them is asked."""
    if is_auto(experiment):
        for recipe in recipes_of(experiment).values():
            check_experiment(recipe, names, faults)
        return
    algorithm, run = experiment.make("method"), experiment.run
    name = type(algorithm).__name__
    if algorithm.auxiliary or experiment.split.auxiliary:
        raise ConfigError(
            f"[method] {experiment.method.name} or [split] auxiliary needs rows at the server, "
            "which has none in a run between sites: use another method, or simulate"
        )
    if run.evaluate_clients is not None:
        raise ConfigError(
            "[run] evaluate_clients is for simulations of many clients; between sites all that "
            "are there are evaluated: leave it out"
        )
    if run.start:
        raise ConfigError(
            f"[run] start is {run.start!r}, but a run between sites begins with the model's own "
            "first weights: leave it out, or simulate"
        )
    if run.device != "cpu" or run.precision is not None:
        ignored = "device" if run.device != "cpu" else "precision"
        raise ConfigError(
            f"[run] {ignored} is {getattr(run, ignored)!r}, but sites compute on the processor, in "
            "the precision of dtype: leave it out, or simulate"
        )
    if experiment.privacy.by_record and faults.policy == "skip":
        raise ConfigError(
            '[privacy] level "record": with policy "skip" a round is played again, and spends '
            'again at the sites that are there: use "wait" or "fail"'
        )
    if experiment.split.sites:
        raise ConfigError(
            f"[split] sites is {experiment.split.sites}, but a run between sites is of all that "
            "the consortium names: leave it out"
        )
    if DRIFT in run.measures:
        raise ConfigError(
            f"[run] measures: {DRIFT!r} watches clients at work, which only the simulator can: "
            "leave it out"
        )
    _check_settings(experiment, names)
    partial = run.cohort_of(len(names)) < len(names) or faults.policy == "skip"
    check_messages(experiment.messages, algorithm, partial)
    if experiment.messages.masked:
        _check_masked(experiment, names, faults)
    if faults.policy == "skip" and not algorithm.partial and not run.allow_partial:
        raise ConfigError(
            f"{name} is defined for rounds in which all sites take part, so none can be skipped: "
            'use policy "wait" or "fail", or set allow_partial = true in [run] to try it all the '
            "same"
        )
    if faults.least_replies > (run.cohort or len(names)):
        raise ConfigError(
            f"least_replies is {faults.least_replies}, but {run.cohort or len(names)} sites take "
            "part in a round: lower it"
        )


def _check_masked(experiment: Experiment, names: Sequence[str], faults: Faults) -> None:
    if faults.policy == "skip":
        raise ConfigError(
            '[messages] reduce is "masked": with policy "skip" a round is played again without a '
            'site, and the two sums differ by what that site has sent: use "wait" or "fail"'
        )
    if faults.norm_factor:
        raise ConfigError(
            '[messages] reduce is "masked": under masks no reply has a length that could be '
            "compared: leave norm_factor out, and clip the messages at the sites"
        )
    problem, method = CHOICES["problem"][experiment.problem.name], experiment.make("method")
    check_masked(experiment.messages, problem, method, experiment.run.cohort_of(len(names)))


def _check_settings(experiment: Experiment, names: Sequence[str]) -> None:
    """What the simulator refuses too: of an error at a site, its type is all that one learns."""
    split = experiment.split
    check_fractions((split.train, split.validation, split.test))
    if split.positive_share is not None:
        check_share(split.positive_share)
    sizes = {part: [1] * len(names) for part in SPLITS if getattr(split, part)}
    clients = absent_clients(experiment, {"names": names, "sizes": sizes})
    check_settings(_settings(experiment), clients)
    kinds = [CHOICES["data"][experiment.data.name], CHOICES["problem"][experiment.problem.name]]
    if experiment.model is not None:
        kinds.append(CHOICES["model"][experiment.model.name])
    # What somebody has added may suit the sites' own columns alone.
    ours = all(kind.__module__.startswith("fedminimax.") for kind in kinds)
    if ours and not hasattr(kinds[0], "client_rows"):
        make_problem(experiment, {"features": 1, "classes": 2, "sites": len(names)})


def _set_up(experiment: Experiment, sites: Sites, place: RunFolder) -> tuple[Setup, Cost]:
    """From the folder, if the run was begun before: then no site is asked."""
    file = place.path / SETUP
    if file.exists():
        answers, about = read(file)
        setup = Setup(about["setup"], answers)
        if setup.about["version"] != __version__:
            raise ConfigError(
                f"the run in {place.path} was begun with fedminimax {setup.about['version']}, and "
                f"this is {__version__}: install the version of the run, or give another name"
            )
        known = (setup.about["experiment"], setup.about["names"])
        if known != (sent_experiment(experiment), list(sites.names)):
            raise ConfigError(
                f"the run in {place.path} is of another experiment or of other sites: give another "
                "name"
            )
        return setup, Cost(*about["cost"])
    place.write_text("config.toml", write_toml(experiment.to_table()))
    setup, cost = set_up(experiment, sites)
    place.write_json(PREPARATION, {k: v for k, v in setup.about.items() if k != "experiment"})
    write(file, setup.answers, {"setup": setup.about, "cost": list(cost)})
    return setup, cost
