"""How several labels are ranked: AUC and AUPRC of each, and their means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedminimax.metrics.federated_auc import federated_aucs
from fedminimax.metrics.ranking import auc, auprc
from fedminimax.types import Measures, Query, Vectors

LEAST = 5  # rows of a class with which a label, at a site or in all, is judged
MEANS = ("auc", "auc_federated", "auc_bound", "auprc", "auprc_federated", "auprc_bound")


def label_measures(
    labels: Sequence[str], at: Vectors, ask: Query, least_per_bin: int = 0
) -> Measures:
    """AUC and AUPRC of each label, by the exchanges of one, and their means.

    Arguments:
        labels: the names.
        at: the vectors of a question about scores.
        ask: the clients, who answer about several labels.
        least_per_bin: see `BinaryProblem`.

    Returns `labels`, a table of each label's measures and counts, and over the labels with at least
    5 rows of each class the plain (macro) means under the names of one label's measures, the mean
    AUC weighted by positives (`auc_by_positives`) and the worst label. The mean of bounds bounds
    the mean. The others are `labels_too_small`. Where sites tell theirs, a site's AUC is the mean
    over the labels of which it has 5 rows of each class; a site without any is `sites_too_small`.
    """

    def summed(question: str, *arrays: np.ndarray) -> list[np.ndarray]:
        found = ask.sum(question, *at, *map(torch.from_numpy, arrays))
        return [sums.cpu().numpy() for sums in found]

    table: dict[str, dict[str, Any]] = {}
    for name, own in zip(
        labels, federated_aucs(summed, len(labels), least=least_per_bin), strict=True
    ):
        table[name] = {
            "auc": own.auc,
            "auc_federated": own.auc,
            "auc_bound": own.bound,
            "auprc": own.auprc,
            "auprc_federated": own.auprc,
            "auprc_bound": own.auprc_bound,
            "positives": own.positives,
            "negatives": own.negatives,
        }
    if ask.sees_rows:
        _add_exact(table, ask.each("scores", *at))
    judged = {
        name: own for name, own in table.items() if min(own["positives"], own["negatives"]) >= LEAST
    }
    found: Measures = {key: _mean(own[key] for own in judged.values()) for key in MEANS}
    positives = [own["positives"] for own in judged.values()]
    worst = min(judged, key=lambda name: judged[name]["auc"], default=None)
    found |= {
        "auc_by_positives": _mean((own["auc"] for own in judged.values()), positives),
        "labels": table,
        "labels_too_small": [name for name in table if name not in judged],
        "worst_label": worst,
        "worst_label_auc": None if worst is None else judged[worst]["auc"],
    }
    return found | (_of_sites(ask, at) if ask.tells_each else {})


def _add_exact(table: dict[str, dict[str, Any]], replies: Sequence[Vectors]) -> None:
    """The measures of all rows, where they can be seen."""
    scores = torch.cat([r[0] for r in replies]).cpu().double().numpy()
    marks = torch.cat([r[1] for r in replies]).cpu().numpy()
    for label, own in enumerate(table.values()):
        known = marks[:, label] >= 0
        pairs = scores[known, label], marks[known, label] > 0
        if known.any() and (exact := auc(*pairs)) is not None:
            own["auc"], own["auprc"] = exact, auprc(*pairs)


def _of_sites(ask: Query, at: Vectors) -> Measures:
    sites = {
        name: _mean(float(own[0]) for own in reply if float(own[1:].min()) >= LEAST)
        for name, reply in zip(ask.names, ask.each("ranking", *at), strict=True)
    }
    known = {name: value for name, value in sites.items() if value is not None}
    worst = min(known, key=known.__getitem__, default=None)
    return {
        "sites": sites,
        "worst_site": worst,
        "worst_site_auc": None if worst is None else known[worst],
        "sites_too_small": [name for name in sites if name not in known],
    }


def _mean(values: Any, weights: Sequence[float] | None = None) -> float | None:
    """The mean of some numbers; None of none."""
    values = list(values)
    return float(np.average(values, weights=weights)) if values else None
