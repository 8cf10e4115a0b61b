"""Memory that is freed in one step and asked for again in the next."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
LARGEST = 1 << 28  # bytes


@cache
def keep_freed_memory() -> bool:
    """Lets the process keep blocks of up to 256 MB for reuse, and says whether it could.

    By default glibc gives large blocks back to the system as soon as they are freed, and every step
    takes its activations and gradients anew, page by page.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP, LARGEST)) and bool(mallopt(_TRIM, LARGEST))
