"""Networks for tables: one row of numbers in, one score out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}


@dataclass(frozen=True)
class Linear:
    """A linear score: with a sigmoid, logistic regression."""

    def build(self, features: int) -> nn.Module:
        return nn.Linear(features, 1)


@dataclass(frozen=True)
class MLP:
    """A multi-layer perceptron with one output."""

    hidden: tuple[int, ...] = (16,)
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    batch_norm: bool = False

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden is {list(self.hidden)}; give the width of each hidden layer")

    def build(self, features: int) -> nn.Module:
        layers: list[nn.Module] = []
        for width in self.hidden:
            layers.append(nn.Linear(features, width))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(width))
            layers.append(_ACTIVATIONS[self.activation]())
            features = width
        return nn.Sequential(*layers, nn.Linear(features, 1))
