"""Questions that a client can answer for any problem, and checks of answers."""

from __future__ import annotations

import torch

from fedminimax.blocks.precision import double
from fedminimax.problems.gradients import dual_statistics, gradients, pullback
from fedminimax.types import Batch, Point, Problem, Vectors

# How many gradients, each over all its rows, a client computes for an answer.
GRADIENTS = {"gradients": 1, "gradient_norms": 1, "pullback": 1}

SLACK = 1 + 1e-5  # for sums in single precision


def counts(reply: Vectors, rows: int) -> str | None:
    """Checks vectors of counts, in each of which a row counts at most once.

    Returns what is wrong, as the end of a sentence about the client, or None. `rows` is how many
    rows the client has.
    """
    for vector in map(double, reply):
        if bool((vector < 0).any() | (vector != vector.round()).any()):
            return f"its counts hold {float(vector.min()):g}, and not whole numbers of at least 0"
        if float(vector.sum()) > rows * SLACK:
            return f"its counts add up to {float(vector.sum()):g}, but it has {rows} rows"
    return None


def shares(reply: Vectors, rows: int) -> str | None:
    """Checks vectors of numbers from 0 to 1. Returns what is wrong, or None."""
    for vector in reply:
        if bool(((vector < 0) | (vector > SLACK)).any()):
            found = f"{float(vector.min()):g} to {float(vector.max()):g}"
            return f"its shares are from {found}, and not from 0 to 1"
    return None


def answer(problem: Problem, question: str, vectors: Vectors, batch: Batch) -> Vectors:
    """A client's answer, computed on all its rows.

    The questions, with the vectors that they are sent with:

    - gradients (value, y): the gradients of the last level there.
    - gradient_norms (x, y): the same, and their squared lengths.
    - pullback (value, vector, level): the transposed Jacobian of the level there times the vector.
    - dual_statistics (x): the means that the best dual is computed from, if the problem has any.
    """
    if question == "gradients":
        return tuple(gradients(problem, Point(*vectors), (batch,)))
    if question == "gradient_norms":
        slopes = gradients(problem, Point(*vectors), (batch,))
        return *slopes, torch.stack([slope.square().sum() for slope in slopes])
    if question == "pullback":
        value, vector, level = vectors
        return (pullback(problem, int(level), value, vector, batch),)
    if question == "dual_statistics" and problem.dual_statistics is not None:
        return (dual_statistics(problem, vectors[0], batch),)
    raise ValueError(f"{type(problem).__name__} does not answer the question {question!r}")
