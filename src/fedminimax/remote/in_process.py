"""Sites in this process: the same messages as between machines, without a network. For tests, and
to rehearse a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


class InProcess:
    """`handlers` take a message and return the reply, as `remote.site.Site.handle` does."""

    rejoins = True

    def __init__(self, handlers: Mapping[str, Callable[[bytes], bytes]]):
        self.handlers = handlers

    def call(
        self, sites: Sequence[str], message: bytes, timeout: float
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        replies, failures = {}, {}
        for name in sites:
            try:
                replies[name] = self.handlers[name](message)
            except OSError as error:  # what a broken link gives, and a late reply
                failures[name] = str(error)
        return replies, failures
