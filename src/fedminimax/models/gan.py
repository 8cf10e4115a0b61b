"""The two networks of a GAN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn


class Players(NamedTuple):
    """A generator, a critic, and the length of the generator's input."""

    generator: nn.Module
    critic: nn.Module
    noise_size: int


@dataclass(frozen=True)
class SmallGAN:
    """A generator and a critic with one hidden layer each, for images with pixels in [-1, 1].

    Arguments:
        noise: the length of the generator's input.
        width: of the hidden layers.
    """

    noise: int = 8
    width: int = 32

    def __post_init__(self) -> None:
        if min(self.noise, self.width) < 1:
            raise ValueError(f"noise is {self.noise} and width {self.width}; give at least 1")

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> Players:
        """The two networks for images of that shape."""
        pixels = math.prod(shape)
        generator = [nn.Linear(self.noise, self.width), nn.Tanh(), nn.Linear(self.width, pixels)]
        critic = [nn.Linear(pixels, self.width), nn.Tanh(), nn.Linear(self.width, outputs)]
        return Players(
            generator=nn.Sequential(*generator, nn.Tanh(), nn.Unflatten(1, shape)),
            critic=nn.Sequential(nn.Flatten(), *critic),
            noise_size=self.noise,
        )
