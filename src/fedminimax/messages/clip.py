"""Bounded updates: no client moves the mean further than a given length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedminimax.messages.stage import Message, Stage, add_update, shrink, update
from fedminimax.types import Clock

_DUAL = ("y", "dual")


@dataclass(frozen=True)
class Clip(Stage):
    """Scales a client's update down to a norm, if it is longer.

    An update is what a client sends less what the server sent down under the same name; a field
    that has no such counterpart (a momentum, an inner value) is an update as it is. With `norm`
    alone, all fields together are bounded. With `dual_norm` too, the fields of the dual player (y,
    and names that end in _y) have this bound, and all others together have `norm`.
    """

    norm: float = 1.0
    dual_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("norm", "dual_norm"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"Clip: {name} is {value!r}; give a finite number above 0")

    def at_client(
        self, down: Message, client: Message, up: Message, kept: Any, clock: Clock
    ) -> tuple[Message, Any]:
        change = update(down, up)
        if self.dual_norm is None:
            return add_update(down, shrink(change, self.norm)), kept
        dual = {n: v for n, v in change._asdict().items() if n in _DUAL or n.endswith("_y")}
        primal = {n: v for n, v in change._asdict().items() if n not in dual}
        for fields, bound in ((primal, self.norm), (dual, self.dual_norm)):
            change = change._replace(
                **dict(zip(fields, shrink(tuple(fields.values()), bound), strict=True))
            )
        return add_update(down, change), kept
