"""Servers as processes: killed and started again they answer as before; SIGTERM ends them; wrong input is one line."""

import http.client
import json
import re
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from helpers import fake_servers, launch
from torch import Tensor

from fluvial.engines.cli import main as cli
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.judges.formats import FlowFactory
from fluvial.engines.extensions.servers.rollout import policy
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.extensions.wire.response import read_response


def start(port: int = 0) -> launch.Process:
    return launch.start("serve-rewards", "helpers.fake_servers:lightness", "--port", str(port))


def test_a_reward_server_is_asked_killed_and_started_again() -> None:
    images, prompts = torch.rand(5, 3, 8, 8), ["x"] * 5
    expected = fake_servers.lightness(images, prompts).float()
    with start() as server:
        url = server.address()
        reward = FlowFactory(HttpClient(url, timeout=20), batch=2)
        assert torch.equal(reward(images, prompts), expected)
        with urllib.request.urlopen(f"{url}/health") as reply:
            assert json.load(reply)["status"] == "ok"
        server.kill()
        server.wait(30)
    with pytest.raises(RunError, match=r"cannot be reached: .*refused"):
        FlowFactory(HttpClient(url, patience=0))(images, prompts)
    found: list[Tensor] = []
    waiting = threading.Thread(target=lambda: found.append(reward(images, prompts)))
    waiting.start()
    with start(int(url.rpartition(":")[2])) as server:
        waiting.join(30)
        assert torch.equal(found[0], expected)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert server.stderr == ""


WRONG = {
    "serve": "serve needs the name of a model, got nothing, expected one of handwriting",
    "serve handwritng": "did you mean 'handwriting'?",
    "serve ./nothing": "./nothing",
    "serve handwriting --micro-batch 0": "--micro-batch is 0, expected an integer >= 1",
    "serve handwriting --deadline 0": "--deadline is 0",
    "serve handwriting --dtype float8": "float8",
    "serve handwriting --weights nothing": "nothing",
    "serve-rewards": "serve-rewards needs the names of rewards",
    "serve-rewards nothing": "rewards is 'nothing', expected one of ",
    "serve-rewards jpeg=2": "reward 'jpeg' has the weight 2, but a server returns plain scores",
    "serve-rewards jpeg --batch 0": "--batch is 0, expected an integer >= 1",
}
WRONG_OF_BOTH = {
    "--port 70000": "--port is 70000, expected an integer in [0, 65535]",
    "--linger-ms -1": "--linger-ms is -1",
    "--host 0.0.0.0": "host is 0.0.0.0, which other machines reach, and there is no API key",
    "--portt 1": "unknown flag --portt",
}


def test_wrong_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A port in use is found before anything is loaded."""
    monkeypatch.delenv("FLUVIAL_SERVE_KEY", raising=False)
    monkeypatch.chdir(tmp_path)

    def refused(rows: dict[str, str]) -> None:
        for typed, says in rows.items():
            assert cli.run(typed.split()) == 2, typed
            assert says in launch.one_line(capsys.readouterr().err)

    refused(WRONG)
    monkeypatch.setattr(policy, "open_policy", lambda *args, **options: pytest.fail("loaded"))
    with fake_servers.loopback(lambda handler: None) as url:
        wrong = {**WRONG_OF_BOTH, f"--port {url.rpartition(':')[2]}": "cannot be listened on"}
        for command in ("serve words", "serve-rewards jpeg"):
            refused({f"{command} {flags}": says for flags, says in wrong.items()})


FIRST, LAST = 500, 3_000  # requests after which memory is read; it varies by 30 kB between them
GROWTH = 200  # bytes per request; an object that stays per request, with its tensor, takes 500 and more


def resident(pid: int) -> int:
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(kilobytes)


@pytest.mark.long
def test_three_thousand_requests_take_no_memory() -> None:
    """Different seeds and prompts; every fifth with log-probabilities and a trajectory, every hundredth wrong."""
    with launch.start("serve", "helpers.tiny_jobs:Tiny", "--port", "0", "--micro-batch", "1", "--steps", "2") as server:
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
