"""A run from its server's side: set-up, rounds, result; from a checkpoint, if there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from fedminimax import __version__
from fedminimax.config import CHOICES, ConfigError, Experiment, write_toml
from fedminimax.data.clients import Clients
from fedminimax.data.imbalance import check_share
from fedminimax.data.split import check_fractions
from fedminimax.deploy.setup import Setup, absent_clients, prepared, sent_experiment, set_up
from fedminimax.deploy.site import SETUP
from fedminimax.engine.call import Faults, LeftOutError, Sites, Transport
from fedminimax.engine.checkpoint import read, write, write_bytes
from fedminimax.engine.crew import Crew
from fedminimax.engine.folder import RunFolder
from fedminimax.engine.round import State
from fedminimax.engine.simulate import Run, check_match, check_numbers, identity, start_point
from fedminimax.engine.sites import Counted, Shadow, SiteFederation, SiteTrainer
from fedminimax.engine.trainer import Plan, succeeded
from fedminimax.experiment import PREPARATION, SPLITS, make_problem
from fedminimax.metrics.optimality import DRIFT, check_names
from fedminimax.types import Cost

SESSION, TRAFFIC = "session.json", "traffic.json"


def run_sites(
    experiment: Experiment,
    transport: Transport,
    names: Sequence[str],
    folder: str | os.PathLike,
    faults: Faults | None = None,
    log: Callable[[str], None] = print,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    on_round: Callable[[int], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    session: int | None = None,
) -> Run:
    """Runs an experiment at sites. A folder that holds an unfinished run of it is gone on with.

    The folder's name is the run's. It holds what that of a simulated run holds, and the set-up. Two
    servers of one run would undo each other's work: the caller sees to it that there is one. If it
    has counted this start, `session` is its number.
    """
    faults = faults or Faults()
    check_experiment(experiment, names, faults)
    place = RunFolder(folder)
    place.path.mkdir(parents=True, exist_ok=True)
    session = count_session(place) if session is None else session
    stopping = interrupted or (lambda: False)
    sites = Sites(transport, tuple(names), place.path.name, faults, log, session, stopping)
    setup, cost = _set_up(experiment, sites, place)
    trainer, state = _trainer(experiment, setup, sites, place, cost)
    trainer.plan = _plan(experiment, on_record, on_round, interrupted)
    trainer.begin(state, "sites", resume=True)
    _begin(sites, setup, trainer.state.round)
    trainer.train()
    moments = None
    if succeeded(trainer.outcome):
        problem = trainer.federation.problem
        moments = trainer.despite_losses(
            lambda: problem.moments(trainer.point, trainer.ask("train"))
        )
        trainer.save_final(moments)
    place.write_json(TRAFFIC, asdict(sites.traffic))
    done = (trainer.history, trainer.outcome, trainer.state.round, trainer.best)
    return Run(trainer.federation.problem, trainer.point, *done, moments, place)


def count_session(place: RunFolder) -> int:
    """How often the run was started, this time included."""
    session = place.read_json(SESSION, missing={"session": 0})["session"] + 1
    place.write_json(SESSION, {"session": session})
    return session


def check_experiment(experiment: Experiment, names: Sequence[str], faults: Faults) -> None:
    """Refuses what no run between sites can do, before any of them is asked."""
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


def _check_settings(experiment: Experiment, names: Sequence[str]) -> None:
    """What the simulator refuses too: of an error at a site, its type is all that one learns."""
    split = experiment.split
    check_fractions((split.train, split.validation, split.test))
    if split.positive_share is not None:
        check_share(split.positive_share)
    check_names(experiment.run.measures)
    sizes = {part: [1] * len(names) for part in SPLITS if getattr(split, part)}
    _check_run(experiment, absent_clients(experiment, {"names": names, "sizes": sizes}))
    kinds = [CHOICES["data"][experiment.data.name], CHOICES["problem"][experiment.problem.name]]
    if experiment.model is not None:
        kinds.append(CHOICES["model"][experiment.model.name])
    # What somebody has added may suit the sites' own columns alone.
    ours = all(kind.__module__.startswith("fedminimax.") for kind in kinds)
    if ours and not hasattr(kinds[0], "client_rows"):
        make_problem(experiment, {"features": 1, "classes": 2, "sites": len(names)})


def _check_run(experiment: Experiment, clients: Clients) -> int:
    """Returns how many sites take part in a round."""
    run = experiment.run
    cohort = len(clients) if run.cohort is None else run.cohort
    every = (run.evaluate_every, run.checkpoint_every, run.stop_early, run.target)
    check_numbers(run.rounds, *every, cohort, clients)
    return cohort


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
    write_bytes(place.path / "config.toml", write_toml(experiment.to_table()).encode())
    setup, cost = set_up(experiment, sites)
    place.write_json(PREPARATION, {k: v for k, v in setup.about.items() if k != "experiment"})
    write(file, setup.answers, {"setup": setup.about, "cost": list(cost)})
    return setup, cost


def _trainer(
    experiment: Experiment, setup: Setup, sites: Sites, place: RunFolder, cost: Cost
) -> tuple[SiteTrainer, State]:
    run, problem = experiment.run, prepared(experiment, setup)
    clients = absent_clients(experiment, setup.about)
    algorithm = experiment.make("method").for_clients(len(clients)).for_problem(problem)
    cohort = _check_run(experiment, clients)
    check_match(problem, algorithm, cohort < len(clients) and not run.allow_partial)
    point = start_point(problem, None, getattr(torch, run.dtype))
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    sampler = Counted(clients)
    common = (problem, algorithm, clients, weights, sampler, None, run.seed, cohort, Crew())
    federation = SiteFederation(*common, messages=experiment.messages, sites=sites)
    shadow = Shadow.of(federation, setup.about["columns"])
    plan = _plan(experiment)
    trainer = SiteTrainer(federation, plan, place, identity(federation, point), shadow)
    return trainer, State(0, 0, algorithm.init_server(problem, point), cost)


def _plan(experiment: Experiment, *callbacks: Any) -> Plan:
    run = experiment.run
    # A checkpoint after every round: nothing is lost but the unfinished one.
    looks = (run.evaluate_every, 1, run.stop_early, run.target, run.measures, None)
    return Plan(run.rounds, *looks, *callbacks)


def _begin(sites: Sites, setup: Setup, round: int) -> None:
    """Every site gets the set-up; later, one that is away has had it before."""
    sites.begin_round(round)
    try:
        sites.exchange(sites.roster.present, setup.message, {}, needed=round == 0)
    except LeftOutError as gone:
        sites.leave_out(gone.reasons)
