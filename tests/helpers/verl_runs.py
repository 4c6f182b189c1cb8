"""Engines of verl on tiny pipelines, batches in verl-omni's field names, and the same updates by fluvial's own engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import optree
import real_verl
import tiny_pipelines
import torch
from torch import Tensor, nn

from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Sampler, bind
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.weights import gather
from fluvial.engines.methods import LossConfig
from fluvial.engines.methods.table import Clipped
from fluvial.engines.sampling.items import RecordedSteps, recorded_steps
from fluvial.models import Schedule
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.lora import use_adapter
from fluvial.models.pipelines.base import Pipeline

STEPS, RECORDED, SIZE, ETA = tiny_pipelines.STEPS, 2, (16, 16), 0.7
PROMPTS = ("a red fox", "two cats", "9 owls in 1 barn", "an owl")
CLASSES = {"sd3": "StableDiffusion3Pipeline", "qwen-image": "QwenImagePipeline", "wan": "WanPipeline"}
LORA: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["to_q", "to_k"]}
CLIP, KL = 0.2, 0.5


def model_config(name: str, folder: Path, **changes: Any) -> Any:
    """Return the fields of verl-omni's DiffusionModelConfig that an engine reads; `scale` is that of guidance."""
    scale, noise = changes.pop("scale", 1.0), changes.pop("noise_level", ETA)
    pipeline = SimpleNamespace(
        height=SIZE[0],
        width=SIZE[1],
        num_inference_steps=STEPS,
        num_frames=changes.pop("frames", 1),
        guidance_scale=scale if name == "sd3" else None,
        true_cfg_scale=1.0 if name == "sd3" else scale,
    )
    fields: dict[str, Any] = {
        "path": str(folder),
        "local_path": str(folder),
        "architecture": CLASSES[name],
        "algorithm": "flow_grpo",
        "lora_rank": 0,
        "lora_alpha": 64,
        "lora_init_weights": "gaussian",
        "target_modules": "all-linear",
        "target_parameters": None,
        "exclude_modules": None,
        "lora": {},
        "lora_adapter_path": None,
        "lora_dtype": None,
        "policy_state_adapters": ("default",),
        "enable_gradient_checkpointing": False,
        "attn_backend": "native",
        "config_path": None,
        "external_lib": None,
        "transformer_subfolder": "transformer",
        "pipeline": pipeline,
        "algo": SimpleNamespace(noise_level=noise, sde_type=changes.pop("sde_type", "sde")),
    }
    return SimpleNamespace(**{**fields, **changes})


def engine_config(*, kind: Any = None, **changes: Any) -> Any:
    """Return verl's own FSDPEngineConfig, or a `kind` of it, with the strategy that its actor's config sets afterwards."""
    config = (kind or real_verl.part("verl.workers.config.engine").FSDPEngineConfig)(
        **{"micro_batch_size_per_gpu": 4, "infer_micro_batch_size_per_gpu": 4, "dtype": "float32", **changes}
    )
    object.__setattr__(config, "strategy", "fluvial")
    return config


def optimizer_config(**changes: Any) -> Any:
    """Return verl's own FSDPOptimizerConfig."""
    config = real_verl.part("verl.workers.config.optimizer").FSDPOptimizerConfig
    return config(**{"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 1e6, "total_training_steps": 10, **changes})


def build(
    model: Any, *, kind: str = "diffusion_model", engine: Any = None, optimizer: Any = "default", save: Any = None
) -> Any:
    """Return an engine as verl's worker makes and resets it; the process group must be open."""
    base = real_verl.load()
    import fluvial.engines.extensions.verl.plugin  # noqa: F401  registers the engines

    made = base.EngineRegistry.new(
        model_type=kind,
        backend="fluvial",
        model_config=model,
        engine_config=engine or engine_config(),
        optimizer_config=optimizer_config() if optimizer == "default" else optimizer,
        checkpoint_config=save,
    )
    made.initialize()
    return made


class Made(NamedTuple):
    """A rollout of a tiny pipeline."""

    model: Pipeline
    cond: Any
    schedule: Schedule
    sampler: Sampler
    trajectory: Trajectory
    advantage: Tensor
    log_prob_old: Tensor


def rollout(
    name: str,
    folder: Path,
    *,
    scale: float = 1.0,
    count: int = 4,
    module: nn.Module | None = None,
    size: tuple[int, ...] = SIZE,
    schedule: Schedule | None = None,
) -> Made:
    """Return samples of a pipeline's base model, recorded at their first steps, with old log-probs near their own."""
    model = tiny_pipelines.opened(name, folder)
    cond = tiny_pipelines.conditions(model, PROMPTS[:count], scale)
    x = tiny_pipelines.start(model, count, size)
    schedule = schedule or model.schedule(STEPS, tuple(x.shape[1:]))
    made = tiny_pipelines.sampled(model, module or model.build(), x, cond, schedule, eta=ETA, forwards="two")
    generator = torch.Generator().manual_seed(1)
    advantage = torch.randn(count, generator=generator)
    old = made.log_prob + 0.1 * torch.randn(made.log_prob.shape, generator=generator)
    return Made(model, cond, schedule, bind("flow_sde", ETA, schedule.levels), made, advantage, old)


def batch(name: str, made: Made, **more: Any) -> Any:
    """Return a rollout as verl-omni's trainer passes it, with a field `micro_batch_size_per_gpu` of 4 unless told."""
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorData

    trajectory, count = made.trajectory, len(made.advantage)
    latents = torch.cat([trajectory.x, trajectory.x_next[:, -1:]], dim=1)
    if name == "qwen-image":
        latents = torch.stack([tiny_pipelines.packed(latents[:, i]) for i in range(latents.shape[1])], dim=1)
    fields: dict[str, Any] = {
        "all_latents": latents,
        "all_timesteps": made.schedule.timesteps[trajectory.steps],
        "old_log_probs": made.log_prob_old,
        "advantages": made.advantage[:, None].expand(-1, RECORDED).clone(),
        **conditioning(name, made.cond),
        **{key: value for key, value in more.items() if isinstance(value, Tensor)},
    }
    data: Any = TensorDict(fields, batch_size=[count])
    plain = {key: value for key, value in more.items() if not isinstance(value, Tensor)}
    for key, value in {"micro_batch_size_per_gpu": 4, **plain}.items():
        data[key] = NonTensorData(value)
    return data


def conditioning(name: str, cond: Any) -> dict[str, Tensor]:
    """Return a model's conditioning in verl-omni's field names."""
    if isinstance(cond, Guided):
        negative = conditioning(name, cond.uncond)
        return {**conditioning(name, cond.cond), **{f"negative_{key}": value for key, value in negative.items()}}
    if name == "sd3":
        return {"prompt_embeds": cond.tokens, "pooled_prompt_embeds": cond.pooled}
    mask = torch.ones(cond.tokens.shape[:2]) if name == "wan" else cond.mask
    return {"prompt_embeds": cond.tokens, "prompt_embeds_mask": mask}


def flow_grpo(*, kl: float = 0.0, calls: list[Any] | None = None) -> Any:
    """Return a loss as verl-omni's flow_grpo and its KL term are published: arXiv 2505.05470, equations 5 and 13."""

    def loss(*, model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, float]]:
        ratio = torch.exp(model_output["log_probs"] - data["old_log_probs"])
        gain = data["advantages"].clamp(-5, 5)
        value = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        if kl:
            away = (model_output["prev_sample_mean"] - data["ref_prev_sample_mean"]) ** 2
            std = model_output["std_dev_t"]
            value = value + kl * (away.flatten(1).mean(1) / (2 * std.flatten() ** 2)).mean()
        if calls is not None:
            strict = torch.are_deterministic_algorithms_enabled()
            calls.append((len(ratio), data["gradient_accumulation_steps"], data["sp_size"], dp_group, strict))
        return value / data["gradient_accumulation_steps"], {"actor/ratio_mean": ratio.mean().item()}

    return loss


def move(module: nn.Module, *, seed: int = 3) -> None:
    """Change the trained parameters, so that policy and reference differ; equal on any number of ranks."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            if parameter.requires_grad:
                change: Any = 0.05 * torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    change = distribute_tensor(change, parameter.device_mesh, parameter.placements)
                parameter.add_(change)


def gradients(engine: Any) -> dict[str, Tensor]:
    """Return the full gradients that an engine holds, by parameter."""
    return {name: gather(p.grad).clone() for name, p in engine.module.named_parameters() if p.grad is not None}


def own_update(
    engine: Engine, made: Made, *, kl: float = 0.0, v_ref: Tensor | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of fluvial's own update with the same items, objective and KL."""
    flat = items(made)
    flat = flat if v_ref is None else flat._replace(predictions={"ref": v_ref})
    config = LossConfig(kl_coef=kl, kl_weight="rate")

    def loss(part: RecordedSteps) -> Any:
        own = optree.tree_map(lambda table: table[part.sample], made.cond)
        v = guided_velocity(made.model, engine.module, part.x, part.level, own, timestep=part.timestep, forwards="two")
        return Clipped(CLIP, CLIP).loss(v, part, config)

    info = engine.update(flat, loss, flat.weight, count=len(flat.level), micro_batch=4, pad_to=len(flat.level))
    moments = {name: tensor for name, tensor in engine.state().items() if name.startswith("exp_avg.")}
    found = {name.removeprefix("exp_avg."): 10 * gather(tensor) for name, tensor in moments.items()}
    return info.loss, found


def items(made: Made) -> RecordedSteps:
    """Return the recorded steps of a rollout as a flat set of items."""
    trajectory, levels = made.trajectory._replace(log_prob=made.log_prob_old), made.schedule.levels
    return recorded_steps(
        trajectory, made.schedule, made.sampler(levels[:-1], levels[1:]), made.advantage, torch.ones(len(made.advantage))
    )


def reference(module: nn.Module, made: Made, *, adapters: bool) -> Tensor:
    """Return the prediction of the module at each item, without its adapters."""
    flat = items(made)
    own = optree.tree_map(lambda table: table[flat.sample], made.cond)
    from contextlib import nullcontext

    with torch.no_grad(), use_adapter(module, None) if adapters else nullcontext():
        return guided_velocity(made.model, module, flat.x, flat.level, own, timestep=flat.timestep, forwards="two")
