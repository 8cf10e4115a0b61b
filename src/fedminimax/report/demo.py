"""The demonstration: what four hospitals gain from training together, and from maximising AUC.

Every number is computed here and now, on random splits of the data that ships with the package.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedminimax.config import Experiment
from fedminimax.data.clients import Clients
from fedminimax.data.prepare import learnt, rows, split_sites
from fedminimax.data.sites import Schema, Site
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.simulate import simulate
from fedminimax.experiment import make_problem, run_experiment
from fedminimax.report import html, quality
from fedminimax.report.runs import grouped, runs_in
from fedminimax.report.tables import bytes_text

ROUNDS = 150
WIDTH = 138
FEDERATED = {
    "FedAvg (cross-entropy)": ("cross_entropy", {"name": "fedavg", "lr": 0.3}),
    "CODASCA (AUC)": ("auc", {"name": "codasca", "lr": 0.3}),
}
REFERENCE = "CODASCA (AUC)"  # what is also trained at one site alone, and on all rows pooled
SETTINGS = {
    "the data as they are (55 % positive)": ("as-they-are", {}),
    "positives thinned to 10 % in training": ("thinned", {"positive_share": 0.1}),
}


class Result(NamedTuple):
    """The test measures of one trained model, and what it cost."""

    measures: dict[str, Any]
    rounds: int  # after which it was taken
    bytes: int


def demo(folder: Path, splits: int = 3) -> int:
    if splits < 2:
        raise ValueError(f"splits is {splits}; give at least 2, so that a spread can be shown")
    if folder.exists():
        raise ValueError(f"{folder} is there already: give another folder, or none")
    console = Console(width=max(WIDTH, Console().width))  # a narrower table is no table
    console.print(
        f"Four hospitals, {splits} random splits of their patients, {ROUNDS} rounds of 8 local "
        "steps. No row leaves its hospital, but for the last line of each table."
    )
    found: dict[str, dict[str, list[Result]]] = {}
    jobs = [(s, split) for s in SETTINGS for split in range(splits)]
    for setting, split in track(jobs, "training", console=console, transient=True):
        for name, result in _one_split(setting, split, folder):
            found.setdefault(setting, {}).setdefault(name, []).append(result)
    for setting, results in found.items():
        console.print(_table(setting, results))
        console.print(_too_small(results))
        console.print(_gains(results))
    console.print(
        f"Mean and standard deviation over splits. Alone and pooled, training is by {REFERENCE}.\n"
        "All train the same network on rows encoded alike, with the settings of\n"
        "experiments/my_sites.toml, and return the best round by validation rows.\n"
        "On the data as they are, both classes are common, and maximising AUC need not beat\n"
        "cross-entropy; it is made for the second case. A difference smaller than its spread over\n"
        "splits is none: four small hospitals do not tell methods apart that are alike."
    )
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"run folders and results.json: {folder}")
    groups = grouped(runs_in([folder], console.print))
    page = html.page(groups, quality.ask_all(groups))
    (folder / "report.html").write_text(page, encoding="utf-8")
    console.print(f"the federated runs as a page: {folder / 'report.html'}", soft_wrap=True)
    return 0


def _one_split(setting: str, number: int, folder: Path) -> Iterator[tuple[str, Result]]:
    short, options = SETTINGS[setting]
    experiments = {
        name: _experiment(problem, method, {**options, "seed": number}, number)
        for name, (problem, method) in FEDERATED.items()
    }
    reference = experiments[REFERENCE]
    reading = reference.make("data").read()
    parts = split_sites(reading.sites, reference.split)
    for place, site in enumerate(parts["train"]):
        own = {"train": [site], "validation": [parts["validation"][place]], "test": parts["test"]}
        yield f"{site.name} alone", _in_one_place(own, reading.schema, reference)
    for name, experiment in experiments.items():
        place = folder / short / experiment.method.name / f"split-{number}"
        run = run_experiment(experiment, place)
        last = run.history[-1]
        sent = last["bytes_up"] + last["bytes_down"]
        yield name, Result(run.kept["test"], run.kept["round"], sent)
    yield "all rows pooled", _in_one_place(parts, reading.schema, reference)


def _experiment(problem: str, method: dict, split: dict, seed: int) -> Experiment:
    return Experiment.from_table(
        {
            "data": {"name": "heart"},
            "split": {"bins": 16, **split},
            "model": {"name": "mlp"},
            "problem": {"name": problem},
            "method": method,
            "run": {
                "rounds": ROUNDS,
                "seed": seed,
                "batch_size": 64,
                "weights": "size",
                "executor": "vectorised",
            },
        }
    )


def _in_one_place(parts: dict[str, list[Site]], schema: Schema, experiment: Experiment) -> Result:
    """One model from these sites' rows put together, by the same method, tested at every site."""
    # A hospital that never measured something cannot use it.
    known = np.any([~np.isnan(site.features).all(0) for site in parts["train"]], axis=0)
    names = {n for n, keep in zip(schema.features, known, strict=True) if keep}
    columns = tuple(column for column in schema.columns if names & set(column.features))
    schema = replace(schema, columns=columns)
    parts = {name: [_with_columns(s, schema.features) for s in own] for name, own in parts.items()}
    inputs = learnt(parts["train"], schema, experiment.split)
    ready = {name: [rows(inputs, site) for site in own] for name, own in parts.items()}
    train, validation = (
        [tuple(np.concatenate(columns) for columns in zip(*ready[name], strict=True))]
        for name in ("train", "validation")
    )
    problem = make_problem(experiment, {"features": len(inputs.outputs)})
    run = simulate(
        problem,
        experiment.make("method"),
        Clients(train, validation=validation, batch_size=experiment.run.batch_size),
        rounds=ROUNDS,
        seed=experiment.run.seed,
        executor="debug",
        evaluate_every=experiment.run.evaluate_every,
        dtype=torch.float32,
    )
    sites = Clients(ready["test"], names=[site.name for site in parts["test"]])
    ask = LocalQuery(run.problem, sites.to(torch.float32), "train", sites.weight_vector("size"))
    point = run.point if run.best is None else run.best.point
    return Result(run.problem.evaluate(point, ask), run.kept["round"], 0)


def _with_columns(site: Site, names: tuple[str, ...]) -> Site:
    return Site(site.name, names, site.features[:, np.isin(site.columns, names)], site.labels)


def _table(setting: str, results: dict[str, list[Result]]) -> Table:
    table = Table(title=f"Test AUC, {setting}", title_justify="left")
    table.add_column("trained on, by")
    sites = list(next(iter(results.values()))[0].measures["sites"])
    for heading in ("all sites", "worst site", *sites, "sent", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, runs in results.items():
        measures = [run.measures for run in runs]
        table.add_row(
            name,
            _spread([m["auc"] for m in measures]),
            _spread([m["worst_site_auc"] for m in measures]),
            *(_spread([m["sites"][site] for m in measures]) for site in sites),
            bytes_text(runs[0].bytes) if runs[0].bytes else "-",
            str(round(statistics.mean(run.rounds for run in runs))),
        )
    return table


def _too_small(results: dict[str, list[Result]]) -> str:
    small = {
        n for runs in results.values() for run in runs for n in run.measures["sites_too_small"]
    }
    if not small:
        return "Every site has at least 5 test rows of each class."
    return "Left out of the worst site, with fewer than 5 test rows of a class: " + ", ".join(
        sorted(small)
    )


def _gains(results: dict[str, list[Result]]) -> str:
    """Methods on the same split are compared split by split: what a split does to both cancels."""
    baseline, *others = (name for name in FEDERATED)
    lines = []
    for name in others:
        pairs = zip(results[name], results[baseline], strict=True)
        gains = [ours.measures["auc"] - theirs.measures["auc"] for ours, theirs in pairs]
        better = sum(gain > 0 for gain in gains)
        mean, spread = statistics.mean(gains), statistics.stdev(gains)
        lines.append(
            f"{name} less {baseline}, split by split: {mean:+.3f} ±{spread:.3f}, better in "
            f"{better} of {len(gains)}"
        )
    return "\n".join(lines)


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return "one class" if not known else f"{known[0]:.3f}"
    return f"{statistics.mean(known):.3f} ±{statistics.stdev(known):.3f}"
