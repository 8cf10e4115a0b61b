"""Calls to sites over NVIDIA FLARE (extra `nvflare`), by its Collab API.

Only bytes are handed to FLARE: it opens none of them, and pickles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvflare.collab import collab


class FlareTransport:
    """For use in a job's main method at the server; the job's client part publishes `handle`."""

    # A site whose process has died is not put back into a running job.
    rejoins = False

    def call(
        self, sites: Sequence[str], message: bytes, timeout: float
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        joined = {proxy.name for proxy in collab.clients}
        failures = {
            name: "it was not there when the job began" for name in sites if name not in joined
        }
        asked = [name for name in sites if name in joined]
        if not asked:
            return {}, failures
        found: Any = collab.get_clients(asked)(timeout=timeout).handle(message)
        replies: dict[str, bytes] = dict(found)
        for name in asked:
            if name not in replies:
                error = found.failures.get(name)
                cause = str(getattr(error, "cause", error)).splitlines()
                failures[name] = f"no reply within {timeout:g} s ({cause[0] if cause else error})"
        return replies, failures
