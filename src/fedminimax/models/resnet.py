"""The residual network of 20 layers for images of 32 x 32 pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedminimax.models.layers import Norm, check_norm, images, norm_layers


class Block(nn.Module):
    """Two convolutions with a shortcut. Where the size halves, the shortcut takes every second
    pixel and adds channels of zeros, which needs no weights (option A of the paper)."""

    def __init__(self, before: int, width: int, stride: int, norm: Norm):
        super().__init__()
        bias = norm == "none"
        self.first = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=bias), *norm_layers(norm, width), nn.ReLU()
        )
        self.second = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, bias=bias), *norm_layers(norm, width)
        )
        self.stride, self.more = stride, width - before

    def forward(self, x: Tensor) -> Tensor:
        around = x
        if self.stride > 1 or self.more:
            around = x[:, :, :: self.stride, :: self.stride]
            half = self.more // 2
            around = F.pad(around, (0, 0, 0, 0, half, self.more - half))
        return F.relu(self.second(self.first(x)) + around)


@dataclass(frozen=True)
class ResNet20:
    """ResNet20 for small images (He et al. 2016): 0.27 million weights for ten classes.

    Arguments:
        width: the channels of the first third, 16 in the paper; the others have two and four times
            as many.
        norm: "batch", "group" or "none", with which convolutions have biases.
    """

    width: int = 16
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_norm(self.norm)
        if self.width < 1:
            raise ValueError(f"width is {self.width}; give at least 1 channel")

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> nn.Sequential:
        """The network for images of that shape."""
        channels, before = images("resnet20", shape), self.width
        layers: list[nn.Module] = [
            nn.Conv2d(channels, before, 3, 1, 1, bias=self.norm == "none"),
            *norm_layers(self.norm, before),
            nn.ReLU(),
        ]
        for third in range(3):
            width = self.width * 2**third
            for number in range(3):
                stride = 2 if third and not number else 1
                layers.append(Block(before, width, stride, self.norm))
                before = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs)]
        return nn.Sequential(*layers)
