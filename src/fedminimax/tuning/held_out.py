"""The rows that judge a trial: validation rows, and never test rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedminimax.data.split import stratified_split
from fedminimax.experiment import Read

SHARE = 0.25  # of the training rows, where the data come without validation rows


def without_test(found: Read, seed: int) -> Read:
    """The data as a search sees them: no test rows, and with validation rows. Where there are
    none, a part of each client's training rows is held out, and a note says so."""
    if "validation" in found.rows:
        return found._replace(rows={s: found.rows[s] for s in ("train", "validation")})
    shares = [SHARE] * len(found.rows["train"])
    note = (
        f"there are no validation rows: {SHARE:.0%} of each client's training rows are held out "
        "to judge by"
    )
    return found._replace(
        rows=_cut(found, found.rows["train"], shares, seed), notes=[*found.notes, note]
    )


def cut_again(found: Read, seed: int) -> Read:
    """The same training and validation rows, dealt anew in the same proportions."""
    pairs = list(zip(found.rows["train"], found.rows["validation"], strict=True))
    together = [
        tuple(_joined(same) for same in zip(train, held, strict=True)) for train, held in pairs
    ]
    shares = [len(held[0]) / (len(train[0]) + len(held[0])) for train, held in pairs]
    return found._replace(rows=_cut(found, together, shares, seed))


def _cut(
    found: Read, clients: Sequence[Sequence[Any]], shares: Sequence[float], seed: int
) -> dict[str, Any]:
    rows: dict[str, Any] = {"train": [], "validation": []}
    for number, (client, share) in enumerate(zip(clients, shares, strict=True)):
        size = len(client[0])
        labels = np.asarray(client[1]) if "classes" in found.supplied else np.zeros(size)
        fractions = (1 - share, share, 0.0)
        train, held, _ = stratified_split(labels, fractions, seed, number)
        if not len(held):  # each class is too small to be in both parts
            train, held, _ = stratified_split(np.zeros(size), fractions, seed, number)
        if not len(held):
            name = number if found.names is None else found.names[number]
            raise ValueError(
                f"the data have no validation rows, and client {name} has {size} training row, "
                "too few to hold some out: nothing but training and test rows could judge a trial, "
                "so nothing is tuned; give validation rows, or more rows"
            )
        for split, chosen in (("train", train), ("validation", held)):
            rows[split].append(tuple(column[chosen] for column in client))
    return rows


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if torch.is_tensor(parts[0]) else np.concatenate(parts)
