"""The reward server as a process: a run goes on where it left off when the server is killed and started again."""

import json
import signal
import threading
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fake_servers
import launch
import pytest
import tiny_jobs as tiny
import torch
from torch import Tensor

from fluvial.engines.cli import main as cli
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.judges.formats import FlowFactory
from fluvial.engines.extensions.servers.asgi import serve
from fluvial.engines.extensions.wire.client import HttpClient

REWARD = "fake_servers:lightness"


def started(port: int = 0) -> launch.Process:
    """Start a server of one reward."""
    return launch.start("serve-rewards", REWARD, "--port", str(port))


def test_a_server_is_asked_killed_and_started_again() -> None:
    """The client waits for it; SIGTERM ends it with 0."""
    images, prompts = torch.rand(5, 3, 8, 8), ["x"] * 5
    expected = fake_servers.lightness(images, prompts).float()
    with started() as server:
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
    with started(int(url.rpartition(":")[2])) as server:
        waiting.join(30)
        assert torch.equal(found[0], expected)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert server.stderr == ""


@pytest.mark.slow
def test_a_training_run_loses_nothing_when_its_server_is_killed(tmp_path: Path) -> None:
    """Its weights are those of a run whose reward is computed in process."""

    def local(images: Tensor, prompts: Any) -> Tensor:
        return fake_servers.lightness((images * 255).round() / 255, prompts).float()

    with init_world() as world:

        def weights(name: str, reward: Any, between: Any) -> dict[str, Tensor]:
            run = tiny.Run(tiny.config(tmp_path / name, updates=3), world, tiny.job(rewards={"light": reward}))
            for number in range(3):
                between(number)
                run.rollout()
            return run.weights()

        expected = weights("local", local, lambda number: None)
        with ExitStack() as stack:
            servers = [stack.enter_context(started())]
            url = servers[0].address()
            port = int(url.rpartition(":")[2])

            def killed(number: int) -> None:
                """Kill the server before the second rollout, and start it again while the rollout waits for it."""
                if number == 1:
                    servers[0].kill()
                    servers[0].wait(30)
                    threading.Timer(0.3, lambda: servers.append(stack.enter_context(started(port)))).start()

            found = weights("served", FlowFactory(HttpClient(url, timeout=20)), killed)
    assert len(servers) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "serve-rewards needs the names of rewards"),
        (("nothing",), "rewards is 'nothing', expected one of "),
        (("jpeg=2",), "reward 'jpeg' has the weight 2, and a server gives plain scores"),
        (("jpeg", "--port", "70000"), "--port is 70000, expected an integer in"),
        (("jpeg", "--batch", "0"), "--batch is 0, expected an integer >= 1"),
        (("jpeg", "--linger-ms", "-1"), "--linger-ms is -1"),
        (("jpeg", "--host", "0.0.0.0"), "host is 0.0.0.0, which other machines reach, and there is no API key"),
        (("jpeg", "--portt", "1"), "unknown flag --portt"),
    ],
)
def test_wrong_input_is_one_line(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLUVIAL_SERVE_KEY", raising=False)
    assert cli.run(["serve-rewards", *args]) == 2
    assert says in launch.one_line(capsys.readouterr().err)


def test_a_port_in_use_is_one_line() -> None:
    def never(scope: Any, receive: Any, send: Any) -> Any:
        raise AssertionError

    with (
        fake_servers.loopback(lambda handler: None) as url,
        pytest.raises(UsageError, match=r"cannot be listened on: .*in use"),
    ):
        serve(never, host="127.0.0.1", port=int(url.rpartition(":")[2]), ready=lambda address: None)


def test_help_is_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve-rewards", "--help"]) == 0
    assert "--most-megapixels" in capsys.readouterr().out
