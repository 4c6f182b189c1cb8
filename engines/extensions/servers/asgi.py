"""Common parts of fluvial's servers: limits, API keys, errors in one line, shutdown on a signal."""

import asyncio
import contextlib
import hmac
import math
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.extensions.wire.decode import WireError, decode


class ConnectionLimits(NamedTuple):
    """Limits of connections.

    Args:
        requests: largest number of connections, and of requests in progress.
        per_address: the same per client address.
        header: seconds until a request's header is complete, from the connection or the last response.
        body: seconds until a request's body is complete, from its header.
        stalled: seconds without progress until an unread response is dropped.
    """

    requests: int = 512
    per_address: int = 256
    header: float = 10.0
    body: float = 60.0
    stalled: float = 60.0


class Connection(H11Protocol):
    """Connection with read timeouts; idle connections are closed under load.

    So a client that is silent, or stops in the middle of a request, does not block others.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits, self.since = limits, self.loop.time()
        self._phase: tuple[Any, bool, bool] | None = None  # request, whether its body is incomplete, whether it is answered
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is in progress: there is none, its header is incomplete, or its response is sent."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the oldest idle connection if there are too many, of this address or in total."""
        super().connection_made(transport)
        self._update_deadline()
        others = sorted((each for each in self.connections if isinstance(each, Connection)), key=lambda each: each.since)
        ours = [each for each in others if _get_host(each) == _get_host(self)]
        for group, most in ((ours, self.limits.per_address), (others, self.limits.requests)):
            oldest = next((each for each in group if each.idle and each is not self), None)
            if len(group) > most and oldest is not None:
                oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read bytes of the client."""
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._cancel()
        super().connection_lost(exc)

    def _update_deadline(self) -> None:
        """Set the deadline for the next part of the request; further bytes of the same part do not extend it."""
        sends_body, answered = self.conn.their_state is h11.SEND_BODY, self.cycle is None or self.cycle.response_complete
        phase = (self.cycle, sends_body, answered)
        if phase == self._phase:
            return
        self._phase = phase
        self._cancel()
        if sends_body or answered:
            self._set_timer(self.limits.body if sends_body else self.limits.header)

    def _set_timer(self, seconds: float) -> None:
        self._cancel()
        unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self.limits.stalled if unread else seconds, self._close_if_stalled, unread)

    def _close_if_stalled(self, unread: int) -> None:
        """Close the connection, unless the client has read from its response since the deadline was set."""
        if self.transport.get_write_buffer_size() < unread:
            self._set_timer(self.limits.header)
        else:
            self.transport.abort()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _get_host(connection: H11Protocol) -> str:
    return connection.client[0] if connection.client else ""


Result = TypeVar("Result")
KEY_ENV = "FLUVIAL_SERVE_KEY"  # environment variable of the API key
ADMIN_KEY_ENV = "FLUVIAL_SERVE_ADMIN_KEY"  # environment variable of the key for control endpoints
OPEN = ("/health", "/health_generate", "/liveness")  # paths without a key, for probes of a cluster
FORM = "multipart/form-data"
# Content types of paths that take a form with files; all others take JSON.
FORMS = {"/v1/images/edits": (FORM,), "/v1/videos": ("application/json", FORM)}
LIMITS = ConnectionLimits()
SMALL = 65536  # largest body that is decoded in the event loop, in bytes: a thread would take longer
MOST_VALUES = 250_000  # values per body, because each becomes an object
GONE = 499  # status of a request whose client has disconnected; nobody receives it


class RequestError(Exception):
    """Error for the client of a request: one line and a status."""

    def __init__(self, problem: str, status: int = 400, *, retry_after: int | None = None) -> None:
        super().__init__(problem)
        self.status, self.problem, self.retry_after = status, " ".join(problem.split()), retry_after


class RequestGuard:
    """Middleware that admits requests with the API key, within the limits, and not from web pages.

    A web page in a browser on this machine can reach a server on the loopback address. Its browser sends the page's Origin,
    sends a preflight request before JSON, and sends the page's own Host if that name was rebound to this address.

    Args:
        key: key that must be sent as a bearer token; empty admits every request whose Host is this machine.
        admin: key of the control endpoints, which is valid for the others too; empty makes `key` valid for all.
        control: paths of the control endpoints.
        page: path of the server's own web page, whose requests are admitted too. The page itself needs no key; everything
            else does, so that other pages have no access.
        limits: largest numbers of requests in progress; `OPEN` is answered beyond them.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str,
        *,
        admin: str = "",
        control: Collection[str] = (),
        page: str = "",
        limits: ConnectionLimits,
    ) -> None:
        assert key or not page
        self.app, self.control, self.page, self.limits = app, frozenset(control), page, limits
        self.expected, self.admin = _encode_token(key), _encode_token(admin)
        self.in_progress = Counter[str]()  # number of requests by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an admitted request; refuse any other without reading its body."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        problem = self._find_problem(scope["method"], scope["path"], Headers(scope=scope)) or self._check_load(address)
        if problem is not None:
            await refuse(problem)(scope, receive, send)
            return
        self.in_progress[address] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.in_progress -= Counter([address])

    def _find_problem(self, method: str, path: str, headers: Headers) -> RequestError | None:
        host = headers.get("host", "")
        if not self.expected and not _is_loopback(_parse_hostname(host)):
            return RequestError(f"the host is {host[:60]!r}, expected this machine's loopback address: set {KEY_ENV}", 421)
        if self.page and method == "GET" and path == self.page:
            return None
        if "origin" in headers and not (self.page and headers["origin"].partition("://")[2] == host):
            return RequestError("the request comes from a web page (Origin), which this server does not answer", 403)
        is_control = bool(self.admin) and path in self.control
        accepted = [self.admin] if is_control else [token for token in (self.expected, self.admin) if token]
        sent = headers.get("authorization", "").encode("latin-1")
        if (is_control or self.expected) and not any(hmac.compare_digest(sent, token) for token in accepted):
            name = "the admin key" if is_control else "an API key"
            return RequestError(f"this server needs {name}, sent as a bearer token", 401)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        expected = FORMS.get(path, ("application/json",))
        if method == "POST" and kind not in expected:
            return RequestError(f"the content type is {kind[:60]!r}, expected {' or '.join(expected)}", 415)
        return None

    def _check_load(self, address: str) -> RequestError | None:
        if self.in_progress[address] < self.limits.per_address and self.in_progress.total() < self.limits.requests:
            return None
        return RequestError("too many requests are in progress: try again later", 503, retry_after=1)


def _encode_token(key: str) -> bytes:
    return f"Bearer {key}".encode() if key else b""


async def read_body(request: Request, *, most_bytes: int, most_values: float = math.inf) -> bytearray:
    """Read a request's body, piece by piece.

    Raises:
        RequestError: it is larger than `most_bytes`, or has the commas of more than `most_values` JSON values.
    """
    problem = RequestError(f"the request has more than {most_bytes // 1_000_000} MB: send less at once", 413)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) > most_bytes:
        raise problem
    body, size, values = bytearray(), 0, 1
    try:
        async for piece in request.stream():
            size, values = size + len(piece), values + piece.count(b",")
            if size > most_bytes:
                raise problem
            if values <= most_values:  # the rest is still read, for clients that send everything before they read the answer
                body += piece
    except ClientDisconnect:
        raise RequestError("the client has disconnected", GONE) from None
    if values > most_values:
        raise RequestError(f"the request has more than {most_values} values: send less at once", 413)
    return body


async def read_json(request: Request, kind: type[Result], *, most_bytes: int, lenient: bool = False) -> Result:
    """Read the JSON body of a request as an object of a type.

    The body is never read beyond `most_bytes`, and a large one is decoded in a thread. Its values are counted before, by the
    commas, because the server would not respond while 60 MB become millions of objects.

    Args:
        lenient: see `convert`.

    Raises:
        RequestError: the body is too large.
        WireError: the body is not JSON, or does not fit the type.
    """
    body = await read_body(request, most_bytes=most_bytes, most_values=MOST_VALUES)
    if len(body) <= SMALL:
        return decode(body, kind, lenient=lenient)
    return await asyncio.to_thread(decode, body, kind, lenient=lenient)


async def run_until_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Await work, and cancel it when the client disconnects. The request's body must have been read.

    Raises:
        RequestError: the client has disconnected.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError("the client has disconnected", GONE)
        return task.result()
    finally:
        for pending in (task, disconnect):
            pending.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refuse(error: RequestError) -> JSONResponse:
    """Build the response to a wrong request: `{"detail": one line}`."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse({"detail": error.problem, "error": error.problem}, error.status, headers)


def build_application(
    routes: Sequence[Route],
    *,
    close: Callable[[], None],
    key: str = "",
    admin: str = "",
    control: Collection[str] = (),
    page: str = "",
    limits: ConnectionLimits = LIMITS,
) -> ASGIApp:
    """Build an ASGI application with errors of one line; a RunError has the status 500.

    Args:
        close: function that is called at the end.
        key, admin, control, page, limits: see `RequestGuard`.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        close()

    handlers: dict[Any, Any] = {
        RequestError: lambda request, error: refuse(error),
        WireError: lambda request, error: refuse(RequestError(str(error))),
        RunError: lambda request, error: refuse(RequestError(str(error), 500)),
    }
    app = Starlette(routes=list(routes), lifespan=lifespan, exception_handlers=handlers)
    return RequestGuard(app, key, admin=admin, control=control, page=page, limits=limits)


def read_key(host: str) -> str:
    """Read the API key from the environment; empty if there is none.

    Raises:
        UsageError: other machines can reach the host, and there is no key.
    """
    key = os.environ.get(KEY_ENV, "").strip()
    if not key and not _is_loopback(host):
        raise UsageError(
            f"`host` is {host}, which other machines reach, and there is no API key: export one in {KEY_ENV} for clients "
            "to send (key_env), or serve on 127.0.0.1"
        )
    return key


def read_admin_key() -> str:
    """Read the key of the control endpoints from the environment; empty if there is none."""
    return os.environ.get(ADMIN_KEY_ENV, "").strip()


def check_address(host: str, port: int) -> None:
    """Raise UsageError if an address cannot be listened on."""
    _open_socket(host, port).close()


def serve(app: ASGIApp, *, host: str, port: int, ready: Callable[[str], None], limits: ConnectionLimits = LIMITS) -> None:
    """Serve an application until SIGINT or SIGTERM; requests in progress then have five seconds to finish.

    Args:
        port: port; 0 takes a free one.
        ready: function that is called with the server's address once it listens.
        limits: see `Connection`.

    Raises:
        UsageError: the address cannot be listened on.
    """
    listener = _open_socket(host, port)
    config = uvicorn.Config(
        app,
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]
        proxy_headers=False,  # a client could send a false address
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    # uvicorn would raise the signal again at the end, and a stopped server would seem to have failed.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    with listener, _stop_on_signals(server):
        address = f"[{host}]" if ":" in host else host
        ready(f"http://{address}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])


@contextlib.contextmanager
def _stop_on_signals(server: Any) -> Iterator[None]:
    """Stop a server on SIGINT and SIGTERM in the context; a second SIGINT stops it at once."""

    def stop(number: int, frame: object) -> None:
        server.force_exit = server.should_exit and number == signal.SIGINT
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_socket(host: str, port: int) -> socket.socket:
    with convert_errors(
        UsageError, OSError, OverflowError, says=f"`host` is {host} and `port` is {port}, which cannot be listened on"
    ):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    listener.set_inheritable(True)
    return listener


def _parse_hostname(host: str) -> str:
    """Return the name in a Host header, without the port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
