"""A real Chromium for tests, driven over its debugging pipe: JSON ended by a null byte, in on 3, out on 4.

No driver and no websocket is needed. Which program: POLYFED_CHROMIUM, else the first of `NAMES` on the path;
`scripts/browser.py` installs one.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chromium-headless-shell")
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-extensions", "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--no-sandbox",
)  # fmt: skip
# Puts the two ends on 3 and 4, wherever they were, and becomes the browser.
BECOME = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def program() -> str | None:
    """The browser to test with; None where there is none."""
    named = os.environ.get("POLYFED_CHROMIUM")
    return shutil.which(named) if named else next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in a headless browser; a context manager.

    Attributes:
        complaints: console errors, uncaught exceptions and what the page's policy blocked.
        requests: every URL that was asked for.
    """

    def __init__(self, path: str, profile: Path, seconds: float = 30.0) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [sys.executable, "-S", "-E", "-c", BECOME, str(to_browser), str(from_browser)]
        self._process = subprocess.Popen(
            [*command, path, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.seconds = seconds
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._buffer, self._last = b"", 0
        self._session: str | None = None
        self._events: list[str] = []

    def __enter__(self) -> Browser:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    # messages

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; its result."""
        self._last += 1
        call = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            call["sessionId"] = self._session
        os.write(self._write, json.dumps(call).encode() + b"\0")
        deadline = time.monotonic() + self.seconds
        while True:
            message = self._next(deadline)
            if message.get("id") == self._last:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, "the browser did not answer" if not ready else "the browser ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, told: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"])[:500])
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {told['message']}")

    # a page

    def open(self, url: str) -> None:
        """Go there and wait until it has loaded."""
        self._events.clear()
        self.ask("Page.navigate", url=url)
        deadline = time.monotonic() + self.seconds
        while "Page.loadEventFired" not in self._events:
            self._next(deadline)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def center(self, selector: str) -> tuple[float, float]:
        """Where an element is, once it has been scrolled into view."""
        find = f"document.querySelector({json.dumps(selector)})"
        box = self.value(
            f"(() => {{ const e = {find}; e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        return box[0], box[1]

    def click(self, selector: str) -> None:
        """Press and release the left button in the middle of an element."""
        x, y = self.center(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str, code: int) -> None:
        """Press and release a key, such as ("Enter", 13) or ("ArrowRight", 39)."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def sized(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The window's size in pixels, and which of the two looks is asked for."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        look = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[look])

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """The page as PNG."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def printed(self, path: Path) -> None:
        """The page as PDF."""
        path.write_bytes(base64.b64decode(self.ask("Page.printToPDF", printBackground=False)["data"]))
