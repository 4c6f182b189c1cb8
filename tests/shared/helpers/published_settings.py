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
# SD3.5-medium at 512 with LoRA of rank 32, as the few-step methods and OPD train it.
SMALL_SD3: dict[str, Any] = {
    "resolution_height": 512,
    "resolution_width": 512,
    "lora_rank": 32,
    "lora_alpha": 64,
    "weight_decay": 1e-4,
}
SMALL_SD3 |= {"finetune": "lora", "max_grad_norm": 1.0}
STUDENT = {**SMALL_SD3, "train_sampling_steps": 4}
FLOW_FACTORY = {**STUDENT, "learning_rate": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "ema_enabled": False}
FLOW_FACTORY |= {"loss_extra.guidance": 4.0, "loss_extra.fake_lr": 1e-5}
TDM_R1 = {
    **STUDENT,
    **{"learning_rate": 7.5e-5, "adam_beta1": 0.0, "adam_beta2": 0.999, "ema_decay": 0.9, "sampler": "euler_ode"},
    **{"prompts_per_rollout": 48, "samples_per_prompt": 24, "advantage_clip": 5.0, "advantage_scale": "global"},
    **{"advantage_std_ddof": 0},  # flow_grpo/stat_tracking.py
    **{"loss_extra.tdm": 0.3, "loss_extra.fake_lr": 3e-4, "loss_extra.guidance": 4.5, "loss_extra.fake_kl": 0.02},
}


def surrogate_of(lowest: float, read_from: float, guidance: float, beta: float, clip: float) -> dict[str, Any]:
    """Return what the configuration of a task of TDM-R1 states of its surrogate."""
    found = {"lowest": lowest, "read_from": read_from, "rl_cfg": guidance, "surrogate_beta": beta, "surrogate_clip": clip}
    return {**TDM_R1, **{f"loss_extra.{name}": value for name, value in found.items()}}


# verl-omni's scripts of MiniMax-H3 (at 2452033f).
MINIMAX_H3: dict[str, Any] = {
    **{"resolution_height": 256, "resolution_width": 384, "num_frames": 121, "train_sampling_steps": 10},
    **{"train_guidance_scale": 1.0, "learning_rate": 3e-4, "weight_decay": 1e-4, "prompts_per_rollout": 32},
    **{"lora_rank": 64, "lora_alpha": 128, "eval_sampling_steps": 40, "eval_guidance_scale": 1.0, "seed": 42},
    **{"lora_targets": ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]},
}
H3_TASKS: dict[str, dict[str, Any]] = {
    "t2va-flowgrpo-lora": {
        **{"samples_per_prompt": 8, "sampler": "cps", "noise_level": 0.8, "micro_batch_per_gpu": 1},
        **{"sde_window_size": 3, "sde_window_range": [0, 8]},
    },
    "t2va-nft-lora": {"samples_per_prompt": 16, "kl_coef": 1e-4, "loss_extra.beta": 0.1, "micro_batch_per_gpu": 16},
}


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
    **{f"verl_omni/minimax-h3/{task}": MINIMAX_H3 | more for task, more in H3_TASKS.items()},
    # UniRL's configurations of MiniMax-H3 (at 04f45774 and 02f9a4bd).
    "unirl/minimax-h3/t2va-flowgrpo": {
        **{"resolution_height": 768, "resolution_width": 768, "num_frames": 124, "train_sampling_steps": 10, "seed": 42},
        **{"sampler": "cps", "noise_level": 0.7, "samples_per_prompt": 4, "prompts_per_rollout": 8, "adam_eps": 1e-12},
        **{"ratio_clip_low": 5e-3, "ratio_clip_high": 5e-3, "learning_rate": 3e-4, "lora_rank": 32, "lora_alpha": 64},
    },
    "unirl/minimax-h3/t2va-nft": {
        **{"resolution_height": 256, "resolution_width": 384, "num_frames": 124, "train_sampling_steps": 10, "seed": 42},
        **{"samples_per_prompt": 16, "prompts_per_rollout": 8, "adam_eps": 1e-8, "weight_decay": 1e-4},
        **{"loss_extra.beta": 0.1, "learning_rate": 3e-4, "lora_rank": 64, "lora_alpha": 128},
    },
    "miles_diffusion/minimax-h3/t2va-pickscore": {
        **{"resolution_height": 768, "resolution_width": 1344, "num_frames": 107, "train_sampling_steps": 10},
        **{"train_guidance_scale": 1.0, "learning_rate": 1e-4, "weight_decay": 1e-4, "adam_eps": 1e-15},
        **{"ratio_clip_low": 1e-4, "ratio_clip_high": 1e-4, "kl_coef": 0.0, "advantage_scale": "global"},
        **{"samples_per_prompt": 8, "prompts_per_rollout": 2, "lora_rank": 64, "lora_alpha": 128},
        **{"sampler": "flow_sde", "noise_level": 0.7, "sde_window_size": 2, "sde_window_range": [1, 4]},
        **{"eval_sampling_steps": 20, "micro_batch_per_gpu": 1},
    },
    # The trainer's default, which its evaluations take (src/flow_factory/hparams/training_args.py:227-242).
    "flow_factory/sd3.5-medium/crd-ocr": {"ema_enabled": True, "ema_decay": 0.995, "ema_interval": 10},
    "flow_factory/flux.1-dev/grpo": {"lora_targets": FLUX},
    # Intervals of SPO are epochs of the data, not rollouts; BranchGRPO's method has a scale of its own.
    **{f"spo/{name}/4k-prompts": {"save_interval": None, "eval_interval": None} for name in ("sd1.5", "sdxl")},
    "branchgrpo/flux.1-dev/hpsv2": {"advantage_scale": None},
    "verl_omni/wan2.2-ti2v-5b/hpsv3-dancegrpo": {"ratio_clip_low": 1e-4, "ratio_clip_high": 1e-4},
    "flow_factory/sd3.5-medium/dmd2": {**FLOW_FACTORY, "sampler": "euler_ode", "loss_extra.fake_updates": 5},
    "flow_factory/sd3.5-medium/tdm": {**FLOW_FACTORY, "sampler": "euler_ode", "loss_extra.huber": 1e-3},
    "tdm_r1/sd3.5-medium/ocr": surrogate_of(0.3, 0.3, 4.5, 10, 1e-3),
    "tdm_r1/sd3.5-medium/geneval": surrogate_of(0.55, 0.25, 2.5, 1, 1e-3),
    "tdm_r1/sd3.5-medium/imagereward": surrogate_of(0.55, 0.4, 3.5, 1, 2e-3),
    "tdm_r1/sd3.5-medium/hpsv2": surrogate_of(0.55, 0.4, 3.5, 10, 2e-3),
    "rtdmd/sd3.5-medium/cold-start": {
        **STUDENT,
        **{"learning_rate": 3e-5, "ema_decay": 0.99, "sampler": "cps", "noise_level": 0.9, "weight_decay": 0.0},
        **{"loss_extra.fake_lr": 3e-5, "loss_extra.fake_updates": 10, "loss_extra.consistency": 0.01},
        "loss_extra.guidance": 4.5,
    },
    "rtdmd/sd3.5-medium/multi-reward": {
        **STUDENT,
        **{"learning_rate": 3e-6, "ema_decay": 0.9, "ema_interval": 8, "samples_per_prompt": 24, "sampler": "cps"},
        **{"ratio_clip_low": 1e-5, "ratio_clip_high": 1e-5, "noise_level": 0.9, "advantage_scale": "global"},
        **{"advantage_std_ddof": 0, "advantage_clip": 5.0},  # rtdmd/trainers/grpo_utils.py
        **{"loss_extra.fake_lr": 3e-5, "loss_extra.coef": 1e-3, "loss_extra.first": 2},
    },
    "diffusion_opd/sd3.5-medium/three-teachers": {
        **SMALL_SD3,
        **{"train_sampling_steps": 10, "train_guidance_scale": 4.5, "learning_rate": 3e-4, "prompts_per_rollout": 72},
        **{"timestep_fraction": 0.99, "ema_decay": 0.9, "ema_interval": 8},
    },
    "flash_grpo/wan2.1-t2v-1.3b/hpsv3": {
        **{"resolution_height": 480, "resolution_width": 832, "num_frames": 81, "train_sampling_steps": 20},
        **{"train_guidance_scale": 4.5, "learning_rate": 1e-4, "ratio_clip_low": 1e-3, "ratio_clip_high": 1e-3},
        **{"kl_coef": 0.0, "advantage_scale": "global", "advantage_clip": 5.0, "samples_per_prompt": 4, "time_shift": 3.0},
        **{"total_epochs": 300, "sde_window_size": 1, "sde_window_range": [0, 10]},
    },
    "tp_grpo/sd3.5-medium/pickscore": {
        **{"sampler": "cps", "noise_level": 0.7, "samples_per_prompt": 24, "prompts_per_rollout": 48, "kl_coef": 1e-4},
        **{"ratio_clip_low": 1e-5, "ratio_clip_high": 1e-5, "micro_batch_per_gpu": 9, "train_guidance_scale": 4.5},
        **{"trained_steps_per_sample": 9},
    },
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
