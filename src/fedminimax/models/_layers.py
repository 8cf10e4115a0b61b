"""What the image networks share: a choice of normalisation, and shapes that are checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import nn

Norm = Literal["batch", "group", "none"]
GROUPS = 8


def normalised(norm: Norm, channels: int) -> list[nn.Module]:
    """The layers that normalise so many channels: one, or none.

    "group" has 8 groups, or as many of them as divide the channels: it uses no other row of the
    batch, so that clients need not agree on statistics.
    """
    if norm == "batch":
        return [nn.BatchNorm2d(channels)]
    return [nn.GroupNorm(math.gcd(GROUPS, channels), channels)] if norm == "group" else []


def check_norm(norm: str) -> None:
    if norm not in get_args(Norm):
        known = ", ".join(map(repr, get_args(Norm)))
        raise ValueError(f"norm is {norm!r}; give one of {known}")


def classifier(
    name: str, shape: tuple[int, ...], trunk: Sequence[nn.Module], widths: Sequence[int], relu: bool
) -> nn.Sequential:
    """The trunk on images of that shape, then fully connected layers of these widths, with or
    without a ReLU between them."""
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
    """How many numbers the body makes of one image."""
    images(name, shape)
    body.eval()  # so that the trial leaves no trace in batch-norm statistics
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
