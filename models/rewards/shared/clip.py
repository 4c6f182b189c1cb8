"""Image-text models with two towers (CLIP, SigLIP): embeddings of images and prompts, and their cosine similarity."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.pixels import frames_of, in_batches

# Processor of the models that are finetuned from OpenCLIP's ViT-H/14, and its commit.
VIT_H = ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "1c2b8495b28150b8a4922ee1c8edee224c284c0c")


class Towers:
    """The two towers of an image-text model, its tokenizer and its preprocessing.

    Images may be anywhere; the model runs on `device`. Gradients flow to images that require them, and never to the weights.

    Args:
        model: model of transformers with `vision_model` and `text_model`, and projections if it has any.
        preprocess: function from images `[N, 3, H, W]` in [0, 1] to the input of the vision model.
        tokenize: function from prompts to the input of the text model.
        device: device of the model; by default that of the first images.
        dtype: dtype of the model.
        batch: largest number of images per forward pass.
        frames: largest number of frames per video.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Callable[[Tensor], Tensor],
        tokenize: Callable[[list[str]], dict[str, Tensor]],
        *,
        device: torch.device | None,
        dtype: torch.dtype,
        batch: int,
        frames: int,
    ) -> None:
        self.model: Any = model.to(device=device, dtype=dtype)
        self.preprocess, self.tokenize = preprocess, tokenize
        self.device, self.dtype, self.batch, self.frames = device, dtype, batch, frames

    def cosines(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the cosine similarity of each frame and its prompt, `[B, n]` in float32; n is 1 for images."""
        return (self.embed_images(images) * self.embed_texts(images, prompts)[:, None]).sum(-1)

    def embed_images(self, images: Tensor) -> Tensor:
        """Return the embedding of each frame, `[B, n, D]`, of length 1, in float32."""
        self._move(images)
        frames = frames_of(images, self.frames)
        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            found = in_batches(self._images, frames.flatten(0, 1), self.batch)
        return found.unflatten(0, frames.shape[:2])

    def embed_texts(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the embedding of each prompt, `[B, D]`, of length 1, in float32; equal prompts are embedded once.

        Args:
            images: images of the prompts, for their number and device.
            prompts: prompts.

        Raises:
            ValueError: there are not as many prompts as images.
        """
        if len(images) != len(prompts):
            raise ValueError(f"there are {len(images)} images and {len(prompts)} prompts, expected one prompt per image")
        self._move(images)
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        with torch.no_grad():
            inputs = self.tokenize(list(numbers))
            rows = torch.arange(len(numbers))
            found = in_batches(lambda part: self._texts({name: ids[part] for name, ids in inputs.items()}), rows, self.batch)
        return found[torch.tensor([numbers[prompt] for prompt in prompts], device=found.device)]

    def _move(self, images: Tensor) -> None:
        """Move the model to the first images' device, unless it has a device of its own."""
        if self.device is None:
            self.device = images.device
            self.model.to(self.device)

    def _images(self, images: Tensor) -> Tensor:
        pixels = self.preprocess(images.to(self.device)).to(self.dtype)
        return self._unit(self.model.vision_model(pixel_values=pixels), "visual_projection")

    def _texts(self, inputs: dict[str, Tensor]) -> Tensor:
        moved = {name: ids.to(self.device) for name, ids in inputs.items()}
        return self._unit(self.model.text_model(**moved), "text_projection")

    def _unit(self, output: Any, projection: str) -> Tensor:
        """Return the pooled output of a tower, projected if the model has a projection (SigLIP has none), of length 1."""
        projected = getattr(self.model, projection, nn.Identity())(output.pooler_output)
        return functional.normalize(projected.float(), dim=-1)


def load_towers(
    reward: str,
    kind: Any,
    weights: str | Path,
    revision: str | None,
    *,
    processor: str | None,
    default: tuple[str, str | None],
    device: str | None,
    dtype: str,
    batch: int,
    frames: int,
) -> Towers:
    """Return the towers of a folder or of an id on the Hub.

    Args:
        reward: name of the reward, for messages.
        kind: class of transformers.
        weights, revision: folder or id, and commit.
        processor: folder or id of tokenizer and preprocessing, if not that of the weights.
        default: id and commit of the processor where neither `processor` nor the folder of weights has one.
        device, dtype, batch, frames: see `Towers`; by name.

    Raises:
        LoadingError: something is missing or does not fit, in one line.
    """
    where, kind_of_number = loading.device_of(reward, device), loading.dtype_of(reward, dtype)
    model: Any = loading.load_model(reward, kind, weights, revision)
    place, commit = loading.processor_of(weights, revision, processor, default)
    return Towers(
        model, loading.load_preprocess(reward, place, commit), load_tokenize(reward, model, place, commit),
        device=where, dtype=kind_of_number, batch=batch, frames=frames,
    )  # fmt: skip


def load_tokenize(reward: str, model: Any, place: str, commit: str | None) -> Callable[[list[str]], dict[str, Tensor]]:
    """Return the function from prompts to the input of a text tower.

    Prompts are padded and cut to the length of the tower. CLIP's tower attends backwards alone, so that padding changes
    nothing; SigLIP's was trained with padding.
    """
    tokenizer = loading.load_tokenizer(reward, place, commit)
    config = model.config.text_config
    if len(tokenizer) > config.vocab_size:
        raise loading.LoadingError(
            f"{reward}: the tokenizer of {place} has {len(tokenizer)} tokens and the weights {config.vocab_size}: give both "
            "of one model (weights, processor)"
        )

    def tokenize(prompts: list[str]) -> dict[str, Tensor]:
        ids = tokenizer(
            prompts, padding="max_length", truncation=True, max_length=config.max_position_embeddings, return_tensors="pt"
        )["input_ids"]
        return {"input_ids": ids}

    return tokenize
