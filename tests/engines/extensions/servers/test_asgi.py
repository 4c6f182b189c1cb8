"""Requests of web pages, which are never obeyed, and large bodies, which keep nobody else out."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import asgi
from helpers import rollout_servers as servers

from fluvial.engines.extensions.servers import asgi as shared
from fluvial.engines.extensions.servers import rewards
from fluvial.engines.extensions.votes import records
from fluvial.engines.extensions.votes import service as votes

STOP = "/release_memory_occupation"
CHANGES = (STOP, "/resume_memory_occupation", "/v1/set_lora", "/v1/unmerge_lora_weights", "/update_weights_from_disk")
# What a browser sends for a page of another site, by how the page asks.
PAGES: dict[str, tuple[dict[str, str], int]] = {
    "a form, or fetch with text/plain": ({"origin": "http://evil.example", "content-type": "text/plain"}, 403),
    "fetch from a file or a sandbox": ({"origin": "null", "content-type": "text/plain"}, 403),
    "fetch without a body": ({"origin": "http://evil.example", "content-type": ""}, 403),
    "a page on another port": ({"origin": "http://localhost:8888", "content-type": "application/json"}, 403),
    "a browser that sends no Origin": ({"content-type": "text/plain;charset=UTF-8"}, 415),
    "a form of an old browser": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "no content type": ({"content-type": ""}, 415),
    "a name bound to this address": ({"host": "evil.example:30000", "origin": "http://evil.example:30000"}, 421),
    "the same without Origin": ({"host": "evil.example:30000"}, 421),
    "a name that looks like one of here": ({"host": "localhost.evil.example"}, 421),
    "an address elsewhere": ({"host": "10.0.0.1:30000"}, 421),
    "no host": ({"host": ""}, 421),
    "a malformed host": ({"host": "[::1"}, 421),
}


def test_a_web_page_changes_nothing() -> None:
    server = servers.served()
    for page, (headers, status) in PAGES.items():
        for path in (*CHANGES, "/rollout/generate"):
            answer = asyncio.run(asgi.call(server.app, path, {}, headers=headers))
            assert (answer.status, set(answer.value)) == (status, {"detail", "error"}), page
    assert (server.policy.weights.released, server.policy.version) == (False, 0)
    # DNS rebinding: for the browser it is the page's own site, so that it would let it read the answers.
    for path in ("/v1/models", "/v1/model_info", "/v1/list_loras"):
        assert asyncio.run(asgi.call(server.app, path, headers={"host": "evil.example:30000"})).status == 421


def test_programs_on_this_machine_are_obeyed() -> None:
    """And probes are answered under any name."""
    for host in ("localhost", "LOCALHOST:30000", "127.0.0.1:30000", "127.0.0.5", "[::1]:30000"):
        server, headers = servers.served(), {"host": host, "content-type": "application/json; charset=utf-8"}
        assert asyncio.run(asgi.call(server.app, STOP, {}, headers=headers)).status == 200
        assert server.policy.weights.released
    for path in ("/health", "/health_generate"):
        assert asyncio.run(asgi.call(servers.served().app, path, headers={"host": "10.1.2.3:30000"})).status == 200


def test_with_a_key_a_server_may_have_any_name() -> None:
    """A page does not know the key; a page that did would still be refused."""
    server, key = servers.served(key="k"), {"host": "node7.cluster:30000", "authorization": "Bearer k"}

    def status(**headers: str) -> Any:
        return asyncio.run(asgi.call(server.app, STOP, {}, headers=headers)).status

    assert status(**{**key, "authorization": ""}) == 401
    assert status(**key, origin="http://evil.example") == 403
    assert status(**key) == 200


def all_servers(folder: Path) -> dict[str, tuple[Any, str, dict[str, str]]]:
    """Return the application of each server, a path that takes large bodies, and headers."""
    scores = rewards.RewardService({"zero": lambda images, prompts: torch.zeros(len(prompts))})
    polls = votes.application(votes.VoteService(records.VoteFolder(folder)), key="k")
    return {
        "rollouts": (servers.served().app, "/rollout/generate", {}),
        "weights": (servers.served().app, "/get_weights_checksum", {}),
        "images": (servers.served().app, "/v1/images/generations", {}),
        "rewards": (rewards.build_application(scores), "/compute", {}),
        "rewards of UniRL": (rewards.build_application(scores), "/score", {}),
        "votes": (polls, "/groups", {"authorization": "Bearer k"}),
    }


def test_a_body_of_too_many_values_is_never_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would become an object: a body of 60 MB took gigabytes, and minutes in which nothing else was answered."""
    monkeypatch.setattr(shared, "decode", lambda *args, **options: pytest.fail("decoded"))
    body = b'{"prompt": "1", "x": [' + b"0," * shared.MOST_VALUES + b"0]}"
    for name, (app, path, headers) in all_servers(tmp_path).items():
        answer = asyncio.run(asgi.call(app, path, body=body, headers=headers))
        assert answer.status == 413, name
        assert "the request has more than 250000 values: send less at once" in answer.value["detail"]


@pytest.mark.parametrize("name", ["rollouts", "rewards"])
def test_probes_are_answered_while_a_large_body_is_decoded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, path, headers = all_servers(tmp_path)[name]
    decode, begun, answered = shared.decode, threading.Event(), threading.Event()

    def slowly(*args: Any, **options: Any) -> Any:
        begun.set()
        assert answered.wait(60)
        return decode(*args, **options)

    monkeypatch.setattr(shared, "decode", slowly)

    async def ask() -> tuple[int, int]:
        body = b'{"prompt": "' + b"1" * shared.SMALL + b'"}'
        large = asyncio.create_task(asgi.call(app, path, body=body, headers=headers))
        await asyncio.to_thread(begun.wait, 60)
        probe = await asgi.call(app, "/health")
        answered.set()
        return probe.status, (await large).status

    assert asyncio.run(ask()) == (200, 400)
