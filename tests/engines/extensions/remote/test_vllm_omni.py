"""vLLM-omni as a source of samples: what its own response classes hold, and what is said of its server."""

import ast
from http.server import BaseHTTPRequestHandler

import pytest
from helpers import fake_servers, launch, wheels
from helpers.fake_rollouts import respond

from fluvial.engines.cli import main as cli

VERSION = "0.30.0"
# What training reads of a reply, as sglang's classes name it; a version that has one of these can be a source.
WANTED = ("latent", "log_prob", "trajector", "timestep", "noise", "denoising")


@pytest.mark.long
def test_its_replies_hold_nothing_to_train_on() -> None:
    """The only latents are those of its world models of robots (`rollout.py`), without log-probabilities."""
    folder = wheels.install("vllm-omni", VERSION, "vllm_omni") / "vllm_omni/entrypoints/openai/protocol"
    seen = set[str]()
    for name in ("images.py", "videos.py", "chat_completion.py"):
        for node in ast.walk(ast.parse((folder / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Response", "Data", "Choice", "Message")):
                seen |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]
    assert {"b64_json", "data"} <= seen
    assert not [field for field in seen if any(word in field for word in WANTED)]


def test_a_server_without_rollouts_is_named(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    def absent(handler: BaseHTTPRequestHandler) -> None:
        respond(handler, b'{"detail": "Not Found"}', 404)

    with fake_servers.loopback(absent) as url:
        typed = ["train", "grpo", "--model", "handwriting", "--rollout.source", url, "--out", f"{tmp_path}/run"]
        assert cli.run([*typed, "--rewards", "jpeg"]) == 1
    says = launch.one_line(capsys.readouterr().err)
    assert f"{url} has no /v1/model_info: fluvial serve and sglang have it, vLLM-omni makes images alone" in says, says
