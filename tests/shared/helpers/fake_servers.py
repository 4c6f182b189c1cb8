"""Servers for the tests of clients: a transport without a network, and a clock without waiting."""

import base64
import io
import json
import math
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx2
import numpy as np
from PIL import Image
from torch import Tensor

from fluvial.engines.extensions.wire.client import HttpClient, Reply


class FakeClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


class Sent(NamedTuple):
    path: str
    headers: httpx2.Headers
    body: bytes


class FakeServer(httpx2.BaseTransport):
    """Transport that answers with given replies, in order, the last one for ever.

    Args:
        replies: a body, a JSON value, a `Reply`, an error to raise, or a function of the request that returns one of them.
    """

    def __init__(self, *replies: Any) -> None:
        self.replies, self.requests, self.lock = list(replies), list[Sent](), threading.Lock()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        sent = Sent(request.url.path, request.headers, request.read())
        with self.lock:
            self.requests.append(sent)
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if callable(reply) and not isinstance(reply, type):
            reply = reply(sent)
        if isinstance(reply, BaseException):
            raise reply
        if not isinstance(reply, Reply):
            reply = Reply(200, {}, reply if isinstance(reply, bytes) else json.dumps(reply).encode())
        headers = {name: value.encode("utf-8", "replace") for name, value in reply.headers.items()}
        return httpx2.Response(reply.status, headers=headers, stream=httpx2.ByteStream(reply.body))  # type: ignore[arg-type]

    def sent(self, number: int = 0) -> Any:
        return json.loads(self.requests[number].body)


def client(*replies: Any, url: str = "http://server:1", **options: Any) -> HttpClient:
    return HttpClient(url, transport=FakeServer(*replies), clock=FakeClock(), **options)


def chat_reply(text: str | None, first: dict[str, float] | None = None) -> dict[str, Any]:
    listed = [{"token": token, "logprob": value} for token, value in (first or {}).items()]
    logprobs = None if first is None else {"content": [{"token": "x", "logprob": 0.0, "top_logprobs": listed}]}
    return {"choices": [{"message": {"role": "assistant", "content": text}, "logprobs": logprobs}]}


class YesNo:
    """Handler of a chat server whose model finds bright images good, as `loopback` takes it; it notes the questions."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer with the probability of yes: how bright the image is."""
        request = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length", 0))) or b"{}")
        answer: Any = {"data": [{"id": "tiny-vlm"}]}
        if request:
            image, text = request["messages"][0]["content"]
            self.questions.append(text["text"])
            file = base64.b64decode(image["image_url"]["url"].partition(",")[2])
            bright = float(np.asarray(Image.open(io.BytesIO(file))).mean()) / 255
            answer = chat_reply("Yes", {"Yes": math.log(bright + 1e-6), "No": math.log(1 - bright + 1e-6)})
        body = json.dumps(answer).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def loopback(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Start a real server on loopback whose requests a function answers, and yield its address.

    Errors of the function are raised in the end, except those of connections; clients only see that one was closed.
    """
    faults: list[BaseException] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                answer(self)
            except OSError:
                pass
            except Exception as error:
                faults.append(error)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *args: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        if faults:
            raise faults[0]


def bomb(side: int) -> bytes:
    """Return a PNG of a few bytes whose header says that it is a large square."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT"


def lightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Score the brightness of 8-bit images exactly, whether they are grey or RGB; for servers in other processes."""
    return (images[:, 0].double() * 255).round().flatten(1).mean(1)


def ranked(images: Tensor, prompts: Sequence[str], group: int) -> list[float]:
    order = images.flatten(1).mean(1).argsort().argsort()
    return (order.double() / max(len(order) - 1, 1)).tolist()
