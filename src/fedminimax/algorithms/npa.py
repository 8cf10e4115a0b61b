"""NPA: the naive parallel algorithm, which averages after every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms.coda_plus import CodaPlus


@dataclass(frozen=True)
class NPA(CodaPlus):
    """NPA, naive parallel descent ascent (Yuan et al., ICML 2021, Appendix C).

    CODA+ with one local step:

        x <- x - lr_s * ( mean_k grad_x f_k(x, y) + proximal * (x - x_0) )
        y <- y + lr_s * mean_k grad_y f_k(x, y)

    Up and down: dx + dy floats per iteration.

    *Differs from the paper*: clients send their moved points rather than gradients; the mean is the
    same. It is weighted as the run says (AUC: by size); the paper's is even.
    """

    local_steps: int = 1
    stage_rounds: int = 800
    solves: ClassVar[str] = "minimax: PL-strongly concave"
    reference: ClassVar[str] = (
        "Yuan et al., Federated Deep AUC Maximization for Heterogeneous Data, ICML 2021, App. C"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps != 1 or self.local_steps_growth != 1:
            raise ValueError(
                f"NPA averages after every step, but local_steps is {self.local_steps}: use "
                "CODA+ for more than one"
            )
