"""A real browser for the tests: Chromium without a window, spoken to over a pipe (its DevTools protocol).

No driver and no package are needed besides the browser itself. `Page.errors` collects what a person would see as an
error in the console: exceptions, console.error, and refused or failed loads.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
TIMEOUT_S = 60.0
# Chromium reads commands from descriptor 3 and answers on 4. The pipes may be there already, so they step aside first.
LAUNCHER = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.closerange(5, 64)
os.execv(sys.argv[3], sys.argv[3:])
"""


def browser_path() -> str | None:
    """Return where a browser is installed, if one is."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One open page."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a report, and wait until its scripts have drawn it."""
        self.load(path, width=width, height=height, dark=dark)
        drawn = "document.documentElement.dataset.drawn"
        self.run(f"new Promise((done) => {{ const look = () => {drawn} ? done(1) : setTimeout(look, 5); look(); }})")

    def load(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open any page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Return what an expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page is drawn: layout, scrolling and changes of the system's colours are in effect then."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def key(self, name: str) -> None:
        text = name if len(name) == 1 else ""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result = answer["result"]
                assert isinstance(result, dict)
                return result

    def _wait_for(self, event: str) -> None:
        while not any(seen["method"] == event for seen in self._events):
            self._read()

    def _read(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._receive, 1 << 20)
            assert chunk, "the browser ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        assert isinstance(message, dict)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextlib.contextmanager
def open_browser() -> Iterator[Page]:
    """Start a browser of its own, and end it."""
    path = browser_path()
    assert path is not None
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="lowtide-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCHER,
                str(to_browser),
                str(from_browser),
                path,
                *FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(from_us, to_us)
        finally:
            os.close(from_us)
            os.close(to_us)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
