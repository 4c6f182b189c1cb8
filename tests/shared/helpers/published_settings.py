"""Settings as the sources of the published runs state them, field by field, in their own names and units.

`published_runs.json` in tests/engines/extensions/published holds, for each field, every value with the numbers of the runs
that state it.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

LIST = Path(__file__).parents[2] / "engines" / "extensions" / "published" / "published_runs.json"

SD3 = ["attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out", "attn.to_k", "attn.to_out.0"]
SD3 += ["attn.to_q", "attn.to_v"]
FLUX = [*SD3, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
QWEN = [target.removeprefix("attn.") for target in SD3]
QWEN += ["img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"]
SMALL = {"lora_rank": 4, "lora_alpha": 4, "lora_targets": ["to_q", "to_k", "to_v", "to_out.0"], "lora_init": "gaussian"}
# The base file of Flow-GRPO, which TempFlow-GRPO's runs are built on (config/base.py at ac4c86e).
BASE_FILE = {
    "learning_rate": 3e-4,
    "ratio_clip_low": 1e-4,
    "ratio_clip_high": 1e-4,
    "advantage_clip": 5.0,
    "seed": 42,
    "adam_eps": 1e-8,
    "weight_decay": 1e-4,
    "max_grad_norm": 1.0,
}
TEMPFLOW = {  # scripts/train_sd3_pr.py at e66824ec
    **BASE_FILE,
    "data_seed": 42,
    "ema_decay": 0.9,
    "ema_interval": 8,
    "kl_kind": "mean_gaussian",
    "lora_rank": 32,
    "lora_alpha": 64,
    "lora_init": "gaussian",
    "lora_targets": SD3,
    "loss_weighting": "2.25*std_dev_t",
    "micro_batch_per_gpu": 6,
    "optimizer": "AdamW",
    "sampler": "flow_sde",
    "samples_per_prompt": 24,
    "samples_per_rollout": 1152,
    "samples_per_update": 576,
    "text_max_length": {"t5": 128},
    "zero_advantage_filter": True,
}
GARDO = {"advantage_scale": None, "advantage_eps": None, "advantage_std_ddof": None}  # stat_tracking.py at 94e23ee
# What a later reading of the sources added to the list, or took out of it (None).
READ_LATER: dict[str, dict[str, Any]] = {
    **{f"gardo/{task}": GARDO for task in ("sd3.5-medium/geneval", "sd3.5-medium/ocr", "flux.1-dev/hpsv2")},
    **{f"tempflow_grpo/sd3.5-medium/{task}": TEMPFLOW for task in ("geneval", "pickscore")},
    "tempflow_grpo/flux.1-dev/hpsv3": BASE_FILE,
    # diffusers 0.17.1 and trl 0.11.4, where the configurations name no adapter
    **{
        f"ddpo/sd1.4/{task}": SMALL
        for task in ("aesthetic", "compressibility", "incompressibility", "prompt_image_alignment")
    },
    "d3po/sd1.5/compressibility": {**SMALL, "prompts_per_rollout": 20},
    "alignprop/sd1.5/aesthetic": SMALL,
    "alignprop/sd1.5/hps": SMALL,
    "flow_grpo/sd3.5-medium/pickscore-fast": {
        "samples_per_prompt": 18,
        "prompts_per_rollout": 64,
        "zero_advantage_filter": False,
    },
    "unirl/qwen-image/nft": {"lora_targets": QWEN},
    "miles_diffusion/qwen-image/ocr": {
        "lora_targets": QWEN,
        "advantage_clip": 5.0,
        "advantage_eps": 1e-4,
        "advantage_std_ddof": 1,
        "adam_eps": 1e-8,
        "max_grad_norm": 1.0,
        "lr_warmup_steps": 0,
        "seed": 1234,
    },
    # The trainer's default, which its evaluations take (src/flow_factory/hparams/training_args.py:227-242).
    "flow_factory/sd3.5-medium/crd-ocr": {"ema_enabled": True, "ema_decay": 0.995, "ema_interval": 10},
    "flow_factory/flux.1-dev/grpo": {"lora_targets": FLUX},
    "verl_omni/wan2.2-ti2v-5b/hpsv3-dancegrpo": {"ratio_clip_low": 1e-4, "ratio_clip_high": 1e-4},
}


def stated() -> Iterator[tuple[str, str, Any]]:
    """Yield (run, field, value) of everything that was read; the numbers of a single loss are fields loss_extra.NAME."""
    table = json.loads(LIST.read_text())
    for field, values in table["settings"].items():
        for ranges, value in values.items():
            for number in _numbers(ranges):
                name = table["runs"][number]
                if field not in READ_LATER.get(name, {}):
                    yield name, field, value
    for name, fields in READ_LATER.items():
        yield from ((name, field, value) for field, value in fields.items() if value is not None)


@cache
def settings_of(name: str) -> Mapping[str, Any]:
    """Return what the source of a run states, by field; `loss_extra` holds the numbers of its loss alone."""
    found: dict[str, Any] = {}
    for run, field, value in stated():
        if run == name:
            field, _, number = field.partition(".")
            if number:
                found.setdefault(field, {})[number] = value
            else:
                found[field] = value
    return found


def _numbers(ranges: str) -> Iterator[int]:
    for part in ranges.split():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
