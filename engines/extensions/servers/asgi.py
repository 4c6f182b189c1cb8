"""Parts that all servers of fluvial share: limits, the API key, errors in one line, an end on a signal."""

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
        requests: largest number of connections, and of requests at work.
        per_address: largest number of them with one address.
        header: seconds until a request's header is complete, from the connection or the last response.
        body: seconds until a request's body is complete, from its header.
        stalled: seconds that a client may not read a response that waits for it.
    """

    requests: int = 512
    per_address: int = 256
    header: float = 10.0
    body: float = 60.0
    stalled: float = 60.0


class Connection(H11Protocol):
    """A connection that is closed when its client is late, or when others need its place and no request is at work.

    So a client that says nothing, or stops in mid-request, keeps nobody else out.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits, self.since = limits, self.loop.time()
        self._phase: tuple[Any, bool, bool] | None = None  # request, whether its body is awaited, whether it is answered
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is at work: there is none, its header is incomplete, or its response is sent."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the oldest idle connection if there are too many, of this address or in all."""
        super().connection_made(transport)
        self._watch()
        others = sorted((each for each in self.connections if isinstance(each, Connection)), key=lambda each: each.since)
        ours = [each for each in others if _host(each) == _host(self)]
        for group, most in ((ours, self.limits.per_address), (others, self.limits.requests)):
            oldest = next((each for each in group if each.idle and each is not self), None)
            if len(group) > most and oldest is not None:
                oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Set the deadline of what the client has to send next; bytes of the same part do not put it off."""
        sends_body, answered = self.conn.their_state is h11.SEND_BODY, self.cycle is None or self.cycle.response_complete
        phase = (self.cycle, sends_body, answered)
        if phase == self._phase:
            return
        self._phase = phase
        self._cancel()
        if sends_body or answered:
            self._wait(self.limits.body if sends_body else self.limits.header)

    def _wait(self, seconds: float) -> None:
        self._cancel()
        unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self.limits.stalled if unread else seconds, self._late, unread)

    def _late(self, unread: int) -> None:
        """Close the connection, unless the client has read of its response since the deadline was set."""
        if self.transport.get_write_buffer_size() < unread:
            self._wait(self.limits.header)
        else:
            self.transport.abort()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _host(connection: H11Protocol) -> str:
    return connection.client[0] if connection.client else ""


Result = TypeVar("Result")
KEY_ENV = "FLUVIAL_SERVE_KEY"  # environment variable of the API key that requests must send
ADMIN_KEY_ENV = "FLUVIAL_SERVE_ADMIN_KEY"  # of the key that requests to control endpoints must send
OPEN = ("/health", "/health_generate", "/liveness")  # paths that need no key, for probes of a cluster
FORM = "multipart/form-data"
# Types of the bodies of paths that take a form with files; all others take JSON.
FORMS = {"/v1/images/edits": (FORM,), "/v1/videos": ("application/json", FORM)}
LIMITS = ConnectionLimits()
SMALL = 65536  # bytes of a body that is decoded at once: a thread takes longer
MOST_VALUES = 250_000  # of a body: each becomes an object, whatever its bytes
GONE = 499  # status of a request whose client has hung up; nobody receives it


class RequestError(Exception):
    """Error of a request, for the client: one line and a status."""

    def __init__(self, problem: str, status: int = 400, *, retry_after: int | None = None) -> None:
        super().__init__(problem)
        self.status, self.problem, self.retry_after = status, " ".join(problem.split()), retry_after


class RequestGuard:
    """Application that lets through what may be answered: requests with the API key, within the limits, of no web page.

    A page in a browser on this machine can send requests to a server that other machines do not reach. Its browser names the
    page as the Origin, asks before it sends JSON, and names the page's own host where that was bound to this address.

    Args:
        key: key that must be sent as a bearer token; empty lets every request through whose Host is this machine.
        admin: key of the control endpoints, which also opens the others; empty leaves them to the API key.
        page: path of a page of the server's own, whose requests are let through as well. The page itself needs no key, all
            else does, so that no page elsewhere can ask anything.
        limits: largest numbers of requests at work; `OPEN` is answered beyond them.
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
        self.expected, self.admin = _token(key), _token(admin)
        self.at_work = Counter[str]()  # requests by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not let through, without reading its body."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        problem = self._problem(scope["method"], scope["path"], Headers(scope=scope)) or self._overload(address)
        if problem is not None:
            await refuse(problem)(scope, receive, send)
            return
        self.at_work[address] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.at_work -= Counter([address])

    def _problem(self, method: str, path: str, headers: Headers) -> RequestError | None:
        host = headers.get("host", "")
        if not self.expected and not _is_loopback(_hostname(host)):
            return RequestError(f"the host is {host[:60]!r}, expected this machine's loopback address: set {KEY_ENV}", 421)
        if self.page and method == "GET" and path == self.page:
            return None
        if "origin" in headers and not (self.page and headers["origin"].partition("://")[2] == host):
            return RequestError("the request is of a web page (Origin), and this server answers none", 403)
        controls = bool(self.admin) and path in self.control
        wanted = [self.admin] if controls else [token for token in (self.expected, self.admin) if token]
        asks = controls or bool(self.expected)
        sent = headers.get("authorization", "").encode("latin-1")
        if asks and not any(hmac.compare_digest(sent, token) for token in wanted):
            name = "the admin key" if controls else "an API key"
            return RequestError(f"this server asks for {name}, sent as a bearer token", 401)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        expected = FORMS.get(path, ("application/json",))
        if method == "POST" and kind not in expected:
            return RequestError(f"the content type is {kind[:60]!r}, expected {' or '.join(expected)}", 415)
        return None

    def _overload(self, address: str) -> RequestError | None:
        if self.at_work[address] < self.limits.per_address and self.at_work.total() < self.limits.requests:
            return None
        return RequestError("too many requests are at work: try again later", 503, retry_after=1)


def _token(key: str) -> bytes:
    return f"Bearer {key}".encode() if key else b""


async def body_of(request: Request, *, most_bytes: int, most_values: float = math.inf) -> bytearray:
    """Return a request's body, read piece by piece.

    Raises:
        RequestError: it is larger, or has as many commas as more than `most_values` of JSON would.
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
            if values <= most_values:  # the rest is read all the same, for a client that sends it before it reads the answer
                body += piece
    except ClientDisconnect:
        raise RequestError("the client has hung up", GONE) from None
    if values > most_values:
        raise RequestError(f"the request has more than {most_values} values: send less at once", 413)
    return body


async def json_of(request: Request, kind: type[Result], *, most_bytes: int, lenient: bool = False) -> Result:
    """Return the JSON of a request's body as an object of a type.

    The body is read piece by piece, never beyond `most_bytes`, and is decoded off the event loop if it is large. Its values
    are counted before that, by the commas: while a body of 60 MB became millions of objects, nothing else was answered.

    Args:
        lenient: see `convert`.

    Raises:
        RequestError: it is too large.
        WireError: it is not JSON, or does not fit the type.
    """
    body = await body_of(request, most_bytes=most_bytes, most_values=MOST_VALUES)
    if len(body) <= SMALL:
        return decode(body, kind, lenient=lenient)
    return await asyncio.to_thread(decode, body, kind, lenient=lenient)


async def until_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of work, which is cancelled when the client hangs up.

    The request's body must have been read.

    Raises:
        RequestError: the client has hung up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError("the client has hung up", GONE)
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refuse(error: RequestError) -> JSONResponse:
    """Return the response to a request that is wrong: `{"detail": one line}`."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse({"detail": error.problem, "error": error.problem}, error.status, headers)


def application(
    routes: Sequence[Route],
    *,
    close: Callable[[], None],
    key: str = "",
    admin: str = "",
    control: Collection[str] = (),
    page: str = "",
    limits: ConnectionLimits = LIMITS,
) -> ASGIApp:
    """Return an ASGI application whose errors are one line: a RunError, a failure of its own work, has the status 500.

    Args:
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


def key_of(host: str) -> str:
    """Return the API key of the environment; empty if there is none.

    Raises:
        UsageError: other machines reach the host, and there is no key.
    """
    key = os.environ.get(KEY_ENV, "").strip()
    if not key and not _is_loopback(host):
        raise UsageError(
            f"`host` is {host}, which other machines reach, and there is no API key: export one in {KEY_ENV}, "
            "which clients then send (key_env), or serve on 127.0.0.1"
        )
    return key


def admin_key() -> str:
    """Return the key of the control endpoints from the environment; empty if there is none."""
    return os.environ.get(ADMIN_KEY_ENV, "").strip()


def check_address(host: str, port: int) -> None:
    """Raise UsageError if an address cannot be listened on."""
    _listening(host, port).close()


def serve(app: ASGIApp, *, host: str, port: int, ready: Callable[[str], None], limits: ConnectionLimits = LIMITS) -> None:
    """Serve an application until SIGINT or SIGTERM, which let the requests at work finish for five seconds.

    Args:
        port: port; 0 takes a free one.
        ready: function that is called with the server's address as soon as it takes connections.
        limits: see `Connection`.

    Raises:
        UsageError: the address cannot be listened on.
    """
    listening = _listening(host, port)
    config = uvicorn.Config(
        app,
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]
        proxy_headers=False,  # a client could name another address
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    # uvicorn would raise the signal again at the end, so that a server that was asked to stop would seem to have failed.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    with listening, _stop_on_signals(server):
        address = f"[{host}]" if ":" in host else host
        ready(f"http://{address}:{listening.getsockname()[1]}")
        server.run(sockets=[listening])


@contextlib.contextmanager
def _stop_on_signals(server: Any) -> Iterator[None]:
    """End a server on SIGINT and SIGTERM; a second SIGINT ends it at once."""

    def stop(number: int, frame: object) -> None:
        server.force_exit = server.should_exit and number == signal.SIGINT
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address."""
    with convert_errors(
        UsageError, OSError, OverflowError, says=f"`host` is {host} and `port` is {port}, which cannot be listened on"
    ):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((host, port), family=family, backlog=1024)
    made.set_inheritable(True)
    return made


def _hostname(host: str) -> str:
    """Return the name in a Host header, without its port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
