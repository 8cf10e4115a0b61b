"""What DRFA and AFL share: a server that weighs its clients, on the simplex."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, Self

import torch
from torch import Tensor

from fedminimax.blocks.projections import simplex
from fedminimax.types import Algorithm, Client, Clock, Down, Server, Up

MOST_CLIENTS = 10_000


@dataclass(frozen=True)
class ClientWeights(Algorithm[Server, Down, Client, Up], Generic[Server, Down, Client, Up]):
    """min over x, max over weights on the simplex of sum_k weights_k f_k(x).

    The server must learn one number from each client, and sees only means: a client sends a vector
    with an entry for everyone, of which only its own is not 0.
    """

    clients: int | None = field(default=None, kw_only=True)  # N; None: as many as the run has
    partial: ClassVar[bool] = True
    maximises: ClassVar[bool] = False
    robust: ClassVar[bool] = False  # a median of vectors with one entry each is zero
    solves: ClassVar[str] = "minimisation of the worst client's loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        count, name = self.clients, type(self).__name__
        if count is None:
            return
        if type(count) is not int or count < 1:
            raise ValueError(f"{name}: clients is {count!r}; give how many clients there are")
        if count > MOST_CLIENTS:
            raise ValueError(
                f"{name} keeps a weight for each of the {count} clients, and each sends a vector "
                f"as long as that: it is refused beyond {MOST_CLIENTS}; group the clients, or use "
                "a method whose dual does not grow with them"
            )

    def for_clients(self, count: int) -> Self:
        """The method for a run with that many clients."""
        if self.clients not in (None, count):
            raise ValueError(
                f"{type(self).__name__}: clients is {self.clients}, but the run has {count}: leave "
                f"it out, or give {count}"
            )
        return replace(self, clients=count)

    @property
    def count(self) -> int:
        if self.clients is None:
            raise ValueError(
                f"{type(self).__name__} has to know how many clients there are: give clients=..."
            )
        return self.clients

    def even(self, like: Tensor) -> Tensor:
        return like.new_full((self.count,), 1 / self.count)

    def own_entry(self, number: Tensor, clock: Clock) -> Tensor:
        """The number at this client's place, 0 elsewhere."""
        places = torch.arange(self.count, device=number.device)
        return torch.where(places == clock.client, number, torch.zeros_like(number))

    def ascend(self, weights: Tensor, lr: Tensor | float, losses: Tensor) -> Tensor:
        # A constant does not change the projection; less it, equal losses leave equal weights
        # exactly as they are.
        return simplex(weights + lr * (losses - losses.min()))
