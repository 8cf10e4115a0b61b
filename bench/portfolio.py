"""Many steps of little arithmetic: the portfolio under Fed-DR-SCGD."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.environments import JAX, Folder, talking
from bench.measure import Effort, alone, in_turn
from bench.ours import Steady, seeded
from bench.portfolio_cpp import CppRun
from bench.table import Found, Row, at_least, faster
from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.data.clients import Clients
from fedminimax.problems.portfolio import Portfolio

WORKERS, ASSETS, ROWS, STEPS = 8, 100, 500, 4
ROUNDS = 500  # in a call, on either side
LR, RATE = 0.01, 0.5
WHAT = f"portfolio, {WORKERS} workers, {ASSETS} assets, batch 1, {STEPS} local steps: fed_dr_scgd"


def rows() -> list[Row]:
    plain = "numpy, each level in closed form, all workers at once"
    merged = "the same, with the terms of each estimate merged by hand"
    return [
        Row("portfolio.numpy", WHAT, plain, at_least(4.0), partial(against_numpy, sweep)),
        Row("portfolio.merged", WHAT, merged, at_least(4.0), partial(against_numpy, merged_sweep)),
        Row("portfolio.cpp", WHAT, "a loop in C++, by hand", at_least(0.9), against_cpp),
    ]


def peer_rows(folder: Folder) -> list[Row]:
    against = "JAX, jit(scan(vmap(vjp))), 500 rounds in a call"
    measure = partial(against_jax, folder)
    return [Row("portfolio.jax", WHAT, against, at_least(0.4), measure)]


def run_of(executor: str = "compiled") -> Steady:
    rows = seeded(lambda: torch.randn(WORKERS, ROWS, ASSETS, dtype=torch.float64))
    clients = Clients([(own,) for own in rows], batch_size=1)
    method = FedDRSCGD(lr=LR, recursion_rate=RATE, local_steps=STEPS)
    return Steady(Portfolio(ASSETS), method, clients, executor, 1, None, "vectorised", ROUNDS)


def against_numpy(step: Step, effort: Effort) -> Found:
    run = run_of()
    times = in_turn({"ours": run, "numpy": alone(NumpyRun(run, step))}, effort)
    return faster(times["ours"], times["numpy"], run.parts)


def against_cpp(effort: Effort) -> Found:
    run = run_of()
    loop = CppRun(run, ROUNDS, LR, RATE)
    times = in_turn({"ours": run, "loop": loop}, effort)
    return faster(times["ours"], times["loop"], run.parts, times["loop"])


def against_jax(folder: Folder, effort: Effort) -> Found:
    run = run_of()
    with tempfile.TemporaryDirectory(prefix="fedminimax-") as own:
        given = Path(own) / "given.npz"
        hand_over(run, given)
        with talking(JAX, folder, str(given)) as peer:
            run.play(1)
            ours, theirs = run.state.server.x.numpy(), np.array(peer.ready["x"])
            apart = float(np.abs(theirs - ours).max() / np.abs(ours).max())
            if not apart < 1e-10:
                raise RuntimeError(
                    f"JAX did another job: after a round its x is off by {apart:.1g}"
                )
            times = in_turn({"ours": run, "jax": peer}, effort)
    about = f"x after a round is ours to {apart:.0e}"
    return faster(times["ours"], times["jax"], run.parts, about=about)


def hand_over(run: Steady, path: Path) -> None:
    """Where the run stands, and the rows of its next call."""
    index = run.index(ROUNDS)[:, :2, :, 0].reshape(ROUNDS, STEPS, 2, WORKERS)
    s = run.state.server
    (h1, h2), (v1, v2, v3) = s.inner, s.momentum
    given = {"x": s.x, "h1": h1, "h2": h2, "v1": v1, "v2": v2, "v3": v3, "index": index}
    given["returns"] = run.federation.clients.train.columns[0]
    np.savez(path, **{name: value.numpy() for name, value in given.items()})


class Estimates(NamedTuple):
    """Of all workers, a row each; the names are those of the method, the levels' entries apart."""

    x: np.ndarray
    mean: np.ndarray  # inner^1: the return, and the weights
    weights: np.ndarray
    same: np.ndarray  # inner^2: the return again, and the variance
    variance: np.ndarray
    v1: np.ndarray  # momentum^1
    v2_mean: np.ndarray  # momentum^2
    v2_weights: np.ndarray
    v3_mean: np.ndarray  # momentum^3
    v3_variance: np.ndarray


Step = Callable[[Estimates, np.ndarray, np.ndarray], Estimates]


class NumpyRun:
    """A run from where the engine's stands; a call is a round, on the batches of this one."""

    def __init__(self, run: Steady, step: Step):
        self.index = run.index()[:, :2, :, 0].numpy()  # the last level uses no rows
        self.returns = run.federation.clients.train.columns[0].numpy()
        self.step = step
        s = run.state.server
        (inner1, inner2), (v1, v2, v3) = (map(_row, s.inner), map(_row, s.momentum))
        split = inner1[:, 0], inner1[:, 1:], inner2[:, 0], inner2[:, 1], v1
        split += v2[:, 0], v2[:, 1:], v3[:, 0], v3[:, 1]
        self.now = Estimates(_row(s.x), *split)

    def __call__(self) -> None:
        now = Estimates(*(np.repeat(v, WORKERS, 0) for v in self.now))
        for first, second in self.index:
            now = self.step(now, self.returns[first], self.returns[second])
        self.now = Estimates(*(v.mean(0, keepdims=True) for v in now))


def _row(vector: torch.Tensor) -> np.ndarray:
    return vector.numpy()[None]


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("kd,kd->k", a, b)


def root_slope(variance: np.ndarray) -> np.ndarray:
    """The derivative of sqrt(max(variance, 1e-8))."""
    return np.where(variance >= 1e-8, 0.5 / np.sqrt(np.maximum(variance, 1e-8)), 0.0)


def storm(estimate: np.ndarray, new: Any, old: Any) -> np.ndarray:
    return new + (1 - RATE) * (estimate - old)


def sweep(old: Estimates, first: np.ndarray, second: np.ndarray) -> Estimates:
    """An iteration, as the method has it: every estimate from the level at both points."""
    x = old.x - LR * old.v1
    mean = storm(old.mean, dot(first, x), dot(first, old.x))
    weights = storm(old.weights, x, old.x)
    off, off_old = dot(second, weights) - mean, dot(second, old.weights) - old.mean
    same = storm(old.same, mean, old.mean)
    variance = storm(old.variance, off**2, off_old**2)
    v3_mean = storm(old.v3_mean, -1.0, -1.0)
    v3_variance = storm(old.v3_variance, root_slope(variance), root_slope(old.variance))
    pull, pull_old = 2 * off * v3_variance, 2 * off_old * old.v3_variance
    v2_mean = storm(old.v2_mean, v3_mean - pull, old.v3_mean - pull_old)
    v2_weights = storm(old.v2_weights, pull[:, None] * second, pull_old[:, None] * second)
    new = v2_mean[:, None] * first + v2_weights
    v1 = storm(old.v1, new, old.v2_mean[:, None] * first + old.v2_weights)
    return Estimates(
        x, mean, weights, same, variance, v1, v2_mean, v2_weights, v3_mean, v3_variance
    )


def merged_sweep(old: Estimates, first: np.ndarray, second: np.ndarray) -> Estimates:
    """The same numbers by less arithmetic: what is linear in two points is taken of their
    difference."""
    stay = 1 - RATE
    x = old.x - LR * old.v1
    ahead = x - stay * old.x
    mean = dot(first, ahead) + stay * old.mean
    weights = ahead + stay * old.weights
    off, off_old = dot(second, weights) - mean, dot(second, old.weights) - old.mean
    same = mean + stay * (old.same - old.mean)
    variance = off * off + stay * (old.variance - off_old * off_old)
    v3_mean = stay * old.v3_mean - RATE
    new_slope, old_slope = root_slope(np.stack([variance, old.variance]))
    v3_variance = new_slope + stay * (old.v3_variance - old_slope)
    pull, pull_old = 2 * off * v3_variance, 2 * off_old * old.v3_variance
    v2_mean = v3_mean - pull + stay * (old.v2_mean - old.v3_mean + pull_old)
    v2_weights = stay * old.v2_weights
    v2_weights += (pull - stay * pull_old)[:, None] * second
    v1 = (v2_mean - stay * old.v2_mean)[:, None] * first
    v1 += v2_weights
    v1 += stay * (old.v1 - old.v2_weights)
    return Estimates(
        x, mean, weights, same, variance, v1, v2_mean, v2_weights, v3_mean, v3_variance
    )
