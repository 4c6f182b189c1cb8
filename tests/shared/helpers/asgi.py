"""Calls an ASGI application without a network, one request or many at once."""

import asyncio
import json
from typing import Any, NamedTuple

import httpx2


class Answer(NamedTuple):
    status: int
    value: Any  # its JSON
    headers: dict[str, str]


async def call(
    app: Any,
    path: str,
    value: Any = None,
    *,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    hangs_up: bool = False,
) -> Answer:
    """Return the response to a request: GET without a body, else POST of a JSON value or of bytes.

    Args:
        hangs_up: send the request, and then close the connection.
    """
    sent: list[Any] = []
    body = json.dumps(value).encode() if body is None and value is not None else body
    pieces = [b""] if body is None else [body[start : start + 1000] for start in range(0, len(body), 1000)]
    waits = asyncio.Event()

    async def receive() -> Any:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        if not hangs_up:
            await waits.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    named = {"host": "127.0.0.1:1", "content-length": str(len(body or b"")), "content-type": "application/json"}
    named = {name: text for name, text in {**named, **(headers or {})}.items() if text}
    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode(), text.encode()) for name, text in named.items()],
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    answer = b"".join(message.get("body", b"") for message in sent)
    back = {name.decode(): text.decode() for name, text in sent[0]["headers"]}
    return Answer(sent[0]["status"], json.loads(answer) if "json" in back.get("content-type", "") else answer, back)


class Transport(httpx2.BaseTransport):
    """Transport of `HttpClient` that calls an application, and notes the paths it is asked for."""

    def __init__(self, app: Any) -> None:
        self.app, self.paths = app, list[str]()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.paths.append(request.url.path)
        body = None if request.method == "GET" else request.read()
        found = asyncio.run(call(self.app, request.url.path, body=body, headers=dict(request.headers)))
        content = found.value if isinstance(found.value, bytes) else json.dumps(found.value).encode()
        return httpx2.Response(found.status, headers=found.headers, stream=httpx2.ByteStream(content))
