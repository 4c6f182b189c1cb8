"""ImageReward: a score of human preference from a BLIP model whose text encoder attends to the image.

Source: arXiv 2304.05977. Its package needs old versions of timm and transformers. Here the published weights are loaded into
BlipVisionModel and BlipTextModel of transformers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.convert import LinearHead, count_layers, fill_model, rename_prefix
from fluvial.models.rewards.shared.loading import LoadingError, ModelReward
from fluvial.models.rewards.shared.pixels import Preprocess, check_pairs, extract_frames, map_batches
from fluvial.models.rewards.table import REWARD_MODELS

FILE = "ImageReward.pt"
TOKENIZER = ("google-bert/bert-base-uncased", "86b5e0934494bd15c9632b12f734a8a67f723594")
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output on the training data
TOKENS = 35  # length of a prompt, as in training
# Prefixes of names that differ between the published weights and transformers.
VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "norm.": "post_layernorm.",
}
BLOCKS = {
    "norm1.": "layer_norm1.",
    "norm2.": "layer_norm2.",
    "attn.qkv.": "self_attn.qkv.",
    "attn.proj.": "self_attn.projection.",
}


@dataclass(eq=False)
class ImageReward(ModelReward):
    """Score (h(t) - 0.167) / 1.033, with t BLIP's first text output, which attends to the image, and h linear in float32.

    The score of a video is the mean over frames.

    Args:
        weights: file of the state dict, folder with `ImageReward.pt`, or id on the Hub.
        processor: folder or id of the tokenizer; by default uncased BERT's.
        frames: largest number of evenly spaced frames per video.
        heads: number of attention heads of the vision and of the text model.
    """

    facts = REWARD_MODELS["imagereward"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    processor: str | None = None
    frames: int = 8
    heads: tuple[int, int] = (16, 12)

    def load(self, commit: str | None) -> nn.ModuleDict:
        """Return the converted vision and text models; see `ModelReward.load`."""
        file = loading.find_weight_file(self.weights, FILE, commit)
        tensors = loading.read_tensors(file)
        parts = {prefix: _strip_prefix(tensors, prefix) for prefix in ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")}
        for prefix, part in parts.items():
            if not part:
                raise LoadingError(f"the weights {file} have no tensor {prefix}*, expected those of ImageReward")
        vision = build_vision_model(parts["blip.visual_encoder."], self.heads[0], file)
        text = build_text_model(parts["blip.text_encoder."], self.heads[1], file)
        self.head = LinearHead(parts["mlp."], text.config.hidden_size, file)
        self.preprocess = Preprocess(vision.config.image_size, (vision.config.image_size,) * 2)
        self.tokenizer = loading.load_tokenizer(*loading.find_processor(file.parent, self.processor, TOKENIZER))
        return nn.ModuleDict({"vision": vision, "text": text})

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images; see `ImageTowers`."""
        check_pairs(images, prompts)
        device, frames = self.place_model(images), extract_frames(images, self.frames)
        flat, count = frames.flatten(0, 1), frames.shape[1]
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(device)

        def score(rows: Tensor) -> Tensor:
            pixels = self.preprocess(flat[rows].to(device)).to(self.precision)
            vision = self.model["vision"](pixel_values=pixels).last_hidden_state
            prompt = rows.to(device) // count
            text = self.model["text"](
                input_ids=tokens["input_ids"][prompt],
                attention_mask=tokens["attention_mask"][prompt],
                encoder_hidden_states=vision,
                encoder_attention_mask=torch.ones(vision.shape[:2], dtype=torch.long, device=vision.device),
            )
            return (self.head(text.last_hidden_state[:, 0].float()) - MEAN) / STD

        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            return map_batches(score, torch.arange(len(flat), device=flat.device), self.batch).view(-1, count).mean(1)


def build_vision_model(tensors: Mapping[str, Tensor], heads: int, source: Path) -> Any:
    """Build BLIP's vision model with published weights.

    Raises:
        LoadingError: tensors are missing, are unknown, or do not fit together.
    """
    from transformers import BlipVisionConfig, BlipVisionModel

    width, _, patch, _ = _get_shape(tensors, "patch_embed.proj.weight", 4, source)
    side = round((_get_shape(tensors, "pos_embed", 3, source)[1] - 1) ** 0.5)
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=_get_shape(tensors, "blocks.0.mlp.fc1.weight", 2, source)[0],
        num_attention_heads=heads,
        num_hidden_layers=count_layers(tensors, r"blocks\.(\d+)\."),
        image_size=patch * side,
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    named = {_rename_vision_tensor(name): value for name, value in tensors.items()}
    return fill_model(BlipVisionModel(config), named, source, kind="BLIP")


def build_text_model(tensors: Mapping[str, Tensor], heads: int, source: Path) -> Any:
    """Build BLIP's text model, which attends to an image, with published weights; see `build_vision_model`."""
    from transformers import BlipTextConfig, BlipTextModel

    vocabulary, width = _get_shape(tensors, "embeddings.word_embeddings.weight", 2, source)
    config = BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=count_layers(tensors, r"encoder\.layer\.(\d+)\."),
        encoder_hidden_size=_get_shape(tensors, "encoder.layer.0.crossattention.self.key.weight", 2, source)[1],
        intermediate_size=_get_shape(tensors, "encoder.layer.0.intermediate.dense.weight", 2, source)[0],
        max_position_embeddings=_get_shape(tensors, "embeddings.position_embeddings.weight", 2, source)[0],
    )
    weights = {name: value for name, value in tensors.items() if name != "embeddings.position_ids"}  # a constant
    return fill_model(BlipTextModel(config, add_pooling_layer=False), weights, source, kind="BLIP")


def _rename_vision_tensor(name: str) -> str:
    """Return the transformers name of a tensor of the vision model."""
    if match := re.match(r"blocks\.(\d+)\.(.+)", name):
        return f"encoder.layers.{match[1]}.{rename_prefix(match[2], BLOCKS)}"
    return rename_prefix(name, VISION)


def _strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _get_shape(tensors: Mapping[str, Tensor], name: str, dimensions: int, source: Path) -> tuple[int, ...]:
    """Return the shape of a tensor; LoadingError if it is missing, or has another number of dimensions."""
    if name not in tensors or tensors[name].ndim != dimensions:
        raise LoadingError(f"the weights {source} have no {name} of {dimensions} dimensions")
    return tuple(tensors[name].shape)
