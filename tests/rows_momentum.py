"""Rows of the methods with momentum, STORM estimates or a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rows import (
    Row,
    auc,
    labelled,
    margin_auc,
    noise_free,
    noisy_by_size,
    noisy_whole,
    robust_least_squares,
    wide_quadratic,
)

from fedminimax.algorithms.ada_fgda import AdaFGDA
from fedminimax.algorithms.fedsgda_m import FedSGDAM
from fedminimax.algorithms.fedsgda_plus import FedSGDAPlus
from fedminimax.algorithms.fgda import FGDA
from fedminimax.algorithms.local_sgda_plus import LocalSGDAPlus
from fedminimax.algorithms.local_sgdam import LocalSGDAM
from fedminimax.algorithms.local_sgdam_plus import LocalSGDAMPlus
from fedminimax.blocks.schedules import InverseRoot, StepDecay
from fedminimax.types import Algorithm

MOMENTUM: dict[str, Any] = {
    "lr": 0.3,
    "primal_lr": 0.4,
    "dual_lr": 0.6,
    "primal_rate": 1.5,
    "dual_rate": 2.0,
}
STORM: dict[str, Any] = {
    "primal_lr": 0.1,
    "dual_lr": 0.2,
    "primal_rate": 0.3,
    "dual_rate": 0.6,
    "local_steps": 3,
}
ADA: dict[str, Any] = {**STORM, "lr": 0.3}
# eta_t = n K^(1/3) / (m + t)^(1/3) and c eta_t^2 with n = 1, K = 5 clients, m = 7, c = 0.9
THEORY: dict[str, Any] = {
    **STORM,
    "lr": InverseRoot(5 ** (1 / 3), shift=8, power=1 / 3),
    "primal_rate": InverseRoot(0.9 * 5 ** (2 / 3), shift=8, power=2 / 3),
    "dual_rate": InverseRoot(0.9 * 5 ** (2 / 3), shift=8, power=2 / 3),
}
FAR: dict[str, Any] = {"problem": wide_quadratic, "clients": noise_free}
HEAVY: dict[str, Any] = {
    "lr": 0.4,
    "primal_lr": 0.1,
    "dual_lr": 0.125,
    "primal_rate": 2.0,
    "dual_rate": 2.0,
}
SLOW: dict[str, Any] = {"primal_lr": 0.05, "dual_lr": 0.05, "local_steps": 8}
RATES: dict[str, Any] = {"primal_rate": 0.2, "dual_rate": 0.2}
ONE: dict[str, Any] = {**RATES, "primal_lr": 0.05, "dual_lr": 0.2, "local_steps": 1}
STALLS: dict[str, Any] = {**FAR, "rounds": 55, "distance": (1e-3, 1e-1)}
EXACT: dict[str, Any] = {**FAR, "rounds": 150, "distance": (0.0, 1e-10)}

# fmt: off
ROWS = (
    Row("sgda+", LocalSGDAPlus(0.1, 0.2, local_steps=2)),
    Row("sgda+-auc", LocalSGDAPlus(0.3, 0.1, local_steps=3, snapshot_every=6), auc, labelled),
    Row("sgda+-sets", LocalSGDAPlus(0.2, 0.2, 2, 2), robust_least_squares, labelled),
    Row("sgda+-far", LocalSGDAPlus(0.05, 0.05, local_steps=8), **STALLS),
    Row("sgda+-far-1", LocalSGDAPlus(0.05, 0.2, local_steps=1), **EXACT),
    Row("fedsgda+", FedSGDAPlus(0.1, 0.2, 3, server_lr=1.3, snapshot_rounds=2)),
    Row("fedsgda+-auc", FedSGDAPlus(InverseRoot(0.3), 0.1, 2, server_lr=0.9), auc, labelled),
    Row("fedsgda+-sets", FedSGDAPlus(0.4, 0.5, 3, 2.5, 2), robust_least_squares, labelled),
    Row("fedsgda+-far", FedSGDAPlus(0.05, 0.05, 8, server_lr=1.5), **STALLS),
    Row("sgdam", LocalSGDAM(**MOMENTUM, local_steps=3)),
    Row("sgdam-auc", LocalSGDAM(lr=StepDecay(0.3, at=(1, 3)), local_steps=2), auc, labelled),
    Row("sgdam-sets", LocalSGDAM(**MOMENTUM, local_steps=3), robust_least_squares, labelled),
    Row("sgdam-whole", LocalSGDAM(**MOMENTUM, local_steps=3), clients=noisy_whole),
    Row("sgdam-far", LocalSGDAM(**HEAVY, local_steps=8), **STALLS),
    Row("sgdam-far-1", LocalSGDAM(**{**HEAVY, "dual_lr": 0.6}, local_steps=1), **EXACT),
    Row("sgdam+", LocalSGDAMPlus(**MOMENTUM, local_steps=2)),
    Row("sgdam+-size", LocalSGDAMPlus(**MOMENTUM, local_steps=2, snapshot_every=6),
        clients=noisy_by_size),
    Row("sgdam+-margin", LocalSGDAMPlus(**MOMENTUM, local_steps=3), margin_auc, labelled),
    Row("sgdam+-sets", LocalSGDAMPlus(**MOMENTUM, local_steps=2, snapshot_every=2),
        robust_least_squares, labelled),
    Row("sgdam+-far", LocalSGDAMPlus(**HEAVY, local_steps=8), **STALLS),
    Row("fedsgda-m", FedSGDAM(**STORM)),
    Row("fedsgda-m-auc", FedSGDAM(**STORM, first_batches=3), auc, labelled),
    Row("fedsgda-m-sets", FedSGDAM(**STORM), robust_least_squares, labelled),
    Row("fedsgda-m-far", FedSGDAM(**SLOW, **RATES), **STALLS),
    Row("fedsgda-m-far-1", FedSGDAM(**ONE), **EXACT),
    Row("fgda", FGDA(**STORM, lr=0.9)),
    Row("fgda-again", FGDA(**STORM, lr=0.9, sync="reaverage")),
    Row("fgda-literal", FGDA(**STORM, lr=0.9, sync="literal")),
    Row("fgda-auc", FGDA(**THEORY), auc, labelled),
    Row("fgda-auc-literal", FGDA(**THEORY, sync="literal"), auc, labelled),
    Row("fgda-size", FGDA(**THEORY, sync="reaverage"), clients=noisy_by_size),
    Row("fgda-sets", FGDA(**STORM), robust_least_squares, labelled),
    Row("fgda-sets-again", FGDA(**STORM, sync="reaverage"), robust_least_squares, labelled),
    Row("fgda-far", FGDA(**SLOW, **RATES), **STALLS),
    # At this rate its floor is still of that order; how it falls is test_identities_momentum's.
    Row("fgda-far-again", FGDA(**SLOW, **RATES, sync="reaverage"), **STALLS),
    Row("fgda-far-literal", FGDA(**SLOW, **RATES, sync="literal"), **STALLS),
    Row("fgda-far-1", FGDA(**ONE), **EXACT),
    Row("fgda-far-1-again", FGDA(**ONE, sync="reaverage"), **EXACT),
    Row("adafgda", AdaFGDA(**ADA, scale_rate=0.5, scale_floor=0.5)),
    Row("adafgda-again", AdaFGDA(**ADA, sync="reaverage"), clients=noisy_by_size),
    Row("adafgda-belief", AdaFGDA(**ADA, scale="adabelief", sync="reaverage"), auc, labelled),
    Row("adafgda-ams", AdaFGDA(**{**THEORY, "lr": 0.1}, scale="amsgrad"), auc, labelled),
    Row("adafgda-norm", AdaFGDA(**ADA, scale="adagrad_norm"), robust_least_squares, labelled),
    Row("adafgda-one", AdaFGDA(**ADA, scale="identity"), robust_least_squares, labelled),
    Row("adafgda-literal", AdaFGDA(**ADA, sync="literal"), robust_least_squares, labelled),
    Row("adafgda-first", AdaFGDA(**ADA, first_scale="identity"), clients=noisy_by_size),
    Row("adafgda-first-again", AdaFGDA(**ADA, sync="reaverage", first_scale="identity"), auc,
        labelled),
    Row("adafgda-far", AdaFGDA(**SLOW, **RATES, lr=12.0, scale="adagrad_norm"),
        **{**STALLS, "rounds": 100}),
)
# fmt: on

FLOATS: dict[type[Algorithm], Callable[[int, int], tuple[int, int]]] = {
    LocalSGDAPlus: lambda x, y: (x + y, x + y),
    FedSGDAPlus: lambda x, y: (x + y, x + y),
    LocalSGDAM: lambda x, y: (2 * (x + y), 2 * (x + y)),
    LocalSGDAMPlus: lambda x, y: (2 * (x + y), 2 * (x + y)),
    FedSGDAM: lambda x, y: (2 * (x + y), 2 * (x + y)),
    FGDA: lambda x, y: (2 * (x + y), 2 * (x + y)),
    AdaFGDA: lambda x, y: (2 * (x + y), 3 * (x + y)),
}


def extra_floats(row: Row, round: int) -> tuple[int, int]:
    """What a round sends beside FLOATS: first rounds, second exchanges, scales of one number."""
    method = row.algorithm
    both = sum(v.numel() for v in row.problem().start())
    up = down = 0
    if isinstance(method, FGDA) and method.sync == "reaverage":
        up, down = up + both, down + both
    if round == 0 and isinstance(method, LocalSGDAM | LocalSGDAMPlus | FGDA):
        down -= both  # there are no averages yet
    if round == 0 and isinstance(method, FedSGDAM):
        up, down = up + both, down + both  # the first estimates are averaged
    if isinstance(method, AdaFGDA):
        scaled = round > 0 or method.first_scale == "rule"
        if method.scale in ("adagrad_norm", "identity") and scaled:
            down += 2 - both
        if round == 0:  # the first estimates go up for the first scales, or there are none
            up, down = (up + both, down) if scaled else (up, down - both)
    return up, down


def diverging() -> tuple[Row, ...]:
    """Each method once, with rates that no run survives; the scales of AdaFGDA do survive them."""
    seen: dict[type, Row] = {}
    for row in ROWS:
        if not isinstance(row.algorithm, AdaFGDA):
            seen.setdefault(type(row.algorithm), row)
    return tuple(
        replace(row, algorithm=replace(row.algorithm, primal_lr=1e60, dual_lr=1e60))
        for row in seen.values()
    )
