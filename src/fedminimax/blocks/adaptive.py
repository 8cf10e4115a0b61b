"""Adaptive scales: from averages of gradients to the diagonal that divides the next steps.

A rule remembers one vector, which starts at 0 as in the papers, without bias correction. What
travels is the diagonal, of the length of the gradient, or 1 where all entries are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scale(ABC):
    """How a diagonal follows from the averages that the server has seen."""

    rate: float = 0.1  # 1 - varrho, the weight of the new square
    floor: float = 0.01  # rho

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"the scale's rate is {self.rate!r}; give the weight of the new square, above 0 "
                "and at most 1"
            )
        if not 0 < self.floor < float("inf"):
            raise ValueError(
                f"the scale's floor is {self.floor!r}; give a finite number above 0, so that "
                "no step is divided by 0"
            )

    @abstractmethod
    def start(self, like: Tensor) -> Tensor:
        """What the rule remembers before the first average."""

    @abstractmethod
    def update(self, memory: Tensor, new: Tensor) -> Tensor:
        """What it remembers after a new average."""

    @abstractmethod
    def diagonal(self, memory: Tensor) -> Tensor:
        """What steps are divided by."""


@dataclass(frozen=True)
class Adam(Scale):
    """a <- (1 - rate) a + rate new^2,    A = sqrt(a) + floor

    >>> adam = Adam(rate=0.25, floor=1.0)
    >>> adam.diagonal(adam.update(torch.zeros(2), torch.tensor([4.0, 6.0])))
    tensor([3., 4.])
    """

    def start(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def update(self, memory: Tensor, new: Tensor) -> Tensor:
        return (1 - self.rate) * memory + self.rate * new**2

    def diagonal(self, memory: Tensor) -> Tensor:
        return memory.sqrt() + self.floor


@dataclass(frozen=True)
class AdaBelief(Scale):
    """a <- (1 - rate) a + rate (new - last)^2,    A = sqrt(a) + floor;  `last`, the average before,
    is at first 0

    >>> belief = AdaBelief(rate=0.25, floor=1.0)
    >>> belief.diagonal(belief.update(torch.tensor([0.0, 2.0]), torch.tensor([6.0])))
    tensor([3.])
    """

    def start(self, like: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(like), torch.zeros_like(like)])

    def update(self, memory: Tensor, new: Tensor) -> Tensor:
        average, last = memory[: new.numel()], memory[new.numel() :]
        return torch.cat([(1 - self.rate) * average + self.rate * (new - last) ** 2, new])

    def diagonal(self, memory: Tensor) -> Tensor:
        return memory[: memory.numel() // 2].sqrt() + self.floor


@dataclass(frozen=True)
class AMSGrad(Scale):
    """Adam whose diagonal never falls:  largest <- max(largest, a),    A = sqrt(largest) + floor

    >>> ams = AMSGrad(rate=0.5, floor=1.0)
    >>> once = ams.update(ams.start(torch.zeros(1)), torch.tensor([2.0]))
    >>> ams.diagonal(ams.update(once, torch.tensor([0.0]))) == ams.diagonal(once)
    tensor([True])
    """

    def start(self, like: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(like), torch.zeros_like(like)])

    def update(self, memory: Tensor, new: Tensor) -> Tensor:
        average, largest = memory[: new.numel()], memory[new.numel() :]
        average = (1 - self.rate) * average + self.rate * new**2
        return torch.cat([average, torch.maximum(largest, average)])

    def diagonal(self, memory: Tensor) -> Tensor:
        return memory[memory.numel() // 2 :].sqrt() + self.floor


@dataclass(frozen=True)
class AdaGradNorm(Scale):
    """b <- b + |new|^2,    A = (sqrt(b) + floor) I;  there is no rate in it

    >>> norm = AdaGradNorm(floor=1.0)
    >>> norm.diagonal(norm.update(torch.zeros(1), torch.tensor([3.0, 4.0])))
    tensor([6.])
    """

    def start(self, like: Tensor) -> Tensor:
        return like.new_zeros(1)

    def update(self, memory: Tensor, new: Tensor) -> Tensor:
        return memory + (new**2).sum()

    def diagonal(self, memory: Tensor) -> Tensor:
        return memory.sqrt() + self.floor


@dataclass(frozen=True)
class Identity(Scale):
    """A = I"""

    def start(self, like: Tensor) -> Tensor:
        return like.new_ones(1)

    def update(self, memory: Tensor, new: Tensor) -> Tensor:
        return memory

    def diagonal(self, memory: Tensor) -> Tensor:
        return memory


SCALES: dict[str, type[Scale]] = {
    "adam": Adam,
    "adabelief": AdaBelief,
    "amsgrad": AMSGrad,
    "adagrad_norm": AdaGradNorm,
    "identity": Identity,
}
