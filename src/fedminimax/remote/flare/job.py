"""The two halves of a job of NVIDIA FLARE: they are installed with fedminimax, not sent along, so
a site that allows its half runs no code that it has not installed itself."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from nvflare.collab import collab

from fedminimax.remote.consortium import CONSORTIUM_VARIABLE, HOME_VARIABLE, SITE_VARIABLE
from fedminimax.remote.flare.transport import FlareTransport
from fedminimax.remote.served import ping, serve
from fedminimax.remote.site import Site, refusal


class RunServer:
    """The server's half: everything about the run is in its folder there. With `pings`, there is no
    run: the sites are called that often, to see what a call costs."""

    def __init__(self, run: str, pings: int = 0):
        self.run, self.pings = run, pings

    @collab.main
    def main(self) -> None:
        consortium = Path(os.environ[CONSORTIUM_VARIABLE])
        if self.pings:
            ping(consortium, self.run, FlareTransport(), self.pings)
        else:
            serve(consortium, self.run, FlareTransport())


class RunSite:
    """A site's half: everything about the site is in its own file."""

    def __init__(self) -> None:
        self._site: Site | None = None

    @collab.init
    def open(self) -> None:
        os.environ["HOME"] = os.environ[HOME_VARIABLE]  # where ~ and the cache of data sets are
        try:
            self._site = Site.open(Path(os.environ[SITE_VARIABLE]))
        except Exception:
            # Raised, it would end the job of all sites, and the server would not learn why.
            traceback.print_exc()

    @collab.publish
    def handle(self, message: bytes) -> bytes:
        if self._site is None:
            return refusal("it cannot open its site folder; its log says more")
        return self._site.handle(message)
