"""Connections of a server: what a client must send in time, and how many one address may have.

A client that says nothing, or stops in mid-request, keeps nobody else out: its connection is the first to be closed when
there are too many, and is closed in any case after some seconds.
"""

import asyncio
from typing import Any, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


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
    """A connection that is closed when its client is late, or when others need its place and no request is at work."""

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
