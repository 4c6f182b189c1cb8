"""HTTP client with bounded retries, timeouts, reply sizes and requests in flight. A failure is a `RunError` of one line."""

import json
import math
import os
import random
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import httpx2

from fluvial.engines.errors import RunError, UsageError, convert_errors

CONNECT = 10.0  # timeout of a connection, in seconds
START = 10.0  # patience with a server that has not answered yet, in seconds: a run ends soon if its server is down
FIRST_DELAY, LAST_DELAY = 0.5, 15.0  # seconds before a retry; doubles from one retry to the next
TRIES = 3  # attempts at a request that the server fails at, without being overloaded or away
AWAY = (408, 429, 502, 503, 504)  # statuses of a server that is overloaded, restarting or behind a proxy
JSON = "application/json"
SHOWN = 160  # characters of a reply in a message
MOST_ERROR = 65536  # largest error reply that is parsed for its detail, in bytes


class UnreachableError(RunError):
    """Failure of a server that is away, overloaded or restarting: the same request may succeed later."""


class Reply(NamedTuple):
    """Reply of any status; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Thread-safe client of one server.

    Args:
        url: address of the server, e.g. http://10.0.0.5:8000, with or without a path.
        timeout: seconds that one request may take, from the connection to the last byte of the reply.
        patience: seconds after the first failure during which a request is retried: after connection errors, timeouts, and
            the statuses 408, 429, 502, 503 and 504. Other statuses of 500 and above are tried three times. Until a server
            has answered once, it is at most 10.
        in_flight: largest number of concurrent requests.
        key_env: environment variable with an API key, sent as a bearer token. Empty sends none.
        most_mb: largest reply, in megabytes.
        transport: httpx transport; by default one connection per request, and no proxy of the environment.

    Raises:
        UsageError: an argument is wrong, or the environment variable is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 120.0,
        patience: float = 120.0,
        in_flight: int = 8,
        key_env: str = "",
        most_mb: int = 64,
        transport: httpx2.BaseTransport | None = None,
        clock: Any = time,  # replaced in tests
    ) -> None:
        self.address, self.url = url.rstrip("/"), _parse_url(url)
        for name, value in {"timeout": timeout, "in_flight": in_flight, "most_mb": most_mb}.items():
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value:g}, expected a number above 0")
        if not (math.isfinite(patience) and patience >= 0):
            raise UsageError(f"patience is {patience:g}, expected seconds, 0 or more")
        self.timeout, self.patience, self.in_flight, self.most_mb = timeout, patience, in_flight, most_mb
        self.clock, self.transport = clock, transport or _build_transport(self.url)
        self.answered = False
        self._key = _build_authorization(key_env)
        self._client = httpx2.Client(
            # A compressed reply could become larger than `most_mb`.
            headers={"Accept-Encoding": "identity", **self._key},
            timeout=httpx2.Timeout(timeout, connect=min(CONNECT, timeout), pool=None),
            transport=self.transport,
            trust_env=False,
        )
        self._slots = threading.BoundedSemaphore(in_flight)
        # Random delays keep many ranks from hitting a restarted server at once. Separate from the other random streams.
        self._jitter = random.Random()

    def get(self, path: str) -> Any:
        """Return the JSON at a path; see `post`."""
        return self._decode(self._fetch(path), path)

    def post(self, path: str, value: Any) -> Any:
        """Post a JSON value, and return the JSON answer; both may hold NaN and Infinity.

        Raises:
            RunError: the server cannot be reached, fails, or does not answer in JSON.
        """
        return self._decode(self._fetch(path, json.dumps(value).encode()), path)

    def post_bytes(self, path: str, body: bytes, *, content_type: str) -> bytes:
        """Post bytes, and return the body of the answer; see `post`."""
        return self._fetch(path, body, content_type)

    def attempt(self, path: str, body: bytes | None = None, content_type: str = JSON) -> tuple[Reply | None, str]:
        """Send a request once; return the reply, None if there was none, and the problem, empty for a success.

        Args:
            body: body; None sends a GET request.

        Raises:
            RunError: the reply is too large.
        """
        try:
            with self._slots:
                reply = self._send(path, body, content_type)
        except (TimeoutError, httpx2.TimeoutException):
            return None, f"{self.address}{path} did not answer within {self.timeout:g} s"
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return None, f"{self.address}{path} cannot be reached: {format_reply(str(error) or type(error).__name__)}"
        if is_success(reply):
            self.answered = True
            return reply, ""
        return reply, f"{self.address}{path} {self._describe_failure(reply)}"

    def _decode(self, body: bytes, path: str) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            kind = "not JSON" if isinstance(error, ValueError) else "JSON that is nested too deeply"
            raise RunError(f"{self.address}{path} answered with {kind}: {format_reply(body)}") from error

    def _fetch(self, path: str, body: bytes | None = None, content_type: str = JSON) -> bytes:
        """Send a request until it succeeds or patience ends; return the body of the reply."""
        start, delay, tries = self.clock.monotonic(), FIRST_DELAY, 0
        while True:
            reply, problem = self.attempt(path, body, content_type)
            tries += 1
            if reply is not None and is_success(reply):
                return reply.body
            wait = max(delay * (0.75 + 0.5 * self._jitter.random()), read_retry_after(reply))
            patience = self.patience if self.answered else min(self.patience, START)
            spent = self.clock.monotonic() - start
            if not can_retry(reply, tries) or spent + wait > patience:
                tried = f" ({tries} tries in {spent:.0f} s)" if tries > 1 else ""
                kind = UnreachableError if can_retry(reply, tries) else RunError
                raise kind(f"{problem}{tried}")
            self.clock.sleep(wait)
            delay = min(2 * delay, LAST_DELAY)

    def _send(self, path: str, body: bytes | None, content_type: str) -> Reply:
        """Send a request; the reply is read piece by piece, so that one that is too large is cut off."""
        most, read = int(self.most_mb * 1_000_000), bytearray()
        too_large = RunError(
            f"{self.address} sent a reply of more than {self.most_mb} MB, which was cut off: set most_mb if it is right"
        )
        with (
            _Deadline(self.timeout) as deadline,
            self._client.stream(
                "GET" if body is None else "POST",
                self.url.copy_with(path=self.url.path.rstrip("/") + path),
                content=body,
                headers={} if body is None else {"Content-Type": content_type},
                extensions={"trace": deadline.trace},
            ) as response,
        ):
            announced = response.headers.get("content-length", "")
            if announced.isdecimal() and int(announced[:18]) > most:
                raise too_large
            for piece in response.iter_raw():
                read += piece
                if len(read) > most:
                    raise too_large
            return Reply(response.status_code, dict(response.headers), bytes(read))

    def _describe_failure(self, reply: Reply) -> str:
        """Describe an error reply in one line."""
        if 300 <= reply.status < 400:
            target = format_reply(reply.headers.get("location", "nowhere"))
            return f"redirects to {target}, and redirects are not followed: set url to the server's own address"
        if reply.status in (401, 403):
            advice = "the key was not accepted" if self._key else "set key_env to the environment variable of an API key"
            return f"answered {reply.status}: {self._quote_reply(reply)}; {advice}"
        return f"answered {reply.status}: {self._quote_reply(reply)}"

    def _quote_reply(self, reply: Reply) -> str:
        """Quote `detail` of a JSON object, or else the body, with the API key masked."""
        text = reply.body[:MOST_ERROR].decode("utf-8", "replace")
        with suppress(ValueError, RecursionError):
            answer = json.loads(reply.body) if len(reply.body) <= MOST_ERROR else None
            if isinstance(answer, dict) and isinstance(answer.get("detail"), str):
                text = answer["detail"]
        key = self._key.get("Authorization", "").removeprefix("Bearer ")
        return format_reply(text.replace(key, "***") if key else text)


class _Deadline:
    """Context that ends a request after some seconds, with a TimeoutError.

    httpx's timeouts restart with every byte, so a server that sends one byte per minute would hold a thread for hours.
    A timer shuts the connection down instead.
    """

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._socket: socket.socket | None = None
        self._expired = False

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._timer.cancel()
        if self._expired:
            raise TimeoutError from error

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Store the socket of the connection; for httpx's `trace` extension."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self._expired:
                self._expire()

    def _expire(self) -> None:
        self._expired = True
        if self._socket is not None:
            with suppress(OSError):  # not SSLSocket's method, which changes state that the other thread uses
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def format_reply(text: bytes | str) -> str:
    """Return the start of a reply for a message: one line of printable characters."""
    start = text[: 4 * SHOWN].decode("utf-8", "replace") if isinstance(text, bytes) else text[: 4 * SHOWN]
    line = "".join(character if character.isprintable() else " " for character in start)
    line = " ".join(line.split())
    return (line if len(line) <= SHOWN else line[: SHOWN - 3] + "...") or "an empty reply"


def is_success(reply: Reply | None) -> bool:
    """Return whether there is a reply with a status from 200 to 299."""
    return reply is not None and 200 <= reply.status < 300


def can_retry(reply: Reply | None, tries: int) -> bool:
    """Return whether the same request may succeed later."""
    return reply is None or reply.status in AWAY or (reply.status >= 500 and tries < TRIES)


def read_retry_after(reply: Reply | None) -> float:
    """Return the seconds of the header Retry-After, 0 without it."""
    text = "" if reply is None else reply.headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, OverflowError, IndexError):
        return 0.0


def _build_transport(url: httpx2.URL) -> httpx2.HTTPTransport:
    """Build a transport without proxies that opens a connection per request."""
    verify = ssl.create_default_context() if url.scheme == "https" else False
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx2.HTTPTransport(verify=verify, trust_env=False, limits=limits)


def _parse_url(url: str) -> httpx2.URL:
    try:
        parts: httpx2.URL | None = httpx2.URL(url)
    except httpx2.InvalidURL:
        parts = None
    known = parts is not None and parts.scheme in ("http", "https") and parts.host and 0 < (parts.port or 1) < 2**16
    if parts is None or not known or not url.isascii() or " " in url:
        raise UsageError(f"url is {format_reply(url)!r}, expected the address of a server, e.g. http://127.0.0.1:8000")
    if parts.userinfo or parts.query or parts.fragment:
        raise UsageError(
            f"url names {parts.host} with a user, a query or a fragment: give the address alone, and an API key in the "
            "environment variable that key_env names"
        )
    return parts


def _build_authorization(key_env: str) -> dict[str, str]:
    """Build the header with the API key of an environment variable."""
    if not key_env:
        return {}
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise UsageError(f"key_env is {key_env!r}, and that environment variable is not set: export the API key in it")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"key_env is {key_env!r}, and that variable holds more than one printable word")
    return {"Authorization": f"Bearer {key}"}


Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def run_in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], *, at_once: int
) -> Iterator[Iterator[tuple[int, Result | BaseException]]]:
    """Call a function on items in threads; yield an iterator over (index, result or exception) as they finish.

    At the end of the context, remaining items are dropped. The threads are daemons, so one that waits for a server does not
    keep the process alive.
    """
    left, over = list(reversed(list(enumerate(items)))), threading.Event()
    done: SimpleQueue[tuple[int, Result | BaseException]] = SimpleQueue()

    def work() -> None:
        while left and not over.is_set():
            try:
                index, item = left.pop()
            except IndexError:  # another thread was faster
                return
            try:
                done.put((index, function(item)))
            except BaseException as error:
                done.put((index, error))

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield (done.get() for _ in items)
    finally:
        over.set()


def find_shared_folder() -> Path:
    """Return this user's folder for weights between trainers and servers on one machine, in shared memory if possible.

    It is created if missing. Other users cannot write to it.

    Raises:
        RunError: the folder cannot be created, or belongs to another user.
    """
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    folder = parent / f"fluvial-{os.getuid()}"
    with convert_errors(RunError, OSError, says=f"{folder} cannot be written"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o22:
        raise RunError(f"{folder} is not this user's own: remove it, or set `rollout.servers.weights_folder`")
    return folder
