"""The methods, by the name that an experiment gives them."""

from __future__ import annotations

from fedminimax.algorithms.coda import Coda
from fedminimax.algorithms.coda_plus import CodaPlus
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.npa import NPA
from fedminimax.types import Algorithm

METHODS: dict[str, type[Algorithm]] = {
    "coda": Coda,
    "coda_plus": CodaPlus,
    "codasca": Codasca,
    "fedavg": FedAvg,
    "local_sgda": LocalSGDA,
    "npa": NPA,
}
