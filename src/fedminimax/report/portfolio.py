"""`fedminimax frontier`: finished portfolio runs against the efficient frontier of their own data.

Everything is computed again from the run's last point and its training rows, in double precision:
Phi, and at the weights divided by their sum the return, the deviation and the ratio; the closed
forms are those of `problems/portfolio.py`, on the mean and covariance of the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedminimax.engine.query import LocalQuery
from fedminimax.engine.trainer import succeeded
from fedminimax.experiment import build, experiment_of, load
from fedminimax.problems.portfolio import (
    IRREGULAR,
    Moments,
    Portfolio,
    frontier,
    least_variance,
    regular,
    tangency,
)
from fedminimax.report.figures import drawing, save
from fedminimax.types import Point

HEADINGS = ("run", "method", "Phi", "return", "deviation", "ratio", "least deviation")
MARKERS = ("o", "s", "^", "v", "D", "P", "X")


class Placed(NamedTuple):
    """Weights in the plane of deviation and return; None where it is not defined."""

    name: str
    method: str
    loss: float | None
    mean: float | None
    deviation: float | None
    least: float | None  # the least deviation that has this return

    @property
    def ratio(self) -> float | None:
        return self.mean / self.deviation if self.mean is not None and self.deviation else None


class Sample(NamedTuple):
    """The runs on one set of returns, and the frontier's own points."""

    moments: Moments
    runs: list[Placed]
    marks: list[Placed]


def placed(folders: Sequence[Path]) -> list[Sample]:
    """The runs of these folders, those on the same returns together."""
    samples: list[Sample] = []
    for folder in folders:
        moments, run = _placed(folder)
        for sample in samples:
            if all(torch.equal(a, b) for a, b in zip(sample.moments, moments, strict=True)):
                sample.runs.append(run)
                break
        else:
            samples.append(Sample(moments, [run], _marks(moments)))
    return samples


def page(samples: Sequence[Sample], figure: str | None = None) -> str:
    """A table for each set of returns, as Markdown."""
    lines = [
        "# Portfolios and the efficient frontier",
        "",
        "Phi at the run's last weights; the other measures at these weights divided by their sum. "
        "Least deviation: that of the frontier, in closed form, at the same return and on the mean "
        "and covariance of the same rows; its weights may be below 0.",
    ]
    for sample in samples:
        lines += ["", f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
        for p in (*sample.runs, *sample.marks):
            numbers = (p.loss, p.mean, p.deviation, p.ratio, p.least)
            lines.append(f"| {' | '.join((p.name, p.method, *map(_text, numbers)))} |")
        if not sample.marks:
            lines += ["", f"There is no frontier: {IRREGULAR}."]
    if figure is not None:
        lines += ["", f"![return against deviation]({figure})"]
    return "\n".join(lines) + "\n"


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Return against deviation: a panel for each set of returns, with its frontier."""
    with drawing("leave --output out"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6 * len(samples), 4), layout="constrained")
        axes = figure.subplots(1, len(samples), squeeze=False)[0]
        for axis, sample in zip(axes, samples, strict=True):
            _draw(axis, sample)
        save(figure, path)


def _draw(axis: Any, sample: Sample) -> None:
    if sample.marks:
        targets = _targets(sample)
        axis.plot(frontier(*sample.moments, targets).deviation, targets, "-", label="frontier")
    for points, filled in ((sample.runs, True), (sample.marks, False)):
        for marker, point in zip(itertools.cycle(MARKERS), points, strict=False):
            if point.mean is not None:
                face = {} if filled else {"markerfacecolor": "none", "color": "black"}
                axis.plot([point.deviation], [point.mean], marker, label=point.name, **face)
    axis.set_xlabel("deviation")
    axis.set_ylabel("return")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def _targets(sample: Sample) -> Tensor:
    """Returns around all points, so that both branches of the frontier are seen."""
    means = [p.mean for p in (*sample.runs, *sample.marks) if p.mean is not None]
    vertex = sample.marks[0].mean
    assert vertex is not None
    reach = 1.2 * max(max(abs(mean - vertex) for mean in means), 0.1 * abs(vertex))
    return torch.linspace(vertex - reach, vertex + reach, 201, dtype=torch.float64)


def _placed(folder: Path) -> tuple[Moments, Placed]:
    experiment = experiment_of(folder)
    if experiment.problem.name != "portfolio":
        raise ValueError(
            f"the run in {folder} is on the problem {experiment.problem.name!r}, which has no "
            "efficient frontier: give runs on portfolio"
        )
    run = load(folder)
    if not succeeded(run.outcome):
        raise ValueError(f"the run in {folder} did not finish ({run.outcome}): leave it out")
    built = build(experiment)
    clients, problem = built.clients.to(torch.float64), built.problem
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    problem = problem.prepare(LocalQuery(problem, clients, "train", weights))
    assert isinstance(problem, Portfolio)
    ask = LocalQuery(problem, clients, "train", weights)
    found = problem.evaluate(Point(run.point.x.double(), run.point.y.double()), ask)
    place = (found["loss"], found.get("return"), found.get("deviation"))
    moments = problem.return_moments(ask)
    return moments, Placed(str(folder), experiment.method.name, *place, _least(moments, place[1]))


def _marks(moments: Moments) -> list[Placed]:
    if not regular(moments):
        return []
    named = {
        "least variance": least_variance(*moments),
        "tangency (largest ratio)": tangency(*moments),
    }
    marks = []
    for name, w in named.items():
        if w is not None:
            mean, deviation = float(w @ moments.mean), float((w @ moments.covariance @ w).sqrt())
            marks.append(Placed(name, "-", None, mean, deviation, _least(moments, mean)))
    return marks


def _least(moments: Moments, mean: float | None) -> float | None:
    if mean is None or not regular(moments):
        return None
    target = torch.tensor([mean], dtype=torch.float64)
    return float(frontier(*moments, target).deviation)


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.5g}"
