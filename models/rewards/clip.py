"""Rewards from two-tower models (CLIP, SigLIP): embeddings of images and prompts, and their cosine similarity.

Sources: PickScore, arXiv 2305.01569, divided by 26 as flow_grpo does, which brings scores near 1; CLIPScore, arXiv
2104.08718; SigLIP, arXiv 2303.15343 and 2502.14786; LAION's improved aesthetic predictor, as in DDPO, arXiv 2305.13301.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.models.rewards.shared.convert import LinearHead
from fluvial.models.rewards.shared.loading import (
    LoadingError,
    ModelReward,
    Processor,
    check_choice,
    find_processor,
    find_weight_file,
    load_model,
    load_preprocess,
    load_tokenizer,
    read_tensors,
)
from fluvial.models.rewards.shared.pixels import check_pairs, extract_frames, map_batches
from fluvial.models.rewards.table import REWARD_MODELS, VIT_L

# Processor of models finetuned from OpenCLIP's ViT-H/14, and its commit.
VIT_H = ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "1c2b8495b28150b8a4922ee1c8edee224c284c0c")
# sac+logos+ava1-l14-linearMSE.pth, as TRL publishes it.
HEAD, REVISION, FILE = "trl-lib/ddpo-aesthetic-predictor", "cf4bd10345610935a80a5d3be9a3133c50f121e4", "aesthetic-model.pth"

Forms = dict[str, Callable[[Tensor, Any], Tensor]]  # functions of the cosine c and the model m, by name


class Towers(ModelReward):
    """Reward from a model with one tower for prompts and one for samples."""

    def embed_texts(self, prompts: Sequence[str]) -> Tensor:
        """Return the embedding of each prompt, `[B, D]`, of length 1, in float32; equal prompts are embedded once."""
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}

        def embed(rows: Tensor) -> Tensor:
            outputs = self.model.text_model(**{name: ids[rows] for name, ids in inputs.items()})
            return self.project(outputs, "text_projection")

        with torch.no_grad():
            inputs = {name: ids.to(self.model_device) for name, ids in self.tokenize(list(numbers)).items()}
            embeds = map_batches(embed, torch.arange(len(numbers), device=self.model_device), self.batch)
        return embeds[torch.tensor([numbers[prompt] for prompt in prompts], device=embeds.device)]

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return the input of the text tower, padded and truncated to its length.

        CLIP's tower is causal, so that padding changes nothing; SigLIP's was trained with padding.
        """
        most = self.model.config.text_config.max_position_embeddings
        inputs = self.tokenizer(prompts, padding="max_length", truncation=True, max_length=most, return_tensors="pt")
        return {"input_ids": inputs["input_ids"]}

    def project(self, output: Any, projection: str) -> Tensor:
        """Return the pooled output of a tower, projected if the model has a projection (SigLIP lacks it), of length 1."""
        projected = getattr(self.model, projection, nn.Identity())(output.pooler_output)
        return functional.normalize(projected.float(), dim=-1)


@dataclass(eq=False, kw_only=True)
class ImageTowers(Towers):
    """Reward from the two towers of an image-text model; for videos the mean over frames.

    Args:
        processor: folder or id of tokenizer and preprocessing; by default those in the folder of weights, or those of
            the published model.
        frames: largest number of evenly spaced frames per video.
    """

    processor: str | None = None
    frames: int = 8
    preprocess: Any = field(init=False)  # images in [0, 1] to the input of the vision tower

    kind: ClassVar[str] = "CLIPModel"  # class of transformers
    folder_processor: ClassVar[Processor | None] = None  # default for a folder of weights without a processor

    def load(self, commit: str | None) -> Any:
        """See `ModelReward.load`."""
        import transformers

        model = load_model(getattr(transformers, self.kind), self.weights, commit)
        processor = find_processor(self.weights, self.processor, self.choose_default_processor(commit))
        self.preprocess = load_preprocess(*processor)
        self.load_tokenizer(model, *processor)
        return model

    def load_tokenizer(self, model: Any, source: str, commit: str | None) -> None:
        """Load the tokenizer; LoadingError if it has more tokens than the text tower."""
        self.tokenizer = load_tokenizer(source, commit)
        if len(self.tokenizer) > (size := model.config.text_config.vocab_size):
            raise LoadingError(
                f"the tokenizer of {source} has {len(self.tokenizer)} tokens and the weights {size}: give both of one model "
                "(weights, processor)"
            )

    def choose_default_processor(self, commit: str | None) -> Processor:
        """Return the processor to use if neither `processor` nor the folder of weights has one."""
        is_folder = Path(self.weights).expanduser().is_dir()
        return self.folder_processor if is_folder and self.folder_processor else (str(self.weights), commit)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.

        Raises:
            ValueError: there are not as many prompts as images.
        """
        check_pairs(images, prompts)
        embeds = self.embed_images(images)
        return self.compute_score((embeds * self.embed_texts(prompts)[:, None]).sum(-1))

    def compute_score(self, cosines: Tensor) -> Tensor:
        """Return the score of each sample, `[B]`, from the cosine similarity of its frames and its prompt, `[B, n]`."""
        return cosines.mean(1)

    def embed_images(self, images: Tensor) -> Tensor:
        """Return the embedding of each frame, `[B, n, D]`, of length 1, in float32."""
        device, frames = self.place_model(images), extract_frames(images, self.frames)

        def embed(part: Tensor) -> Tensor:
            pixels = self.preprocess(part.to(device)).to(self.precision)
            return self.project(self.model.vision_model(pixel_values=pixels), "visual_projection")

        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            return map_batches(embed, frames.flatten(0, 1), self.batch).unflatten(0, frames.shape[:2])


def compute_logit_scale(model: Any) -> Tensor:
    """Return the factor exp(logit_scale) of a model's logits."""
    return model.logit_scale.float().exp()


@dataclass(eq=False)
class PickScore(ImageTowers):
    """Score exp(logit_scale) cos(f(x), g(p)) / 26, with a CLIP model finetuned on human choices between two images."""

    facts = REWARD_MODELS["pickscore"]
    weights: str | Path = facts.weights

    def compute_score(self, cosines: Tensor) -> Tensor:
        """Return the scaled mean over frames."""
        return compute_logit_scale(self.model) * cosines.mean(1) / 26

    def choose_default_processor(self, commit: str | None) -> Processor:
        """Return the processor of the ViT-H/14 that PickScore was finetuned from."""
        return VIT_H


@dataclass(eq=False, kw_only=True)
class Similarity(ImageTowers):
    """Score by a form of the cosine similarity of an image and its prompt; for videos the mean over frames."""

    form: str = "cosine"

    forms: ClassVar[Forms]

    def load(self, commit: str | None) -> Any:
        """See `ModelReward.load`; the form is checked first."""
        check_choice("form", self.form, self.forms)
        return super().load(commit)

    def compute_score(self, cosines: Tensor) -> Tensor:
        """Return the mean of the form over frames."""
        return self.forms[self.form](cosines, self.model).mean(1)


@dataclass(eq=False)
class ClipScore(Similarity):
    """Score cos(f(x), g(p)) of an image x and a prompt p, with a CLIP model.

    Args:
        form: "cosine" c, "logits" exp(logit_scale) c / 30, or "paper" 2.5 max(c, 0).
        resize: "processor", the bicubic filter of CLIP's preprocessing, or "bilinear", without rounding, as
            DiffusionNFT's `flow_grpo/clip_scorer.py` resizes tensors.
    """

    facts = REWARD_MODELS["clipscore"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    resize: str = "processor"

    folder_processor = VIT_L
    forms: ClassVar[Forms] = {
        "cosine": lambda c, m: c,  # UniRL, Flow-Factory
        "logits": lambda c, m: compute_logit_scale(m) * c / 30,  # flow_grpo
        "paper": lambda c, m: 2.5 * c.clamp(min=0),  # arXiv 2104.08718
    }

    def load(self, commit: str | None) -> Any:
        """See `ModelReward.load`; the filter is checked first."""
        check_choice("resize", self.resize, ("processor", "bilinear"))
        model = super().load(commit)
        if self.resize == "bilinear":
            self.preprocess = replace(self.preprocess, resample="tensor")
        return model


@dataclass(eq=False)
class Siglip(Similarity):
    """Score cos(f(x), g(p)) of an image x and a prompt p, with a SigLIP model.

    SigLIP 2 with a fixed resolution has the same architecture; models with native aspect ratios (NaFlex) do not.

    Args:
        form: "cosine" c, "logit" exp(logit_scale) c + logit_bias, or "probability", the sigmoid of the logit.
    """

    facts = REWARD_MODELS["siglip"]
    weights: str | Path = facts.weights

    kind = "SiglipModel"
    forms: ClassVar[Forms] = {
        "cosine": lambda c, m: c,
        "logit": lambda c, m: compute_logit_scale(m) * c + m.logit_bias.float(),
        "probability": lambda c, m: (compute_logit_scale(m) * c + m.logit_bias.float()).sigmoid(),
    }

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return the input of the text tower for prompts in lower case, as in training; SigLIP 2 tokenizes both cases."""
        return super().tokenize([prompt.lower() for prompt in prompts])


@dataclass(eq=False)
class Aesthetic(ImageTowers):
    """Score h(f(x) / |f(x)|), with f the image tower of CLIP ViT-L/14 and h linear layers 768-1024-128-64-16-1.

    The layers have no activations between them, were trained on human ratings from 1 to 10, and are computed in float32.
    Prompts are not used.

    Args:
        head: file of the head, folder with `aesthetic-model.pth`, or id on the Hub.
    """

    facts = REWARD_MODELS["aesthetic"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    head: str | Path = HEAD

    folder_processor = VIT_L

    def load(self, commit: str | None) -> Any:
        """See `ModelReward.load`; the head is loaded first, because it is small."""
        file = find_weight_file(self.head, FILE, REVISION if self.head == HEAD else None)
        tensors = read_tensors(file)
        model = super().load(commit)
        self.layers = LinearHead(tensors, model.config.projection_dim, file)
        return model

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images."""
        return self.layers(self.embed_images(images)).mean(1)
