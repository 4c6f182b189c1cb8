"""Modular pipelines trained from the command line: on recorded steps, and on samples noised to levels between steps."""

import json
from pathlib import Path

import pytest
from helpers import launch, tiny_modular
from helpers.marks import long

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
SHORT = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch 2 --updates 2 "
    "--passes.minibatches 1 --final-samples 2 --evaluation.every 0 --rewards jpeg"
)
FLUX3 = (
    "--pipeline.height 16 --pipeline.width 16 --sampling.guidance.scale 3 "
    "--pipeline.call text_encoder_out_layers=[1,2] max_sequence_length=512"
)
H3 = "--pipeline.height 32 --pipeline.width 32 --pipeline.frames 124 --sampling.guidance.scale 1"


@pytest.mark.parametrize(
    ("name", "method", "further", "ranks"),
    [
        ("Flux3", "grpo", "", 1),
        long("Flux3", "nft", "--noising.levels continuous --noising.each 2", 2),
        long("Flux3", "awm", "--noising.levels uniform --noising.each 2", 1),
        long("Flux3", "grpo", "--engine.base nf4", 1),
        long("Flux3", "grpo", "--train full", 2),
        long("MiniMaxH3", "grpo", "--sampling.sampler cps --sampling.sampler.eta 0.8", 2),
        long("MiniMaxH3", "guard", "--train full", 1),
        long("MiniMaxH3", "nft", "--noising.each 2", 2),
    ],
)
def test_a_modular_pipeline_is_trained_on_policy(name: str, method: str, further: str, ranks: int, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in tiny_modular.TEXTS))
    model, size = tiny_modular.folder_of(name, tmp_path / "model"), {"Flux3": FLUX3, "MiniMaxH3": H3}[name]
    args = ["train", method, "--model", str(model), "--prompts", str(prompts), "--out", str(tmp_path / "run")]
    said = launch.fluvial(*args, *SHORT.split(), *size.split(), *further.split(), ranks=ranks)
    assert said.returncode == 0, said.stdout + said.stderr
    line = (said.stdout + said.stderr).split("trained through its own blocks, velocities and images within ")[1]
    within = float(line.replace(";", " ").split()[0])
    assert within <= tiny_modular.TRAIN[name].error
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert len(updates) == 2
    assert all(record["grad_norm"] > 0 for record in updates)
    assert method not in ("grpo", "guard") or updates[0]["first_pass_max_abs_log_ratio"] == 0
    assert len([*(tmp_path / "run").glob("lora/*.safetensors" if "full" not in further else "weights/*.safetensors")]) == 1
    if (name, further) == ("Flux3", ""):
        asked = f"--rewards jpeg --seeds 1 --micro-batch 2 --prompts {prompts} --out {tmp_path / 'scores'}"
        evaluated = launch.fluvial("eval", str(tmp_path / "run"), *asked.split())
        assert evaluated.returncode == 0, evaluated.stderr
        assert (tmp_path / "scores" / "table.json").is_file()


@pytest.mark.parametrize(
    ("name", "frames", "says"),
    [long("LTX", 9, "diffusers does not split all inputs of the attention"), long("Helios", 5, "layer by layer")],
)
def test_networks_whose_tokens_cannot_be_split_are_refused(name: str, frames: int, says: str, tmp_path: Path) -> None:
    """Of LTX, whose masks have a row per head, and of Helios, whose layers are split one by one."""
    model, prompts = tiny_modular.folder_of(name, tmp_path / "model"), tmp_path / "prompts.txt"
    prompts.write_text("\n".join(tiny_modular.TEXTS))
    size = f"--pipeline.height 32 --pipeline.width 32 --pipeline.frames {frames} --engine.context_parallel 2"
    call = "--pipeline.call num_latent_frames_per_chunk=3" if name == "Helios" else ""
    args = ["train", "grpo", "--model", str(model), "--prompts", str(prompts), "--out", str(tmp_path / "run")]
    said = launch.fluvial(*args, *SHORT.split(), *size.split(), *call.split(), ranks=2)
    assert said.returncode == 2, said.stderr
    line = said.stderr.splitlines()[-1]
    assert says in line
    assert line.startswith("fluvial: ")
    assert "--engine.context-parallel is 2: " in line
    assert "Traceback" not in said.stderr
