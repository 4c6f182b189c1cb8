"""Runs whose samples `fluvial serve` makes, in another process: the weights have the bits of runs in one process."""

import re
from pathlib import Path

import pytest
from helpers import launch, tiny_pipelines
from helpers.marks import long

from fluvial.engines.cli import main as cli

ROLLOUT = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch rollout "
    "--updates 2 --passes.minibatches 1"
)
BOUND = r"(\d+) of (\d+) modules of the adapter are bound(?:, (\d+) have no visible effect)?"
# Layers of the last block whose results go nowhere, by the model.
UNUSED = {"handwriting": 1, "sd3": 1, "qwen-image": 2}
REST = "--final-samples 2 --evaluation.every 0 --checkpoint.every 2 --tracker none --update-micro-batch rollout"


@pytest.mark.bits
@pytest.mark.parametrize(
    ("name", "train"),
    [("handwriting", "lora"), long("handwriting", "full"), long("sd3", "lora"), long("qwen-image", "lora")],
)
def test_two_updates_with_a_server_have_the_bits_of_those_without(
    tmp_path: Path, name: str, train: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter, or all weights, are pushed after each update; the handshake finds no difference, nor does a rollout."""
    monkeypatch.setenv("ADMIN", "secret")
    model, size = (
        ["handwriting"],
        ["--sampling.window", "random", "--sampling.window.size", "1", "--sampling.window.high", "2"],
    )
    if name != "handwriting":
        row = tiny_pipelines.ROWS[name]
        model = [str(tiny_pipelines.save(row, tmp_path / name))]
        size = ["--pipeline.height", str(row.sizes[0][0]), "--pipeline.width", str(row.sizes[0][1])]
        (tmp_path / "prompts.txt").write_text("".join(f"a {animal}\n" for animal in ("cat", "dog", "cow", "fly", "bee")))
    prompts = [] if name == "handwriting" else launch.rewarded("--prompts", str(tmp_path / "prompts.txt"))
    weights = tmp_path / "weights"
    weights.mkdir()
    run = ["train", "grpo", "--model", *model, *prompts, *size, *ROLLOUT.split(), *REST.split()]
    run += ["--train", train]
    assert cli.run([*run, "--out", str(tmp_path / "inside")]) == 0, capfd.readouterr().err
    options = ["--port", "0", "--micro-batch", "2", "--weights-root", str(weights)]
    asked = [] if name == "handwriting" else size
    with launch.start("serve", *model, *options, *asked, FLUVIAL_SERVE_ADMIN_KEY="secret") as server:
        served = ["--rollout.source", server.address(), "--rollout.servers.weights-folder", str(weights)]
        served += ["--rollout.servers.admin-env", "ADMIN"]
        assert cli.run([*run, *served, "--out", str(tmp_path / "served")]) == 0, capfd.readouterr().err
    assert launch.weights(tmp_path / "served") == launch.weights(tmp_path / "inside")
    records = launch.records(tmp_path / "served")
    handshake = next(record["handshake"] for record in records if "handshake" in record)
    assert handshake["kind"] == "fluvial"
    assert set(handshake["log_prob_difference"].values()) == {0.0}
    for words in handshake.get("binding", {}).values():  # a layer whose result is not used has no effect
        found = re.fullmatch(BOUND, words)
        assert found is not None
        assert int(found[1]) + int(found[3] or 0) == int(found[2])
        assert int(found[3] or 0) == UNUSED.get(name, 0)
    assert ("binding" in handshake) == (train == "lora")
    updates = [record for record in records if "grad_norm" in record]
    assert {record["first_pass_max_abs_log_ratio"] for record in updates} == {0.0}  # files of equal sizes make no update
    assert [*weights.iterdir()] == []  # nothing is left behind
