"""The rows of the minimisation baselines and of the methods that weigh clients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from rows import (
    SIZES,
    Row,
    cross_entropy,
    labelled,
    labelled_by_size,
    labelled_rows,
    least_squares,
    seeded,
)
from rows import _squares as squares
from torch import nn

from fedminimax.algorithms.afl import AFL
from fedminimax.algorithms.drfa import DRFA
from fedminimax.algorithms.fedprox import FedProx
from fedminimax.algorithms.local_sgdm import LocalSGDM
from fedminimax.algorithms.local_sgdm_rl import LocalSGDMRL
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.blocks.projections import ball
from fedminimax.blocks.schedules import InverseRoot, StepDecay
from fedminimax.data.clients import Clients
from fedminimax.problems.functions import Minimax
from fedminimax.problems.weighted_cross_entropy import WeightedCrossEntropy
from fedminimax.random import generator
from fedminimax.types import Algorithm


def least_squares_in_a_ball() -> Minimax:
    """An x that wants to leave its ball: the projection binds."""
    return Minimax(squares, torch.zeros(3), project_x=ball(0.05))


def labelled_evenly() -> Clients:
    """DRFA's cohort differs from round to round; a graph needs batches of one shape all the same,
    so no client may be short of rows."""
    return Clients(labelled_rows((7, 9, 12, 5, 6)), batch_size=4)


CLASSES = 3


def class_rows(size: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of three classes, of which the third is rare."""
    labels = (np.arange(size) % 5 % CLASSES).astype(np.float64)
    features = generator(number, "classes").standard_normal((size, 3)) + 0.2 * number
    features[:, 0] += labels
    return features, labels


def classes() -> Clients:
    """The server holds four rows of each class."""
    own, _ = class_rows(4 * CLASSES, 9)
    auxiliary = (own, np.repeat(np.arange(float(CLASSES)), 4))
    rows = [class_rows(size, number) for number, size in enumerate((7, 5, 12, 4, 6))]
    return Clients(rows, batch_size=4, auxiliary=auxiliary)


def class_weighted() -> WeightedCrossEntropy:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES))

    return WeightedCrossEntropy(seeded(layers), CLASSES)


def class_weighted_linear() -> WeightedCrossEntropy:
    return WeightedCrossEntropy(seeded(lambda: nn.Linear(3, CLASSES, bias=False)), CLASSES)


# fmt: off
ROWS = (
    Row("sgdm", LocalSGDM(0.1, 0.9, local_steps=3), cross_entropy, labelled),
    Row("sgdm-size", LocalSGDM(0.1, 0.1, local_steps=2), cross_entropy, labelled_by_size),
    Row("sgdm-schedule", LocalSGDM(StepDecay(0.1, at=(1, 3)), 0.5, 3), least_squares, labelled),
    Row("sgdm-sets", LocalSGDM(0.1, 0.5, 3), least_squares_in_a_ball, labelled),
    Row("sgdm-rl", LocalSGDMRL(0.1, 0.5, 3, slope=0.3), class_weighted, classes),
    Row("sgdm-rl-schedule", LocalSGDMRL(StepDecay(0.2, at=(1, 3)), auxiliary_steps=1),
        class_weighted_linear, classes),
    Row("scaffold", Scaffold(0.1, 1.0, local_steps=3), cross_entropy, labelled),
    Row("scaffold-size", Scaffold(0.1, 1.3, local_steps=3), cross_entropy, labelled_by_size),
    Row("scaffold-schedule", Scaffold(InverseRoot(0.05), local_steps=3), least_squares, labelled),
    Row("scaffold-sets", Scaffold(0.05, 2.5, 3), least_squares_in_a_ball, labelled),
    Row("scaffold-I", Scaffold(0.1, 1.0, 3, option="I"), cross_entropy, labelled),
    Row("scaffold-I-size", Scaffold(0.05, 0.9, 2, option="I"), least_squares, labelled_by_size),
    Row("fedprox", FedProx(0.1, local_steps=3, proximal=0.5), cross_entropy, labelled),
    Row("fedprox-size", FedProx(0.1, 2, proximal=2.0), least_squares, labelled_by_size),
    Row("fedprox-sets", FedProx(0.1, 3, proximal=0.1), least_squares_in_a_ball, labelled),
    Row("drfa", DRFA(0.1, 0.05, local_steps=3), cross_entropy, labelled_evenly),
    Row("drfa-schedule", DRFA(InverseRoot(0.05), StepDecay(0.1, at=(2,)), 2), least_squares,
        labelled_evenly),
    Row("drfa-sets", DRFA(0.1, 0.5, local_steps=3), least_squares_in_a_ball, labelled_evenly),
    Row("afl", AFL(0.1, 0.1), cross_entropy, labelled),
    Row("afl-last", AFL(InverseRoot(0.05), 0.3, output="last"), least_squares, labelled),
    Row("afl-sets", AFL(0.1, 0.3), least_squares_in_a_ball, labelled),
)
# fmt: on

FLOATS: dict[type[Algorithm], Callable[[int, int], tuple[int, int]]] = {
    LocalSGDM: lambda x, y: (2 * x, 2 * x),
    # and, once a round, the server with itself: extra_floats
    LocalSGDMRL: lambda x, y: (2 * x, 2 * x + y),
    Scaffold: lambda x, y: (2 * x, 2 * x),
    FedProx: lambda x, y: (x, x),
    DRFA: lambda x, y: (2 * x + len(SIZES), 2 * x),
    AFL: lambda x, y: (x + len(SIZES), x + len(SIZES)),
}


def extra_floats(row: Row, round: int) -> tuple[float, float]:
    """What the server sends to and hears from its own rows, as a share of each client."""
    if not isinstance(row.algorithm, LocalSGDMRL):
        return 0, 0
    x, y = (v.numel() for v in row.problem().start())
    return y / len(SIZES), (x + y) / len(SIZES)
