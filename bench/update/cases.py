"""The cases of the benchmark: a transformer with random weights, a rollout from it, and both implementations of an update.

The model is an SD3 transformer. Both sides have the same weights, samples, sharding (FSDP2, one unit per block), optimizer
and gradient; `bench.baselines` describes the published loop. Both put the same number of (sample, step) items through one
forward and backward pass, so that they hold the same activations: the baseline samples at one step, the engine any items.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.bench import harness
from fluvial.bench.baselines import PublishedLoop, StoredSamples
from fluvial.core.checks import check_choice, check_number
from fluvial.core.random import Key, fold_in, key, normal
from fluvial.core.rollout import Trajectory, scan
from fluvial.core.table import plan
from fluvial.core.transitions import Transition, flow_sde
from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig, UpdateInfo
from fluvial.engines.engine.world import World
from fluvial.engines.sampling import items
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.kernels import policy_loss, sde_step
from fluvial.models import Cond, LoraConfig, add_lora
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.handwriting import Handwriting
from fluvial.models.handwriting.model import CONFIG, CodeCond
from fluvial.models.pipelines.folder import CONFIGURATIONS

# The adapter of SD3's transformer; `predict`, `blocks` and `schedule` work for every size.
MODEL = Handwriting(None)
ETA, CLIP, SCALE = 0.7, 0.01, 4.5
# No clip of the norm: the two sides' gradients are compared.
OPTIMIZER = OptimizerConfig(lr=1e-6, max_grad_norm=1e9)
CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class NetworkSize:
    """A transformer and what goes into it.

    Args:
        settings: keyword arguments of diffusers' SD3Transformer2DModel.
        event: shape of one latent.
        tokens: number of tokens per prompt.
    """

    settings: Mapping[str, Any]
    event: tuple[int, ...]
    tokens: int

    def build(self, train: Literal["lora", "full"], device: torch.device) -> nn.Module:
        """Return the transformer with random weights, the same in every process; drawn on the device to save time."""
        from diffusers import SD3Transformer2DModel

        with torch.random.fork_rng(), device:
            torch.manual_seed(0)
            module = SD3Transformer2DModel(**self.settings)
        if train == "lora":
            add_lora(module, LoraConfig(), MODEL.lora_targets)
        return module


_MEDIUM = json.loads(
    (CONFIGURATIONS / "stable-diffusion-3.5-medium" / "transformer" / "config.json").read_text(encoding="utf-8")
)
SD35 = {name: value for name, value in _MEDIUM.items() if not name.startswith("_")}
TINY = {
    **CONFIG,
    "sample_size": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "caption_projection_dim": 8,
    "joint_attention_dim": 6,
    "pooled_projection_dim": 5,
    "pos_embed_max_size": 4,
}
SIZES = {
    "tiny": NetworkSize(TINY, (1, 4, 4), 2),  # for tests
    "small": NetworkSize(CONFIG, (1, 8, 32), 4),  # the handwriting model: 0.6 million parameters
    "medium": NetworkSize(  # 8 million
        {**CONFIG, "num_layers": 6, "attention_head_dim": 32, "num_attention_heads": 6, "caption_projection_dim": 192},
        (1, 8, 32),
        4,
    ),
    "sd3.5-medium 512^2": NetworkSize(SD35, (16, 64, 64), 333),  # 2.2 billion
    "sd3.5-medium 1024^2": NetworkSize(SD35, (16, 128, 128), 333),
}


@dataclass(frozen=True)
class UpdateConfig:
    """Count and time the update of a stored rollout, beside the loop of published trainers.

    Args:
        sizes: model sizes: tiny, small, medium, and for GPUs sd3.5-medium 512^2 and sd3.5-medium 1024^2.
        train: lora, full or both.
        steps: numbers of recorded steps of the updates that are timed.
        counted: numbers of recorded steps of the updates that are counted: few, some and many. They use the first size, the
            most ranks and one micro-batch of samples per rank.
        ranks: numbers of ranks.
        samples: samples per rank.
        micro_batch: (sample, step) items per forward and backward pass.
        guidance: use classifier-free guidance in the update.
        checkpointing: keep only each block's inputs for the backward pass, on both sides.
        runs: number of timed updates of each side.
        threads: CPU threads per process.
        json: print the counts and the speed-up as one line of JSON at the end.
        out: folder of update.csv and update-counts.csv; rows are appended.
    """

    sizes: tuple[str, ...] = ("sd3.5-medium 512^2", "sd3.5-medium 1024^2") if CUDA else ("small", "medium")
    train: tuple[Literal["lora", "full"], ...] = ("lora", "full")
    steps: tuple[int, ...] = (10,)
    counted: tuple[int, int, int] = (2, 10, 50)
    ranks: tuple[int, ...] = (1,) if torch.cuda.device_count() == 1 else (2,)
    samples: int = 8
    micro_batch: int = 4
    guidance: bool = True
    checkpointing: bool = CUDA
    runs: int = 5
    threads: int = 1
    json: bool = False
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        for name in ("samples", "micro_batch", "runs", "threads"):
            check_number("update", name, getattr(self, name), low=1)
        if self.samples % self.micro_batch:
            raise ValueError(f"update: micro_batch is {self.micro_batch}, expected a divisor of the {self.samples} samples")
        for name in ("steps", "counted", "ranks"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"update: {name} is {getattr(self, name)}, expected numbers of at least 1")
        if sorted(set(self.counted)) != list(self.counted):
            raise ValueError(f"update: counted is {self.counted}, expected rising numbers")
        for size in self.sizes:
            check_choice("update", "sizes", size, SIZES)


@dataclass(frozen=True)
class UpdateCase:
    """One rollout: the model, the samples and the micro-batches of its update."""

    size: NetworkSize
    train: Literal["lora", "full"]
    steps: int
    guidance: bool
    samples: int
    micro_batch: int
    checkpointing: bool = False  # recompute each block's activations, on both sides


class Rollout(NamedTuple):
    """A rank's stored samples, in the engine's form and in the published loop's."""

    flat: RecordedSteps
    cond: Cond  # `Guided` with guidance
    stored: StoredSamples
    sigmas: Tensor  # [T + 1]
    timesteps: Tensor  # [T]


def make_rollout(engine: Engine, case: UpdateCase, world: World) -> Rollout:
    """Sample trajectories with the engine's policy and record every step."""
    device, size = world.device, case.size
    root = fold_in(key(1), world.rank)
    schedule = MODEL.schedule(case.steps)
    sigmas, timesteps = schedule.levels.to(device), schedule.timesteps.to(device)

    def draw(stream: int, *shape: int) -> Tensor:
        return normal(fold_in(root, stream), (case.samples, *shape), device=device)

    # The kernel's own log-prob, so that the first ratio is 1 on a GPU, too.
    def step_fused(transition: Transition, x: Tensor, v: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        return sde_step(transition, x, v, key=key)

    widths = size.settings["joint_attention_dim"], size.settings["pooled_projection_dim"]
    positive, negative = (CodeCond(draw(stream, size.tokens, widths[0]), draw(stream + 1, widths[1])) for stream in (0, 2))
    scale = torch.full((case.samples,), SCALE, device=device)
    cond: Cond = Guided(positive, negative, scale) if case.guidance else positive
    sampler = partial(flow_sde, eta=ETA, sigma_max=sigmas[1])
    chunks = []
    with engine.inference() as module:
        for first in range(0, case.samples, case.micro_batch):
            part = optree.tree_map(lambda table, first=first: table[first : first + case.micro_batch], cond)

            def velocity(x: Tensor, sigma: Tensor, step: int, part: Cond = part) -> Tensor:
                return guided_velocity(MODEL, module, x, sigma, part, timestep=timesteps[step].expand(len(x))).float()

            x = draw(4, *size.event)[first : first + case.micro_batch]
            table = plan(schedule.levels, sampler, batch=len(x), record=range(case.steps), device=device)
            chunks.append(scan(velocity, x, table, fold_in(root, 5 + first), draw=step_fused))
    trajectory: Trajectory = items.concatenate(chunks)
    advantage = draw(1000)
    stored = StoredSamples(
        x=trajectory.x,
        x_next=trajectory.x_next,
        timesteps=timesteps.expand(case.samples, -1),
        log_prob=trajectory.log_prob,
        advantage=advantage,
        cond=positive,
        uncond=negative if case.guidance else None,
        scale=SCALE,
    )
    flat = items.make_recorded_steps(
        trajectory, schedule, sampler(sigmas[:-1], sigmas[1:]), advantage, torch.ones_like(advantage)
    )
    return Rollout(flat, cond, stored, sigmas, timesteps)


def build_engine(case: UpdateCase, world: World, sharding: EngineConfig) -> Engine:
    """Return fluvial's engine over a new transformer."""
    module = case.size.build(case.train, world.device)
    if case.checkpointing:
        sharding = replace(sharding, checkpointing="block")
    return Engine(module, MODEL.blocks(module), OPTIMIZER, world, updates=1000, sharding=sharding)


def build_published(case: UpdateCase, world: World) -> PublishedLoop:
    """Return the published loop over a new transformer."""
    dtype = EngineConfig().compute_dtype(world.device)
    module: Any = case.size.build(case.train, world.device)
    if case.checkpointing:
        module.enable_gradient_checkpointing()  # diffusers' own
    scheduler = MODEL.build_scheduler(case.steps)
    return PublishedLoop(MODEL, module, OPTIMIZER, world, scheduler=scheduler, eta=ETA, clip=CLIP, compute=dtype)


def update_engine(
    engine: Engine,
    rollout: Rollout,
    *,
    micro_batch: int,
    forwards: Literal["one", "two"] = "one",
    gradient: Literal["both", "conditional"] = "both",
) -> UpdateInfo:
    """Make one optimizer update with the engine on a rollout."""

    def loss(batch: RecordedSteps) -> Any:
        v = guided_velocity(
            MODEL,
            engine.module,
            batch.x,
            batch.level,
            optree.tree_map(lambda table: table[batch.sample], rollout.cond),
            timestep=batch.timestep,
            forwards=forwards,
            gradient=gradient,
        )
        return policy_loss(
            batch.transition,
            batch.x,
            v,
            batch.x_next,
            log_prob_old=batch.log_prob_old,
            advantage=batch.signal,
            clip_low=CLIP,
            clip_high=CLIP,
        )

    flat, held = rollout.flat, len(rollout.flat.level)
    return engine.update(flat, loss, flat.weight, count=held * engine.world.size, micro_batch=micro_batch, pad_to=held)
