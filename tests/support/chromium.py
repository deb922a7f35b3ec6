"""Headless Chromium without network, driven over the DevTools protocol:
the behaviour of HTML pages in a browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WITHIN_S = 60


class Browser:
    """Browser with one tab, as a context manager; :meth:`opened` loads a page in it."""

    def __init__(self, profile: Path) -> None:
        """Start the browser. ``profile``: empty folder for its user data."""
        assert CHROMIUM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        flags = (
            f"--headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir={profile} "
            f"--remote-debugging-pipe "
            f"--proxy-server=127.0.0.1:9 --no-first-run --disable-background-networking"
        )
        # with --remote-debugging-pipe the browser reads from descriptor 3 and writes to 4
        command = f'exec 8<&{theirs_in} 9>&{theirs_out}; exec 3<&8 4>&9; exec "$0" {flags}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._to)
        os.close(self._from)

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result;
        events that arrive before it are appended to ``events``.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def opened(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Load a page in a window of ``width`` pixels; block until its load event."""
        self.events.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def picture(self, target: Path) -> None:
        """Save a screenshot of the whole page as PNG."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(found["data"]))

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + WITHIN_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser has said nothing for {WITHIN_S} s"
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has gone"
            self._rest += more
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message
