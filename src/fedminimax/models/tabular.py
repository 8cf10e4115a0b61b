"""Fully connected networks: for rows of numbers, and for small images, which they flatten."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}


@dataclass(frozen=True)
class Linear:
    """A linear function for each output; with a sigmoid, logistic regression."""

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> nn.Module:
        """The network for inputs of that shape."""
        return _flat(shape, nn.Linear(math.prod(shape), outputs))


@dataclass(frozen=True)
class MLP:
    """A multi-layer perceptron.

    Arguments:
        hidden: the width of each hidden layer.
        activation: "tanh", "relu" or "elu".
        batch_norm: is there batch normalisation before each activation?
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu", "elu"] = "tanh"
    batch_norm: bool = False

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden is {list(self.hidden)}; give the width of each hidden layer")

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> nn.Module:
        """The network for inputs of that shape."""
        layers: list[nn.Module] = []
        features = math.prod(shape)
        for width in self.hidden:
            layers.append(nn.Linear(features, width))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(width))
            layers.append(_ACTIVATIONS[self.activation]())
            features = width
        return _flat(shape, *layers, nn.Linear(features, outputs))


@dataclass(frozen=True)
class MLP3(MLP):
    """A multi-layer perceptron of three layers, for the robust networks of AdaFGDA.

    The paper says only "a 3-layer MLP" (Section 6.3). Ours: two hidden layers of 200 and 100, with
    ReLU.
    """

    hidden: tuple[int, ...] = (200, 100)
    activation: Literal["tanh", "relu", "elu"] = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.hidden) != 2:
            raise ValueError(f"hidden is {list(self.hidden)}; three layers have two hidden widths")


def _flat(shape: tuple[int, ...], *layers: nn.Module) -> nn.Module:
    if len(shape) > 1:
        return nn.Sequential(nn.Flatten(), *layers)
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)
