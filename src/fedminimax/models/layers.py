"""Parts of the image networks: normalisation layers, classifier heads, and a check of shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import nn

Norm = Literal["batch", "group", "none"]
GROUPS = 8


def norm_layers(norm: Norm, channels: int) -> list[nn.Module]:
    """The layers that normalise that many channels: one, or none.

    "group" is GroupNorm with 8 groups, or the largest divisor of the channels that also divides 8.
    It uses no statistics over rows, so clients have none to agree on.
    """
    if norm == "batch":
        return [nn.BatchNorm2d(channels)]
    return [nn.GroupNorm(math.gcd(GROUPS, channels), channels)] if norm == "group" else []


def check_norm(norm: str) -> None:
    """Refuses an unknown normalisation."""
    if norm not in get_args(Norm):
        known = ", ".join(map(repr, get_args(Norm)))
        raise ValueError(f"norm is {norm!r}; give one of {known}")


def classifier(
    name: str, shape: tuple[int, ...], trunk: Sequence[nn.Module], widths: Sequence[int], relu: bool
) -> nn.Sequential:
    """A network for images: the trunk, then fully connected layers.

    Arguments:
        name: how errors call the network.
        shape: of an image, (channels, height, width).
        trunk: the layers before the fully connected ones.
        widths: the number of features of each fully connected layer.
        relu: is there a ReLU between two of them?
    """
    body = nn.Sequential(*trunk, nn.Flatten())
    layers: list[nn.Module] = []
    features = features_of(name, body, shape)
    for number, width in enumerate(widths):
        if number and relu:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(features, width))
        features = width
    return nn.Sequential(*body, *layers)


def features_of(name: str, body: nn.Module, shape: tuple[int, ...]) -> int:
    """How many features the body has for an image of that shape."""
    images(name, shape)
    body.eval()  # so that batch-norm statistics stay as they are
    try:
        with torch.no_grad():
            return body(torch.zeros(1, *shape)).shape[1]
    except RuntimeError as error:
        raise ValueError(
            f"images of {shape[1]} x {shape[2]} pixels are too small for {name}"
        ) from error
    finally:
        body.train()


def images(name: str, shape: tuple[int, ...]) -> int:
    """The number of channels of images of that shape."""
    if len(shape) != 3:
        raise ValueError(
            f"{name} takes images of shape (channels, height, width), but rows have the shape "
            f"{shape}: choose another model, or image data"
        )
    return shape[0]
