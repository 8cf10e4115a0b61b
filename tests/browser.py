"""A headless Chromium, spoken to through a pipe: no driver and no package is needed."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-pipe", "about:blank"),
)
CHROMIUM = shutil.which("chromium")


class Browser:
    """One page. `complaints` are errors, exceptions and warnings; `asked` are addresses."""

    def __init__(self, profile: Path):
        assert CHROMIUM is not None
        (read, self.write), (self.read, write) = os.pipe(), os.pipe()
        # Chromium reads from file 3 and writes to file 4.
        shell = f'exec "$0" "$@" 3<&{read} 4>&{write}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, f"--user-data-dir={profile}", *FLAGS],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self.number, self.session, self.heard = 0, None, b""
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write)
        os.close(self.read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, place: Path | str, width: int, dark: bool = False, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        self.prefer(dark)
        before = self.loaded
        address = place if isinstance(place, str) else place.resolve().as_uri()
        self.call("Page.navigate", url=address)
        give_up = time.monotonic() + 60
        while self.loaded == before:
            assert time.monotonic() < give_up, "the page did not load in a minute"
            self.call("Runtime.evaluate", expression="0")
            time.sleep(0.02)

    def prefer(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> bool:
        """Whether an expression becomes true within a minute."""
        give_up = time.monotonic() + 60
        while not (found := bool(self.value(expression))) and time.monotonic() < give_up:
            time.sleep(0.05)
        return found

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path, whole: bool = True) -> None:
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def print(self, path: Path) -> None:
        made = self.call("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.heard:
            more = os.read(self.read, 1 << 20)
            assert more, "Chromium has ended"
            self.heard += more
        line, _, self.heard = self.heard.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded += 1
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
