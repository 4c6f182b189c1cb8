"""Runs with prompts of several lengths: rollout and update pad alike, whichever samples they compute together."""

from pathlib import Path

import pytest
from helpers import tiny_pipelines
from helpers.pipeline_runs import TWO_UPDATES, expect_on_policy, updates

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
    rollout = "--sampling.prompts 4 --sampling.group 2 --sampling.steps 4 --trained random --trained.fraction 0.5"
    rollout += " --data.order epochs"
    words = ["train", "grpo", "--model", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--rewards", "jpeg"]
    held = ["--pipeline.heldout", str(tmp_path / "heldout.txt"), "--out", str(tmp_path / "run")]
    assert cli.run([*words, *held, *size.split(), *rollout.split(), *TWO_UPDATES]) == 0, capfd.readouterr().err
    expect_on_policy(tmp_path / "run")
    texts = [record["text"] for record in updates(tmp_path / "run")]
    assert [text["tokens"] for text in texts] == [64, 64]  # the long prompt is in every epoch of four
    assert texts[0]["saved"] == 0.5
    assert 0.3 < texts[0]["padding_waste"] < 0.9
