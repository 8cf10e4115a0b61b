"""Agnostic learning, or group DRO, over sites: minimise the loss of the site with the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedminimax.problems.groups import WorstGroup
from fedminimax.types import Batch, Query


class WorstSite(WorstGroup):
    """Worst-site risk: min over network weights, max over site weights on the simplex.

    min over x, max over y of sum_s y_s F_s(x), where F_s is the mean cross-entropy of the rows of
    site s (Mohri et al., Agnostic Federated Learning, ICML 2019; Sagawa et al., Distributionally
    Robust Neural Networks, ICLR 2020). A row's third column is the number of its site,
    0 .. sites - 1 (`numbered` adds it). If each client is one site and all clients have the same
    weight, client k of N has f_k(x, y) = N y_k loss_k(x). A site may also be spread over clients,
    or a client hold several. Measures: accuracy, and loss and accuracy of the worst site.

    Arguments:
        module: the network, as in `Classifier`.
        sites: how many there are.
    """

    word, words = "site", "sites"
    monitor = "worst_site_accuracy"
    own_entries = True

    def __init__(self, module: nn.Module, sites: int):
        super().__init__(module, sites)
        self._names: Sequence[str] = ()

    def rows_from(self, clients: Sequence[Sequence[Any]], draw: int = 0) -> Sequence[Sequence[Any]]:
        return add_numbers(clients)

    def group(self, batch: Batch) -> Tensor:
        if len(batch.rows) < 3:
            raise ValueError(
                "rows have no column with the number of their site: give (features, labels, "
                "number), as `numbered` does"
            )
        return batch.rows[2].long()

    def prepare(self, ask: Query) -> Self:
        known = super().prepare(ask)
        # Later evaluations may ask some of the clients only.
        known._names = ask.names
        return known

    def group_name(self, group: int) -> str:
        """The client's name if each client is a site, else the number of the site."""
        return self._names[group] if len(self._names) == self.groups else str(group)


def add_numbers(clients: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The rows of each client with the client's number as a further column.

    >>> add_numbers([(np.ones((2, 1)), np.zeros(2)), (np.ones((1, 1)), np.ones(1))])[1][2]
    array([1])
    """

    def column(rows: Sequence[Any], number: int) -> Any:
        size = len(rows[0])
        if isinstance(rows[0], Tensor):
            return torch.full((size,), number, device=rows[0].device)
        return np.full(size, number)

    return [(*rows, column(rows, number)) for number, rows in enumerate(clients)]
