"""Questions that any problem can answer, from which optimality is measured; checks of answers."""

from __future__ import annotations

import torch
from torch import Tensor

from fedminimax.blocks.precision import double
from fedminimax.problems.gradients import gradients, inner_pullback
from fedminimax.types import Batch, Point, Problem

# What a client computes for an answer, in gradient evaluations over all its rows.
GRADIENTS = {"gradients": 1, "gradient_norms": 1, "pullback": 1}

SLACK = 1 + 1e-5  # of what single precision adds up


def counts(reply: tuple[Tensor, ...], rows: int) -> str | None:
    """What is wrong with vectors that count rows by kind, each row at most once."""
    for vector in map(double, reply):
        if bool((vector < 0).any() | (vector != vector.round()).any()):
            return f"its counts hold {float(vector.min()):g}, and not whole numbers of at least 0"
        if float(vector.sum()) > rows * SLACK:
            return f"its counts add up to {float(vector.sum()):g}, but it has {rows} rows"
    return None


def shares(reply: tuple[Tensor, ...], rows: int) -> str | None:
    """What is wrong with vectors of numbers from 0 to 1."""
    for vector in reply:
        if bool(((vector < 0) | (vector > SLACK)).any()):
            found = f"{float(vector.min()):g} to {float(vector.max()):g}"
            return f"its shares are from {found}, and not from 0 to 1"
    return None


def answer(
    problem: Problem, question: str, vectors: tuple[Tensor, ...], batch: Batch
) -> tuple[Tensor, ...]:
    """A client's reply, on all its rows.

    - gradients (value, y): those of the last level there.
    - gradient_norms (x, y): those gradients and their squared lengths.
    - pullback (value, vector, level): the level's Jacobian there, transposed, times the vector.
    - dual_statistics (x): what the best dual follows from, if the problem says how.
    """
    if question == "gradients":
        return tuple(gradients(problem, Point(*vectors), (batch,)))
    if question == "gradient_norms":
        slopes = gradients(problem, Point(*vectors), (batch,))
        return *slopes, torch.stack([slope.square().sum() for slope in slopes])
    if question == "pullback":
        value, vector, level = vectors
        return (inner_pullback(problem, int(level), value, vector, batch)[1],)
    if question == "dual_statistics" and problem.dual_statistics is not None:
        return (problem.dual_statistics(vectors[0], batch),)
    raise ValueError(f"{type(problem).__name__} does not answer the question {question!r}")
