"""Ask a server, and again where that may help: bounded waiting, bounded replies, a bounded number of requests in flight.

Every failure is one line, a `RunError`.
"""

import json
import math
import os
import random
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.http.transport import Reply, Request, TooLargeError, Transport, send

START = 10.0  # seconds of patience with a server that has not answered yet: one that is down ends a run in its first seconds
FIRST_DELAY, LAST_DELAY = 0.5, 15.0  # seconds before a request is sent again; each delay is twice the one before
TRIES = 3  # times that a request is sent which the server fails at, without being overloaded or away
AWAY = (408, 429, 502, 503, 504)  # statuses of a server that is overloaded, restarting or behind a proxy
SHOWN = 160  # characters of a reply in a message


class Clock(Protocol):
    """Time, which tests replace."""

    def now(self) -> float:
        """Return seconds since any start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class WallClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class HttpClient:
    """Requests to one server, from any number of threads.

    Args:
        url: address of the server, e.g. http://10.0.0.5:8000, with or without a path.
        timeout: seconds that one request may take, from the connection to the last byte of the reply.
        patience: seconds after the first failure during which a request is sent again: after connection errors, timeouts,
            and the statuses 408, 429, 502, 503 and 504. Other statuses of 500 and above are tried three times. Until a
            server has answered once, it is at most 10.
        in_flight: largest number of requests at the same time.
        key_env: environment variable that holds an API key, sent as a bearer token. Empty sends none.
        most_mb: largest reply, in megabytes.
        transport: function that carries a request.
        clock: time.

    Raises:
        UsageError: an argument is wrong, or the environment variable is not set.
    """

    def __init__(
        self, url: str, *, timeout: float = 120.0, patience: float = 120.0, in_flight: int = 8, key_env: str = "",
        most_mb: int = 64, transport: Transport = send, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.address, self.url = url.rstrip("/"), _split(url)
        for name, value in {"timeout": timeout, "in_flight": in_flight, "most_mb": most_mb}.items():
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value:g}, expected a number above 0")
        if not (math.isfinite(patience) and patience >= 0):
            raise UsageError(f"patience is {patience:g}, expected seconds, 0 or more")
        self.timeout, self.patience, self.in_flight, self.most_mb = timeout, patience, in_flight, most_mb
        self.transport: Transport = transport
        self.clock: Clock = clock or WallClock()
        self.answered = False
        self._headers = _authorization(key_env)
        self._slots = threading.BoundedSemaphore(in_flight)
        # Delays differ between clients, so that those of many ranks do not knock at a restarted server in step. No other
        # stream of randomness is touched.
        self._jitter = random.Random()

    def get(self, path: str) -> Any:
        """Return the JSON at a path; see `post`."""
        return self.decoded(self._fetched(path, None, {}), path)

    def post(self, path: str, value: Any) -> Any:
        """Return the JSON that the server answers to a value.

        Raises:
            RunError: the server cannot be reached, fails, or does not answer in JSON.
        """
        body = json.dumps(value).encode()
        return self.decoded(self._fetched(path, body, {"Content-Type": "application/json"}), path)

    def post_bytes(self, path: str, body: bytes, *, content_type: str) -> bytes:
        """Return the bytes that the server answers; see `post`."""
        return self._fetched(path, body, {"Content-Type": content_type})

    def attempt(
        self, path: str, body: bytes | None = None, *, content_type: str = "application/json"
    ) -> tuple[Reply | None, str]:
        """Send a request once; return the reply, None if there was none, and what is wrong where it is no success.

        Args:
            path: path, with its first slash.
            body: body; None sends a GET request.
            content_type: media type of the body.

        Raises:
            RunError: the reply is too large.
        """
        kind = {} if body is None else {"Content-Type": content_type}
        request = Request(self.url, self.url.path.rstrip("/") + path, {**self._headers, **kind}, body)
        reply, problem = self._tried(request)
        self.answered |= is_success(reply)
        return reply, f"{self.address}{path} {problem}"

    def decoded(self, body: bytes, path: str) -> Any:
        """Return a body as JSON, in which NaN and Infinity may stand for numbers."""
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            kind = "not JSON" if isinstance(error, ValueError) else "JSON that is nested too deeply"
            raise RunError(f"{self.address}{path} answered with {kind}: {shown(body)}") from error

    def _fetched(self, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        """Return the body of the first reply that is a success."""
        request = Request(self.url, self.url.path.rstrip("/") + path, {**self._headers, **headers}, body)
        start, delay, tries = self.clock.now(), FIRST_DELAY, 0
        while True:
            reply, problem = self._tried(request)
            tries += 1
            if reply is not None and is_success(reply):
                self.answered = True
                return reply.body
            asked = retry_after(reply)
            wait = max(delay * (0.75 + 0.5 * self._jitter.random()), asked)
            patience = self.patience if self.answered else min(self.patience, START)
            spent = self.clock.now() - start
            if not may_pass(reply, tries) or spent + wait > patience:
                tried = f" ({tries} tries in {spent:.0f} s)" if tries > 1 else ""
                raise RunError(f"{self.address}{path} {problem}{tried}")
            self.clock.sleep(wait)
            delay = min(2 * delay, LAST_DELAY)

    def _tried(self, request: Request) -> tuple[Reply | None, str]:
        """Return the reply, None if there was none, and what is wrong in words."""
        most = int(self.most_mb * 1_000_000)
        try:
            with self._slots:
                reply = self.transport(request, timeout=self.timeout, most_bytes=most)
        except TooLargeError:
            raise RunError(
                f"{self.address} sent a reply of more than {self.most_mb} MB, which was cut off: set most_mb if it is right"
            ) from None
        except TimeoutError:
            return None, f"did not answer within {self.timeout:g} s"
        except (OSError, HTTPException, ValueError) as error:
            return None, f"cannot be reached: {shown(str(error) or type(error).__name__)}"
        if 300 <= reply.status < 400:
            target = shown(reply.headers.get("location", "nowhere"))
            return reply, f"redirects to {target}, and redirects are not followed: set url to the server's own address"
        if reply.status in (401, 403):
            advice = "the key was not accepted" if self._headers else "set key_env to the environment variable of an API key"
            return reply, f"answered {reply.status}: {advice}"
        return reply, f"answered {reply.status}: {shown(reply.body)}"


def shown(text: bytes | str) -> str:
    """Return the start of a reply as it is put into a message: one line, printable characters alone."""
    start = text[: 4 * SHOWN].decode("utf-8", "replace") if isinstance(text, bytes) else text[: 4 * SHOWN]
    line = "".join(character if character.isprintable() else " " for character in start)
    line = " ".join(line.split())
    return (line if len(line) <= SHOWN else line[: SHOWN - 3] + "...") or "an empty reply"


def is_success(reply: Reply | None) -> bool:
    """Return whether there is a reply, of a status from 200 to 299."""
    return reply is not None and 200 <= reply.status < 300


def may_pass(reply: Reply | None, tries: int) -> bool:
    """Return whether the same request may succeed later."""
    return reply is None or reply.status in AWAY or (reply.status >= 500 and tries < TRIES)


def retry_after(reply: Reply | None) -> float:
    """Return the seconds that the server asks to wait for, 0 if it does not say."""
    text = "" if reply is None else reply.headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, OverflowError, IndexError):
        return 0.0


def _split(url: str) -> SplitResult:
    """Return the parts of a server's address.

    Raises:
        UsageError: it is none.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known or not url.isascii() or any(character <= " " for character in url):
        raise UsageError(f"url is {shown(url)!r}, expected the address of a server, e.g. http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            f"url names {parts.hostname} with a user, a query or a fragment: give the address alone, and an API key in the "
            "environment variable that key_env names"
        )
    return parts


def _authorization(key_env: str) -> dict[str, str]:
    """Return the header that holds the API key of an environment variable."""
    if not key_env:
        return {}
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise UsageError(f"key_env is {key_env!r}, and that environment variable is not set: export the API key in it")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"key_env is {key_env!r}, and that variable holds more than one printable word")
    return {"Authorization": f"Bearer {key}"}
