"""Reducers that bear some wrong replies. They need every reply, so they cannot be a masked sum."""

# A value from a file may be of another type than its annotation says.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedminimax.blocks.trees import flat, rebuild, tree_map
from fedminimax.messages.stage import Message, Reducer, add_update, update
from fedminimax.types import Clock


def _sort(field: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each number's replies in ascending order, with their weights, and the sums of these."""
    values, order = field.sort(dim=0)
    own = weights.to(field)[order]
    return values, own, own.cumsum(0)


@dataclass(frozen=True)
class TrimmedMean(Reducer):
    """The mean of each number without its extremes (Yin et al., ICML 2018, section 4).

    `share` of the clients' weight is left out at either end; a client at the edge counts with the
    part of its weight that is inside. With equal weights and a whole number of clients to leave
    out, this is the paper's estimator. It bears wrong replies of up to that weight.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise ValueError(
                f"TrimmedMean: share is {self.share!r}; give a number of at least 0 and below 0.5"
            )

    def reduce(
        self, state: Any, down: Message, ups: Message, weights: Tensor, clock: Clock
    ) -> tuple[Message, Any]:
        def trim(field: Tensor) -> Tensor:
            values, own, until = _sort(field, weights)
            inside = until.clamp(max=1 - self.share) - (until - own).clamp(min=self.share)
            inside = inside.clamp(min=0)
            return (inside * values).sum(0) / inside.sum(0)

        return tree_map(trim, ups), state


@dataclass(frozen=True)
class Median(Reducer):
    """The weighted median of each number (Yin et al., ICML 2018, section 3): half of the clients'
    weight is on either side; between two numbers that both fit, their mean."""

    def reduce(
        self, state: Any, down: Message, ups: Message, weights: Tensor, clock: Clock
    ) -> tuple[Message, Any]:
        def middle(field: Tensor) -> Tensor:
            values, _, until = _sort(field, weights)
            slack = 8 * torch.finfo(field.dtype).eps  # of sums of weights
            lower = (until < 0.5 - slack).sum(0, keepdim=True).clamp(max=len(values) - 1)
            upper = (until <= 0.5 + slack).sum(0, keepdim=True).clamp(max=len(values) - 1)
            return (values.gather(0, lower) + values.gather(0, upper))[0] / 2

        return tree_map(middle, ups), state


@dataclass(frozen=True)
class CentredClipping(Reducer):
    """The mean of updates that are clipped around a centre (Karimireddy, He and Jaggi, Learning
    from History for Byzantine Robust Optimization, ICML 2021, section 4).

    The centre is the aggregated update of the round before, and zero at first. Every client's
    update is pulled to within `radius` of it, all fields together, and the weighted mean of what
    remains moves the centre; this is done `iterations` times.
    """

    radius: float = 10.0
    iterations: int = 1

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise ValueError(f"CentredClipping: radius is {self.radius!r}; give a number above 0")
        if not isinstance(self.iterations, int) or self.iterations < 1:
            raise ValueError(
                f"CentredClipping: iterations is {self.iterations!r}; give a whole number of at "
                "least 1"
            )

    def init_server(self, up: Message) -> Any:
        return up  # zeros

    def reduce(
        self, state: Any, down: Message, ups: Message, weights: Tensor, clock: Clock
    ) -> tuple[Message, Any]:
        count = len(weights)

        def to_each(field: Tensor) -> Tensor:
            return field.expand(count, *field.shape)

        sent = tree_map(to_each, down)
        changes, centre = flat(update(sent, ups)), flat(state)
        for _ in range(self.iterations):
            apart = [change - middle for change, middle in zip(changes, centre, strict=True)]
            lengths = torch.stack([a.reshape(count, -1).square().sum(1) for a in apart]).sum(0)
            factor = (self.radius / lengths.sqrt()).clamp(max=1) * weights.to(lengths)
            centre = [
                middle + (factor.to(a) @ a.reshape(count, -1)).reshape(middle.shape)
                for middle, a in zip(centre, apart, strict=True)
            ]
        change = rebuild(ups, centre)
        return add_update(down, change), change
