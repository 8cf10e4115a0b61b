"""The objectives, by the name that an experiment gives them."""

from __future__ import annotations

from fedminimax.problems.auc import AUC
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.fair import Fair
from fedminimax.problems.group_dro import GroupDRO
from fedminimax.problems.image_gan import ImageGAN
from fedminimax.problems.levels import Levels
from fedminimax.problems.maml import MAML
from fedminimax.problems.pl_pl import PLPL
from fedminimax.problems.portfolio import Portfolio
from fedminimax.problems.quadratic import Quadratic
from fedminimax.problems.ratio_loss import RatioLoss
from fedminimax.problems.robust import Robust
from fedminimax.problems.weighted_cross_entropy import WeightedCrossEntropy
from fedminimax.problems.wgan import WGAN
from fedminimax.types import Problem

PROBLEMS: dict[str, type[Problem]] = {
    "auc": AUC,
    "compositional_auc": CompositionalAUC,
    "cross_entropy": CrossEntropy,
    "fair": Fair,
    "image_gan": ImageGAN,
    "levels": Levels,
    "maml": MAML,
    "pl_pl": PLPL,
    "portfolio": Portfolio,
    "quadratic": Quadratic,
    "ratio_loss": RatioLoss,
    "robust": Robust,
    "weighted_cross_entropy": WeightedCrossEntropy,
    "wgan": WGAN,
    "worst_site": GroupDRO,
}
