"""Federated optimisation of objectives that are not plain averages."""

from __future__ import annotations

__version__ = "0.1.0"

from fedminimax.algorithms.coda import Coda
from fedminimax.algorithms.coda_plus import CodaPlus
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.npa import NPA
from fedminimax.blocks.projections import ball, nonnegative, simplex
from fedminimax.blocks.schedules import Constant, InverseRoot, Stagewise, StepDecay
from fedminimax.data.clients import Clients
from fedminimax.engine.simulate import Run, simulate
from fedminimax.experiment import load, resume
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.functions import Composition, Minimax
from fedminimax.problems.quadratic import Quadratic
from fedminimax.types import Algorithm, Batch, Clock, Phase, Point, Problem

__all__ = [
    "AUC",
    "NPA",
    "Algorithm",
    "Batch",
    "Clients",
    "Clock",
    "Coda",
    "CodaPlus",
    "Codasca",
    "Composition",
    "Constant",
    "CrossEntropy",
    "FedAvg",
    "InverseRoot",
    "LocalSGDA",
    "Minimax",
    "Phase",
    "Point",
    "Problem",
    "Quadratic",
    "Run",
    "Stagewise",
    "StepDecay",
    "ball",
    "load",
    "nonnegative",
    "resume",
    "simplex",
    "simulate",
]
