"""`fluvial serve` as a process that trainers push to: a run has the bits of one that makes its own samples."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from marks import long
from safetensors.torch import save_file

from fluvial.engines.extensions.wire.response import RolloutSample, read_response


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that trainers and the server see."""
    return tmp_path_factory.mktemp("pushes")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The address of a server in a process of its own, with the micro-batch of the small runs."""
    arguments = ("handwriting", "--port", "0", "--micro-batch", "4", "--weights-root", str(folder))
    with launch.start("serve", *arguments, FLUVIAL_SERVE_ADMIN_KEY="secret") as server:
        yield server.address()


def post(url: str, path: str, value: Any, *, key: str = "secret") -> tuple[int, Any]:
    """Return the status of an answer, and its JSON or its bytes."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(value).encode(), headers)) as reply:
            body = reply.read()
            return reply.status, json.loads(body) if "json" in reply.headers["content-type"] else body
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def sample(url: str) -> RolloutSample:
    """Return a sample of the current weights."""
    return read_response(post(url, "/rollout/generate", {"prompt": "0427", "seed": 5, "num_inference_steps": 2})[1])[0]


@pytest.mark.slow
@pytest.mark.parametrize("train", [long("full"), "lora"])
def test_a_served_run_has_the_bits_of_one_in_process(
    tmp_path: Path, folder: Path, url: str, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rollout is made by the weights of its update. The second run finds the base that the first one pushed."""
    monkeypatch.setenv("ADMIN", "secret")
    common = ("--updates", "2", "--train", train, "--sampling.sampler.eta", "0.7")
    launch.train(tmp_path / "alone", *common)
    servers = ("--rollout.servers.weights-folder", str(folder), "--rollout.servers.admin-env", "ADMIN")
    launch.train(tmp_path / "served", *common, "--rollout.source", url, *servers)
    assert launch.weights(tmp_path / "served") == launch.weights(tmp_path / "alone")
    assert list(folder.iterdir()) == []  # the trainer has removed what it left


def test_a_process_refuses_damaged_weights_and_keeps_its_own(folder: Path, url: str) -> None:
    """And a client without the admin key, and files elsewhere."""
    status, before = post(url, "/get_weights_checksum", {})
    assert status == 200
    first, network = sample(url), folder / "bad" / "transformer"
    network.mkdir(parents=True)
    save_file({"a": torch.ones(3)}, network / "diffusion_pytorch_model.safetensors")
    for path, says in {
        folder / "bad": "holds a, which",
        folder / "none": "cannot be read",
        Path("/etc"): "is outside",
    }.items():
        status, answer = post(url, "/update_weights_from_disk", {"model_path": str(path)})
        assert (status, answer["success"]) == (400, False)
        assert says in answer["message"]
    assert post(url, "/update_weights_from_disk", {"model_path": str(folder / "bad")}, key="other")[0] == 401
    assert post(url, "/release_memory_occupation", {})[0] == 200
    assert post(url, "/rollout/generate", {"prompt": "0427"})[0] == 503
    assert post(url, "/resume_memory_occupation", {})[0] == 200
    assert post(url, "/get_weights_checksum", {})[1] == before
    assert torch.equal(sample(url).generated_output, first.generated_output)
    (network / "diffusion_pytorch_model.safetensors").unlink()
    network.rmdir()
    network.parent.rmdir()
