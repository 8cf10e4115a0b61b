"""The two networks of a GAN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn


class Players(NamedTuple):
    """The generator and the critic, and how long the noise is that images are made from."""

    generator: nn.Module
    critic: nn.Module
    noise_size: int


@dataclass(frozen=True)
class SmallGAN:
    """A generator and a critic of one hidden layer each, for images with pixels in [-1, 1].

    noise: the length of the vector that an image is made from.
    """

    noise: int = 8
    width: int = 32

    def __post_init__(self) -> None:
        if min(self.noise, self.width) < 1:
            raise ValueError(f"noise is {self.noise} and width {self.width}; give at least 1")

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> Players:
        pixels = math.prod(shape)
        made = [nn.Linear(self.noise, self.width), nn.Tanh(), nn.Linear(self.width, pixels)]
        told = [nn.Linear(pixels, self.width), nn.Tanh(), nn.Linear(self.width, outputs)]
        generator = nn.Sequential(*made, nn.Tanh(), nn.Unflatten(1, shape))
        return Players(generator, nn.Sequential(nn.Flatten(), *told), self.noise)
