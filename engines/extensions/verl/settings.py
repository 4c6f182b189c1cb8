"""The configs that verl passes to an engine, as those of fluvial: each field is translated, or refused in one line."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fluvial.core.transitions import SamplerName, check_eta
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig, OptimizerName
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.models.lora import LoraConfig, LowRank

# verl-omni's names of samplers. The form is that of its log-probabilities, see `core.gaussian.log_prob`.
SAMPLERS: dict[str, tuple[SamplerName, Literal["density", "unscaled"]]] = {
    "sde": ("flow_sde", "density"),
    "cps": ("cps", "unscaled"),
    "dance_sde": ("dance_sde", "density"),
}
OPTIMIZERS: dict[str, OptimizerName] = {"AdamW": "adamw", "AdamW8bit": "adamw8bit"}
DTYPES: dict[str, Literal["float32", "bfloat16"]] = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
NETWORK = "transformer"  # folder of the network in a pipeline, and its name in the rollout's
# The algorithm that verl-omni registers for one architecture alone, unless model.external_lib registers more.
DANCE, DANCES = "dance_grpo", "WanPipeline"
# Fields of the model config that change the network in a way that the engine has not.
ABSENT = ("exclude_modules", "target_parameters", "config_path")


@dataclass(frozen=True)
class Settings:
    """Settings that an engine of verl is built from."""

    folder: Path  # pipeline in diffusers' layout
    architecture: str  # class of the pipeline
    size: tuple[int, int, int]  # height and width in pixels, and number of frames
    steps: int  # number of steps of a rollout
    scale: Mapping[str, float]  # guidance scale by the name of its field; both names exist, and a model reads one
    sampler: SamplerName  # of the stochastic steps
    form: Literal["density", "unscaled"]  # of the log-probabilities
    eta: float  # scale of the sampler's noise
    engine: EngineConfig  # sharding and precision
    optimizer: OptimizerConfig | None  # None for an engine that only makes forward passes
    lora: LoraConfig | None  # None trains all weights
    adapters: tuple[str, ...]  # their names, `default` first
    seed: int  # of the adapter's first values
    merge: bool  # whether adapters are merged into the weights that rollouts get
    sent: Literal["float32", "bfloat16"]  # dtype of the base weights that rollouts get
    offloads_parameters: bool  # whether they lie on the host between the phases
    offloads_optimizer: bool
    micro_batches: tuple[int | None, int | None]  # items per pass, training and inference, where the batch does not say
    export: bool  # whether a checkpoint also holds the weights as diffusers reads them

    def fingerprint(self) -> dict[str, Any]:
        """Return what a checkpoint and the engine that loads it must share, as JSON holds it, which has no tuples."""
        lora: dict[str, Any] | None = None
        if self.lora is not None:
            targets, weights = self.lora.targets, self.lora.weights
            lora = {**asdict(self.lora), "targets": targets and [*targets], "weights": weights and str(weights)}
        return {
            "architecture": self.architecture,
            "lora": lora,
            "adapters": list(self.adapters),
            "optimizer": None if self.optimizer is None else self.optimizer.name,
        }


def read_settings(model: Any, engine: Any, optimizer: Any, checkpoint: Any, *, ranks: int) -> Settings:
    """Return the settings that verl's four configs stand for.

    Args:
        model: verl-omni's DiffusionModelConfig.
        engine: verl's FSDPEngineConfig.
        optimizer: verl's FSDPOptimizerConfig. An engine that only makes forward passes ignores it: verl-omni's reference and
            teacher always come with one.
        checkpoint: verl's CheckpointConfig; None leaves it at its defaults.
        ranks: number of ranks.

    Raises:
        UsageError: a field is missing or has a value that fluvial does not support.
    """
    if engine.forward_only:
        optimizer = None
    elif optimizer is None:
        raise UsageError("the optimizer config is missing: set it, or engine.forward_only")
    pipeline, algorithm = _part(model, "pipeline"), _part(model, "algo")
    if model.algorithm == DANCE and model.architecture != DANCES and model.external_lib is None:
        raise UsageError(
            f"model.algorithm is {DANCE!r}, and verl-omni samples so with {DANCES} alone: for {model.architecture} set "
            "model.algorithm=flow_grpo and model.algo.sde_type=dance_sde, which has the same loss"
        )
    if algorithm.sde_type not in SAMPLERS:
        raise UsageError(f"model.algo.sde_type is {algorithm.sde_type!r}, expected one of {', '.join(map(repr, SAMPLERS))}")
    sampler, form = SAMPLERS[algorithm.sde_type]
    try:
        check_eta("model.algo", sampler, float(algorithm.noise_level))
    except ValueError as error:
        raise UsageError(f"{error} (model.algo.noise_level)") from error
    if model.transformer_subfolder != NETWORK:
        raise UsageError(f"model.transformer_subfolder is {model.transformer_subfolder!r}, expected {NETWORK!r}")
    seed = int(engine.seed)
    return Settings(
        folder=Path(model.local_path or model.path),
        architecture=str(model.architecture),
        size=(int(pipeline.height), int(pipeline.width), int(pipeline.num_frames)),
        steps=int(pipeline.num_inference_steps),
        scale={name: float(getattr(pipeline, name) or 0.0) for name in ("guidance_scale", "true_cfg_scale")},
        sampler=sampler,
        form=form,
        eta=float(algorithm.noise_level),
        engine=_engine(engine, model, ranks=ranks),
        optimizer=None if optimizer is None else _optimizer(optimizer),
        lora=_lora(model, trained=optimizer is not None),
        adapters=tuple(name for name in _adapters(model) if name != "reference"),
        seed=seed,
        merge=bool((getattr(model, "lora", None) or {}).get("merge", False)),
        sent=_dtype("engine.dtype", engine.dtype),
        offloads_parameters=bool(engine.param_offload),
        offloads_optimizer=bool(engine.optimizer_offload),
        micro_batches=(engine.micro_batch_size_per_gpu, engine.infer_micro_batch_size_per_gpu),
        export="hf_model" in (() if checkpoint is None else checkpoint.save_contents),
    )


def lr_factor(config: Any) -> Callable[[int], float]:
    """Return the learning rate after n calls of `lr_scheduler_step`, in units of the peak, as verl's FSDP engines have it.

    In a warm-up of w calls it is n / w, so the first updates of a constant schedule with a warm-up have the rate 0. A cosine
    may count from 1 (`zero_indexed_step`).

    Args:
        config: verl's optimizer config.

    Raises:
        UsageError: the schedule is not known, or a cosine does not know the number of steps.
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


def _part(model: Any, name: str) -> Any:
    part = getattr(model, name, None)
    if part is None:
        raise UsageError(f"the model config has no {name}: expected verl-omni's DiffusionModelConfig")
    return part


def _engine(config: Any, model: Any, *, ranks: int) -> EngineConfig:
    """Return sharding and precision."""
    size = ranks if config.fsdp_size in (-1, 0) or config.fsdp_size > ranks else int(config.fsdp_size)
    if ranks % size:
        raise UsageError(f"engine.fsdp_size is {size}, expected a divisor of the {ranks} ranks, or -1")
    mixed: Mapping[str, Any] = config.mixed_precision or {}
    buffers = mixed.get("buffer_dtype", "fp32")
    if DTYPES.get(str(buffers)) != "float32":
        raise UsageError(f"engine.mixed_precision.buffer_dtype is {buffers!r}, and buffers stay in float32: leave it out")
    if config.qat.enable:
        raise UsageError("engine.qat.enable is True, and fluvial has no quantisation-aware training: set it to False")
    backend = model.attn_backend
    return EngineConfig(
        comm="reshard" if config.reshard_after_forward else "keep",
        # Without the field (verl 0.9.0, 0.10.0.dev), gradients are always synchronised after the last micro-batch.
        grad_sync="last" if getattr(config, "use_no_sync_for_gradient_accumulation", True) else "every",
        replicas=ranks // size,
        context_parallel=int(config.ulysses_sequence_parallel_size),
        compute=_dtype("engine.mixed_precision.param_dtype", mixed["param_dtype"]) if "param_dtype" in mixed else "auto",
        reduce=_dtype("engine.mixed_precision.reduce_dtype", mixed.get("reduce_dtype", "fp32")),
        checkpointing="block" if model.enable_gradient_checkpointing else "none",
        offload="always" if config.offload_policy else "none",
        compile="auto" if config.use_torch_compile else False,
        attention=None if backend in (None, "native") else str(backend),
        deterministic=bool(config.full_determinism),
    )


def _optimizer(config: Any) -> OptimizerConfig:
    """Return the optimizer. The learning rate is scheduled apart, see `lr_factor`."""
    if config.optimizer not in OPTIMIZERS:
        raise UsageError(f"optim.optimizer is {config.optimizer!r}, expected one of {', '.join(map(repr, OPTIMIZERS))}")
    if config.clip_grad is None:
        raise UsageError("optim.clip_grad is None, expected the norm that gradients are clipped to")
    more = dict(config.override_optimizer_config or {})
    eps = float(more.pop("eps", 1e-8))
    if more:
        raise UsageError(f"optim.override_optimizer_config holds {', '.join(sorted(more))}, expected eps alone")
    first, second = (float(decay) for decay in config.betas)
    with convert_errors(UsageError, ValueError, says="optim"):
        return OptimizerConfig(
            name=OPTIMIZERS[config.optimizer],
            lr=float(config.lr),
            betas=(first, second),
            eps=eps,
            weight_decay=float(config.weight_decay),
            max_grad_norm=float(config.clip_grad),
        )


def _lora(model: Any, *, trained: bool) -> LoraConfig | None:
    """Return the adapter, or None if all weights are trained."""
    for name in ABSENT:
        if getattr(model, name, None):
            raise UsageError(f"model.{name} is {getattr(model, name)!r}, which fluvial does not support: leave it out")
    if model.lora_dtype is not None and _dtype("model.lora_dtype", model.lora_dtype) != "float32":
        raise UsageError(f"model.lora_dtype is {model.lora_dtype!r}, and adapters are trained in float32: leave it out")
    path = model.lora_adapter_path
    if model.lora_rank <= 0:
        if path is not None:
            raise UsageError(f"model.lora_adapter_path is {path}, and model.lora_rank is {model.lora_rank}: set the rank")
        if trained and tuple(_adapters(model)) not in (("default",), ()):
            raise UsageError(
                f"model.policy_state_adapters are {', '.join(_adapters(model))}, which need LoRA: set model.lora_rank"
            )
        return None
    targets = model.target_modules
    if path is None and (isinstance(targets, str) or not targets):
        raise UsageError(
            f"model.target_modules is {targets!r}, expected a list of names of layers, e.g. [to_q, to_k, to_v, to_out.0]"
        )
    init = model.lora_init_weights
    if init not in ("gaussian", "default", True):
        raise UsageError(f"model.lora_init_weights is {init!r}, expected gaussian or True")
    return LoraConfig(
        rank=int(model.lora_rank),
        alpha=float(model.lora_alpha),
        form=LowRank("gaussian" if init == "gaussian" else "default"),
        targets=None if path is not None else tuple(map(str, targets)),
        weights=None if path is None else Path(path),
    )


def _adapters(model: Any) -> Sequence[str]:
    names = tuple(map(str, getattr(model, "policy_state_adapters", ("default",))))
    if names and names[0] != "default":
        raise UsageError(f"model.policy_state_adapters are {', '.join(names)}, expected default first")
    return names


def _dtype(field: str, value: Any) -> Literal["float32", "bfloat16"]:
    if str(value) not in DTYPES:
        raise UsageError(f"{field} is {value!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[str(value)]
