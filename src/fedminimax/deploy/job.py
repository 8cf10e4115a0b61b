"""The two halves of a job of NVIDIA FLARE: they are installed with fedminimax, not sent along, so
a site that allows these two classes runs no code that it has not installed itself."""

from __future__ import annotations

import os
from pathlib import Path

from nvflare.collab import collab

from fedminimax.deploy.consortium import CONSORTIUM_VARIABLE, SITE_VARIABLE
from fedminimax.deploy.served import serve
from fedminimax.deploy.site import Site
from fedminimax.engine.nvflare import FlareTransport


class RunServer:
    """The server's half: everything about the run is in its folder there."""

    def __init__(self, run: str):
        self.run = run

    @collab.main
    def main(self) -> None:
        serve(Path(os.environ[CONSORTIUM_VARIABLE]), self.run, FlareTransport())


class RunSite:
    """A site's half: everything about the site is in its own file."""

    def __init__(self) -> None:
        self._site: Site | None = None

    @collab.init
    def open(self) -> None:
        # Reading the rows once, before the first call has its time measured.
        self._site = Site.open(Path(os.environ[SITE_VARIABLE]))

    @collab.publish
    def handle(self, message: bytes) -> bytes:
        assert self._site is not None
        return self._site.handle(message)
