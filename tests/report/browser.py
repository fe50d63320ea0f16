"""A real browser for the tests: headless chromium over its DevTools protocol, through a pipe of its own.

    with Browser() as browser:
        page = browser.open(path, width=900, dark=True)
        page.value("document.title"), page.faults

No library: messages are JSON with a zero byte behind each, written to the browser's descriptor 3 and read from its 4
(`--remote-debugging-pipe`). https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT = 60.0  # seconds for an answer


def program() -> str | None:
    """The browser of this machine; `CKPT_CHROMIUM` names another."""
    return os.environ.get("CKPT_CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """A running browser. It ends, and what it wrote goes, with the block."""

    def __init__(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="ckpt-browser-")
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        def descriptors() -> None:
            low = os.dup(to_read)
            high = os.dup(to_write)
            os.dup2(low, 3)
            os.dup2(high, 4)

        found = program()
        assert found is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        quiet = ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"]
        self._process = subprocess.Popen(
            [found, "--remote-debugging-pipe", *flags, *quiet, f"--user-data-dir={self._scratch}", "about:blank"],
            close_fds=False,
            preexec_fn=descriptors,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self.events = list[dict[str, Any]]()
        self._target = ""

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command of the protocol and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        until = time.monotonic() + WAIT
        while (answer := self._next(until - time.monotonic())).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert seconds > 0 and select.select([self._in], [], [], seconds)[0], "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, width: int = 1600, dark: bool = False, script: bool = True) -> Tab:
        """The page of a file, drawn, in place of the last one. script: does it run scripts?"""
        if self._target:
            self.call("Target.closeTarget", targetId=self._target)
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        tab.call("Emulation.setEmulatedMedia", features=scheme)
        tab.call("Emulation.setScriptExecutionDisabled", value=not script)
        tab.call("Page.navigate", url=path.resolve().as_uri())
        tab.until("location.protocol === 'file:' && document.readyState === 'complete'")
        if script:
            tab.until("!document.getElementById('data') || document.body.dataset.drawn")
        return tab


class Tab:
    """An open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is, as a plain value."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        end = time.monotonic() + WAIT
        while not self.value(expression):
            assert time.monotonic() < end, f"never came true: {expression}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Until what has been done is drawn: figures follow their width a frame later."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def type(self, text: str) -> None:
        """Text into what has the focus, as a keyboard gives it."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, times: int = 1) -> None:
        """A key by its name in JavaScript: `Tab`, `ArrowDown`, `Enter`."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "End": 35,
            "Home": 36,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more
                )

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12_000), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        return base64.b64decode(data)

    @property
    def faults(self) -> list[str]:
        """What the console holds that is an error or a warning, and every exception."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event.get("params", {})
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
        return found
