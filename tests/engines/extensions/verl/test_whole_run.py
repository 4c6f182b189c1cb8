"""Five steps of verl-omni's own entry point on the CPU: its Ray workers, reward loop, agent loop and rollout server.

vLLM-Omni's engine, which has no CPU wheel, is answered by fluvial's sampling (`shared/workers/verl_rollout.py`).
"""

from pathlib import Path
from typing import Any

import optree
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import omni_rollouts, tiny_pipelines, verl_omni_run, verl_runs
from safetensors.torch import load_file
from torch import Tensor

from fluvial.core.advantages import group_advantages
from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import bind
from fluvial.engines.engine.world import World
from fluvial.engines.methods import StepKLConfig
from fluvial.engines.methods.table import Grpo
from fluvial.engines.sampling.score import score
from fluvial.models import Schedule
from fluvial.models.pipelines.base import unpack

# Adam's eps is large here, so that rounding moves no weight.
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.filterwarnings("ignore:the gradient has an RMS")]

STEPS, T, SAMPLES = 5, 3, 4
FULL = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": verl_runs.KL}
LORA = {
    "actor_rollout_ref.model.lora_rank": 2,
    "actor_rollout_ref.model.lora_alpha": 4,
    "actor_rollout_ref.model.target_modules": ["to_q", "to_k"],
}
# Samples come out of TransferQueue in a random order, so all of a step are in one update.
V1 = {
    "trainer.use_v1": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "ray_kwargs.ray_init.num_cpus": 16,
}
GUIDED = {"sd3": "guidance_scale", "qwen-image": "true_cfg_scale"}
SCALE = 2.5


def prompts(file: Path) -> Path:
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "negative_prompt": [{"role": "user", "content": "bad"}],
            "data_source": "tiny",
            "reward_model": {"style": "rule", "ground_truth": text},
            "extra_info": {"index": i},
        }
        for i, text in enumerate(verl_runs.PROMPTS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def collected(name: str, step: int, folder: Path) -> tuple[verl_runs.Made, Tensor, list[str]]:
    """Return the samples of a step in the trainer's order, their rewards and prompts."""
    files = sorted(folder.glob(f"{step}-*.pt"), key=lambda file: int(file.stem.split("-")[1]))
    rows: list[dict[str, Any]] = [torch.load(file, weights_only=True) for file in files]
    assert len(rows) == SAMPLES
    model = tiny_pipelines.opened(name, verl_runs.folder(name))
    shape = tuple(model.latent_shape(*verl_runs.SIZE))
    schedule = Schedule(rows[0]["levels"], rows[0]["timesteps"][0])  # verl-omni's: it takes each VAE's factor for 8
    latents = torch.cat([row["latents"] for row in rows])
    latents = unpack(latents, shape[-2]) if getattr(model, "packed", False) else latents
    log_prob = torch.cat([row["log_probs"] for row in rows])
    steps = torch.arange(T).expand(SAMPLES, T)
    trajectory = Trajectory(latents[:, :-1], latents[:, 1:], steps, log_prob, None, latents[:, -1], None)
    texts = [row["prompt"] for row in rows]
    reward = torch.tensor([omni_rollouts.red("", row["image"], None, None) for row in rows])
    centred = group_advantages(reward, torch.tensor([texts.index(text) for text in texts]), scale="none")
    advantage = centred / (reward.repeat_interleave(T).std() + 1e-4)  # verl-omni counts a reward once per step
    cond = omni_rollouts.condition(model, texts, ["bad"] * SAMPLES, SCALE)
    sampler = bind("flow_sde", verl_runs.ETA, schedule.levels)
    return verl_runs.Made(name, model, cond, schedule, sampler, trajectory, advantage, log_prob), reward, texts


@pytest.mark.parametrize(
    ("entry", "name", "adapters"),
    [
        ("main_diffusion", "sd3", ()),
        ("main_diffusion", "qwen-image", ("default",)),
        ("main_diffusion_v1", "sd3", ("default",)),
    ],
)
def test_five_steps_leave_fluvials_own_weights(
    world: World, tmp_path: Path, entry: str, name: str, adapters: tuple[str, ...]
) -> None:
    """Full fine-tuning with a reference worker and the KL, and LoRA; with guidance. In v1 a step is one update, else two."""
    out, scale = tmp_path / "checkpoints", f"actor_rollout_ref.rollout.pipeline.{GUIDED[name]}"
    is_v1 = entry.endswith("v1")
    more = {**(LORA if adapters else FULL), **(V1 if is_v1 else {}), scale: SCALE}
    chosen = verl_omni_run.settings(verl_runs.folder(name), prompts(tmp_path / "prompts.parquet"), out, **more)
    verl_omni_run.run(tmp_path, chosen, entry)
    parts = [torch.arange(SAMPLES)] if is_v1 else [*torch.arange(SAMPLES).chunk(2)]
    own: verl_runs.Own | None = None
    base: verl_runs.Own | None = None
    for step in range(1, STEPS + 1):
        made, reward, texts = collected(name, step, tmp_path / "rollouts")
        assert texts == [text for text in verl_runs.PROMPTS[2 * (step % 2 == 0) :][:2] for _ in range(2)]
        assert float(reward.std()) > 0
        own = own or verl_runs.Own(made, world, adapters)
        base = base or verl_runs.Own(made, world, adapters)
        given: dict[str, Any] = {"model": made.model, "cond": made.cond, "schedule": made.schedule, "sampler": made.sampler}
        old = score(made.trajectory, own.engine.module, **given, forwards="two")
        torch.testing.assert_close(old, made.log_prob_old, rtol=0, atol=2e-5)  # the server had these weights
        items = verl_runs.items(made._replace(log_prob_old=old))
        items = items._replace(predictions={} if adapters else {"ref": base.other(items, made.cond, None)})
        kl = StepKLConfig(0.0 if adapters else verl_runs.KL, weight="auto" if adapters else "rate")
        method = Grpo(clip_low=verl_runs.CLIP, clip_high=verl_runs.CLIP, kl=kl)
        for part in parts:
            rows = torch.cat([t * SAMPLES + part for t in range(T)])
            own.update(optree.tree_map(lambda tensor, rows=rows: tensor[rows], items), made.cond, method, micro_batch=6)
        compare(own.weights(), out / f"global_step_{step}" / "actor", lora=bool(adapters))


def compare(expected: dict[str, Tensor], folder: Path, *, lora: bool) -> None:
    """Check that a checkpoint has these weights to 1e-6."""
    (file,) = (folder / ("lora_adapter" if lora else "huggingface")).glob("*.safetensors")
    found = load_file(file)
    trained = {name: tensor for name, tensor in expected.items() if not lora or ".lora_" in name}
    for name, tensor in trained.items():
        key = f"transformer.{name.replace('.default.', '.')}" if lora else name
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
    assert len(trained) > 4
