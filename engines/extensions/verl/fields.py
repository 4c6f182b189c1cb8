"""Tables of verl's config fields: those that are honoured, and those that other parts of verl read.

A field in neither table, such as one of a new version, is refused unless it has its default.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import Any

from fluvial.engines.errors import UsageError

# Fields that `settings.read_settings` and `settings.build_lr_factor` read, by part of the config.
HONOURED: dict[str, tuple[str, ...]] = {
    "model": (
        *("path", "local_path", "architecture", "trust_remote_code", "transformer_subfolder", "config_path"),
        *("enable_gradient_checkpointing", "attn_backend", "pipeline", "algo"),
        *("lora_rank", "lora_alpha", "lora_init_weights", "lora_adapter_path", "lora_dtype", "lora"),
        *("target_modules", "exclude_modules", "target_parameters", "policy_state_adapters"),
    ),
    "model.pipeline": (
        *("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "true_cfg_scale"),
        "max_sequence_length",
    ),
    "model.algo": ("noise_level", "sde_type"),
    "engine": (
        *("param_offload", "optimizer_offload", "offload_policy", "forward_only", "dtype", "model_dtype", "mixed_precision"),
        *("micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu", "seed", "full_determinism", "use_torch_compile"),
        *("fsdp_size", "reshard_after_forward", "ulysses_sequence_parallel_size"),
        "use_no_sync_for_gradient_accumulation",
    ),
    "optim": (
        *("optimizer", "optimizer_impl", "lr", "betas", "weight_decay", "clip_grad", "override_optimizer_config"),
        *("lr_scheduler_type", "lr_warmup_steps", "lr_warmup_steps_ratio", "total_training_steps", "min_lr_ratio"),
        *("num_cycles", "zero_indexed_step"),
    ),
    "checkpoint": ("save_contents", "load_contents"),
}
TOKENS, ROLLOUT = "tokenizers are those of verl's agent loop", "of the rollout"
FSDP1, COPIED = "of FSDP1", "verl itself copies it to the field that took its place"
# Fields that other parts of verl read, or that tune details of its own engine.
ELSEWHERE: dict[str, dict[str, str]] = {
    "model": {
        "model_type": "chooses the engine in verl's registry",
        "algorithm": "chooses verl-omni's adapter, whose scheduler and hooks are used",
        "external_lib": "verl-omni imports it",
        "use_shm": "verl-omni copies the folder",
        "transformer_config": "of verl-omni's count of FLOPs",
        "fsdp_layer_prefixes": "weights are gathered one tensor at a time in any case",
        "mtp": "of language models",
        **dict.fromkeys(("tokenizer_path", "local_tokenizer_path", "load_tokenizer", "tokenizer", "processor"), TOKENS),
        **dict.fromkeys(("extra_tokenizers", "extra_tokenizer_map", "custom_chat_template"), TOKENS),
    },
    "model.pipeline": dict.fromkeys(("output_type", "frame_rate", "aspect_ratio", "video_flow_shift"), ROLLOUT),
    "model.algo": dict.fromkeys(
        (
            *("sde_window_size", "sde_window_range", "sde_contiguous", "sde_window_seed"),
            *("sample_strategy", "iters_per_group"),
        ),
        ROLLOUT,
    ),
    "engine": {
        "strategy": "chooses the engine in verl's registry",
        **dict.fromkeys(
            (
                *("use_dynamic_bsz", "max_token_len_per_gpu", "infer_max_token_len_per_gpu", "use_remove_padding"),
                "use_fused_kernels",
            ),
            "of language models; verl's workers set it",
        ),
        **dict.fromkeys(("wrap_policy", "forward_prefetch", "use_orig_params"), FSDP1),
    },
    "optim": {"grad_clip": COPIED, "warmup_style": COPIED},
    "checkpoint": {"save_lora_only": "a checkpoint holds the trained weights alone in any case"},
}


def check_unread(part: str, config: Any) -> None:
    """Raise UsageError for the first field that is in neither table and differs from its default.

    Args:
        part: part of the config, a key of the tables.
        config: verl's dataclass; other objects have no defaults, and pass.
    """
    for each in fields(config) if is_dataclass(config) else ():
        if each.name in HONOURED[part] or each.name in ELSEWHERE[part]:
            continue
        value, default = getattr(config, each.name), get_default(each)
        if value is not None and _to_dict(value, default) != _to_dict(default, default):
            raise UsageError(f"{part}.{each.name} is {value!r}, which fluvial does not support: leave it at {default!r}")


def get_default(field: Field[Any]) -> Any:
    """Return the default of a dataclass's field; None if it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def _to_dict(value: Any, default: Any) -> Any:
    """Convert a nested config to a dict, with the default's values for missing fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping) and is_dataclass(default) and not isinstance(default, type):
        return {**asdict(default), **value}
    return value
