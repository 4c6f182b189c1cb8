"""Engines of verl on tiny pipelines, batches in verl-omni's field names, and the same updates by fluvial's own engine."""

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from helpers import omni_rollouts, real_verl, tiny_pipelines, verl_omni_configs
from torch import Tensor, nn

from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Sampler, bind
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.gathered import gather
from fluvial.engines.sampling.items import Pairs, RecordedSteps, make_recorded_steps
from fluvial.models import LoraConfig, Schedule, add_lora
from fluvial.models.guidance import guided_velocity
from fluvial.models.lora import LowRank, use_adapter
from fluvial.models.pipelines.base import Pipeline

STEPS, RECORDED, SIZE, ETA = tiny_pipelines.STEPS, 2, (16, 16), 0.7
PROMPTS = ("a red fox", "two cats", "9 owls in 1 barn", "an owl")
CLASSES = {"sd3": "StableDiffusion3Pipeline", "qwen-image": "QwenImagePipeline", "wan": "WanPipeline"}
LORA: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["to_q", "to_k"]}
CLIP, KL = 0.2, 0.5
EPS = 1e-4  # of Adam: rounding in a gradient that is 0 in exact arithmetic moves no weight
NEAR = {"override_optimizer_config": {"eps": EPS}}
DEFAULT: dict[str, Any] = {}  # changes of a config


@cache
def folder(name: str) -> Path:
    """Return the folder of a tiny pipeline, which is saved once per process, in what goes with the session."""
    return tiny_pipelines.save(
        tiny_pipelines.ROWS[name], Path(os.environ["FLUVIAL_TEST_STORE"]) / f"verl-{name}-{os.getpid()}"
    )


def model_config(name: str, path: Path | None = None, **changes: Any) -> Any:
    """Return the fields of verl-omni's DiffusionModelConfig that an engine reads; `scale` is that of guidance."""
    path = folder(name) if path is None else path
    scale, noise = changes.pop("scale", 1.0), changes.pop("noise_level", ETA)
    height, width, frames = changes.pop("size", (*SIZE, 1))
    pipeline = verl_omni_configs.DiffusionPipelineConfig(
        height=height,
        width=width,
        num_inference_steps=STEPS,
        num_frames=changes.pop("frames", frames),
        max_sequence_length=changes.pop("tokens", 512),
        guidance_scale=changes.pop("guidance", scale if name == "sd3" else None),
        true_cfg_scale=changes.pop("true", 1.0 if name == "sd3" else scale),
    )
    algo = verl_omni_configs.DiffusionRolloutAlgoConfig(noise_level=noise, sde_type=changes.pop("sde_type", "sde"))
    fields: dict[str, Any] = {
        "path": str(path),
        "local_path": str(path),
        "architecture": CLASSES.get(name),
        "algorithm": "flow_grpo",
        "enable_gradient_checkpointing": False,
        "attn_backend": "native",
        "pipeline": pipeline,
        "algo": algo,
    }
    return verl_omni_configs.DiffusionModelConfig(**{**fields, **changes})


def engine_config(*, kind: Any = None, **changes: Any) -> Any:
    """Return verl's own FSDPEngineConfig, or a `kind` of it, with the strategy that its actor's config sets afterwards."""
    config = (kind or real_verl.part("verl.workers.config.engine").FSDPEngineConfig)(
        **{"micro_batch_size_per_gpu": 4, "infer_micro_batch_size_per_gpu": 4, "dtype": "float32", **changes}
    )
    object.__setattr__(config, "strategy", "fluvial")
    return config


def optimizer_config(**changes: Any) -> Any:
    config = real_verl.part("verl.workers.config.optimizer").FSDPOptimizerConfig
    return config(**{"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 1e6, "total_training_steps": 10, **changes})


def build(
    name: str,
    *,
    path: Path | None = None,
    kind: str = "diffusion_model",
    engine: Any = None,
    optimizer: dict[str, Any] | None = DEFAULT,
    save: Any = None,
    **model: Any,
) -> Any:
    """Return an engine as verl's worker makes and resets it; the process group must be open.

    Args:
        name: name of a tiny pipeline; `path` is another folder than its own.
        engine: changes of `engine_config`, or another config.
        optimizer: changes of `optimizer_config`; None gives the engine none.
        model: changes of `model_config`.
    """
    base = real_verl.load()
    import fluvial.engines.extensions.verl.plugin  # noqa: F401  registers the engines

    made = base.EngineRegistry.new(
        model_type=kind,
        backend="fluvial",
        model_config=model_config(name, path, **model),
        engine_config=engine_config(**(engine or {})) if isinstance(engine, dict | None) else engine,
        optimizer_config=None if optimizer is None else optimizer_config(**optimizer),
        checkpoint_config=save,
    )
    made.initialize()
    return made


class Made(NamedTuple):
    name: str
    model: Pipeline
    cond: Any
    schedule: Schedule
    sampler: Sampler
    trajectory: Trajectory
    advantage: Tensor
    log_prob_old: Tensor


def rollout(
    name: str,
    *,
    scale: float = 1.0,
    size: tuple[int, ...] = SIZE,
    schedule: Schedule | None = None,
) -> Made:
    """Return samples of a pipeline's base model, recorded at their first steps, with old log-probs near their own."""
    model = tiny_pipelines.opened(name, folder(name))
    cond = tiny_pipelines.conditions(model, PROMPTS, scale)
    x = tiny_pipelines.start(model, len(PROMPTS), size)
    schedule = schedule or model.schedule(STEPS, tuple(x.shape[1:]))
    made = tiny_pipelines.sampled(model, model.build(), x, cond, schedule, eta=ETA, forwards="two")
    generator = torch.Generator().manual_seed(1)
    advantage = torch.randn(len(PROMPTS), generator=generator)
    old = made.log_prob + 0.1 * torch.randn(made.log_prob.shape, generator=generator)
    return Made(name, model, cond, schedule, bind("flow_sde", ETA, schedule.levels), made, advantage, old)


def batch(made: Made, *, conditioned: bool = True, **more: Any) -> Any:
    """Return a rollout as verl-omni's trainer passes it, by verl's own function, with a `micro_batch_size_per_gpu` of 4.

    Args:
        conditioned: whether it holds the prompts' embeddings.
        more: further fields, or other values: tensors and lists of each sample, and values of all.
    """
    trajectory = made.trajectory
    latents = torch.cat([trajectory.x, trajectory.x_next[:, -1:]], dim=1)
    if getattr(made.model, "packed", False):
        latents = torch.stack([tiny_pipelines.packed(latents[:, i]) for i in range(latents.shape[1])], dim=1)
    fields: dict[str, Any] = {
        "all_latents": latents,
        "all_timesteps": made.schedule.timesteps[trajectory.steps],
        "old_log_probs": made.log_prob_old,
        "advantages": made.advantage[:, None].expand(-1, trajectory.x.shape[1]).clone(),
        **(omni_rollouts.conditioning(made.cond) if conditioned else {}),
    }
    plain: dict[str, Any] = {"micro_batch_size_per_gpu": 4}
    for name, value in more.items():
        (fields if isinstance(value, Tensor | list) else plain)[name] = value
    return real_verl.part("verl.utils.tensordict_utils").get_tensordict(fields, non_tensor_dict=plain)


def infer(engine: Any, data: Any) -> dict[str, Tensor]:
    with engine.eval_mode():
        found: dict[str, Tensor] = engine.infer_batch(data)["model_output"]
    return found


def train(engine: Any, data: Any) -> Any:
    """Take an optimizer step with `flow_grpo`, and return what the engine says of it."""
    with engine.train_mode():
        assert engine.mode == "train"
        return engine.train_batch(data, flow_grpo())


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
    return {name: gather(p.grad).clone() for name, p in engine.module.named_parameters() if p.grad is not None}


def items(made: Made) -> RecordedSteps:
    trajectory, levels = made.trajectory._replace(log_prob=made.log_prob_old), made.schedule.levels
    return make_recorded_steps(
        trajectory, made.schedule, made.sampler(levels[:-1], levels[1:]), made.advantage, torch.ones(len(made.advantage))
    )


class Own:
    """fluvial's own engine of a network, which a method trains on items.

    Args:
        made: rollout of the network.
        world: process group.
        adapters: names of LoRA adapters; none train all weights.
        sharding: sharding and precision.
        buffers: dtype of the network's buffers.
    """

    def __init__(
        self,
        made: Made,
        world: World,
        adapters: tuple[str, ...] = (),
        *,
        sharding: EngineConfig | None = None,
        buffers: torch.dtype = torch.float32,
    ) -> None:
        self.made, module = made, made.model.build()
        for buffer in module.buffers():
            buffer.data = buffer.data.to(buffers)
        if adapters:
            lora = LoraConfig(rank=2, alpha=4, form=LowRank("gaussian"), targets=tuple(LORA["target_modules"]))
            add_lora(module, lora, (), adapters=adapters, seed=42)
        optimizer = OptimizerConfig(lr=1e-3, eps=EPS, max_grad_norm=1e6)
        self.engine = Engine(module, made.model.blocks(module), optimizer, world, sharding=sharding or EngineConfig())

    def predict(self, x: Tensor, items: Any, cond: Any) -> Tensor:
        """Return the prediction at each item, guided as the rollout; pairs `[P, 2, ...]` share level and conditioning."""
        each = x.shape[1] if isinstance(items, Pairs) else 1
        level, timestep, sample = (t.repeat_interleave(each) for t in (items.level, items.timestep, items.sample))
        own = optree.tree_map(lambda table: table[sample], cond)
        flat = x.flatten(0, 1) if isinstance(items, Pairs) else x
        v = guided_velocity(self.made.model, self.engine.module, flat, level, own, timestep=timestep, forwards="two")
        return v.view_as(x)

    def other(self, items: Any, cond: Any, adapter: str | None) -> Tensor:
        with torch.no_grad(), use_adapter(self.engine.module, adapter):
            return self.predict(items.x, items, cond)

    def update(self, items: Any, cond: Any, method: Any, *, micro_batch: int = 4) -> float:
        self.before = self.weights()

        def loss(part: Any) -> Any:
            return method.loss(self.predict(part.x, part, cond), part)

        size = len(items.level)
        return self.engine.update(items, loss, items.weight, count=size, micro_batch=micro_batch, pad_to=size).loss

    def weights(self) -> dict[str, Tensor]:
        return {name: gather(p.detach()).clone() for name, p in self.engine.module.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the first step, which are ten times Adam's first moments."""
        moments = {name: tensor for name, tensor in self.engine.state().items() if name.startswith("exp_avg.")}
        return {name.removeprefix("exp_avg."): 10 * gather(tensor) for name, tensor in moments.items()}

    def check_equal(self, engine: Any) -> None:
        """Check that the engine of verl has the same weights to 1e-6, and that the last step changed them."""
        expected = self.weights()
        for name, p in engine.module.named_parameters():
            torch.testing.assert_close(gather(p.detach()), expected[name], rtol=0, atol=1e-6)
        assert max(float((tensor - self.before[name]).abs().max()) for name, tensor in expected.items()) > 1e-4
