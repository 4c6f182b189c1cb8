"""PickScore: how well an image fits a prompt, learnt from people's choices between two images.

Source: arXiv 2305.01569; divided by 26, as flow_grpo does, which brings scores near 1.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fluvial.models.rewards.shared.clip import VIT_H, load_towers
from fluvial.models.rewards.table import REWARD_MODELS

MODEL = REWARD_MODELS["pickscore"]


class PickScore:
    """exp(logit_scale) cos(f(x), g(p)) / 26, with a CLIP model finetuned on choices; of videos the mean over frames.

    Args:
        weights: folder of a CLIPModel of transformers, or id on the Hub.
        revision: commit on the Hub; by default that of the default weights.
        processor: folder or id of tokenizer and preprocessing; by default those in the folder of weights, or those of
            the published CLIP model.
        device: device of the model, e.g. "cuda:1"; by default that of the first images.
        dtype: "float32", "bfloat16" or "float16".
        batch: largest number of images per forward pass.
        frames: largest number of evenly spaced frames that a video is scored by.

    Raises:
        ValueError: the weights are not there or are no CLIP model, in one line.
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
    ) -> None:
        from transformers import CLIPModel

        self.towers = load_towers(
            "pickscore", CLIPModel, weights, MODEL.commit(weights, revision),
            processor=processor, default=VIT_H, device=device, dtype=dtype, batch=batch, frames=frames,
        )  # fmt: skip

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.
        """
        cosines = self.towers.cosines(images, prompts)
        return self.towers.model.logit_scale.float().exp() * cosines.mean(1) / 26
