"""What LocalSCGDAM and LocalSCGDM share: which point is returned, and the steps of their level-wise
synchronisation."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._levelwise import Part
from fedminimax.blocks.schedules import at
from fedminimax.blocks.vectors import average
from fedminimax.types import Clock, Draw, Point, Problem

Output = Literal["x", "inner"]


def check_output(owner: str, output: Output, problem: Problem) -> None:
    """Refuses output "inner" for a problem whose last inner value cannot stand for x."""
    kind = type(problem).__name__
    if output == "inner" and problem.depth == 1:
        raise ValueError(f"{owner}: output is inner, but {kind} has no inner level: give x")
    if output == "inner" and getattr(problem, "evaluated", "x") == "stepped":
        raise ValueError(
            f"{owner}: output is inner, the weights after the inner step, but {kind} has "
            'evaluated "stepped", which would take that step again: leave one of them out'
        )


def output_point(owner: str, output: Output, server: Any) -> Point:
    """The point that a run returns; x as long as no client has sent an inner value."""
    if output == "x" or not server.inner:
        return Point(server.x, server.y)
    if len(server.inner[-1]) != len(server.x):
        raise ValueError(
            f"{owner}: output is inner, but the last inner value has length "
            f"{len(server.inner[-1])} and x {len(server.x)}: give x"
        )
    return Point(server.inner[-1], server.y)


# Of a synchronisation level by level; `client` has the fields of LevelwiseSCGDM's.


def average_value(
    method: Any, k: int, problem: Problem, down: Any, client: Any, batch: Draw, clock: Clock
) -> Any:
    """inner^k, averaged with the value at the averaged inner^(k-1)."""
    value = SampledLevels(problem, batch).value(k, client.inputs[k - 1])
    weight, part = at(method.lr, clock) * at(method.inner_rate, clock), Part("inner", k)
    return part.put(client, average(part.of(client), value, weight))


def pull_slope(
    method: Any, k: int, problem: Problem, down: Any, client: Any, batch: Draw, clock: Clock
) -> Any:
    """The gradient in inner^(k-1), from the averaged one in inner^k."""
    slope = slope_in(k).of(client)
    below = SampledLevels(problem, batch).pull(k, client.inputs[k - 1], slope)
    return with_slope(method, k - 1, client, below, clock)


def with_slope(method: Any, k: int, client: Any, slope: Tensor, clock: Clock) -> Any:
    """The client with a new gradient in inner^k; for k = 0 with the momentum moved towards it."""
    if k:
        return slope_in(k).put(client, slope)
    weight = at(method.lr, clock) * at(method.primal_rate, clock)
    return client._replace(momentum_x=average(client.momentum_x, slope, weight))


def slope_in(k: int) -> Part:
    """What stands for the gradient in inner^k: for that in x a momentum."""
    return Part("slopes", k) if k else Part("momentum_x")
