"""The three methods of the table, each with the loop that one would write for it, and with the best
that one can write."""

from __future__ import annotations

from typing import NamedTuple

from bench.by_hand import (
    AdaFGDALoop,
    CodascaLoop,
    Loop,
    MergedCodascaLoop,
    SGDALoop,
)
from fedminimax.algorithms.ada_fgda import AdaFGDA
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.types import Algorithm

STEPS, BATCH = 4, 32


class Method(NamedTuple):
    name: str
    algorithm: Algorithm
    plain: type[Loop]
    best: type[Loop]
    gradients: int = 1  # of a client in a step


METHODS = (
    Method("local_sgda", LocalSGDA(local_steps=STEPS), SGDALoop, SGDALoop),
    Method(
        "codasca",
        Codasca(local_steps=STEPS, stage_rounds=10**6),
        CodascaLoop,
        MergedCodascaLoop,
    ),
    Method("ada_fgda", AdaFGDA(local_steps=STEPS), AdaFGDALoop, AdaFGDALoop, gradients=2),
)
