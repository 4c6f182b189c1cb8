"""Requests are bounded in time, size and number, and are sent again where that may help; every failure is one line."""

import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx2
import pytest
from helpers.fake_servers import client, loopback

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.wire.client import HttpClient, Reply, is_success, read_retry_after

BUSY = Reply(503, {}, b"loading")
REFUSED = httpx2.ConnectError("[Errno 111] refused")


def asked(server: HttpClient) -> list[float]:
    slept: list[float] = server.clock.slept
    return slept


def test_what_may_pass_is_tried_again_with_growing_delay() -> None:
    broken = REFUSED, httpx2.ReadTimeout("slow"), httpx2.RemoteProtocolError("closed")
    for failure in (*broken, BUSY, Reply(429, {}, b"")):
        server = client(failure, failure, failure, {"ok": 1})
        assert server.post("/score", {}) == {"ok": 1}
        assert len(asked(server)) == 3
        for before, after, middle in zip(asked(server), asked(server)[1:], (1.0, 2.0), strict=False):
            assert after > before
            assert 0.7 * middle < after < 1.3 * middle


def test_a_request_that_fails_is_tried_as_often_as_that_may_help() -> None:
    """A wrong one will be wrong again; a server that fails at one is there, and a fault of its own will hardly pass."""
    for status, tries in {400: 1, 401: 1, 404: 1, 413: 1, 422: 1, 500: 3}.items():
        server = client(Reply(status, {}, b"no such thing"))
        with pytest.raises(RunError, match=rf"http://server:1/score answered {status}: no such thing"):
            server.post("/score", {})
        assert len(asked(server)) == tries - 1
    moved = client(Reply(302, {"location": "http://elsewhere/"}, b""))
    with pytest.raises(RunError, match="redirects to http://elsewhere/, and redirects are not followed"):
        moved.post("/score", {})
    assert len(moved.transport.requests) == 1  # type: ignore[attr-defined]


def test_a_server_that_never_answered_is_given_up_within_seconds() -> None:
    """One that is down at the start of a run ends it soon; one that has answered is waited for."""
    server = client({"ok": 1}, REFUSED, patience=100)
    server.get("/health")
    with pytest.raises(RunError, match=r"cannot be reached: .*refused"):
        server.get("/health")
    assert 60 < sum(asked(server)) <= 100
    assert max(asked(server)) < 15 * 1.25
    server = client(REFUSED, patience=100)
    with pytest.raises(RunError, match="cannot be reached"):
        server.get("/health")
    assert sum(asked(server)) <= 10


def test_the_server_says_when_to_come_back() -> None:
    server = client(Reply(429, {"retry-after": "7"}, b""), {"ok": 1})
    server.get("/x")
    assert asked(server) == [7.0]
    late = client(Reply(429, {"retry-after": "1000000000000"}, b""))
    with pytest.raises(RunError, match="answered 429"):
        late.get("/x")
    odd = client(Reply(429, {"retry-after": "soon"}, b""), Reply(503, {"retry-after": "-5"}, b""), {"ok": 1})
    assert odd.get("/x") == {"ok": 1}
    at = Reply(503, {"retry-after": formatdate(time.time() + 60, usegmt=True)}, b"")
    assert 50 < read_retry_after(at) <= 60


def test_what_is_no_json_is_one_line() -> None:
    for body in (b"<html>\n<b>hello</b>\x1b[31m\n</html>", b"", b"[" * 100_000, b"\xff\xfe", b"1" * 10_000):
        with pytest.raises(RunError, match=r"http://server:1/score answered with") as error:
            client(body).post("/score", {})
        assert "\n" not in str(error.value)
        assert "\x1b" not in str(error.value)
        assert len(str(error.value)) < 300


def test_a_refusal_has_the_words_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key and a wrong page have the same status, and only the server knows which it is."""
    monkeypatch.setenv("MY_KEY", "k1")
    advice = "set key_env to the environment variable of an API key"
    for body, says in (
        (b"", "an empty reply"),
        (b"<h1>Sign in</h1>", "<h1>Sign in</h1>"),
        (b'{"detail": "this server asks for the admin key", "error": 1}', "this server asks for the admin key"),
        (b'{"detail": [1]}', '{"detail": [1]}'),
        (b"[" * 60_000, "[" * 157 + "..."),
        (b'{"detail": "%s"}' % (b"x" * 70_000), '{"detail": "' + "x" * 145 + "..."),
    ):
        for status, options, end in (
            (401, {}, f"; {advice}"),
            (403, {}, f"; {advice}"),
            (401, {"key_env": "MY_KEY"}, "; the key was not accepted"),
            (400, {}, ""),
        ):
            with pytest.raises(RunError) as error:
                client(Reply(status, {}, body), **options).get("/x")
            assert str(error.value) == f"http://server:1/x answered {status}: {says}{end}"


@pytest.mark.parametrize("body", [b"", b"secret is wrong", b'{"detail": "no user has the key secret"}'])
def test_the_key_is_sent_and_never_shown(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret\n")
    server = client(Reply(401, {}, body), key_env="MY_KEY")
    with pytest.raises(RunError, match=r"answered 401: .*; the key was not accepted") as error:
        server.get("/x")
    assert "secret" not in str(error.value)
    assert ("***" in str(error.value)) == bool(body)
    assert server.transport.requests[0].headers["Authorization"] == "Bearer secret"  # type: ignore[attr-defined]


def test_wrong_options_are_refused() -> None:
    urls = "server:8000", "ftp://server", "http://[::1", "http://a b", "http://host:99999"
    wrong: list[tuple[dict[str, Any], str]] = [
        *(({"url": url}, "expected the address of a server") for url in urls),
        ({"url": "http://me:word@server"}, "with a user, a query or a fragment"),
        ({"url": "http://server?key=1"}, "with a user, a query or a fragment"),
        ({"timeout": 0}, "timeout is 0, expected a number above 0"),
        ({"patience": float("nan")}, "patience is nan"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"key_env": "NOT_SET_HERE"}, "that environment variable is not set"),
    ]
    for options, says in wrong:
        with pytest.raises(UsageError, match=says) as error:
            client({}, **options)
        assert "word" not in str(error.value)


def test_the_number_of_requests_in_flight_is_bounded() -> None:
    lock, running, largest = threading.Lock(), 0, 0
    pair = threading.Barrier(2, timeout=60)

    def slow(request: Any) -> Any:
        nonlocal running, largest
        with lock:
            running += 1
            largest = max(largest, running)
        pair.wait()
        with lock:
            running -= 1
        return {}

    server = client(slow, in_flight=2)
    threads = [threading.Thread(target=server.get, args=("/x",)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert largest == 2


def head(handler: BaseHTTPRequestHandler, *headers: tuple[str, str]) -> None:
    handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    handler.send_response(200)
    for name, value in headers:
        handler.send_header(name, value)
    handler.end_headers()


def test_an_endless_reply_is_cut_off() -> None:
    """Whether its length was announced or not, after the megabytes that were allowed."""
    written = 0

    def endless(handler: BaseHTTPRequestHandler) -> None:
        nonlocal written
        head(handler)
        while True:
            written += handler.wfile.write(b"[" * 65536)

    def announced(handler: BaseHTTPRequestHandler) -> None:
        head(handler, ("Content-Length", "1000000000"))

    for answer in (endless, announced):
        with loopback(answer) as url, pytest.raises(RunError, match="reply of more than 1 MB"):
            HttpClient(url, timeout=20, most_mb=1).get("/x")
    assert written < 50_000_000  # what the buffers between the two hold, and no gigabyte


@pytest.mark.parametrize("where", ["headers", "body"])
def test_a_server_that_sends_a_byte_now_and_then_does_not_hold_a_thread(where: str) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        if where == "body":
            head(handler)
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.02)

    with loopback(drip) as url, pytest.raises(RunError, match=r"did not answer within 0\.2 s"):
        HttpClient(url, timeout=0.2, patience=0).get("/x")


def test_a_reply_that_breaks_off_is_asked_for_again() -> None:
    calls = []

    def broken(handler: BaseHTTPRequestHandler) -> None:
        calls.append(handler.path)
        head(handler, ("Content-Length", "9" if len(calls) < 2 else "2"))
        handler.wfile.write(b"{}")

    with loopback(broken) as url:
        assert HttpClient(url, timeout=5).get("/x") == {}
    assert len(calls) == 2


def test_an_attempt_is_made_once() -> None:
    """What is wrong is said, and whoever asked decides what to do about it."""
    server = client(REFUSED, BUSY, {"ok": 1})
    assert server.attempt("/score", b"{}") == (None, "http://server:1/score cannot be reached: [Errno 111] refused")
    assert server.attempt("/score", b"{}")[0] == BUSY
    assert not server.answered
    assert is_success(server.attempt("/score", b"{}")[0])
    assert server.answered
    assert asked(server) == []
