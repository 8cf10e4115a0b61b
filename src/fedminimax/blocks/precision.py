"""Double precision, with a substitute on devices that do not have it (Apple's MPS)."""

from __future__ import annotations

import torch
from torch import Tensor

NO_DOUBLE = ("mps",)


def counting(device: torch.device) -> torch.dtype:
    """The type for counts on a device: float64 if it has it, because counts are divided."""
    return torch.float32 if device.type in NO_DOUBLE else torch.float64


def double(values: Tensor) -> Tensor:
    """The values in float64, moved to the CPU if their device does not have it."""
    return (values.cpu() if values.device.type in NO_DOUBLE else values).double()
