"""Carry one HTTP request over one connection, bounded in time and in bytes.

Python's own http.client does it: a reply is read piece by piece, so that one that is too large is cut off, no redirect is
followed, no proxy of the environment stands between a run and a server of its own cluster, and no package has to be
installed.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult

CONNECT = 10.0  # seconds that a connection may take
PIECE = 1 << 16  # bytes read at once


class Request(NamedTuple):
    """A request.

    Args:
        url: scheme, host and port.
        path: path, with its first slash.
        body: body; None sends a GET request.
    """

    url: SplitResult
    path: str
    headers: Mapping[str, str]
    body: bytes | None


class Reply(NamedTuple):
    """A reply of any status; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class TooLargeError(Exception):
    """The reply has more bytes than the caller takes."""


class Transport(Protocol):
    """Function that carries a request, `send` or a test's."""

    def __call__(self, request: Request, /, *, timeout: float, most_bytes: int) -> Reply:
        """Return the reply.

        Raises:
            OSError, HTTPException: no connection, or one that broke before the reply was complete; TimeoutError after
            `timeout`.
            TooLargeError: the reply has more than `most_bytes`.
        """
        ...


def send(request: Request, /, *, timeout: float, most_bytes: int) -> Reply:
    """Return the reply to a request, see `Transport`.

    A timeout of a socket begins again with every byte, so a server that sends one byte per minute would hold a thread for
    hours. A timer closes the connection at the deadline instead.
    """
    deadline = time.monotonic() + timeout
    kind = HTTPSConnection if request.url.scheme == "https" else HTTPConnection
    connection = kind(request.url.hostname or "", request.url.port, timeout=min(CONNECT, timeout))
    expired = threading.Event()
    timer: threading.Timer | None = None
    try:
        connection.connect()
        # http.client forgets the socket of a connection that the server will close.
        connected = connection.sock
        connected.settimeout(max(deadline - time.monotonic(), 0.001))
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), _cut, (connected, expired))
        timer.daemon = True
        timer.start()
        # A server may reply and hang up before it has read a large request; what it said is the better message.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("GET" if request.body is None else "POST", request.path, request.body, dict(request.headers))
        return _read(connection.getresponse(), most_bytes, expired)
    except (OSError, HTTPException) as error:
        if expired.is_set():
            raise TimeoutError from error
        raise
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def _read(response: HTTPResponse, most_bytes: int, expired: threading.Event) -> Reply:
    """Return a reply whose headers have been read."""
    length, body = response.length, bytearray()
    try:
        if length is not None and length > most_bytes:
            raise TooLargeError
        while piece := response.read1(PIECE):
            body += piece
            if len(body) > most_bytes:
                raise TooLargeError
        if expired.is_set():
            raise TimeoutError
        if response.length:  # what is still to come of the length that was announced
            raise IncompleteRead(bytes(body), response.length)
    finally:
        response.close()
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, bytes(body))


def _cut(connected: socket.socket, expired: threading.Event) -> None:
    """Shut a connection down, which ends what another thread waits for on it."""
    expired.set()
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # not SSLSocket's, which changes what the other thread uses
