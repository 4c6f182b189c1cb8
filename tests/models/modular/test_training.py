"""Modular pipelines trained from the command line: on recorded steps, and on samples noised to levels between steps."""

import json
from pathlib import Path

import pytest
from helpers import launch, tiny_modular
from helpers.marks import long

SHORT = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch 2 --updates 2 "
    "--passes.minibatches 1 --final-samples 2 --evaluation.every 0 --pipeline.height 16 --pipeline.width 16 --rewards jpeg "
    "--sampling.guidance.scale 3 --pipeline.call text_encoder_out_layers=[1,2] max_sequence_length=512"
)


@pytest.mark.parametrize(
    ("method", "further", "ranks"),
    [
        ("grpo", "", 1),
        ("nft", "--noising.levels continuous --noising.each 2", 2),
        long("awm", "--noising.levels uniform --noising.each 2", 1),
        long("grpo", "--engine.base nf4", 1),
        long("grpo", "--train full", 2),
    ],
)
def test_flux3_is_trained_on_policy(method: str, further: str, ranks: int, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in tiny_modular.TEXTS))
    model = tiny_modular.folder_of("Flux3", tmp_path / "model")
    args = ["train", method, "--model", str(model), "--prompts", str(prompts), "--out", str(tmp_path / "run")]
    said = launch.fluvial(*args, *SHORT.split(), *further.split(), ranks=ranks)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "trained through its own blocks, velocities and images within 0" in said.stdout + said.stderr
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert len(updates) == 2
    assert all(record["grad_norm"] > 0 for record in updates)
    assert method != "grpo" or updates[0]["first_pass_max_abs_log_ratio"] == 0
    assert len([*(tmp_path / "run").glob("lora/*.safetensors" if "full" not in further else "weights/*.safetensors")]) == 1
