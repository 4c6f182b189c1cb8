"""Opens a page in headless Chromium, and says what it asked the network for, what it complained of, and what it holds."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)
LIMIT = 60.0  # seconds for one answer
TEXT = "document.body.innerText"


def binary() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A tab of a browser, driven through the pipes of its debugging protocol."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read, self.count, self.rest = write, read, 0, b""
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Log", "Runtime", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path | str) -> None:
        """Load a file or an address, and wait until its images are there too."""
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        end = time.monotonic() + LIMIT
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression} did not become true within {LIMIT:g} s: {self.value(TEXT)}"
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def resize(self, width: int) -> None:
        """Make the window so wide, and fail if something is wider, or an interval in a table is on two lines."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert self.value("document.body.scrollWidth <= window.innerWidth"), f"something is wider than {width} pixels"
        broken = "[...document.querySelectorAll('td span')].some(part => part.getClientRects().length > 1)"
        assert not self.value(broken), f"an interval is on two lines at {width} pixels"

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for, itself included, data that it holds left out."""
        sent = [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def complaints(self) -> list[dict[str, Any]]:
        kinds = {"Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"}
        return [event["params"] for event in self.events if event["method"] in kinds]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT
        while b"\0" not in self.rest:
            ready = select.select([self.read], [], [], max(end - time.monotonic(), 0))[0]
            assert ready, f"the browser said nothing for {LIMIT:g} s"
            part = os.read(self.read, 1 << 16)
            assert part, "the browser ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found


@contextmanager
def tab() -> Iterator[Tab]:
    """Start a browser with a new profile, and end it afterwards."""
    path = binary()
    assert path is not None
    there, write = os.pipe()
    read, here = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(  # it takes commands from descriptor 3 and answers on 4
            ["bash", "-c", f'exec "$@" 3<&{there} 4>&{here}', "bash", path, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(there, here),
            env={**os.environ, "HOME": profile},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(here)
        try:
            yield Tab(write, read)
        finally:
            os.close(write)
            os.close(read)
            process.kill()
            process.wait()
