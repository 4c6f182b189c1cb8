"""Translation of verl's configs to fluvial's: each field is translated, or refused in one line."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fluvial.core.transitions import SamplerName, check_eta
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig, OptimizerName
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.extensions.verl.adapters import Targets
from fluvial.engines.extensions.verl.fields import check_unread
from fluvial.models.lora import LoraConfig, LowRank

# Sampler and form of the log-probabilities (see `core.gaussian.log_prob`) by verl-omni's name.
SAMPLERS: dict[str, tuple[SamplerName, Literal["density", "unscaled"]]] = {
    "sde": ("flow_sde", "density"),
    "cps": ("cps", "unscaled"),
    "dance_sde": ("dance_sde", "density"),
    "ddim": ("ddim", "density"),  # for models that predict epsilon, which verl-omni lacks
}
# Optimizers by `optimizer_impl` and `optimizer`.
OPTIMIZERS: dict[str, OptimizerName] = {
    "torch.optim.AdamW": "adamw",
    "torchao.optim._AdamW": "adamw",
    "torchao.optim.AdamW8bit": "adamw8bit",
    "torchao.optim.AdamW4bit": "adamw4bit",
    "bitsandbytes.optim.AdamW8bit": "adamw8bit",
}
# Arguments of these optimizers with one supported value; weights in bfloat16 are rounded stochastically.
FIXED = {
    **{"fused": True, "bf16_stochastic_round": True},
    **dict.fromkeys(("foreach", "amsgrad", "maximize", "capturable", "differentiable"), False),
}
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[str, Dtype] = {
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
}
CONTENTS = ("model", "optimizer", "extra")  # contents of every checkpoint
TRAINED_DTYPES = ("float32", "bfloat16")  # dtypes of trained parameters, and of sums over ranks
NETWORK = "transformer"  # folder of the network in most pipelines, and its name in the rollout engine


@dataclass(frozen=True)
class Settings:
    """Settings of an engine of verl."""

    model: str  # value of `--model`: the folder of a pipeline, or `module:name`
    architecture: str  # class of the pipeline
    part: str  # folder of the network; NETWORK is the model's own
    weights: Path | None  # folder of the network outside the pipeline
    trusts_code: bool  # whether code of the folder may run
    size: tuple[int, int, int]  # height and width in pixels, and number of frames
    steps: int  # number of steps of a rollout
    guidance_scale: float | None  # guidance; an input of a distilled network
    true_cfg_scale: float  # guidance of models that do not read guidance_scale
    kind: str  # verl-omni's name of the sampler
    sampler: SamplerName  # sampler of the stochastic steps
    form: Literal["density", "unscaled"]  # form of the log-probabilities
    eta: float  # scale of the sampler's noise
    engine: EngineConfig  # sharding and precision
    optimizer: OptimizerConfig | None  # None for an engine that only runs forward passes
    lora: LoraConfig | None  # None trains all weights
    targets: Targets  # adapted layers
    adapter_dtype: Dtype  # dtype of the trained adapter's parameters
    buffers: Dtype  # dtype of the network's floating-point buffers
    adapters: tuple[str, ...]  # names of the adapters, `default` first
    seed: int  # seed of the adapter's initial values
    merge: bool  # whether rollouts get merged weights
    sent: Dtype  # dtype of the base weights for rollouts
    offloads_parameters: bool  # whether parameters are on the host between phases
    offloads_optimizer: bool  # whether the optimizer state is
    micro_batches: tuple[int | None, int | None]  # default number of items per pass, in training and inference
    tokens: int  # length to which the rollout pads prompts
    export: bool  # whether checkpoints also hold the weights in diffusers' format

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the engine that loads it must share, as JSON, without tuples."""
        lora = None if self.lora is None else {**asdict(self.lora), "targets": self.targets}
        return {
            "architecture": self.architecture,
            "lora": json.loads(json.dumps(lora, default=str)),  # paths become texts
            "adapters": list(self.adapters),
            "optimizer": None if self.optimizer is None else self.optimizer.name,
        }


def read_settings(model: Any, engine: Any, optimizer: Any, checkpoint: Any, *, ranks: int) -> Settings:
    """Read the settings from verl's four configs.

    Args:
        model: verl-omni's DiffusionModelConfig.
        engine: verl's FSDPEngineConfig.
        optimizer: verl's FSDPOptimizerConfig. No effect with `forward_only`: verl-omni's reference and teacher always have
            one.
        checkpoint: verl's CheckpointConfig; None takes its defaults.
        ranks: number of ranks.

    Raises:
        UsageError: a field is missing or has a value that fluvial does not support.
    """
    if engine.forward_only:
        optimizer = None
    elif optimizer is None:
        raise UsageError("the optimizer config is missing: set it, or engine.forward_only")
    pipeline, algorithm = _get_part(model, "pipeline"), _get_part(model, "algo")
    parts = {"model": model, "model.pipeline": pipeline, "model.algo": algorithm, "engine": engine, "checkpoint": checkpoint}
    for part, config in {**parts, "optim": optimizer}.items():
        check_unread(part, config)
    if checkpoint is not None and (missing := {*CONTENTS} - {*checkpoint.load_contents}):
        raise UsageError(f"checkpoint.load_contents leaves out {', '.join(sorted(missing))}, which is restored too: add it")
    if algorithm.sde_type not in SAMPLERS:
        raise UsageError(f"model.algo.sde_type is {algorithm.sde_type!r}, expected one of {', '.join(map(repr, SAMPLERS))}")
    sampler, form = SAMPLERS[algorithm.sde_type]
    try:
        check_eta("model.algo", sampler, float(algorithm.noise_level))
    except ValueError as error:
        raise UsageError(f"{error} (model.algo.noise_level)") from error
    seed, architecture = int(engine.seed), str(model.architecture)
    return Settings(
        model=architecture if ":" in architecture else str(model.local_path or model.path),
        architecture=architecture,
        part=str(model.transformer_subfolder),
        weights=None if model.config_path is None else Path(model.config_path),
        trusts_code=bool(model.trust_remote_code),
        size=(int(pipeline.height), int(pipeline.width), int(pipeline.num_frames)),
        steps=int(pipeline.num_inference_steps),
        guidance_scale=None if pipeline.guidance_scale is None else float(pipeline.guidance_scale),
        true_cfg_scale=float(pipeline.true_cfg_scale),
        kind=str(algorithm.sde_type),
        sampler=sampler,
        form=form,
        eta=float(algorithm.noise_level),
        engine=_read_engine(engine, model, ranks=ranks),
        optimizer=None if optimizer is None else _read_optimizer(optimizer),
        lora=_read_lora(model, trained=optimizer is not None),
        targets=Targets(
            _read_names(model.target_modules), _read_names(model.exclude_modules), tuple(model.target_parameters or ())
        ),
        adapter_dtype=_read_dtype("model.lora_dtype", model.lora_dtype or "fp32", TRAINED_DTYPES),
        buffers=_read_dtype(
            "engine.mixed_precision.buffer_dtype", (engine.mixed_precision or {}).get("buffer_dtype", "fp32")
        ),
        adapters=tuple(name for name in _read_adapters(model) if name != "reference"),
        seed=seed,
        merge=_read_merge(model),
        sent=_read_dtype("engine.dtype", engine.dtype),
        offloads_parameters=bool(engine.param_offload),
        offloads_optimizer=bool(engine.optimizer_offload),
        micro_batches=(engine.micro_batch_size_per_gpu, engine.infer_micro_batch_size_per_gpu),
        tokens=int(pipeline.max_sequence_length),
        export="hf_model" in (() if checkpoint is None else checkpoint.save_contents),
    )


def build_lr_factor(config: Any) -> Callable[[int], float]:
    """Return the function from n calls of `lr_scheduler_step` to the relative learning rate, as in verl's FSDP engines.

    In a warm-up of w calls it is n / w, so the first updates with a warm-up have learning rate 0. A cosine may count from 1
    (`zero_indexed_step`).

    Args:
        config: verl's optimizer config.

    Raises:
        UsageError: the schedule is unknown, or depends on a number of steps that is not set.
    """
    kind, total = config.lr_scheduler_type, config.total_training_steps
    if kind not in ("constant", "cosine"):
        raise UsageError(f"optim.lr_scheduler_type is {kind!r}, expected 'constant' or 'cosine'")
    warmup = config.lr_warmup_steps if config.lr_warmup_steps is not None else -1
    if (kind == "cosine" or (warmup <= 0 and config.lr_warmup_steps_ratio > 0)) and total <= 0:
        raise UsageError(f"optim.total_training_steps is {total}, expected the number of steps that the schedule depends on")
    if warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * total)
    floor, cycles, first = config.min_lr_ratio or 0.0, config.num_cycles, 0 if config.zero_indexed_step else 1

    def constant(done: int) -> float:
        return done / warmup if done < warmup else 1.0

    def cosine(done: int) -> float:
        step = done + first
        if step < warmup:
            return step / warmup
        wave = math.cos(2 * math.pi * cycles * (step - warmup) / max(1, total - warmup))
        return (1 - floor) / 2 * wave + (1 + floor) / 2

    return constant if kind == "constant" else cosine


def _get_part(model: Any, name: str) -> Any:
    part = getattr(model, name, None)
    if part is None:
        raise UsageError(f"the model config has no {name}: expected verl-omni's DiffusionModelConfig")
    return part


def _read_engine(config: Any, model: Any, *, ranks: int) -> EngineConfig:
    """Read sharding and precision."""
    size = ranks if config.fsdp_size in (-1, 0) or config.fsdp_size > ranks else int(config.fsdp_size)
    if ranks % size:
        raise UsageError(f"engine.fsdp_size is {size}, expected a divisor of the {ranks} ranks, or -1")
    mixed: Mapping[str, Any] = config.mixed_precision or {}
    if unknown := sorted({*mixed} - {"param_dtype", "reduce_dtype", "buffer_dtype"}):
        raise UsageError(
            f"engine.mixed_precision has {', '.join(unknown)}, expected param_dtype, reduce_dtype, buffer_dtype"
        )
    backend = model.attn_backend
    return EngineConfig(
        comm="reshard" if config.reshard_after_forward else "keep",
        # Without the field (verl 0.9.0, 0.10.0.dev), gradients are always synchronised after the last micro-batch.
        grad_sync="last" if getattr(config, "use_no_sync_for_gradient_accumulation", True) else "every",
        replicas=ranks // size,
        context_parallel=int(config.ulysses_sequence_parallel_size),
        compute=_read_dtype("engine.mixed_precision.param_dtype", mixed["param_dtype"])
        if "param_dtype" in mixed
        else "auto",
        masters=_read_dtype("engine.model_dtype", config.model_dtype or "fp32", TRAINED_DTYPES),
        reduce=_read_dtype("engine.mixed_precision.reduce_dtype", mixed.get("reduce_dtype", "fp32"), TRAINED_DTYPES),
        checkpointing="block" if model.enable_gradient_checkpointing else "none",
        offload="always" if config.offload_policy else "none",
        compile="auto" if config.use_torch_compile else False,
        attention=None if backend in (None, "native") else str(backend),
        deterministic=bool(config.full_determinism),
    )


def _read_optimizer(config: Any) -> OptimizerConfig:
    """Read the optimizer; its schedule is that of `build_lr_factor`."""
    kind = f"{config.optimizer_impl}.{config.optimizer}"
    if kind not in OPTIMIZERS:
        raise UsageError(f"optim.optimizer_impl and optimizer are {kind}, expected one of {', '.join(OPTIMIZERS)}")
    if config.clip_grad is None:
        raise UsageError("optim.clip_grad is None, expected the norm that gradients are clipped to")
    overrides = dict(config.override_optimizer_config or {})
    first, second = (float(decay) for decay in overrides.pop("betas", config.betas))
    numbers = {"lr": config.lr, "weight_decay": config.weight_decay, "eps": 1e-8}
    lr, weight_decay, eps = (float(overrides.pop(name, value)) for name, value in numbers.items())
    for name, value in overrides.items():
        if value is not None and value != FIXED.get(name):
            expected = f"{FIXED[name]}" if name in FIXED else f"only betas, {', '.join(numbers)}"
            raise UsageError(f"optim.override_optimizer_config has {name} {value!r}, expected {expected}")
    with convert_errors(UsageError, ValueError, says="optim"):
        return OptimizerConfig(
            name=OPTIMIZERS[kind],
            lr=lr,
            betas=(first, second),
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=float(config.clip_grad),
        )


def _read_lora(model: Any, *, trained: bool) -> LoraConfig | None:
    """Read the adapter; None if all weights are trained."""
    path = model.lora_adapter_path
    if model.lora_rank <= 0:
        if path is not None:
            raise UsageError(f"model.lora_adapter_path is {path}, and model.lora_rank is {model.lora_rank}: set the rank")
        if trained and tuple(_read_adapters(model)) not in (("default",), ()):
            raise UsageError(
                f"model.policy_state_adapters are {', '.join(_read_adapters(model))}, which need LoRA: set model.lora_rank"
            )
        return None
    if path is None and not model.target_modules and not model.target_parameters:
        raise UsageError(
            f"model.target_modules is {model.target_modules!r}, expected all-linear or a list of names of layers"
        )
    init = model.lora_init_weights
    if init not in ("gaussian", "default", True):
        raise UsageError(f"model.lora_init_weights is {init!r}, expected gaussian or True")
    return LoraConfig(
        rank=int(model.lora_rank),
        alpha=float(model.lora_alpha),
        form=LowRank("gaussian" if init == "gaussian" else "default"),
        weights=None if path is None else Path(path),
    )


def _read_merge(model: Any) -> bool:
    """Return whether adapters are sent merged; UsageError for other fields of `model.lora`, which are Megatron's."""
    lora = dict(getattr(model, "lora", None) or {})
    merge = bool(lora.pop("merge", False))
    if lora:
        raise UsageError(f"model.lora has {', '.join(sorted(lora))}, expected only merge: the others are for Megatron")
    return merge


def _read_adapters(model: Any) -> Sequence[str]:
    names = tuple(map(str, getattr(model, "policy_state_adapters", ("default",))))
    if names and names[0] != "default":
        raise UsageError(f"model.policy_state_adapters are {', '.join(names)}, expected default first")
    return names


def _read_names(names: Any) -> str | tuple[str, ...]:
    return names if isinstance(names, str) else tuple(map(str, names or ()))


def _read_dtype(field: str, value: Any, known: Sequence[str] = tuple(DTYPES.values())) -> Any:
    dtype = DTYPES.get(str(value))
    if dtype not in known:
        raise UsageError(
            f"{field} is {value!r}, expected one of {', '.join(n for n, kind in DTYPES.items() if kind in known)}"
        )
    return dtype
