"""The oracles: every derivative that a method may ask a problem for, on one client's batch.

Methods call these and nothing else, so that how a derivative is computed can change without
touching a method.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from fedminimax.blocks.parted import backward, leaf
from fedminimax.blocks.vectors import transformed
from fedminimax.problems.twice import DifferentiatedTwice
from fedminimax.types import Batch, Draw, Point, Problem


def gradients(problem: Problem, point: Point, batch: Draw, dual_at: Tensor | None = None) -> Point:
    """The gradients in x and in y of a problem of depth 1, both at the given point.

    They are the caller's own, to be written over (`spent`). `dual_at` is another x at which the
    gradient in y is taken, on the same rows (the snapshot methods).
    """
    x, y = point.x, point.y
    if y.numel() == 0:
        (slope,) = grad(lambda x: problem.outer(x, y, batch[-1]), x)
        return Point(slope, torch.zeros_like(y))
    if dual_at is None:
        return Point(*grad(lambda x, y: problem.outer(x, y, batch[-1]), x, y))
    return Point(
        *grad(lambda x: problem.outer(x, y, batch[-1]), x),
        *grad(lambda y: problem.outer(dual_at, y, batch[-1]), y),
    )


def grad(function: Callable[..., Tensor], *at: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a number in each of its arguments; for a client alone by plain autograd,
    which takes less time than torch.func."""
    if transformed():
        return torch.func.grad(function, argnums=tuple(range(len(at))))(*at)
    with torch.enable_grad():
        leaves = [leaf(v) for v in at]
        return backward(function(*leaves), leaves)


def slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of a number, for levels that contain one: it can be differentiated again."""
    if transformed():
        return torch.func.grad(function)(at)
    with torch.enable_grad():
        again = at.requires_grad
        # A view: of what the derivative outside is taken in, `Network.parts` are leaves themselves.
        here = at.view_as(at) if again else at.detach().requires_grad_()
        with DifferentiatedTwice() if again else nullcontext():
            found = function(here)
        return torch.autograd.grad(found, here, create_graph=again)[0]


def outer_gradients(problem: Problem, value: Tensor, y: Tensor, batch: Batch) -> Point:
    """The gradients of the last level at an estimate of what the levels before it return."""
    return gradients(problem, Point(value, y), (batch,))


def inner_pullback(
    problem: Problem, level: int, value: Tensor, vector: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """F_level(value) and its Jacobian there, transposed, times `vector`: one forward and one
    backward pass."""
    found, pull = value_and_pull(problem, level, value, batch)
    return found, pull(vector)


def value_and_pull(
    problem: Problem, level: int, value: Tensor, batch: Batch
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`inner_pullback` for a vector that will be known only once the value is: the one forward
    pass serves both."""
    if transformed():
        found, pull = torch.func.vjp(lambda v: problem.inner(level, v, batch), value)[:2]
        return found, lambda vector: pull(vector)[0]
    with torch.enable_grad():
        here = value.detach().requires_grad_()
        reached = problem.inner(level, here, batch)

    def pulled(vector: Tensor) -> Tensor:
        return torch.autograd.grad(reached, here, vector, materialize_grads=True)[0]

    return reached.detach(), pulled


def inner_jacobian(
    problem: Problem, level: int, value: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """F_level(value) and its whole Jacobian there: a backward pass, and a row to store, for each
    number that the level returns."""

    def twice(v: Tensor) -> tuple[Tensor, Tensor]:
        reached = problem.inner(level, v, batch)
        return reached, reached

    jacobian, reached = torch.func.jacrev(twice, has_aux=True)(value)
    return reached, jacobian


def composed_gradients(problem: Problem, point: Point, batch: Draw) -> Point:
    """The gradients of all levels composed at this one client: exact only if the client is
    alone."""

    def objective(x: Tensor, y: Tensor) -> Tensor:
        for level in range(1, problem.depth):
            x = problem.inner(level, x, batch[level - 1])
        return problem.outer(x, y, batch[-1])

    return Point(*torch.func.grad(objective, argnums=(0, 1))(*point))
