"""The densely connected network of 121 layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedminimax.models.layers import Norm, check_norm, images, norm_layers

BLOCKS = (6, 12, 24, 16)
NARROW = 4  # the 1 x 1 convolution has this many times `growth` channels


class Layer(nn.Module):
    """A convolution of 1 x 1 and one of 3 x 3, whose output is concatenated to the input."""

    def __init__(self, before: int, growth: int, norm: Norm):
        super().__init__()
        bias, middle = norm == "none", NARROW * growth
        self.added = nn.Sequential(
            *(*norm_layers(norm, before), nn.ReLU()),
            nn.Conv2d(before, middle, 1, bias=bias),
            *(*norm_layers(norm, middle), nn.ReLU()),
            nn.Conv2d(middle, growth, 3, padding=1, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.added(x)], dim=1)


@dataclass(frozen=True)
class DenseNet121:
    """DenseNet121 (Huang et al. 2017): 7,978,856 weights for 1000 outputs, 6,954,881 for one.

    Arguments:
        growth: how many channels each layer adds, 32 in the paper; the first convolution has twice
            as many.
        norm: "batch", "group" or "none", with which convolutions have biases.
        stem: the first layers. "large" is a convolution of 7 x 7 and pooling, which divide the size
            by 4, as in the paper for ImageNet; "small" is a convolution of 3 x 3 that keeps the
            size, as in the paper for CIFAR.
    """

    growth: int = 32
    norm: Norm = "batch"
    stem: Literal["large", "small"] = "large"

    def __post_init__(self) -> None:
        check_norm(self.norm)
        if self.growth < 2 or self.growth % 2:
            raise ValueError(f"growth is {self.growth}; give an even number of at least 2 channels")

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> nn.Sequential:
        """The network for images of that shape."""
        channels, width, bias = images("densenet121", shape), 2 * self.growth, self.norm == "none"
        large = self.stem == "large"
        size, stride, padding = (7, 2, 3) if large else (3, 1, 1)
        layers: list[nn.Module] = [
            nn.Conv2d(channels, width, size, stride, padding, bias=bias),
            *(*norm_layers(self.norm, width), nn.ReLU()),
            *([nn.MaxPool2d(3, 2, 1)] if large else []),
        ]
        for number, count in enumerate(BLOCKS):
            if number:
                layers += [*norm_layers(self.norm, width), nn.ReLU()]
                layers += [nn.Conv2d(width, width // 2, 1, bias=bias), nn.AvgPool2d(2)]
                width //= 2
            for _ in range(count):
                layers.append(Layer(width, self.growth, self.norm))
                width += self.growth
        layers += [*norm_layers(self.norm, width), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs)]
        return nn.Sequential(*layers)
