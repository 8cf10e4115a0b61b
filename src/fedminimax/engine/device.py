"""Where a run computes."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch

from fedminimax.blocks.precision import NO_DOUBLE

KNOWN = ("cpu", "cuda", "mps")


def device_of(given: str | torch.device | None, dtype: torch.dtype) -> torch.device:
    """The device that was asked for, if it is there and has the precision.

    >>> device_of(None, torch.float32)
    device(type='cpu')
    """
    try:
        device = torch.device(given or "cpu")
    except RuntimeError:
        device = None
    if device is None or device.type not in KNOWN:
        raise ValueError(f"device is {str(given)!r}; give one of {', '.join(KNOWN)}")
    count = 1 if device.type == "cpu" else getattr(torch, device.type).device_count()
    if (device.index or 0) >= count:
        raise ValueError(
            f"device is {str(given)!r}, but torch sees {count or 'no'} such "
            f"device{'' if count == 1 else 's'} on this machine: leave device out, or install a "
            "torch that has it"
        )
    if device.type in NO_DOUBLE and dtype == torch.float64:
        raise ValueError(f"device {device.type} has no float64: use dtype float32, or another one")
    return device


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given: a clock must not stop before."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def usable_cores() -> int:
    """How many this process may use, which can be fewer than the machine has."""
    return len(_own_cores()) or os.cpu_count() or 1


def _own_cores() -> list[int]:
    """Which ones; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def share_of_cores(number: int, parts: int) -> list[int]:
    """The cores of the process with this number, where so many share those of this one; with more
    processes than cores, some have the same one."""
    own = _own_cores()
    return own[number % len(own) :: parts] if own else []


def stay_on(cores: list[int]) -> None:
    """This thread, and those that it will begin, use these cores; an operation uses one core where
    the system does not tell which there are."""
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(1, len(cores)))


@contextmanager
def threads(count: int) -> Generator[None, None, None]:
    """Within it an operation on the host is shared by so many threads."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chance(device: torch.device) -> list[torch.Tensor]:
    """The state of torch's own random numbers, on the host and on the device."""
    own = [] if device.type == "cpu" else [getattr(torch, device.type).get_rng_state()]
    return [torch.random.get_rng_state(), *own]
