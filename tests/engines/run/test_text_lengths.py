"""Runs with prompts of several lengths: rollout and update pad alike, whichever samples they compute together."""

from pathlib import Path

import pytest
from helpers import launch, tiny_pipelines

from fluvial.engines.cli import main as cli

PROMPTS = "a fox\ntwo cats\n" + "b " * 30 + "owls\n" + "nine owls\n"


@pytest.mark.parametrize("name", ["qwen-image"])
def test_the_first_ratio_is_one_with_prompts_of_any_length(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fraction of the steps, drawn per sample, mixes other samples in a micro-batch of the update than in the rollout."""
    folder = tiny_pipelines.save(tiny_pipelines.ROWS[name], tmp_path / name)
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    (tmp_path / "heldout.txt").write_text("a cow\n")
    size = "--pipeline.height 16 --pipeline.width 16 --pipeline.text-tokens 128"
    rollout = (
        "--sampling.prompts 4 --sampling.group 2 --sampling.steps 4 --micro-batch 2 --update-micro-batch rollout "
        "--passes.minibatches 1 "
        "--trained random --trained.fraction 0.5"
    )
    rest = "--updates 2 --final-samples 2 --evaluation.every 0 --checkpoint.every 2 --data.order epochs"
    words = ["train", "grpo", "--model", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--rewards", "jpeg"]
    held = ["--pipeline.heldout", str(tmp_path / "heldout.txt"), "--out", str(tmp_path / "run")]
    assert cli.run([*words, *held, *size.split(), *rollout.split(), *rest.split()]) == 0, capfd.readouterr().err
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert [record["first_pass_max_abs_log_ratio"] for record in updates] == [0.0, 0.0]
    assert [record["text"]["tokens"] for record in updates] == [64, 64]  # the long prompt is in every epoch of four
    assert updates[0]["text"]["saved"] == 0.5
    assert 0.3 < updates[0]["text"]["padding_waste"] < 0.9
