"""verl-omni's configs of a model, with the fields and defaults of its source (verl-project/verl-omni, a1139ba, Apache 2.0).

`workers/config/diffusion/model.py` and `rollout.py` there. verl-omni is on no package index; where it is installed, its own
classes are taken.
"""

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DiffusionPipelineConfig:
    height: int = 512
    width: int = 512
    num_inference_steps: int = 10
    output_type: str = "image"
    true_cfg_scale: float = 1.0
    max_sequence_length: int = 512
    guidance_scale: float | None = None
    num_frames: int = 1
    frame_rate: float = 24.0
    aspect_ratio: str | None = None
    video_flow_shift: float = 12.0


@dataclass
class DiffusionRolloutAlgoConfig:
    noise_level: float = 1.0
    sde_type: str = "sde"
    sde_window_size: int | None = None
    sde_window_range: list[int] | None = None
    sde_contiguous: bool = True
    sample_strategy: str = "random"
    iters_per_group: int = 1
    sde_window_seed: int = 0


@dataclass
class DiffusionModelConfig:
    path: str = "???"
    architecture: str | None = None
    transformer_config: dict[str, Any] | None = None
    algorithm: str = "???"
    local_path: str | None = None
    tokenizer_path: str | None = None
    local_tokenizer_path: str | None = None
    model_type: str = "diffusion_model"
    load_tokenizer: bool = True
    tokenizer: Any = None
    processor: Any = None
    extra_tokenizers: dict[str, Any] | None = None
    extra_tokenizer_map: Any = None
    use_shm: bool = False
    trust_remote_code: bool = False
    custom_chat_template: str | None = None
    external_lib: str | None = None
    enable_gradient_checkpointing: bool = True
    attn_backend: str = "_flash_3_varlen_hub"
    lora_rank: int = 0
    lora_alpha: int = 64
    lora_init_weights: str = "gaussian"
    target_modules: Any = "all-linear"
    target_parameters: list[str] | None = None
    exclude_modules: str | None = None
    lora: dict[str, Any] = field(default_factory=dict)
    lora_adapter_path: str | None = None
    policy_state_adapters: tuple[str, ...] = ("default",)
    lora_dtype: str | None = None
    mtp: Any = None
    pipeline: DiffusionPipelineConfig = field(default_factory=DiffusionPipelineConfig)
    algo: DiffusionRolloutAlgoConfig | None = field(default_factory=DiffusionRolloutAlgoConfig)
    fsdp_layer_prefixes: list[str] = field(default_factory=lambda: ["transformer_blocks."])
    config_path: str | None = None
    transformer_subfolder: str = "transformer"


OWN = {
    "model": DiffusionModelConfig,
    "model.pipeline": DiffusionPipelineConfig,
    "model.algo": DiffusionRolloutAlgoConfig,
}


def load() -> dict[str, Any]:
    """Return the classes by part of the config."""
    if importlib.util.find_spec("verl_omni") is None:
        return dict(OWN)
    theirs = importlib.import_module("verl_omni.workers.config.diffusion")
    return {part: getattr(theirs, kind.__name__) for part, kind in OWN.items()}
