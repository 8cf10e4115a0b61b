"""What a finished run's model is worth on the rows it is judged by, of which its clients are asked
again: ROC curve, precision and recall, sites, probabilities and operating points."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedminimax.engine.query import LocalQuery
from fedminimax.engine.settings import evaluated_clients
from fedminimax.experiment import build, experiment_of, load
from fedminimax.metrics.federated_auc import ROC, auc_from_counts, histograms, roc_from_counts
from fedminimax.metrics.precision_recall import (
    PrecisionRecall,
    auprc_from_counts,
    precision_recall_from_counts,
)
from fedminimax.metrics.ranking import auc_interval, auprc
from fedminimax.problems.binary import BinaryProblem
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.report.judged import Bin, Rule, auprc_interval, reliability, rules
from fedminimax.report.operating import Calibration, calibration_of
from fedminimax.types import Vectors

Interval = tuple[float, float] | None

SAME = 0.02  # how far a site's AUC may be from the record's: two rows swapped by rounding
FINE = 1e-3  # a corner of a curve this close to the one before is not drawn


class Asked(NamedTuple):
    """What the clients of a run tell again about the rows of a split."""

    split: str
    curve: ROC
    auc: float
    bound: float
    precision: PrecisionRecall
    auprc: float
    auprc_bound: float
    rows: dict[str, tuple[int, int]]  # (negatives, positives) of each site
    withheld: int  # sites that report too few rows of a class to be counted
    seen: Seen | None = None  # None where clients report no small counts, let alone rows

    @property
    def total(self) -> int:
        """How many rows there are."""
        return sum(map(sum, self.rows.values()))

    @property
    def positives(self) -> int:
        """How many of them are positive."""
        return sum(positive for _, positive in self.rows.values())


class Seen(NamedTuple):
    """What takes the rows themselves: those of a simulated run are here to be read."""

    auprc: float
    auprc_interval: Interval
    intervals: dict[str, Interval]  # of each site's AUC
    bins: tuple[Bin, ...]  # none without a calibration by validation rows
    rules: tuple[Rule, ...]


def asked(folder: Path, split: str) -> Asked | str:
    """The model that a run returns, on its rows, or a sentence why that cannot be told."""
    experiment = experiment_of(folder)
    try:
        run = load(folder)
        clients = build(experiment).clients.to(run.point.x.dtype)
    except (OSError, ValueError) as error:
        return f"the rows could not be read again ({error})"
    problem, record = run.problem, run.kept
    if not isinstance(problem, BinaryProblem):
        return f"{experiment.problem.name} does not rank rows, so it has no ROC curve"
    if problem.labels:
        return f"it ranks {len(problem.labels)} labels, of which a table tells"
    returned = run.rounds if run.best is None else run.best.round
    if record["round"] != returned:
        return f"the run ended at round {returned}, which was not evaluated"
    if split not in clients.splits:
        return f"there are no {split} rows any more"
    returning = run if run.best is None else run.best
    point, moments = returning.point, returning.moments
    if isinstance(problem, CompositionalAUC) and problem.evaluated == "stepped":
        point, moments = problem.stepped(point, moments)
    at = (point.x,) if moments is None else (point.x, moments)
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    settings = experiment.run
    numbers = evaluated_clients(settings, len(clients))
    ask = LocalQuery(problem, clients, split, weights, numbers)

    def summed(question: str, *arrays: np.ndarray) -> np.ndarray:
        return ask.sum(question, *at, *map(torch.from_numpy, arrays))[0].numpy()

    sites = {n: r[0].tolist() for n, r in zip(ask.names, ask.each("ranking", *at), strict=True)}
    if other := _another(record[split]["sites"], {n: r[0] for n, r in sites.items()}):
        return f"the rows are not those that the run was evaluated on: {other}"
    areas: list[tuple[ROC, float, float]] = []
    precisions: list[tuple[PrecisionRecall, float, float]] = []
    withheld = 0
    for edges, counts, lack in histograms(summed, least=problem.least_per_bin):
        curve, value = roc_from_counts(counts, edges), auc_from_counts(counts, edges)
        other, mean = precision_recall_from_counts(counts, edges), auprc_from_counts(counts, edges)
        if curve is None or value is None or other is None or mean is None:
            return f"the {split} rows that are reported are of one class"
        areas.append((curve, *value))
        precisions.append((other, *mean))
        withheld = max(lack)
    area = min(areas, key=lambda each: each[2])
    precision = min(precisions, key=lambda each: each[2])
    rows = {
        name: (int(negatives), int(positives)) for name, (_, negatives, positives) in sites.items()
    }
    shown = None
    if problem.least_per_bin <= 1:
        pairs = dict(zip(ask.names, ask.each("scores", *at), strict=True))
        shown = _seen(pairs, calibration_of(folder, best=run.best is not None))
    return Asked(split, *area, *precision, rows, withheld, shown)


def _seen(pairs: dict[str, Vectors], known: Calibration | None) -> Seen:
    """What scores and labels of each site say."""
    own = {n: (pair[0].double().numpy(), (pair[1] > 0).numpy()) for n, pair in pairs.items()}
    scores, labels = (np.concatenate(part) for part in zip(*own.values(), strict=True))
    area = auprc(scores, labels)
    assert area is not None  # both classes are there: the counts have said so
    return Seen(
        area,
        auprc_interval(area, int(labels.sum())),
        {name: auc_interval(*each) for name, each in own.items()},
        () if known is None else reliability(known.platt.probabilities(scores), labels),
        () if known is None else rules(known, scores, labels),
    )


def _another(recorded: dict[str, float | None], now: dict[str, float]) -> str | None:
    """What tells the rows from those of the record; a site with one class says -1."""
    if recorded.keys() != now.keys():
        return "the sites have other names"
    for name, value in recorded.items():
        before = -1.0 if value is None else value
        if abs(before - now[name]) > SAME:
            return f"the AUC of {name} is {now[name]:.3f}, the record has {before:.3f}"
    return None


def thinned(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """The corners that a drawing can show."""
    kept = [0]
    for number in range(1, len(corners) - 1):
        if np.abs(corners[number] - corners[kept[-1]]).max() >= FINE:
            kept.append(number)
    return corners[[*kept, len(corners) - 1]]
