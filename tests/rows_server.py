"""The rows of the methods with a step or an exchange of their own at the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rows import (
    EXACT,
    STALLS,
    Row,
    auc,
    labelled,
    linear_auc,
    margin_auc,
    noisy_by_size,
    robust_least_squares,
)

from fedminimax.algorithms.cdma import CDMAADA, CDMANC, CDMAONE
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDA, FedNormSGDAPlus
from fedminimax.algorithms.fednest import FedNest
from fedminimax.algorithms.fess_gda import FESSGDA
from fedminimax.algorithms.fsgda import FSGDA
from fedminimax.algorithms.sagda import SAGDA
from fedminimax.algorithms.smoothed_gda import SmoothedAGDA, SmoothedGDA
from fedminimax.blocks.schedules import InverseRoot, StepDecay
from fedminimax.types import Algorithm

LOCAL: dict[str, Any] = {"primal_lr": 0.1, "dual_lr": 0.2, "local_steps": 3}
SERVER: dict[str, Any] = {**LOCAL, "primal_server_lr": 1.3, "dual_server_lr": 0.9}
NORM: dict[str, Any] = {**LOCAL, "primal_server_lr": 0.12, "dual_server_lr": 0.15}
SETS: dict[str, Any] = {"primal_lr": 0.2, "dual_lr": 0.2, "local_steps": 3}
FALLING = InverseRoot(0.1, unit="round")
NEST: dict[str, Any] = {
    "primal_lr": 0.3,
    "dual_lr": 0.4,
    "local_steps": 3,
    "inner_steps": 2,
    "inner_rounds": 2,
}
ONE: dict[str, Any] = {"primal_lr": 0.1, "dual_lr": 0.1}
DRIFT: dict[str, Any] = {"primal_lr": 0.04, "dual_lr": 0.04, "local_steps": 8}
NORM_DRIFT: dict[str, Any] = {**DRIFT, "primal_server_lr": 0.04, "dual_server_lr": 0.04}
SINGLE: dict[str, Any] = {"primal_lr": 0.1, "dual_lr": 0.3, "local_steps": 1}

# fmt: off
ROWS = (
    Row("fess", FESSGDA(**SERVER, smoothing=0.5, anchor_rate=0.3)),
    Row("fess-sets", FESSGDA(**SETS, dual_server_lr=2.5, dual_proximal=0.4), robust_least_squares,
        labelled),
    Row("fess-auc", FESSGDA(StepDecay(0.3, at=(1, 3)), 0.1, 2, 1.2, anchor_rate=FALLING), auc,
        labelled),
    Row("fess-far", FESSGDA(**DRIFT, smoothing=1.0, anchor_rate=0.5), **STALLS),
    Row("fess-far-1", FESSGDA(**SINGLE, smoothing=2.0, anchor_rate=0.5), **EXACT),
    Row("smoothed", SmoothedGDA(0.5, FALLING, **ONE)),
    Row("smoothed-far", SmoothedGDA(2.0, 0.5, primal_lr=0.1, dual_lr=0.3), **EXACT),
    Row("smoothed-a", SmoothedAGDA(**ONE, smoothing=0.5)),
    Row("smoothed-a-same", SmoothedAGDA(**ONE, second_batch=False), margin_auc, labelled),
    Row("smoothed-a-far", SmoothedAGDA(2.0, 0.5, primal_lr=0.1, dual_lr=0.3), **EXACT),
    Row("fsgda", FSGDA(**SERVER)),
    Row("fsgda-auc", FSGDA(FALLING, 0.1, 2, 1.5, FALLING), auc, labelled),
    Row("fsgda-far", FSGDA(**DRIFT, dual_server_lr=1.2), **STALLS),
    Row("fsgda-far-1", FSGDA(**SINGLE), **EXACT),
    Row("sagda", SAGDA(**SERVER)),
    Row("sagda-sets", SAGDA(**SETS, dual_server_lr=2.5), robust_least_squares, labelled),
    Row("sagda-far", SAGDA(**DRIFT), **EXACT),
    Row("fed-norm", FedNormSGDA(**NORM, client_steps=(1, 4, 2, 3, 1))),
    Row("fed-norm-turns", FedNormSGDA(**NORM, least_steps=1), clients=noisy_by_size),
    # What a client's last steps lack of its first is larger, the more steps it takes.
    Row("fed-norm-far", FedNormSGDA(**NORM_DRIFT, client_steps=(2, 4, 6, 8, 10) * 2),
        **{**STALLS, "distance": (1e-2, 1.0)}),
    Row("fed-norm+", FedNormSGDAPlus(**NORM, client_steps=(1, 4, 2, 3, 1), snapshot_rounds=2)),
    Row("fed-norm+-sets", FedNormSGDAPlus(**SETS, snapshot_rounds=2, least_steps=1),
        robust_least_squares, labelled),
    Row("fed-norm+-far", FedNormSGDAPlus(**NORM_DRIFT, snapshot_rounds=2), **STALLS),
    Row("cdma-nc", CDMANC(**LOCAL)),
    Row("cdma-nc-far", CDMANC(**DRIFT), **STALLS),
    # Where curvature is the same in all rows, the batches cancel: these need another problem.
    Row("cdma-one", CDMAONE(**LOCAL), auc, labelled),
    Row("cdma-one-sets", CDMAONE(**SETS), robust_least_squares, labelled),
    Row("cdma-one-far", CDMAONE(**DRIFT), **EXACT),
    Row("cdma-ada", CDMAADA(), linear_auc, labelled),
    Row("cdma-ada-sets", CDMAADA(**SETS, momentum_rate=0.3), robust_least_squares, labelled),
    Row("cdma-ada-far", CDMAADA(**DRIFT, momentum_rate=0.3), **EXACT),
    Row("fednest", FedNest(**NEST), linear_auc, labelled),
    Row("fednest-sets", FedNest(**NEST, control_data="minibatch"), robust_least_squares,
        labelled),
    Row("fednest-far", FedNest(0.15, 0.9, 8, inner_rounds=2), **{**EXACT, "rounds": 20}),
)
# fmt: on

# Floats per client and round, up and down, by the lengths of x and y.
FLOATS: dict[type[Algorithm], Callable[[int, int], tuple[int, int]]] = {
    FESSGDA: lambda x, y: (x + y, x + y),
    SmoothedGDA: lambda x, y: (x + y, x + y),
    SmoothedAGDA: lambda x, y: (x + y, 2 * x + y),
    FSGDA: lambda x, y: (x + y, x + y),
    SAGDA: lambda x, y: (2 * (x + y), 2 * (x + y)),
    FedNormSGDA: lambda x, y: (x + y + 1, x + y),
    FedNormSGDAPlus: lambda x, y: (x + y + 1, 2 * x + y),
    CDMANC: lambda x, y: (x + y, x + y),
    CDMAONE: lambda x, y: (2 * (x + y), 2 * (x + y)),
    CDMAADA: lambda x, y: (2 * (x + y), 3 * (x + y)),
    FedNest: lambda x, y: (2 * x + 4 * y, 2 * x + 5 * y),  # of two inner rounds, as in all rows
}


def extra_floats(row: Row, round: int) -> tuple[int, int]:
    """What a round sends beside FLOATS: less, when a snapshot or a previous point is not needed."""
    x, y = (v.numel() for v in row.problem().start())
    method = row.algorithm
    if isinstance(method, FedNormSGDAPlus) and round % method.snapshot_rounds == 0:
        return 0, -x
    if isinstance(method, CDMAADA) and round == 0:
        return 0, -(x + y)
    return 0, 0
