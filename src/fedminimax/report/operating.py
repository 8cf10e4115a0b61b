"""From a run's scores to probabilities and classes, by what its validation rows say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedminimax.engine.simulate import Run
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import Built, outputs_of
from fedminimax.metrics import calibration as maps
from fedminimax.metrics.federated_auc import Histogram

CALIBRATION = "calibration.json"


class Calibration(NamedTuple):
    """Platt's map of a model's outputs, and the counts that tell the rates at each of them."""

    platt: maps.Platt
    counts: Histogram

    def score_at(self, wanted: str, value: float) -> float:
        """The output above which a row counts as positive: where the probability is `value`, or
        the sensitivity or specificity on the validation rows is at least that."""
        if wanted == "probability":
            return self.platt.score_at(value)
        return maps.operating_point(self.counts, wanted, value).score


def save_calibration(run: Run, built: Built, folder: str | os.PathLike) -> None:
    """Writes the calibration of the last and of the best model beside them, where a run was trained
    on tables with two classes and kept validation rows of both."""
    schema = built.about.get("schema")
    if schema is None or schema["classes"] or "validation" not in built.clients.splits:
        return
    if Path(folder, CALIBRATION).exists():
        return  # a finished run that was resumed
    shards = built.clients.splits["validation"]
    rows = [shards.rows(number) for number in range(len(built.clients))]
    if len(np.unique(np.concatenate([row[1].numpy() for row in rows]))) < 2:
        return
    least = getattr(built.problem, "least_per_bin", 0)
    found: dict[str, Any] = {}
    for name in ("last", "best") if run.best is not None else ("last",):
        held = [(outputs_of(run, row[0], name == "best").numpy(), row[1].numpy()) for row in rows]

        def ask(question: str, *arrays: np.ndarray, held: Any = held) -> np.ndarray:
            return np.sum([maps.answer(question, *h, *arrays, least=least) for h in held], axis=0)

        counts = maps.federated_counts(ask, least)
        found[name] = {
            "platt": maps.federated_platt(ask).to_json(),
            "edges": counts.edges.tolist(),
            "counts": counts.counts.tolist(),
            "withheld": list(counts.withheld),
        }
    RunFolder(folder).write_json(CALIBRATION, found)


def calibration_of(folder: str | os.PathLike, best: bool) -> Calibration | None:
    """What `save_calibration` wrote; None of a run that has none, as one between sites."""
    if not Path(folder, CALIBRATION).exists():
        return None
    held = RunFolder(folder).read_json(CALIBRATION).get("best" if best else "last")
    if held is None:
        return None
    platt = maps.from_json(held["platt"])
    assert isinstance(platt, maps.Platt)
    counts = np.array(held["counts"], np.float64)
    return Calibration(platt, Histogram(np.array(held["edges"]), counts, tuple(held["withheld"])))
