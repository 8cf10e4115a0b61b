"""The objectives, by the name that an experiment gives them."""

from __future__ import annotations

from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.quadratic import Quadratic
from fedminimax.types import Problem

PROBLEMS: dict[str, type[Problem]] = {
    "auc": AUC,
    "cross_entropy": CrossEntropy,
    "quadratic": Quadratic,
}
