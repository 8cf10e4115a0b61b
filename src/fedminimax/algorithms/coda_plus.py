"""CODA+: stage-wise local descent ascent with a proximal term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedminimax.algorithms._stagewise import StageAveraged


@dataclass(frozen=True)
class CodaPlus(StageAveraged):
    """CODA+ (Yuan, Guo et al., Federated Deep AUC Maximization, ICML 2021, Algorithms 1 and 2).

    Stage s starts at (x_0, y_0), what the stage before returned. Client k takes steps

        x <- x - lr_s * ( grad_x f_k(x, y) + proximal * (x - x_0) )
        y <- y + lr_s * grad_y f_k(x, y)

    with both gradients at the old point and on one batch, and every `local_steps` the server
    averages x and y. The stage returns the average over its steps and clients. Up and down:
    dx + dy floats per round; x_0 is the first point a client receives in a stage, so it travels
    once.

    *Differs from the paper*: `proximal` is the coefficient itself (the paper writes it as gamma,
    1/gamma and 1/(2 gamma) in turn; its experiments use 1/500 to 1/1000). `stage_output = "last"`
    continues from the last point as the authors' code does; there the centre is each client's own
    average, here it is the common last point. Stages have `stage_rounds` rounds, as in the
    experiments; the theory's growth is `stage_growth`. The sets of the problem, if any, are
    projected onto after each move. Means over clients are weighted as the run says (AUC: by size);
    the paper's are even. A run that ends inside a stage returns the last average, not the stage's.
    """

    solves: ClassVar[str] = "minimax: PL-strongly concave"
    reference: ClassVar[str] = (
        "Yuan et al., Federated Deep AUC Maximization for Heterogeneous Data, ICML 2021, Alg. 1-2"
    )
