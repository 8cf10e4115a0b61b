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
from fedminimax.problems.binary import BinaryProblem

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
    on tables and ranks two classes, or several labels, and kept validation rows of both classes."""
    schema, problem = built.about.get("schema"), built.problem
    labels = getattr(problem, "labels", ())
    if schema is None or "validation" not in built.clients.splits:
        return
    if schema["classes"] and not labels:
        return
    if Path(folder, CALIBRATION).exists():
        return  # a finished run that was resumed
    shards = built.clients.splits["validation"]
    rows = [shards.batch(number) for number in range(len(built.clients))]
    least = getattr(problem, "least_per_bin", 0)
    found: dict[str, Any] = {}
    for name in ("last", "best") if run.best is not None else ("last",):
        outputs = [outputs_of(run, batch.features, name == "best").numpy() for batch in rows]
        if not isinstance(problem, BinaryProblem) or not labels:
            held = zip(outputs, [batch.labels.numpy() for batch in rows], strict=True)
            found[name] = _calibrated(list(held), least)
            continue
        marks = [problem.marks(batch).numpy() for batch in rows]
        each: dict[str, Any] = {}
        for place, label in enumerate(labels):
            known = [own[:, place] >= 0 for own in marks]
            held = [
                (scores[there, place], own[there, place])
                for scores, own, there in zip(outputs, marks, known, strict=True)
                if there.any()
            ]
            each[label] = _calibrated(held, least)
        found[name] = {"labels": each}
    if all(one is not None for one in found.values()):
        RunFolder(folder).write_json(CALIBRATION, found)


def _calibrated(held: list[tuple[np.ndarray, np.ndarray]], least: int) -> dict[str, Any] | None:
    """The calibration by each site's scores and labels; None without rows of both classes."""
    if not held or len(np.unique(np.concatenate([labels for _, labels in held]))) < 2:
        return None

    def ask(question: str, *arrays: np.ndarray) -> np.ndarray:
        return np.sum([maps.answer(question, *h, *arrays, least=least) for h in held], axis=0)

    counts = maps.federated_counts(ask, least)
    return {
        "platt": maps.federated_platt(ask).to_json(),
        "edges": counts.edges.tolist(),
        "counts": counts.counts.tolist(),
        "withheld": list(counts.withheld),
    }


def calibration_of(folder: str | os.PathLike, best: bool, label: str = "") -> Calibration | None:
    """What `save_calibration` wrote, of one of several labels if named; None of a run that has
    none, as one between sites."""
    if not Path(folder, CALIBRATION).exists():
        return None
    held = RunFolder(folder).read_json(CALIBRATION).get("best" if best else "last")
    if held is not None and "labels" in held:
        held = held["labels"].get(label)
    if held is None:
        return None
    platt = maps.from_json(held["platt"])
    assert isinstance(platt, maps.Platt)
    counts = np.array(held["counts"], np.float64)
    return Calibration(platt, Histogram(np.array(held["edges"]), counts, tuple(held["withheld"])))
