"""Tiny Qwen-VL models with heads and random weights, saved as the reward models with them are published."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_rewards import randomise
from torch import Tensor

from fluvial.core.random import key, normal
from fluvial.models.tiny.encoders import build_qwen_tokenizer

WIDTH = 16
# Renders a conversation as Qwen2-VL's template does.
CHAT = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message.role }}\n"
    "{% for content in message.content %}{% if content.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ content.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def tokenizer() -> Any:
    found = build_qwen_tokenizer()
    found.add_tokens(list(MEDIA), special_tokens=True)
    found.chat_template = CHAT
    return found


def config(kind: str) -> Any:
    import transformers

    tokens = tokenizer()
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(tokens),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if kind == "Qwen2VL":
        vision |= {"embed_dim": 8, "hidden_size": WIDTH, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 8, "out_hidden_size": WIDTH, "intermediate_size": 12, "fullatt_block_indexes": [1]}
    ids = {f"{name}_token_id": tokens.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    return getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **ids)


def save_base(folder: Path, kind: str) -> None:
    config(kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def backbone(kind: str, *, extra: int, seed: int = 0) -> Any:
    """Return a model with random weights whose vocabulary has further tokens."""
    import transformers

    found = config(kind)
    found.text_config.vocab_size += extra
    return randomise(getattr(transformers, f"{kind}Model")(found).float(), seed=seed, scale=0.2)


def published(model: Any, *, old: bool = True) -> dict[str, Tensor]:
    def name_of(name: str) -> str:
        if not old:
            return f"model.{name}"
        return name if name.startswith("visual.") else name.replace("language_model.", "model.")

    tensors = {name_of(name): value.clone() for name, value in model.state_dict().items()}
    return {**tensors, "lm_head.weight": torch.zeros(2, WIDTH)}


def head(prefix: str, outputs: int, *, seed: int) -> dict[str, Tensor]:
    """Return a head of three layers with ReLU and dropout between them, as the places of an nn.Sequential."""
    sizes = {"0": (WIDTH, 12), "3": (12, 6), "5": (6, outputs)}
    found = {}
    for number, (place, (inputs, size)) in enumerate(sizes.items()):
        found[f"{prefix}{place}.weight"] = 0.5 * normal(key(100 * seed + number), (size, inputs))
        found[f"{prefix}{place}.bias"] = 0.5 * normal(key(100 * seed + 50 + number), (size,))
    return found


def save_video_reward(folder: Path, tensors: dict[str, Tensor]) -> None:
    (folder / "checkpoint-11352").mkdir(parents=True)
    torch.save(tensors, folder / "checkpoint-11352" / "model.pth")
    settings = {
        "data_config": {"fps": 2.0, "max_frame_pixels": 448 * 448},
        "peft_lora_config": {"lora_r": 2, "lora_alpha": 4, "use_rslora": False},
        "inference_config": {"VQ_mean": 3.7, "VQ_std": 2.2, "MQ_mean": 1.2, "MQ_std": 1.4, "TA_mean": -1.0, "TA_std": 2.6},
    }
    (folder / "model_config.json").write_text(json.dumps(settings))
