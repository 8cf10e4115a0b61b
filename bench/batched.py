"""A round of LocalSGDA on AUC with the MLP 64-32-1, all clients at once, by hand: under vmap, and
with the derivatives written out; and the part of it that no method can leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from bench.ours import Steady
from fedminimax.engine.executors.compiled.inductor import inductor

FEATURES, HIDDEN = 64, 32
SIZES = (HIDDEN * FEATURES, HIDDEN, HIDDEN, 1, 1, 1)  # of the weights, a and b


class Given(NamedTuple):
    """What a round starts from: the server's point, the rows of all, and those of each batch."""

    x: Tensor
    y: Tensor
    features: Tensor
    labels: Tensor
    # (steps, clients, batch)
    index: Tensor  # type: ignore[reportIncompatibleMethodOverride]  # nobody searches in this tuple
    weights: Tensor
    share: float
    lr: float

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, self.y, self.features, self.labels, self.index, self.weights]


def given_by(run: Steady) -> Given:
    federation, state = run.federation, run.state
    method, problem, index = federation.algorithm, federation.problem, run.index()[:, 0]
    features, labels = federation.clients.train.columns
    weights = (federation.weights / federation.weights.sum()).to(features.dtype)
    share, lr = problem.positive_share, method.primal_lr  # type: ignore[attr-defined]
    return Given(state.server.x, state.server.y, features, labels, index, weights, share, lr)


def in_groups(given: Given, size: int) -> list[Given]:
    """The same for so many clients at a time; their results add up to those of all."""
    parts = zip(given.index.split(size, 1), given.weights.split(size), strict=True)
    return [given._replace(index=index.contiguous(), weights=own) for index, own in parts]


def added(results: Iterable[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*results, strict=True)
    return torch.stack(x).sum(0), torch.stack(y).sum(0)


def vmapped(given: Given) -> tuple[Tensor, Tensor]:
    def loss(x: Tensor, y: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        first, shift, second, last, a, b = x.split(SIZES)
        hidden = torch.relu(torch.addmm(shift, features, first.view(HIDDEN, FEATURES).T))
        s, p, negative = torch.sigmoid(hidden @ second + last), given.share, 1 - labels
        squares = (1 - p) * (s - a) ** 2 * labels + p * (s - b) ** 2 * negative
        difference = p * s * negative - (1 - p) * s * labels
        return (squares + 2 * (1 + y) * difference).mean() - p * (1 - p) * (y * y).sum()

    def client(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x, y = given.x, given.y
        for step in range(len(features)):
            along = grad(loss, argnums=(0, 1))(x, y, features[step], labels[step])
            x, y = x - given.lr * along[0], y + given.lr * along[1]
        return x, y

    rows = given.features[given.index], given.labels[given.index]
    x, y = vmap(client, in_dims=1)(*rows)
    return given.weights @ x, given.weights @ y


def written_out(given: Given) -> tuple[Tensor, Tensor]:
    clients, p, lr = given.index.shape[1], given.share, given.lr
    parts = [part.expand(clients, -1) for part in given.x.split(SIZES)]
    first, shift, second, last, a, b = parts
    first, y = first.reshape(clients, HIDDEN, FEATURES), given.y.expand(clients, -1)
    for rows in given.index:
        features, positive = given.features[rows], given.labels[rows]
        count, negative = positive.shape[1], 1 - positive
        hidden = torch.relu(torch.baddbmm(shift[:, None], features, first.transpose(1, 2)))
        s = torch.sigmoid((hidden * second[:, None]).sum(2) + last)
        above, below = (1 - p) * (s - a) * positive, p * (s - b) * negative
        sign = p * negative - (1 - p) * positive
        slope = 2 * (above + below + (1 + y) * sign) / count * s * (1 - s)
        down = slope[:, :, None] * second[:, None] * (hidden > 0)
        y_slope = 2 * (sign * s).mean(1, keepdim=True) - 2 * p * (1 - p) * y
        second = second - lr * (slope[:, :, None] * hidden).sum(1)
        first = first - lr * torch.bmm(down.transpose(1, 2), features)
        shift, last = shift - lr * down.sum(1), last - lr * slope.sum(1, keepdim=True)
        a = a + lr * 2 * above.mean(1, keepdim=True)
        b = b + lr * 2 * below.mean(1, keepdim=True)
        y = y + lr * y_slope
    x = torch.cat([first.flatten(1), shift, second, last, a, b], 1)
    return given.weights @ x, given.weights @ y


def machine_code(given: Given) -> Callable[[Given], list[Tensor]]:
    """`written_out` for what is shaped like this, without the guards of `torch.compile`."""

    def operations(*tensors: Tensor) -> list[Tensor]:
        own = dict(zip(Given._fields, tensors, strict=False))
        return list(written_out(given._replace(**own)))

    code = inductor(make_fx(operations)(*given.tensors), given.tensors)
    return lambda own: code(own.tensors)


def products(run: Steady, gradients: int) -> Callable[[], None]:
    """The rows of all batches, and for each gradient of a step the products with the large weights:
    forward, and for the slope."""
    features, index = run.federation.clients.train.columns[0], run.index()[:, 0]
    clients = index.shape[1]
    first = run.state.server.x[: SIZES[0]].expand(clients, -1).reshape(clients, FEATURES, HIDDEN)

    def call() -> None:
        for rows in index:
            batch = features[rows]
            for _ in range(gradients):
                torch.bmm(batch.transpose(1, 2), torch.bmm(batch, first))

    return call
