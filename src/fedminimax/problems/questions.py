"""Questions that any problem can answer: what optimality is measured from."""

from __future__ import annotations

import torch
from torch import Tensor

from fedminimax.problems.gradients import gradients, inner_pullback
from fedminimax.types import Batch, Point, Problem

# What a client computes for an answer, in gradient evaluations over all its rows.
GRADIENTS = {"gradients": 1, "gradient_norms": 1, "pullback": 1}


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
