"""Image-text models with two towers (CLIP, SigLIP): embeddings of images and prompts, and their cosine similarity."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.facts import RewardModel
from fluvial.models.rewards.shared.pixels import frames_of, in_batches

Processor = tuple[str, str | None]  # folder or id of tokenizer and preprocessing, and commit

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


@dataclass(eq=False)
class TowerReward:
    """Reward from the two towers of an image-text model; of videos the mean over frames.

    Args:
        weights: folder of a model of transformers, or id on the Hub.
        revision: commit on the Hub; by default that of the default weights.
        processor: folder or id of tokenizer and preprocessing; by default those in the folder of weights, or those of
            the published model.
        device: device of the model, e.g. "cuda:1"; by default that of the first images.
        dtype: dtype of the towers, "float32", "bfloat16" or "float16".
        batch: largest number of images per forward pass.
        frames: largest number of evenly spaced frames that a video is scored by.

    Raises:
        ValueError: the weights are not there or are of another model, or an option is wrong; in one line.
    """

    weights: str | Path
    _: KW_ONLY
    revision: str | None = None
    processor: str | None = None
    device: str | None = None
    dtype: str = "float32"
    batch: int = 16
    frames: int = 8
    towers: Towers = field(init=False)

    facts: ClassVar[RewardModel]
    kind: ClassVar[str] = "CLIPModel"  # class of transformers
    folder_processor: ClassVar[Processor | None] = None  # for a folder of weights without a processor

    def __post_init__(self) -> None:
        where, dtype = loading.device_of(self.facts.name, self.device), loading.dtype_of(self.facts.name, self.dtype)
        model, preprocess, tokenize = self.load(self.facts.commit(self.weights, self.revision))
        self.towers = Towers(model, preprocess, tokenize, device=where, dtype=dtype, batch=self.batch, frames=self.frames)

    def score(self, cosines: Tensor) -> Tensor:
        """Return the score of each sample, `[B]`, from the cosine similarity of its frames and its prompt, `[B, n]`."""
        return cosines.mean(1)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.
        """
        return self.score(self.towers.cosines(images, prompts))

    def load(self, commit: str | None) -> tuple[Any, Callable[[Tensor], Tensor], Callable[[list[str]], dict[str, Tensor]]]:
        """Return the model, its preprocessing and its tokenizer.

        Raises:
            LoadingError: something is missing or does not fit, in one line.
        """
        import transformers

        name = self.facts.name
        model = loading.load_model(name, getattr(transformers, self.kind), self.weights, commit)
        place = loading.processor_of(self.weights, self.processor, self.default_processor(commit))
        return model, loading.load_preprocess(name, *place), load_tokenize(name, model, *place)

    def default_processor(self, commit: str | None) -> Processor:
        """Return the processor where neither `processor` nor the folder of weights has one."""
        is_folder = Path(self.weights).expanduser().is_dir()
        return self.folder_processor if is_folder and self.folder_processor else (str(self.weights), commit)

    def check_form(self, form: str, forms: Sequence[str]) -> None:
        """Raise LoadingError unless a form of the score is known."""
        if form not in forms:
            raise loading.LoadingError(f"{self.facts.name}: form is {form!r}, expected one of {', '.join(forms)}")


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
