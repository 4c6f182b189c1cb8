"""A server's memory does not grow with the number of its requests."""

import http.client
import json
import re
from pathlib import Path

import launch
import pytest

from fluvial.engines.extensions.wire.response import read_response

FIRST, LAST = 500, 3_000  # requests after which memory is read; it varies by 30 kB between them
GROWTH = 200  # bytes per request; an object that stays per request, with its tensor, takes 500 and more


def resident(pid: int) -> int:
    """Return the bytes of memory that a process holds."""
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(kilobytes)


@pytest.mark.long
def test_three_thousand_requests_take_no_memory() -> None:
    """Different seeds and prompts; every fifth with log-probabilities and a trajectory, every hundredth wrong."""
    with launch.start("serve", "tiny_jobs:Tiny", "--port", "0", "--micro-batch", "1", "--steps", "2") as server:
        connection = http.client.HTTPConnection("127.0.0.1", int(server.address().rpartition(":")[2]), timeout=60)
        sizes = dict[int, int]()
        for number in range(1, LAST + 1):
            body: dict[str, object] = {"prompt": str(number % 4), "seed": number}
            if number % 5:
                body |= {"rollout": False, "num_inference_steps": 1}
            else:
                body |= {"rollout_return_dit_trajectory": True, "rollout_sde_step_indices": [number % 2]}
            if number % 100 == 0:
                body["prompt"] = f"no digit {number}"
            connection.request("POST", "/rollout/generate", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            data = reply.read()
            if number % 100 == 0:
                assert reply.status == 400
            elif number % 1000 == 1:
                assert reply.status == 200
                assert len(read_response(data)) == 1
            if number in (FIRST, LAST):
                sizes[number] = resident(server.pid)
        connection.close()
        assert server.stderr == ""
    assert sizes[LAST] - sizes[FIRST] <= GROWTH * (LAST - FIRST), sizes
