"""HPSv2.1: a score of human preference, from a CLIP ViT-H/14 finetuned on people's rankings.

Source: arXiv 2306.09341. The published weights are a state dict of open_clip; they are converted to a CLIPModel.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.clip import VIT_H, Towers, load_tokenize
from fluvial.models.rewards.shared.open_clip import to_clip_model
from fluvial.models.rewards.shared.pixels import CLIP_MEAN, CLIP_STD, as_bytes, normalised, pad_to_square
from fluvial.models.rewards.table import REWARD_MODELS

MODEL, FILE = REWARD_MODELS["hpsv2"], "HPS_v2.1_compressed.pt"


class Hpsv2:
    """cos(f(x), g(p)) with HPSv2.1's CLIP model; of videos the mean over frames.

    The longer edge of an image is resized to 224 pixels and the rest is black, as in the published evaluation, so that
    nothing is cropped.

    Args:
        weights: file of the state dict, folder with `HPS_v2.1_compressed.pt`, or id on the Hub.
        revision: commit on the Hub; by default that of the default weights.
        processor: folder or id of the tokenizer; by default that of the ViT-H/14 that HPSv2 was finetuned from.
        device: device of the model, e.g. "cuda:1"; by default that of the first images.
        dtype: "float32", "bfloat16" or "float16".
        batch: largest number of images per forward pass.
        frames: largest number of evenly spaced frames that a video is scored by.
        heads: number of attention heads of the vision and of the text tower, where they are not those of a published model.

    Raises:
        ValueError: the weights are not there or are not those of a CLIP model of open_clip, in one line.
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
        heads: tuple[int, int] | None = None,
    ) -> None:
        where, kind = loading.device_of("hpsv2", device), loading.dtype_of("hpsv2", dtype)
        commit = MODEL.commit(weights, revision)
        file = loading.hub_file("hpsv2", weights, FILE, commit)
        model = to_clip_model("hpsv2", loading.read_tensors("hpsv2", file), file, heads=heads)
        self.side = model.config.vision_config.image_size
        tokenize = load_tokenize("hpsv2", model, *loading.processor_of(file.parent, None, processor, VIT_H))
        self.towers = Towers(model, self._preprocess, tokenize, device=where, dtype=kind, batch=batch, frames=frames)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.
        """
        return self.towers.cosines(images, prompts).mean(1)

    def _preprocess(self, images: Tensor) -> Tensor:
        """Return images as the input of the vision model; padding is black before the normalisation."""
        return normalised(pad_to_square(as_bytes(images) / 255, self.side), CLIP_MEAN, CLIP_STD)
