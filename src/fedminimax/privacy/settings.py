"""What a run promises, and with which settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedminimax.privacy.accountant import check_delta, check_epsilon


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of a run: one training row is replaced by an empty one.

    level: "record" promises it of every training row. epsilon, delta: what the whole run may spend.
    row_clip: the length to which a row's gradient is cut, in x and y together. dual_scale: by which
    the part in y is multiplied before it is cut and gets noise, and divided after. noise: the
    multiplier of every release; as small as the planned rounds allow, when not given. With a noise
    of its own, a run stops when one more round would spend more than epsilon.
    """

    level: Literal["none", "record"] = "none"
    epsilon: float = 3.0
    delta: float = 1e-5
    row_clip: float = 1.0
    dual_scale: float = 1.0
    noise: float | None = None

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        for name in ("row_clip", "dual_scale", "noise"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"[privacy] {name} is {value!r}; give a finite number above 0")

    @property
    def by_record(self) -> bool:
        return self.level == "record"
