"""What Fed-DR-SCGD and its minimax form share: the check of their settings, the projection, and the
steps of their level-wise synchronisation."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._levelwise import Part
from fedminimax.algorithms._tracked import check_weight
from fedminimax.blocks.projections import ball
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.storm import storm
from fedminimax.types import Clock, Draw, Problem

Projection = Literal["none", "ball", "third"]


def check_settings(owner: str, rate: Rate, projection: str, radius: Any) -> None:
    """Refuses settings with which no run can begin. `radius` may be anything: a user gave it."""
    check_weight(owner, "recursion_rate", rate)
    if projection not in get_args(Projection):
        known = " or ".join(get_args(Projection))
        raise ValueError(f"{owner}: projection is {projection!r}; give {known}")
    if not isinstance(radius, int | float) or not 0 < radius < math.inf:
        raise ValueError(f"{owner}: radius is {radius!r}; give a finite number above 0")


def project(projection: Projection, radius: float, vector: Tensor) -> Tensor:
    """Pi of the box: onto the ball of this radius, a third of the vector, or the vector itself."""
    if projection == "ball":
        return ball(radius)(vector)
    return vector / 3 if projection == "third" else vector


# Of a synchronisation level by level; `client` has the fields of LevelwiseDRSCGD's.


def track_value(
    method: Any, k: int, problem: Problem, down: Any, client: Any, batch: Draw, clock: Clock
) -> Any:
    """inner^k at the averaged inner^(k-1)."""
    F, part = SampledLevels(problem, batch), Part("inner", k)
    new, old = F.value(k, client.inputs[k - 1]), F.value(k, client.old_inputs[k - 1])
    return part.put(client, storm(part.of(client), new, old, at(method.recursion_rate, clock)))


def track_pull(
    method: Any, k: int, problem: Problem, down: Any, client: Any, batch: Draw, clock: Clock
) -> Any:
    """momentum^k at the averaged inner^(k-1) and momentum^(k+1)."""
    F, part, above = (
        SampledLevels(problem, batch),
        Part("momentum", k),
        k,
    )  # the place of momentum^(k+1)
    new = F.pull(k, client.inputs[k - 1], client.momentum[above])
    old = F.pull(k, client.old_inputs[k - 1], client.old_momentum[above])
    v = storm(part.of(client), new, old, at(method.recursion_rate, clock))
    return part.put(client, method.bound(v, problem.depth - k + 1))
