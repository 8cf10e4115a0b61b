"""The problems: in Python by class (`fm.problems.Fair`), in files by the names in `PROBLEMS`."""

from __future__ import annotations

from fedminimax.problems.auc import AUC as AUC
from fedminimax.problems.auto import Auto as Auto
from fedminimax.problems.compositional_auc import CompositionalAUC as CompositionalAUC
from fedminimax.problems.cross_entropy import CrossEntropy as CrossEntropy
from fedminimax.problems.fair import Fair as Fair
from fedminimax.problems.functions import Composition as Composition
from fedminimax.problems.functions import Minimax as Minimax
from fedminimax.problems.image_gan import ImageGAN as ImageGAN
from fedminimax.problems.levels import Levels as Levels
from fedminimax.problems.maml import MAML as MAML
from fedminimax.problems.pl_pl import PLPL as PLPL
from fedminimax.problems.portfolio import Portfolio as Portfolio
from fedminimax.problems.quadratic import Quadratic as Quadratic
from fedminimax.problems.ratio_loss import RatioLoss as RatioLoss
from fedminimax.problems.robust import Robust as Robust
from fedminimax.problems.weighted_cross_entropy import WeightedCrossEntropy as WeightedCrossEntropy
from fedminimax.problems.wgan import WGAN as WGAN
from fedminimax.problems.worst_site import WorstSite as WorstSite
from fedminimax.types import Problem

PROBLEMS: dict[str, type[Problem]] = {
    "auc": AUC,
    "auto": Auto,
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
    "worst_site": WorstSite,
}
