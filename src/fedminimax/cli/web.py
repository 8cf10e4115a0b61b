"""A page that shows runs as they go: read-only, on this machine only, its address a secret."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedminimax.report.live import Going, page_of
from fedminimax.report.page import POLICY, whole

HOST = "127.0.0.1"
SECONDS = 1.0  # between two looks at the folders
QUIET = 15  # looks without news after which a sign of life is sent
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Look = Callable[[], Sequence[Going]]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, title: str, look: Look):
        super().__init__((HOST, 0), _Handler)
        self.title, self.look = title, look
        self.token, self.over = secrets.token_urlsafe(16), threading.Event()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # type: ignore[assignment]  the one that makes it
    server_version, sys_version = "fedminimax", ""

    def do_GET(self) -> None:
        """The page, or the events that keep it up to date; nothing else is here."""
        # A name that leads here is another origin: only the address that was printed is answered.
        if self.headers.get("Host") != f"{HOST}:{self.server.server_port}":
            return self.send_error(403, "ask by the address that was printed")
        token, _, rest = self.path.lstrip("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self.send_error(404)
        if rest == "":
            return self._page()
        if rest == "events":
            return self._events()
        return self.send_error(404)

    def _page(self) -> None:
        body = '<p id="live" role="status"></p><main></main>'
        policy = f"{POLICY}; connect-src 'self'"
        scripts = ("page.js", "live.js")
        foot = "This page is read-only, and on this machine alone."
        text = whole(self.server.title, "fedminimax, live", body, policy, scripts, foot)
        self._begin("text/html; charset=utf-8")
        self.wfile.write(text.encode())

    def _events(self) -> None:
        self._begin("text/event-stream")
        before, quiet = "", 0
        try:
            while not self.server.over.is_set():
                now = json.dumps({"html": page_of(self.server.look())})
                quiet = 0 if now != before or quiet > QUIET else quiet + 1
                if quiet == 0:
                    self.wfile.write((f"data: {now}\n\n" if now != before else ":\n\n").encode())
                    self.wfile.flush()
                before = now
                self.server.over.wait(SECONDS)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the page was closed

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Type": kind, **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address would be in it."""


@contextmanager
def serve(title: str, look: Look) -> Iterator[str]:
    """Serves the page for as long as the block lasts; gives its address."""
    server = _Server(title, look)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.address
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
