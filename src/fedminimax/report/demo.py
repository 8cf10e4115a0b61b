"""The demonstration: what the default gives, beside FedAvg, each site alone, and all rows pooled.

Every number is computed here and now, on random splits of data that come with the package and with
scikit-learn.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedminimax.config import Experiment
from fedminimax.data.folder import Reading
from fedminimax.data.prepare import split_sites
from fedminimax.experiment import assemble, read_tables, run_experiment
from fedminimax.report import baselines, html, quality
from fedminimax.report.dots import dots
from fedminimax.report.runs import grouped, runs_in
from fedminimax.tuning.auto import recipes_of, run_auto

ROUNDS = 100
WIDTH = 110
AUTO, FEDAVG = "federated: auto, the default", "federated: FedAvg on cross-entropy"
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "heart": ("four hospitals, 920 patients, 55 % with heart disease", {"name": "heart"}),
    "digits": ("five sites, 1,797 pictures, 10 % eights", {"name": "scikit_learn"}),
}
SCIKIT: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[], Any]]] = {
    "each site alone: logistic regression": (baselines.alone, baselines.logistic_regression),
    "each site alone: gradient boosting": (baselines.alone, baselines.gradient_boosting),
    "all rows pooled: logistic regression": (baselines.pooled, baselines.logistic_regression),
    "all rows pooled: gradient boosting": (baselines.pooled, baselines.gradient_boosting),
}
MEASURES = ("auc", "auprc", "worst_site_auc")

Found = dict[str, list[dict[str, Any]]]  # measures of each split, by row of the table


def demo(folder: Path, splits: int = 3) -> int:
    """Plays the demonstration, and writes it to the folder."""
    if splits < 2:
        raise ValueError(f"splits is {splits}; give at least 2, so that a spread can be shown")
    if folder.exists():
        raise ValueError(f"{folder} is there already: give another folder, or none")
    console = Console(width=max(WIDTH, Console().width))  # a narrower table is no table
    console.print(
        f"Two sets of sites, {splits} random splits of their rows, {ROUNDS} rounds of 8 local "
        "steps. No row leaves its site, but for the lines that say pooled."
    )
    found: dict[str, Found] = {name: {} for name in DATA}
    jobs = [(name, split) for name in DATA for split in range(splits)]
    for name, split in track(jobs, "training", console=console, transient=True):
        for row, measures in _one_split(name, split, folder / name / f"split-{split}"):
            found[name].setdefault(row, []).append(measures)
    for name, results in found.items():
        console.print(_table(f"{name}: {DATA[name][0]}", results))
        console.print(_gain(results))
        panels = {
            title: {row: [m[measure] for m in own] for row, own in results.items()}
            for title, measure in (("test AUC", "auc"), ("test AUPRC", "auprc"))
        }
        picture = dots(f"{name}: {DATA[name][0]}", panels, AUTO)
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
    console.print(
        "Mean and standard deviation over splits, on test rows of all sites; validation rows\n"
        "chose recipes and rounds. FedAvg trains the network of experiments/my_sites.toml on rows\n"
        "encoded alike. A difference smaller than its spread over splits is none."
    )
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    chosen = [path.parent for path in folder.glob("*/split-*/*/final.safetensors")]
    groups = grouped(runs_in(sorted(chosen), console.print))
    page = html.page(groups, quality.ask_all(groups))
    (folder / "report.html").write_text(page, encoding="utf-8")
    pictures = ", ".join(str(folder / f"{name}.svg") for name in DATA)
    console.print(f"run folders and results.json: {folder}\npictures: {pictures}", soft_wrap=True)
    console.print(f"the federated runs as a page: {folder / 'report.html'}", soft_wrap=True)
    return 0


def asked(data: Mapping[str, Any], seed: int, rounds: int = ROUNDS) -> Experiment:
    """The default on this data, as experiments/my_sites.toml has it."""
    return Experiment.from_table(
        {
            "data": dict(data),
            "split": {"bins": 16, "seed": seed},
            "model": {"name": "mlp"},
            "problem": {"name": "auto"},
            "run": {"rounds": rounds, "seed": seed, "batch_size": 64, "weights": "size"},
        }
    )


def _one_split(name: str, number: int, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    auto = asked(DATA[name][1], number, ROUNDS)
    reading: Reading = auto.make("data").read()
    parts = split_sites(reading.sites, auto.split)
    train, test = (
        {site.name: (site.features, site.labels) for site in parts[part]}
        for part in ("train", "test")
    )
    for row, (way, make) in SCIKIT.items():
        yield row, way(make, list(train.values()), test)

    def read(experiment: Experiment) -> Any:
        return read_tables(reading, experiment.split)

    fedavg = recipes_of(auto)["cross_entropy"]
    made = assemble(fedavg, read(fedavg), fedavg.make("method"))
    yield FEDAVG, _measured(run_experiment(fedavg, folder / "fedavg", built=made))
    searched = run_auto(auto, folder / "auto", reader=read)
    yield AUTO, {**_measured(searched.run), "chosen": searched.record["chosen"]}


def _measured(run: Any) -> dict[str, Any]:
    test = run.kept["test"]
    return {name: test[name] for name in (*MEASURES, "sites")}


def _table(title: str, results: Found) -> Table:
    table = Table(title=f"Test, {title}", title_justify="left")
    table.add_column("")
    for heading in ("AUC", "AUPRC", "AUC of the worst site"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, runs in results.items():
        cells = (_spread([m[name] for m in runs]) for name in MEASURES)
        table.add_row(row, *cells, style="bold" if row == AUTO else "")
    return table


def _gain(results: Found) -> str:
    """Compared split by split: what a split does to both cancels."""
    chosen = ", ".join(m["chosen"] for m in results[AUTO])
    lines = [f"auto chose {chosen}"]
    for other in (row for row in results if row != AUTO):
        gains = [a["auc"] - b["auc"] for a, b in zip(results[AUTO], results[other], strict=True)]
        mean, spread, better = (
            statistics.mean(gains),
            statistics.stdev(gains),
            sum(gain > 0 for gain in gains),
        )
        lines.append(
            f"AUC of auto less {other}, split by split: {mean:+.3f} ±{spread:.3f}, better in "
            f"{better} of {len(gains)}"
        )
    return "\n".join(lines)


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return "one class" if not known else f"{known[0]:.3f}"
    return f"{statistics.mean(known):.3f} ±{statistics.stdev(known):.3f}"
