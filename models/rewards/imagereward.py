"""ImageReward: a score of human preference, from a BLIP model that reads the prompt while it looks at the image.

Source: arXiv 2304.05977. Its package needs old versions of timm and transformers. Here the published weights are loaded into
BlipVisionModel and BlipTextModel of transformers.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.heads import LinearHead
from fluvial.models.rewards.shared.loading import LoadingError
from fluvial.models.rewards.shared.pixels import Preprocess, frames_of, in_batches
from fluvial.models.rewards.table import REWARD_MODELS

MODEL, FILE = REWARD_MODELS["imagereward"], "ImageReward.pt"
TOKENIZER = ("google-bert/bert-base-uncased", "86b5e0934494bd15c9632b12f734a8a67f723594")
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output on the training data
TOKENS = 35  # of a prompt, as in training
# Beginnings of names that differ between the published weights and transformers.
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


class ImageReward:
    """(h(t) - 0.167) / 1.033, with t BLIP's first text output, which attends to the image, and h linear layers.

    Of videos the mean over frames.

    Args:
        weights: file of the state dict, folder with `ImageReward.pt`, or id on the Hub.
        revision: commit on the Hub; by default that of the default weights.
        processor: folder or id of the tokenizer; by default that of BERT, uncased.
        device: device of the model, e.g. "cuda:1"; by default that of the first images.
        dtype: dtype of the towers, "float32", "bfloat16" or "float16"; the head is computed in float32.
        batch: largest number of images per forward pass.
        frames: largest number of evenly spaced frames that a video is scored by.
        heads: number of attention heads of the vision and of the text model.

    Raises:
        ValueError: the weights are not there or are those of another model, in one line.
    """

    def __init__(
        self,
        weights: str | Path = MODEL.weights,
        *,
        revision: str | None = None,
        processor: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch: int = 16,
        frames: int = 8,
        heads: tuple[int, int] = (16, 12),
    ) -> None:
        self.device, self.dtype = loading.device_of("imagereward", device), loading.dtype_of("imagereward", dtype)
        self.batch, self.frames = batch, frames
        file = loading.hub_file("imagereward", weights, FILE, MODEL.commit(weights, revision))
        tensors = loading.read_tensors("imagereward", file)
        parts = {prefix: _below(tensors, prefix) for prefix in ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")}
        for prefix, found in parts.items():
            if not found:
                raise LoadingError(
                    f"imagereward: the weights {file} have no tensor {prefix}*, expected those of ImageReward"
                )
        self.vision = vision_model(parts["blip.visual_encoder."], heads[0], file)
        self.text = text_model(parts["blip.text_encoder."], heads[1], file)
        self.head = LinearHead("imagereward", parts["mlp."], self.text.config.hidden_size, file)
        for model in (self.vision, self.text):
            model.to(device=self.device, dtype=self.dtype)
        side = self.vision.config.image_size
        self.preprocess = Preprocess(side, (side, side))
        place, commit = loading.processor_of(file.parent, processor, TOKENIZER)
        self.tokenizer = loading.load_tokenizer("imagereward", place, commit)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.

        Raises:
            ValueError: there are not as many prompts as images.
        """
        if len(images) != len(prompts):
            raise ValueError(f"there are {len(images)} images and {len(prompts)} prompts, expected one prompt per image")
        if self.device is None:
            self.device = images.device
            self.vision.to(self.device)
            self.text.to(self.device)
        frames = frames_of(images, self.frames)
        flat, count = frames.flatten(0, 1), frames.shape[1]
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(self.device)

        def scored(rows: Tensor) -> Tensor:
            pixels = self.preprocess(flat[rows].to(self.device)).to(self.dtype)
            seen = self.vision(pixel_values=pixels).last_hidden_state
            of = rows.to(self.device) // count
            read = self.text(
                input_ids=tokens["input_ids"][of],
                attention_mask=tokens["attention_mask"][of],
                encoder_hidden_states=seen,
                encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
            )
            return (self.head(read.last_hidden_state[:, 0].float()) - MEAN) / STD

        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            return in_batches(scored, torch.arange(len(flat), device=flat.device), self.batch).view(-1, count).mean(1)


def vision_model(tensors: Mapping[str, Tensor], heads: int, source: Path) -> Any:
    """Return BLIP's vision model with published weights.

    Args:
        tensors: tensors by their published names.
        heads: number of attention heads.
        source: file of the weights, for messages.

    Raises:
        LoadingError: tensors are missing, are others, or do not fit together.
    """
    from transformers import BlipVisionConfig, BlipVisionModel

    width, _, patch, _ = _shape(tensors, "patch_embed.proj.weight", 4, source)
    side = round((_shape(tensors, "pos_embed", 3, source)[1] - 1) ** 0.5)
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=_shape(tensors, "blocks.0.mlp.fc1.weight", 2, source)[0],
        num_attention_heads=heads,
        num_hidden_layers=_count(tensors, r"blocks\.(\d+)\."),
        image_size=patch * side,
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    return _filled(BlipVisionModel(config), {_vision_name(name): value for name, value in tensors.items()}, source)


def text_model(tensors: Mapping[str, Tensor], heads: int, source: Path) -> Any:
    """Return BLIP's text model, which attends to an image, with published weights; see `vision_model`."""
    from transformers import BlipTextConfig, BlipTextModel

    vocabulary, width = _shape(tensors, "embeddings.word_embeddings.weight", 2, source)
    config = BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=_count(tensors, r"encoder\.layer\.(\d+)\."),
        encoder_hidden_size=_shape(tensors, "encoder.layer.0.crossattention.self.key.weight", 2, source)[1],
        intermediate_size=_shape(tensors, "encoder.layer.0.intermediate.dense.weight", 2, source)[0],
        max_position_embeddings=_shape(tensors, "embeddings.position_embeddings.weight", 2, source)[0],
    )
    kept = {name: value for name, value in tensors.items() if name != "embeddings.position_ids"}  # a constant
    return _filled(BlipTextModel(config, add_pooling_layer=False), kept, source)


def _filled(model: Any, tensors: Mapping[str, Tensor], source: Path) -> Any:
    """Return a model with tensors loaded, for inference; LoadingError if they are not exactly its own."""
    try:
        report = model.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)
    except RuntimeError as error:  # a tensor of another shape
        raise LoadingError(f"imagereward: the weights {source} do not fit: {str(error).splitlines()[-1].strip()}") from error
    loading.check_complete("imagereward", source, missing=report.missing_keys)
    if report.unexpected_keys:
        raise LoadingError(f"imagereward: the weights {source} hold {report.unexpected_keys[0]}, which BLIP does not have")
    return loading.frozen(model)


def _vision_name(name: str) -> str:
    """Return the name in transformers of a tensor of the vision model."""
    if found := re.match(r"blocks\.(\d+)\.(.+)", name):
        rest = next((new + found[2].removeprefix(old) for old, new in BLOCKS.items() if found[2].startswith(old)), found[2])
        return f"encoder.layers.{found[1]}.{rest}"
    return next((new + name.removeprefix(old) for old, new in VISION.items() if name.startswith(old)), name)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """Return the number of layers that names of tensors show."""
    return 1 + max((int(found[1]) for name in tensors if (found := re.match(pattern, name))), default=-1)


def _shape(tensors: Mapping[str, Tensor], name: str, dimensions: int, source: Path) -> tuple[int, ...]:
    """Return the shape of a tensor; LoadingError if it is not there, or has another number of dimensions."""
    if name not in tensors or tensors[name].ndim != dimensions:
        raise LoadingError(f"imagereward: the weights {source} have no {name} of {dimensions} dimensions")
    return tuple(tensors[name].shape)
