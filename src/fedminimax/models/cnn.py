"""The small convolutional networks of the papers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedminimax.models.layers import Norm, check_norm, classifier, images, norm_layers


@dataclass(frozen=True)
class FashionCNN:
    """The Fashion-MNIST network of the LocalSCGDAM paper (Table 3).

    Twice convolution (32, then 64 channels), normalisation, ReLU and max-pooling by 2; then fully
    connected layers of 600 and 120 features. The table gives no kernel size, no padding and no
    activation between the last layers. Ours: 3 x 3, padded by 1 in the first layer and not in the
    second.

    Arguments:
        norm: "batch", "group" or "none".
        activation: between the fully connected layers: "none", as in the table, or "relu".
    """

    norm: Norm = "batch"
    activation: Literal["none", "relu"] = "none"

    def __post_init__(self) -> None:
        check_norm(self.norm)

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> nn.Sequential:
        """The network for images of that shape."""
        trunk = [
            nn.Conv2d(images("fashion_cnn", shape), 32, 3, padding=1),
            *(*norm_layers(self.norm, 32), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Conv2d(32, 64, 3),
            *(*norm_layers(self.norm, 64), nn.ReLU(), nn.MaxPool2d(2)),
        ]
        relu = self.activation == "relu"
        return classifier("fashion_cnn", shape, trunk, (600, 120, outputs), relu)


@dataclass(frozen=True)
class LeNet5:
    """LeNet5 (LeCun et al. 1998): two convolutions of 5 x 5, then layers of 120 and 84 features.

    Images of 28 x 28 pixels are padded to 32 x 32, as in the original. Ours: ReLU and max-pooling
    instead of the sigmoids and trained averages of 1998. The AdaFGDA paper, which uses LeNet5, does
    not say.
    """

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> nn.Sequential:
        """The network for images of that shape."""
        channels = images("lenet5", shape)
        trunk = [
            nn.Conv2d(channels, 6, 5, padding=2 if shape[-1] < 32 else 0),
            *(nn.ReLU(), nn.MaxPool2d(2)),
            nn.Conv2d(6, 16, 5),
            *(nn.ReLU(), nn.MaxPool2d(2)),
        ]
        return classifier("lenet5", shape, trunk, (120, 84, outputs), relu=True)


@dataclass(frozen=True)
class CIFARCNN:
    """The CIFAR-10 network of the FESS-GDA paper (Table 3).

    Three times convolution of 3 x 3 padded by 1 (16, 32, 64 channels), ReLU and max-pooling by 2;
    then fully connected layers of 512 and 64 features with ReLU.

    Argument:
        norm: "none", as in the paper, or "batch" or "group" before each ReLU of the convolutions.
    """

    norm: Norm = "none"

    def __post_init__(self) -> None:
        check_norm(self.norm)

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> nn.Sequential:
        """The network for images of that shape."""
        before, trunk = images("cifar_cnn", shape), []
        for width in (16, 32, 64):
            trunk.append(nn.Conv2d(before, width, 3, padding=1))
            trunk += [*norm_layers(self.norm, width), nn.ReLU(), nn.MaxPool2d(2)]
            before = width
        return classifier("cifar_cnn", shape, trunk, (512, 64, outputs), relu=True)


@dataclass(frozen=True)
class CNN7:
    """A network of seven layers, for the CIFAR-10 experiment of AdaFGDA.

    The paper says only "a 7-layer CNN" (Section 6.2). Ours: six convolutions of 3 x 3 padded by 1
    with ReLU, max-pooling by 2 after every second one, and a fully connected layer.

    Arguments:
        width: the channels of the first two convolutions; the next have twice and four times as
            many.
        norm: before each ReLU: "batch", "group" or "none".
    """

    width: int = 32
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_norm(self.norm)
        if self.width < 1:
            raise ValueError(f"width is {self.width}; give at least 1 channel")

    def build(self, shape: tuple[int, ...], outputs: int = 1) -> nn.Sequential:
        """The network for images of that shape."""
        before, trunk = images("cnn7", shape), []
        for times in (1, 2, 4):
            width = times * self.width
            for _ in range(2):
                trunk.append(nn.Conv2d(before, width, 3, padding=1))
                trunk += [*norm_layers(self.norm, width), nn.ReLU()]
                before = width
            trunk.append(nn.MaxPool2d(2))
        return classifier("cnn7", shape, trunk, (outputs,), relu=False)
