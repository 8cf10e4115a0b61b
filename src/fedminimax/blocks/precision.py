"""Precision where a device may not have it: Apple's MPS knows no double precision."""

from __future__ import annotations

import torch
from torch import Tensor

NO_DOUBLE = ("mps",)


def counting(device: torch.device) -> torch.dtype:
    """For counts, which are divided by one another."""
    return torch.float32 if device.type in NO_DOUBLE else torch.float64


def double(values: Tensor) -> Tensor:
    """In double precision; on the host, if the device has none."""
    return (values.cpu() if values.device.type in NO_DOUBLE else values).double()
