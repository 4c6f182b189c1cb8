"""`fluvial serve` as a process: killed and started again it gives the same bits; SIGTERM ends it; errors are one line."""

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import fake_servers
import launch
import pytest
import torch

from fluvial.engines.cli import main as cli
from fluvial.engines.extensions.wire.response import RolloutSample, read_response

JSON = {"Content-Type": "application/json"}
MODEL = "tiny_jobs:Tiny"
BODY = {"prompt": "1", "seed": 5, "num_outputs_per_prompt": 2, "rollout_return_dit_trajectory": True}


def started(port: int = 0) -> launch.Process:
    """Start a server of the tiny net, as a user-defined model."""
    return launch.start("serve", MODEL, "--port", str(port), "--micro-batch", "2", "--steps", "3")


def ask(url: str, body: Any) -> list[RolloutSample]:
    """Return the samples of a request."""
    request = urllib.request.Request(f"{url}/rollout/generate", json.dumps(body).encode(), JSON)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers["content-type"] == "application/msgpack"
        return read_response(reply.read())


def test_a_server_is_killed_and_started_again() -> None:
    """The bits are those of before; SIGTERM ends it with 0, and nothing is written to stderr."""
    with started() as server:
        url = server.address()
        before = ask(url, BODY)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(url, {"prompt": "no code"})
        server.kill()
        server.wait(30)
    with started(int(url.rpartition(":")[2])) as server:
        after = ask(server.address(), {**BODY, "num_outputs_per_prompt": 1})
        for one, other in zip(before, after, strict=False):
            assert torch.equal(one.generated_output, other.generated_output)
            assert one.dit_trajectory is not None
            assert other.dit_trajectory is not None
            assert torch.equal(one.dit_trajectory.latents, other.dit_trajectory.latents)
            assert one.rollout_log_probs is not None
            assert other.rollout_log_probs is not None
            assert torch.equal(one.rollout_log_probs, other.rollout_log_probs)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert server.stderr == ""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "serve needs the name of a model, got nothing, expected one of handwriting"),
        (("handwritng",), "did you mean 'handwriting'?"),
        (("./nothing",), "./nothing"),
        (("handwriting", "--port", "70000"), "--port is 70000, expected an integer in [0, 65535]"),
        (("handwriting", "--micro-batch", "0"), "--micro-batch is 0, expected an integer >= 1"),
        (("handwriting", "--deadline", "0"), "--deadline is 0"),
        (("handwriting", "--linger-ms", "-1"), "--linger-ms is -1"),
        (("handwriting", "--dtype", "float8"), "float8"),
        (("handwriting", "--weights", "nothing"), "nothing"),
        (("handwriting", "--host", "0.0.0.0"), "host is 0.0.0.0, which other machines reach, and there is no API key"),
        (("handwriting", "--portt", "1"), "unknown flag --portt"),
    ],
)
def test_wrong_input_is_one_line(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLUVIAL_SERVE_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.run(["serve", *args]) == 2
    assert says in launch.one_line(capsys.readouterr().err)


def test_a_port_in_use_is_found_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fluvial.engines.extensions.servers.rollout.opening.open_policy", lambda *args, **options: pytest.fail("loaded")
    )
    with fake_servers.loopback(lambda handler: None) as url:
        assert cli.run(["serve", "handwriting", "--port", url.rpartition(":")[2]]) == 2
    assert "cannot be listened on" in launch.one_line(capsys.readouterr().err)


def test_help_is_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--help"], ["handwriting", "--help"]):
        assert cli.run(["serve", *args]) == 0
        assert "--micro-batch" in capsys.readouterr().out
