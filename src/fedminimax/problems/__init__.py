"""The objectives, by the name that an experiment gives them.

Those that need more than one module or several outputs (Fair, GroupDRO, ImageGAN, Robust) are made
from Python.
"""

from __future__ import annotations

from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.pl_pl import PLPL
from fedminimax.problems.quadratic import Quadratic
from fedminimax.problems.ratio_loss import RatioLoss
from fedminimax.problems.wgan import WGAN
from fedminimax.types import Problem

PROBLEMS: dict[str, type[Problem]] = {
    "auc": AUC,
    "cross_entropy": CrossEntropy,
    "pl_pl": PLPL,
    "quadratic": Quadratic,
    "ratio_loss": RatioLoss,
    "wgan": WGAN,
}
