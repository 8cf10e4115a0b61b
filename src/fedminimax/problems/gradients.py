"""What a method may ask a problem for, on one client's batch: derivatives, values and statistics.

Methods call these functions only, so that the way an answer is computed can change without touching
a method. With privacy for rows, a step is given a `Guarded` problem, which answers with noise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from fedminimax.blocks.parted import backward, leaf
from fedminimax.blocks.vectors import is_transformed
from fedminimax.problems.guarded import Guarded
from fedminimax.problems.twice import DifferentiatedTwice
from fedminimax.types import Batch, Draw, Point, Problem


def gradients(problem: Problem, point: Point, batch: Draw, dual_at: Tensor | None = None) -> Point:
    """The gradients in x and in y of a problem of depth 1.

    Arguments:
        problem: the problem.
        point: where the gradients are taken.
        batch: the batches of a step, one per level; the last one is used.
        dual_at: another x at which the gradient in y is taken, on the same rows.

    Returns the two gradients as a Point.
    """
    if isinstance(problem, Guarded):
        return problem.gradients(point, batch[-1], dual_at)
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
    """The gradients of a function that returns a number, in each of its arguments.

    Outside vmap plain autograd is used, which takes less time than torch.func.
    """
    if is_transformed():
        return torch.func.grad(function, argnums=tuple(range(len(at))))(*at)
    with torch.enable_grad():
        leaves = [leaf(v) for v in at]
        return backward(function(*leaves), leaves)


def slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of a function that returns a number, for objectives and levels that contain a
    gradient: the result can be differentiated again."""
    if is_transformed():
        return torch.func.grad(function)(at)
    with torch.enable_grad():
        again = at.requires_grad
        # A view, because `Network.parts` of the outer derivative's argument are leaves themselves.
        here = at.view_as(at) if again else at.detach().requires_grad_()
        with DifferentiatedTwice() if again else nullcontext():
            found = function(here)
        return torch.autograd.grad(found, here, create_graph=again)[0]


def outer_value(problem: Problem, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """F_K at one client: a number."""
    if isinstance(problem, Guarded):
        return problem.outer_value(value, y, batch)
    return problem.outer(value, y, batch)


def dual_statistics(problem: Problem, x: Tensor, batch: Batch) -> Tensor:
    """The means over rows that the best dual is computed from."""
    if isinstance(problem, Guarded):
        return problem.row_statistics(x, batch)
    return problem.dual_statistics(x, batch)


def class_slopes(problem: Problem, copies: Tensor, batch: Batch) -> Tensor:
    """For each class, the gradient of the mean loss of its rows, each at its own x in `copies`."""
    if isinstance(problem, Guarded):
        return problem.class_slopes(copies, batch)
    # Unchecked: the method asks for such a problem.
    losses: Callable[..., Tensor] = problem.class_losses  # type: ignore[attr-defined]
    each = torch.eye(len(copies), dtype=copies.dtype, device=copies.device)

    def slope_of(x: Tensor, one: Tensor) -> Tensor:
        return torch.func.grad(lambda x: one @ losses(x, batch))(x)

    return torch.func.vmap(slope_of)(copies, each)


def inner_value(problem: Problem, level: int, value: Tensor, batch: Batch) -> Tensor:
    """F_level(value) at one client."""
    if isinstance(problem, Guarded):
        return problem.inner_value(level, value, batch)
    return problem.inner(level, value, batch)


def pullback(problem: Problem, level: int, value: Tensor, vector: Tensor, batch: Batch) -> Tensor:
    """The transposed Jacobian of F_level at `value`, times `vector`."""
    if isinstance(problem, Guarded):
        return problem.pullback(level, value, vector, batch)
    return value_and_pull(problem, level, value, batch)[1](vector)


def value_and_pull(
    problem: Problem, level: int, value: Tensor, batch: Batch
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """F_level(value), and the function that multiplies a vector by the transposed Jacobian there.
    Both use the same forward pass."""
    if isinstance(problem, Guarded):
        own = problem
        found = own.inner_value(level, value, batch)
        return found, lambda vector: own.pullback(level, value, vector, batch)
    if is_transformed():
        found, pull = torch.func.vjp(lambda v: problem.inner(level, v, batch), value)[:2]
        return found, lambda vector: pull(vector)[0]
    with torch.enable_grad():
        here = value.detach().requires_grad_()
        result = problem.inner(level, here, batch)

    def pull(vector: Tensor) -> Tensor:
        return torch.autograd.grad(result, here, vector, materialize_grads=True)[0]

    return result.detach(), pull


def inner_jacobian(
    problem: Problem, level: int, value: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """F_level(value) and its whole Jacobian there: one backward pass and one stored row for each
    number that the level returns."""
    if isinstance(problem, Guarded):
        return problem.inner_value(level, value, batch), problem.jacobian(level, value, batch)

    def twice(v: Tensor) -> tuple[Tensor, Tensor]:
        result = problem.inner(level, v, batch)
        return result, result

    jacobian, result = torch.func.jacrev(twice, has_aux=True)(value)
    return result, jacobian
