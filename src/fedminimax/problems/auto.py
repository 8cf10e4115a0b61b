"""No objective of its own, but the wish that validation rows choose one."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from fedminimax.problems.binary import BinaryProblem
from fedminimax.types import Point

AUTO = "auto"
NO_EXPERIMENT = (
    'problem "auto" is a choice between experiments, and no experiment itself: use fedminimax run, '
    "fedminimax deploy or FederatedClassifier, or name a problem"
)
Measure = Literal["auc", "auprc", "worst_site_auc"]


class Auto(BinaryProblem):
    """The objective, method, network and rates that do best on validation rows.

    A few recipes are trained side by side; the better ones go on, and the best is the run's result
    (successive halving; `fedminimax.tuning.auto` has the recipes). All of it costs at most three
    times the gradients of one run. Test rows decide nothing.

    Arguments:
        measure: what is to be large on the validation rows of all sites: "auc", "auprc", or
            "worst_site_auc".
        local_steps: steps that a client takes in a round, whatever is chosen.
        least_per_bin: see `BinaryProblem`.
    """

    def __init__(
        self,
        module: nn.Module,
        measure: Measure = "auc",
        local_steps: int = 8,
        least_per_bin: int = 0,
    ):
        super().__init__(module, least_per_bin)
        raise ValueError(NO_EXPERIMENT)

    def start(self) -> Point:
        """Never called."""
        raise NotImplementedError

    def outer(self, value: Any, y: Any, batch: Any) -> Any:
        """Never called."""
        raise NotImplementedError
