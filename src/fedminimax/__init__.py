"""Federated optimisation of objectives that are not plain averages."""

from __future__ import annotations

__version__ = "0.1.0"

import fedminimax.engine.waiting  # noqa: F401  before torch is imported
from fedminimax.algorithms.ada_fgda import AdaFGDA
from fedminimax.algorithms.afl import AFL
from fedminimax.algorithms.cdma import CDMAADA, CDMANC, CDMAONE
from fedminimax.algorithms.coda import Coda
from fedminimax.algorithms.coda_plus import CodaPlus
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.drfa import DRFA
from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.fed_dr_scgda import FedDRSCGDA
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDA, FedNormSGDAPlus
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.fednest import FedNest
from fedminimax.algorithms.fedprox import FedProx
from fedminimax.algorithms.fedsgda_m import FedSGDAM
from fedminimax.algorithms.fedsgda_plus import FedSGDAPlus
from fedminimax.algorithms.fess_gda import FESSGDA
from fedminimax.algorithms.fgda import FGDA
from fedminimax.algorithms.fsgda import FSGDA
from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.algorithms.local_scgdm import LocalSCGDM
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.local_sgda_plus import LocalSGDAPlus
from fedminimax.algorithms.local_sgdam import LocalSGDAM
from fedminimax.algorithms.local_sgdam_plus import LocalSGDAMPlus
from fedminimax.algorithms.local_sgdm import LocalSGDM
from fedminimax.algorithms.local_sgdm_rl import LocalSGDMRL
from fedminimax.algorithms.nlasg import NLASG
from fedminimax.algorithms.npa import NPA
from fedminimax.algorithms.sagda import SAGDA
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.algorithms.scsc import SCSC
from fedminimax.algorithms.smoothed_gda import SmoothedAGDA, SmoothedGDA
from fedminimax.algorithms.smvr import SMVR
from fedminimax.blocks.projections import ball, nonnegative, simplex
from fedminimax.blocks.schedules import Constant, InverseRoot, Stagewise, StepDecay
from fedminimax.data.clients import Clients, Ranges
from fedminimax.engine.simulate import Run, simulate
from fedminimax.estimator import FederatedClassifier
from fedminimax.experiment import load, resume
from fedminimax.messages import (
    CentredClipping,
    Clip,
    Median,
    Messages,
    Reducer,
    Stage,
    TrimmedMean,
)
from fedminimax.problems.auc import AUC
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.fair import Fair
from fedminimax.problems.functions import Composition, Minimax
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
from fedminimax.types import Algorithm, Batch, Clock, Phase, Point, Problem

__all__ = [
    "AFL",
    "AUC",
    "CDMAADA",
    "CDMANC",
    "CDMAONE",
    "DRFA",
    "FESSGDA",
    "FGDA",
    "FSGDA",
    "MAML",
    "NLASG",
    "NPA",
    "PLPL",
    "SAGDA",
    "SCSC",
    "SMVR",
    "WGAN",
    "AdaFGDA",
    "Algorithm",
    "Batch",
    "CentredClipping",
    "Clients",
    "Clip",
    "Clock",
    "Coda",
    "CodaPlus",
    "Codasca",
    "Composition",
    "CompositionalAUC",
    "Constant",
    "CrossEntropy",
    "Fair",
    "FedAvg",
    "FedDRSCGD",
    "FedDRSCGDA",
    "FedNest",
    "FedNormSGDA",
    "FedNormSGDAPlus",
    "FedProx",
    "FedSGDAM",
    "FedSGDAPlus",
    "FederatedClassifier",
    "GroupDRO",
    "ImageGAN",
    "InverseRoot",
    "Levels",
    "LocalSCGDAM",
    "LocalSCGDM",
    "LocalSGDA",
    "LocalSGDAM",
    "LocalSGDAMPlus",
    "LocalSGDAPlus",
    "LocalSGDM",
    "LocalSGDMRL",
    "Median",
    "Messages",
    "Minimax",
    "Phase",
    "Point",
    "Portfolio",
    "Problem",
    "Quadratic",
    "Ranges",
    "RatioLoss",
    "Reducer",
    "Robust",
    "Run",
    "Scaffold",
    "SmoothedAGDA",
    "SmoothedGDA",
    "Stage",
    "Stagewise",
    "StepDecay",
    "TrimmedMean",
    "WeightedCrossEntropy",
    "ball",
    "load",
    "nonnegative",
    "resume",
    "simplex",
    "simulate",
]
