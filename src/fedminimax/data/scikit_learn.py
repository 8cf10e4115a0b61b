"""Two small data sets that come with scikit-learn, dealt out to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fedminimax.data.arrays import reading_of
from fedminimax.data.folder import Reading
from fedminimax.data.partition import dirichlet
from fedminimax.data.sites import DataError

Which = Literal["digits", "breast_cancer"]


@dataclass(frozen=True)
class ScikitLearn:
    """A data set of scikit-learn, with clients that differ in their classes.

    which: "digits", 1,797 small pictures of handwritten digits as 64 numbers each, of which the
    eights (9.7 %) are positive, and clients differ in which digits they have; or "breast_cancer",
    569 tumours, of which the malignant ones (37 %) are positive. Both are of the UCI repository.
    """

    which: Which = "digits"
    clients: int = 5
    concentration: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.which not in get_args(Which):
            raise DataError(f"which is {self.which!r}; use one of {', '.join(get_args(Which))}.")

    def read(self) -> Reading:
        from sklearn import datasets  # takes a while to load

        load: Any = getattr(datasets, f"load_{self.which}")
        held = load()
        features, classes = np.asarray(held.data, np.float64), np.asarray(held.target)
        labels = classes == 8 if self.which == "digits" else classes == 0
        parts = dirichlet(classes, self.clients, self.concentration, self.seed)
        whose = np.empty(len(labels), int)
        for number, rows in enumerate(parts):
            whose[rows] = number
        names = [str(name).replace(" ", "_") for name in held.feature_names]
        return reading_of(features, labels.astype(int), (0, 1), whose, names)
