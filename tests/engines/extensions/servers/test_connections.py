"""Connections that say nothing, stop in mid-request or do not read: they are closed, and keep nobody else out."""

import asyncio
import json
import logging
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any

import pytest
import uvicorn
from helpers import launch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.server import ServerState

from fluvial.engines.extensions.servers.asgi import Connection, ConnectionLimits, build_application, read_json

QUICK = ConnectionLimits(requests=6, per_address=4, header=0.4, body=0.4, stalled=0.4)
HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = HEAD + b"Content-Length: 2\r\n\r\n{}"
ALONE = HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
HALF = HEAD + b"Content-Length: 100\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LARGE = 30_000_000

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[..., Awaitable[Stream]]


class Go(asyncio.Event):
    """The event that `/slow` waits for."""

    begun = 0  # requests that wait for it, or have

    async def reached(self, count: int) -> None:
        while self.begun < count:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(limits: ConnectionLimits = QUICK, key: str = "") -> AsyncIterator[tuple[Open, Go]]:
    """Serve, and yield a function that connects and sends bytes, and the event that `/slow` waits for."""
    go = Go()

    async def echo(request: Request) -> Response:
        return JSONResponse(await read_json(request, dict[str, Any], most_bytes=1000))

    async def slow(request: Request) -> Response:
        go.begun += 1
        await go.wait()
        return Response(b"done")

    async def large(request: Request) -> Response:
        return Response(bytes(LARGE))

    routes = [Route("/echo", echo, methods=["POST"]), Route("/slow", slow), Route("/large", large)]
    routes.append(Route("/health", lambda request: Response(b"well")))
    app = build_application(routes, close=lambda: None, key=key, limits=limits)
    config = uvicorn.Config(app, log_config=None)
    config.load()
    make = partial(Connection, config=config, server_state=ServerState(), app_state={}, limits=limits)
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []

    async def connect(sent: bytes = b"", **options: Any) -> Stream:
        stream = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1], **options)
        stream[1].write(sent)
        writers.append(stream[1])
        return stream

    try:
        yield connect, go
    finally:
        go.set()
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.05)


async def rest(stream: Stream) -> bytes:
    try:
        return await asyncio.wait_for(stream[0].read(), 60)
    except ConnectionError:  # reset, or broken by what was written after the end
        return b""


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HALF])
@pytest.mark.parametrize("drips", [False, True])
def test_who_does_not_finish_is_closed(sent: bytes, drips: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without a word before, after a part of the header, or of the body; single bytes do not put it off."""

    async def run() -> float:
        async with opened() as (connect, _):
            stream, start = await connect(sent), time.monotonic()
            while drips and not stream[0].at_eof():
                await asyncio.sleep(0.1)
                stream[1].write(b" " if sent.startswith(HEAD) else b"G")
            assert await rest(stream) == b""
            return time.monotonic() - start

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) > 0.3
    assert caplog.records == []


def test_who_is_silent_keeps_nobody_out() -> None:
    """The oldest connection that waits is closed for a new one; requests at work are not."""

    async def run() -> None:
        async with opened(QUICK._replace(header=60)) as (connect, go):
            slow = await connect(b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            await go.reached(1)
            silent = [await connect() for _ in range(10)]
            assert (await rest(await connect(HEALTH))).endswith(b"well")
            assert [await rest(each) for each in silent[:7]] == [b""] * 7
            silent[-1][1].write(HEALTH)  # still open
            assert (await rest(silent[-1])).endswith(b"well")
            go.set()
            assert (await rest(slow)).endswith(b"done")

    asyncio.run(run())


def test_requests_beyond_the_limit_are_refused_and_health_is_not() -> None:
    async def run() -> None:
        async with opened() as (connect, go):
            slow = [await connect(b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") for _ in range(4)]
            await go.reached(4)
            for _ in range(3):
                assert b"503 Service" in await rest(await connect(ALONE))
                assert (await rest(await connect(HEALTH))).endswith(b"well")
            go.set()
            assert all([(await rest(each)).endswith(b"done") for each in slow])
            assert b"200 OK" in await rest(await connect(ALONE))

    asyncio.run(run())


def test_a_key_is_checked_before_a_body_is_read() -> None:
    async def run() -> bytes:
        async with opened(QUICK._replace(body=60), key="k") as (connect, _):
            return await asyncio.wait_for((await connect(HALF))[0].readline(), 60)

    assert b"401 Unauthorized" in asyncio.run(run())


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("reads", [False, True])
def test_who_does_not_read_a_response_is_closed(reads: bool, last: bytes) -> None:
    async def run() -> tuple[int, float]:
        async with opened(QUICK._replace(header=0.1)) as (connect, _):
            stream, _ = await connect(b"GET /large HTTP/1.1\r\nHost: localhost\r\n" + last + b"\r\n", limit=2**16)
            start, size = time.monotonic(), 0
            if not reads:
                await asyncio.sleep(4)
            try:
                while part := await asyncio.wait_for(stream.read(10**6), 60):
                    size += len(part)
                    await asyncio.sleep(0.03 if reads else 0)
            except ConnectionResetError:
                pass
            return size, time.monotonic() - start

    size, seconds = asyncio.run(run())
    assert (size > LARGE) == reads
    assert not reads or seconds > 2 * QUICK.stalled


def test_a_client_that_hangs_up_in_mid_body_writes_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with opened() as (connect, _):
            for sent in (HALF, BODY[:-1]):
                _, writer = await connect(sent)
                await asyncio.sleep(0.05)
                writer.transport.abort()
                await asyncio.sleep(0.1)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert caplog.records == []


def test_a_server_answers_beside_a_thousand_silent_connections() -> None:
    """And beside hundreds of half-sent bodies; as a process, whose stderr stays empty."""
    with launch.start("serve", "helpers.tiny_jobs:Tiny", "--port", "0", "--micro-batch", "2", "--steps", "3") as server:
        port = int(server.address().rpartition(":")[2])
        for sent, count in ((b"", 1000), (HALF.replace(b"/echo", b"/rollout/generate"), 300)):
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
            for each in crowd:
                each.sendall(sent)
            for path, body in (("/health", None), ("/rollout/generate", b'{"prompt": "1"}')):
                if sent and body:
                    continue  # this address has its share of requests; another one would be answered
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=20) as reply:
                    assert reply.status == 200
                    assert body or json.load(reply)["status"] == "ok"
            for each in crowd:
                with closing(each):
                    pass
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert server.stderr == ""
