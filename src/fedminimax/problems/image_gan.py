"""A GAN whose players are both networks: one makes images, the other tells them from real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedminimax.blocks.precision import double
from fedminimax.blocks.projections import ball
from fedminimax.problems.network import Network
from fedminimax.problems.network_problem import NetworkProblem
from fedminimax.random import generator as random_numbers
from fedminimax.types import Batch, Measures, Point, Query, Vectors


class ImageGAN(NetworkProblem):
    """A generative adversarial network on images: x is the generator's weights, y the critic's.

    A row is a pair (image, noise). With D the critic's number for an image and G the generator's
    image for a noise vector, the one function that x minimises and y maximises is

        mean of D(image) - D(G(noise))  -  penalty |y|^2                        "wasserstein"
        mean of log s(D(image)) + log(1 - s(D(G(noise))))  -  penalty |y|^2     "logistic"

    s the sigmoid, and |y| <= radius: without a bound a Wasserstein critic of several layers keeps
    growing. (The non-saturating loss gives the players two different functions, so it is no minimax
    problem.) The noise is a column of the rows (`with_noise`), so that a step depends on its batch
    only. Measures: squared distances of the mean and of the standard deviation of pixels between
    real and generated images.

    Arguments:
        generator: the network from noise to images.
        critic: the network from images to one number.
        form: "wasserstein" or "logistic".
        penalty: the factor of |y|^2.
        radius: the largest |y|.
        noise_size: the length of the noise that `rows_from` adds; an experiment takes it from its
            model. Not needed if the rows already have noise.
    """

    monitor = "mean_distance"

    def __init__(
        self,
        generator: nn.Module,
        critic: nn.Module,
        form: Literal["wasserstein", "logistic"] = "wasserstein",
        penalty: float = 1e-3,
        radius: float = 10.0,
        noise_size: int | None = None,
    ):
        super().__init__(generator)
        self.critic, self.noise_size = Network(critic), noise_size
        if form not in ("wasserstein", "logistic"):
            raise ValueError(f'form is {form!r}; give "wasserstein" or "logistic"')
        if not 0 <= penalty < math.inf or not 0 < radius < math.inf:
            raise ValueError(
                f"penalty is {penalty!r} and radius {radius!r}; give a number of at least 0, and "
                "one above 0"
            )
        if self.network.has_norms or self.critic.has_norms:
            raise ValueError(
                "a GAN's batch normalisation would mix the images of a batch, real or made: use "
                "GroupNorm or LayerNorm"
            )
        self.form, self.penalty, self.radius = form, penalty, radius
        self.critic_text = self.critic.text
        self._project = ball(radius)

    def start(self) -> Point:
        return Point(self.network.start(), self._project(self.critic.start()))

    def project_y(self, y: Tensor, /) -> Tensor:
        return self._project(y)

    def rows_from(self, clients: Sequence[Sequence[Any]], draw: int = 0) -> Sequence[Sequence[Any]]:
        if self.noise_size is None:
            raise ValueError("the length of the noise is not known: give noise_size")
        return with_noise([rows[0] for rows in clients], self.noise_size, draw)

    def generate(self, x: Tensor, batch: Batch) -> Tensor:
        """The images that the generator makes from the noise of a batch."""
        images, noise = batch.rows
        made = self.network(x, noise)
        if made[0].numel() != images[0].numel():
            raise ValueError(
                f"the generator makes {made[0].numel()} pixels, but an image has "
                f"{images[0].numel()}: end it with as many outputs"
            )
        return made.reshape(images.shape)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        made = self.critic(y, self.generate(value, batch)).reshape(-1)
        real = self.critic(y, batch.rows[0]).reshape(-1)
        if self.form == "wasserstein":
            values = real - made
        else:
            values = F.logsigmoid(real) + F.logsigmoid(-made)
        return batch.mean(values) - self.penalty * (y @ y)

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question != "pixels":
            return super().answer(question, vectors, batch)
        sets = (batch.rows[0].flatten(1), self.generate(vectors[0], batch).flatten(1))
        # In double precision, because the variance is a small difference of these means.
        return tuple(batch.mean(double(v)) for images in sets for v in (images, images**2))

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        real, real2, made, made2 = ask.mean("pixels", point.x)
        spread = [(s - m * m).clamp(min=0).sqrt() for m, s in ((real, real2), (made, made2))]
        return super().evaluate(point, ask) | {
            "mean_distance": float((real - made).square().mean()),
            "spread_distance": float((spread[0] - spread[1]).square().mean()),
        }


def with_noise(clients: Sequence[Any], size: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Rows (image, noise) from each client's images. A row keeps its noise throughout a run.

    Arguments:
        clients: the images of each client.
        size: the length of the noise.
        seed: other seeds give other noise.
    """
    rows = []
    for number, images in enumerate(clients):
        images = torch.as_tensor(images)
        noise = random_numbers(seed, "noise", number).standard_normal((len(images), size))
        rows.append((images, torch.from_numpy(noise).to(images.dtype)))
    return rows
