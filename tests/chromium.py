"""A headless Chromium for the tests, driven over a pipe: no port, no driver, no network.

``tests/bootstrap/chromium.sh`` finds or installs it. Requests and replies follow the DevTools protocol: they are JSON
objects, each ended by a zero byte.

``python -m tests.chromium PAGE FOLDER`` saves screenshots of the page at each width, light and dark.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers import bootstrap

__all__ = ["SCHEMES", "WIDTHS", "Browser", "Opened", "chromium", "running"]

WIDTHS = (390, 1280, 2560)
SCHEMES = ("light", "dark")
ANSWER_WITHIN = 120.0  # seconds to wait at most for a reply; on an idle machine a reply takes about 0.1 s
STOP_WITHIN = 10.0
CHUNK = 65536
OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--disable-features=Translate,MediaRouter,OptimizationHints",
    "--proxy-server=127.0.0.1:9", "--remote-debugging-pipe",
]  # fmt: skip
# Chromium reads from descriptor 3 and writes to 4.
STARTER = """
import fcntl, os, sys
for number, given in zip((3, 4), [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]):
    os.dup2(given, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str:
    return bootstrap("chromium")


@dataclass
class Opened:
    """A loaded page: what it logged and which addresses it requested."""

    seconds: float  #: the time in which the page loaded completely
    errors: list[str] = field(default_factory=list)  #: messages of the console, and exceptions
    requests: list[str] = field(default_factory=list)  #: addresses


class Browser:
    """A browser with one tab. At the end of ``with`` all its processes end, which form a process group of their own."""

    def __init__(self, program: str, folder: str) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self._read, self._write = theirs[0], ours[1]
        command = [program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        starter = [sys.executable, "-c", STARTER, str(ours[0]), str(theirs[1])]
        self._process = subprocess.Popen(
            [*starter, *command], pass_fds=(ours[0], theirs[1]), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._rest, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []

    def attach(self) -> None:
        targets = self.ask("Target.getTargets")["targetInfos"]
        tab = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    def open(self, url: str, width: int, scheme: str, *, height: int = 900) -> Opened:
        """Load the page at this width. ``scheme`` is "light" or "dark"."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        # the browser does not load an address that differs from the present one only behind its #
        self._load("about:blank")
        began = time.monotonic()
        self._load(url)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        opened = Opened(time.monotonic() - began)
        for event in self._events:
            match event["method"], event["params"]:
                case "Network.requestWillBeSent", {"request": {"url": str(address)}}:
                    opened.requests.append(address)
                case "Log.entryAdded", {"entry": {"level": "error", "text": str(text)}}:
                    opened.errors.append(text)
                case "Runtime.consoleAPICalled", {"type": "error" | "assert", "args": arguments}:
                    opened.errors.append(str(arguments))
                case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                    opened.errors.append(str(details))
        return opened

    def _load(self, url: str) -> None:
        self._events.clear()
        begun = self.ask("Page.navigate", url=url)
        if "errorText" in begun:
            raise RuntimeError(f"{url}: {begun['errorText']}")
        while not any(
            event["method"] == "Page.lifecycleEvent"
            and (event["params"]["loaderId"], event["params"]["name"]) == (begun["loaderId"], "load")
            for event in self._events
        ):
            self._receive()

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page. The page's security policy does not apply to it."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode={"Tab": 9}.get(key, 0)
            )

    def picture(self, path: Path, *, whole: bool = True) -> None:
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": params}
        if self._session and not method.startswith("Target."):
            request["sessionId"] = self._session
        data = json.dumps(request).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while (answer := self._receive()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_WITHIN)

    def _receive(self) -> dict[str, Any]:
        """Return the next message. Events are recorded too."""
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], ANSWER_WITHIN)[0]:
                raise TimeoutError(f"Chromium says nothing for {ANSWER_WITHIN:g} s")
            if not (chunk := os.read(self._read, CHUNK)):
                raise RuntimeError(f"Chromium ended by itself ({self._process.poll()})")
            self._rest += chunk
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self._events.append(message)
        return message


@contextmanager
def running() -> Iterator[Browser]:
    """Start a browser with an empty profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(chromium(), folder)
        try:
            browser.attach()
            yield browser
        finally:
            browser.close()


def main(page: str, folder: str) -> None:
    with running() as browser:
        for width in WIDTHS:
            for scheme in SCHEMES:
                opened = browser.open(Path(page).absolute().as_uri(), width, scheme)
                browser.picture(Path(folder, f"{width}-{scheme}.png"), whole=False)
                wide = browser.run("document.documentElement.scrollWidth")
                print(f"{width} {scheme}: {opened.seconds:.2f} s, {wide} wide, {opened.errors}, {opened.requests}")


if __name__ == "__main__":
    main(*sys.argv[1:])
