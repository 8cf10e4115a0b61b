"""Base class of problems with a network: x begins with the weights of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedminimax.problems.network import Network, weights_of
from fedminimax.types import Batch, Point, Problem, Query, Vectors


class NetworkProblem(Problem):
    """A problem whose x begins with the weights of a network, followed by variables of its own.

    Arguments:
        module: the network, any torch module without random layers such as dropout.
    """

    def __init__(self, module: nn.Module):
        self.network = Network(module)

    @classmethod
    def outputs_for(cls, classes: int) -> int:
        """How many outputs its network has for that many classes."""
        return 1

    def rows_from(self, clients: Sequence[Sequence[Any]], draw: int = 0) -> Sequence[Sequence[Any]]:
        """The rows that the problem needs, made from each client's (features, labels).

        `draw` is 0, 1 or 2 for training, validation and test rows, so that what is drawn differs.
        """
        return clients

    def network_weights(self, x: Tensor) -> Tensor:
        return self.parts(x)[0]

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The network's weights, and what follows them."""
        # One operation, because the derivative through a slice allocates a vector as long as x.
        own, length = self.network.length, x.shape[0]
        # Unchecked: these are two parts.
        return (x, x[:0]) if length == own else x.split((own, length - own))  # type: ignore[return-value]

    def start_from(self, module: nn.Module) -> Tensor:
        usual, weights = self.start().x, weights_of(module)
        length = self.network.length
        if [p.shape for p in module.parameters()] != self.network.shapes:
            raise ValueError(
                f"the module to start from has {weights.numel()} weights, the problem's network "
                f"{length}, or others: give a module of the same architecture"
            )
        return torch.cat([weights.to(usual), usual[length:]])

    def moments(self, point: Point, ask: Query) -> Tensor | None:
        """The mean over clients of E[x] and E[x^2] at each batch-norm layer, in one exchange."""
        return ask.mean("moments", point.x)[0] if self.network.has_norms else None

    def module(self, point: Point, moments: Tensor | None = None) -> nn.Module:
        return self.network.module(self.network_weights(point.x), moments)

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question == "moments":
            return (self.network.moments(self.network_weights(vectors[0]), batch.features),)
        return super().answer(question, vectors, batch)
