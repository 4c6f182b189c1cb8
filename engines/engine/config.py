"""The configurations of the engine and of its optimizer, and the learning-rate schedule.

This module must not import FSDP2, which would dominate the time of a recipe's --help.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch.optim import Optimizer

from fluvial.core.checks import BATCH, COUNT, INDEX, RATE, check_fields, check_number
from fluvial.engines.choices import refuse_unused
from fluvial.engines.errors import UsageError
from fluvial.models.device import is_accelerator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OptimizerName = Literal["adamw", "adamw8bit", "adamw4bit", "adafactor", "muon", "prodigy", "sgd"]
# Settings without effect, per optimizer.
UNUSED: dict[OptimizerName, tuple[str, ...]] = {"adafactor": ("betas", "eps"), "sgd": ("eps",)}


@dataclass(frozen=True)
class EngineConfig:
    """Sharding, precision, checkpointing and offload of a module.

    Args:
        comm: When parameters are gathered: "keep" gathers them once per update and keeps them unsharded until its last
            backward pass; "reshard" frees them after each use and gathers them again.
        grad_sync: When gradients are reduced: "last" reduces them once per update and stores them unsharded until then;
            "every" reduces them after each micro-batch, for full fine-tuning whose unsharded gradients do not fit.
        replicas: Number of copies of the module, each sharded over an equal part of the ranks (hybrid sharding); 1 shards
            over all ranks. If it equals the number of ranks, each rank has a full copy without FSDP2, unless offload is
            always; then one all-reduce per update sums the gradients, whatever grad_sync is. auto uses full copies if only
            adapters are trained and comm is keep, because gathering all weights takes more memory; otherwise it is 1.
        context_parallel: Number of ranks that share one sample, each with a part of its tokens (Ulysses, arXiv 2309.14509,
            by diffusers); with 1 every rank has its own samples.
        ring: Number of ranks per ring, in which keys and values are passed on; across rings, ranks exchange tokens for heads
            (USP, arXiv 2405.07719), so the number of heads need only be a multiple of `context_parallel` / `ring`.
            `attention` is then _native_flash by default, without masks and in half precision on a GPU.
        compute: Dtype of the gathered parameters and of the computation: float32, bfloat16, float16 (with loss scaling), or
            auto (bfloat16 on a GPU). Trained weights are stored in the dtype of `masters`, adapters in float32, frozen
            weights in this dtype. Numbers per sample (noise levels, timesteps) keep their dtype.
        base: Format of the frozen linear layers of the blocks under adapters: auto (the dtype of `compute`), bfloat16, int8
            (a scale per row), int4 or nf4 (a scale per 64 values), fp8 (e4m3, a scale per row), or fp8_dynamic (inputs are
            rounded as well, with a scale per row, so that Hopper multiplies in fp8). Weights are rounded once, on loading;
            rollout, update and reference use the same ones. Every rank has all of them. Merged exports dequantise them.
        masters: Dtype of trained weights between updates, except adapters. bfloat16 halves the memory of weights and
            gradients; each step is computed in float32 and rounded stochastically, so that small steps add up.
        reduce: Dtype of gradient reductions.
        checkpointing: Activations stored for the backward pass; the others are recomputed. "none" stores all; "block" stores
            only each block's inputs, and "host" stores these on the host; "selective" also stores attention and every second
            matrix product.
        checkpointed: Number of blocks to checkpoint, from the first on; the others store all activations. By default all.
        offload: State on the host: "always" stores parameters, gradients and optimizer state there and copies what is used;
            "phases" moves what the current phase does not use, such as the optimizer state in a rollout; "blocks" stores the
            frozen weights of all blocks there, or a number those of that many blocks, evenly spread, and copies each to the
            GPU while the previous block computes (block swap, also of a quantised base).
        compile: Compile the repeated blocks (torch.compile, one region for all of them); auto does on a GPU, unless
            checkpointing is selective. Rollout and update are then separate programs, which may round differently. Programs
            are cached in TORCHINDUCTOR_CACHE_DIR, by default ~/.cache/fluvial/compiled. reduce-overhead also launches each
            pass of a rollout as a CUDA graph, for small networks and images; it needs full weights on each rank.
        attention: Attention backend of diffusers, such as native, flash or _native_cudnn; by default the model's.
        deterministic: Use only deterministic algorithms of torch, and raise for operations without one.
    """

    comm: Literal["keep", "reshard"] = "keep"
    grad_sync: Literal["last", "every"] = "last"
    replicas: int | Literal["auto"] = "auto"
    context_parallel: int = 1
    ring: int = 1
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    base: Literal["auto", "bfloat16", "int8", "int4", "nf4", "fp8", "fp8_dynamic"] = "auto"
    masters: Literal["float32", "bfloat16"] = "float32"
    reduce: Literal["float32", "bfloat16"] = "float32"
    checkpointing: Literal["none", "block", "selective", "host"] = "none"
    checkpointed: int | None = None
    offload: Literal["none", "phases", "blocks", "always"] | int = "none"
    compile: bool | Literal["auto", "reduce-overhead"] = "auto"
    attention: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("replicas", "context_parallel", "ring", "checkpointed", "offload"), BATCH)
        check_fields(self, "engine", **counts)
        refuse_unused(self, "engine.")
        if self.context_parallel % self.ring:
            raise UsageError("engine.ring", self.ring, f"a divisor of `engine.context_parallel`, {self.context_parallel}")
        if self.compile in (True, "reduce-overhead") and self.checkpointing == "selective":
            hint = "with `engine.compile`, a compiled block chooses what it keeps"
            raise UsageError("engine.checkpointing", "selective", "none, block or host", hint)
        if self.base != "auto" and self.offload == "always":
            hint = f"`engine.base` is {self.base}, whose weights stay on the device"
            raise UsageError("engine.offload", "always", "none, phases, blocks or a number", hint)
        for name, value in {"comm": "keep", "context_parallel": 1}.items() if self.swaps_blocks else ():
            if getattr(self, name) != value:
                hint = f"`engine.offload` is {self.offload}, with which every rank computes with whole weights"
                raise UsageError(f"engine.{name}", getattr(self, name), str(value), hint)

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        if self.checkpointing == "none":
            yield "checkpointed", "with `engine.checkpointing` none"
        if self.context_parallel == 1:
            yield "ring", "with `engine.context_parallel` 1, where ranks share no sample"

    @property
    def swaps_blocks(self) -> bool:
        """Whether frozen weights of blocks are stored on the host."""
        return self.offload == "blocks" or isinstance(self.offload, int)

    def compiles(self, device: torch.device) -> bool:
        """Return whether the blocks are compiled on a device."""
        if self.compile == "auto":
            return is_accelerator(device) and self.checkpointing != "selective"
        return bool(self.compile)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Return the compute dtype on a device."""
        if self.compute == "auto":
            return torch.bfloat16 if is_accelerator(device) else torch.float32
        return DTYPES[self.compute]


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule, gradient clipping and moving average of the weights.

    Args:
        name: Optimizer: adamw; adamw8bit or adamw4bit (AdamW with moments of 8 or 4 bits, which need torchao); adafactor
            (factored second moment, no first moment, arXiv 1804.04235); muon (orthogonalised steps of matrices, arXiv
            2502.16982, AdamW for other tensors; no published result shows that it helps adapters); prodigy (AdamW that
            estimates its step size, arXiv 2306.06101); or sgd.
        lr: Peak learning rate. Muon's steps have the size of AdamW's; for prodigy it is a factor, 1 as published.
        betas: Decay per update of Adam's first and second moment; the first one is sgd's momentum. Muon's momentum is 0.95.
        eps: Term added to the root of Adam's second moment. It must be well below the RMS of the gradient, else every step
            shrinks: policy gradients of RMS 5e-9 occur, and 1e-8 then freezes training without an error.
        weight_decay: Decoupled weight decay, as a fraction of the learning rate per update; sgd adds it to the gradient.
        schedule: Learning rate after the warm-up: constant, or cosine down to the floor.
        warmup: Number of updates in which the learning rate rises linearly to its peak; update 1 of 4 uses a quarter of it.
            A value below 1 is a fraction of all updates.
        min_lr_ratio: Floor of the cosine schedule, as a fraction of the peak learning rate.
        max_grad_norm: Bound to which the gradient norm, over all parameters and ranks, is clipped.
        ema_decay: Decay per update of the moving average of the weights, which evaluation and export use; 0 disables it.
        ema_interval: Number of updates between two updates of the moving average.
        ema_repeats: Number of times that an update of the moving average is applied, which raises the decay to that power.
            Flow-GRPO's code applies it once per micro-batch.
        ema_warmup: Warm up the decay of the moving average: at update n it is min(ema_decay, (1 + n) / (10 + n)), so that
            the initial weights are forgotten quickly. Otherwise it is ema_decay from the first update on.
        max_skipped: Number of consecutive updates with a gradient that is not finite, after which the run stops.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: float = 0.0
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    ema_interval: int = 1
    ema_repeats: int = 1
    ema_warmup: bool = True
    max_skipped: int = 10

    def __post_init__(self) -> None:
        shares = dict.fromkeys(("min_lr_ratio", "ema_decay"), (0, 1))
        sizes = {"lr": RATE, "weight_decay": RATE, "warmup": INDEX}
        counts = dict.fromkeys(("max_skipped", "ema_interval", "ema_repeats"), COUNT)
        check_fields(self, "optimizer", eps=(1e-45, math.inf), max_grad_norm=(1e-12, math.inf), **shares, **sizes, **counts)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise UsageError("optimizer.betas", self.betas, "two numbers")
        for field, decay in (("betas", self.betas[0]), ("betas", self.betas[1]), ("ema_decay", self.ema_decay)):
            check_number("optimizer", field, decay, low=0, high=1)
            if decay == 1:
                raise UsageError(f"optimizer.{field}", getattr(self, field), "below 1", "the average would never change")
        refuse_unused(self, "optimizer.")
        if self.warmup > 1 and self.warmup % 1:
            raise UsageError("optimizer.warmup", self.warmup, "a whole number of updates, or a fraction of all below 1")
        if self.name == "prodigy" and self.lr < 0.1:
            hint = "prodigy estimates the step size, and this is a factor of it"
            raise UsageError("optimizer.lr", self.lr, "about 1", hint)

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        for name in UNUSED.get(self.name, ()):
            yield name, f"with `optimizer.name` {self.name}, which has none"
        if self.schedule == "constant":
            yield "min_lr_ratio", "with `optimizer.schedule` constant"
        for name in () if self.ema_decay else ("ema_warmup", "ema_interval", "ema_repeats"):
            yield name, "with `optimizer.ema_decay` 0, without a moving average"

    @property
    def planned_fields(self) -> list[str]:
        """Names of the settings that make the learning rate depend on the number of updates."""
        planned = {"schedule": self.schedule != "constant", "warmup": self.warmup % 1 != 0}
        return [name for name, is_planned in planned.items() if is_planned]

    @cached_property
    def adam_eps(self) -> float | None:
        """`eps`, or None for an optimizer without it."""
        return None if "eps" in UNUSED.get(self.name, ()) else self.eps


def lr_factor(optimizer: Optimizer, config: OptimizerConfig, *, updates: int | None) -> Callable[[int], float]:
    """Return the learning rate of an update, in units of the peak, as a function of the number n of previous updates.

    In a warm-up of w updates it is (n + 1) / w, so update w uses the peak. Afterwards it is floor + (1 - floor) s(n), where
    s is 1, or half a cosine from update max(w, 1) on.

    Raises:
        UsageError: the schedule depends on the number of planned updates, and `updates` is None.
    """
    if updates is None:
        for field in config.planned_fields:
            hint = "it depends on the number of updates; set `updates`"
            raise UsageError(f"optimizer.{field}", getattr(config, field), hint=hint)
        updates = 0
    from diffusers.optimization import get_scheduler  # takes seconds to import, which a recipe's help does not need

    warmup = int(config.warmup) if config.warmup % 1 == 0 else math.ceil(config.warmup * updates)
    # Only the function of the number of updates is used: without state there is nothing to resume.
    schedule: Callable[[int], float] = get_scheduler(
        "constant_with_warmup" if config.schedule == "constant" else "cosine",
        optimizer,
        num_warmup_steps=max(warmup - 1, 0),
        num_training_steps=updates,
    ).lr_lambdas[0]
    floor = config.min_lr_ratio
    return lambda done: (done + 1) / warmup if done < warmup else floor + (1 - floor) * schedule(done)
