"""Similarity of the images before and after an edit, by features of DINOv2.

Sources: DINOv2, arXiv 2304.07193; DINO similarity, arXiv 2208.12242, section 4.2; LPIPS, arXiv 1801.03924, equation 1 with
weights of 1, which is `lpips=False` in its package.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.models.rewards.shared.loading import LoadingError, ModelReward, load_model, load_preprocess, resolve_weights
from fluvial.models.rewards.shared.pixels import check_pairs, extract_frames, map_batches
from fluvial.models.rewards.table import REWARD_MODELS


@dataclass(eq=False, kw_only=True)
class EditPairs(ModelReward):
    """Reward of an image and the image of its prompt's record, from a DINOv2 model; for videos the mean over frames.

    Args:
        frames: largest number of evenly spaced frames per video.
    """

    frames: int = 8
    preprocess: Any = field(init=False)

    def load(self, commit: str | None) -> Any:
        """See `ModelReward.load`."""
        from transformers import Dinov2Model

        self.preprocess = load_preprocess(resolve_weights(self.weights), commit)
        return load_model(Dinov2Model, self.weights, commit)

    @abstractmethod
    def compute_features(self, images: Tensor) -> Tensor:
        """Return the features of images in [0, 1], `[N, ...]` in float32."""

    @abstractmethod
    def compare(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the score of each pair of features, `[N]`."""

    def __call__(self, images: Tensor, prompts: Sequence[str], condition_images: Sequence[Tensor]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: not used.
            condition_images: image before the edit, `[C, H, W]` in [0, 1] each, of any size.
        """
        check_pairs(images, prompts)
        device, frames = self.place_model(images), extract_frames(images, self.frames)
        flat, count = frames.flatten(0, 1), frames.shape[1]
        with torch.no_grad():
            conditions = (extract_frames(image[None].to(device), 1)[:, 0] for image in condition_images)
            before = torch.cat([*map(self.compute_features, conditions)])

        def score(rows: Tensor) -> Tensor:
            return self.compare(before[rows.to(device) // count], self.compute_features(flat[rows].to(device)))

        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            return map_batches(score, torch.arange(len(flat), device=flat.device), self.batch).view(-1, count).mean(1)


@dataclass(eq=False)
class Dino(EditPairs):
    """Score cos(f(x), f(y)) of an image x and the image y before the edit, with f DINOv2's class token."""

    facts = REWARD_MODELS["dino"]
    weights: str | Path = facts.weights

    def compute_features(self, images: Tensor) -> Tensor:
        """Return the class tokens, `[N, D]`, of length 1."""
        output = self.model(pixel_values=self.preprocess(images).to(self.precision))
        return functional.normalize(output.pooler_output.float(), dim=-1)

    def compare(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the cosine of each pair."""
        return (before * after).sum(-1)


@dataclass(eq=False)
class Perceptual(EditPairs):
    """Score -sum_l mean_i |u_li(x) - u_li(y)|^2, with u_li the feature of patch i in layer l, of length 1.

    LPIPS uses layers of a convolutional network; here they are evenly spaced blocks of DINOv2, including the last.

    Args:
        layers: number of compared blocks.
    """

    facts = REWARD_MODELS["perceptual"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    layers: int = 4

    def load(self, commit: str | None) -> Any:
        """See `ModelReward.load`."""
        model = super().load(commit)
        depth = model.config.num_hidden_layers
        if not 1 <= self.layers <= depth:
            raise LoadingError(f"layers is {self.layers}, expected 1 to {depth}, the blocks of the model")
        self.chosen = [round(depth * (number + 1) / self.layers) for number in range(self.layers)]
        return model

    def compute_features(self, images: Tensor) -> Tensor:
        """Return the features of the patches, `[N, L, P, D]`, of length 1."""
        output = self.model(pixel_values=self.preprocess(images).to(self.precision), output_hidden_states=True)
        layers = torch.stack([output.hidden_states[layer][:, 1:] for layer in self.chosen], 1)
        return functional.normalize(layers.float(), dim=-1)

    def compare(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the negative distance of each pair."""
        return -(before - after).square().sum(-1).mean(-1).sum(-1)
