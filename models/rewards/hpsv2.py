"""HPSv2.1: a score of human preference, from a CLIP ViT-H/14 finetuned on people's rankings.

Source: arXiv 2306.09341. The published weights are a state dict of open_clip; they are converted to a CLIPModel.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.clip import VIT_H, TowerReward, load_tokenize
from fluvial.models.rewards.shared.open_clip import to_clip_model
from fluvial.models.rewards.shared.pixels import CLIP_MEAN, CLIP_STD, as_bytes, normalised, pad_to_square
from fluvial.models.rewards.table import REWARD_MODELS

MODEL, FILE = REWARD_MODELS["hpsv2"], "HPS_v2.1_compressed.pt"


@dataclass(eq=False)
class Hpsv2(TowerReward):
    """cos(f(x), g(p)) with HPSv2.1's CLIP model; of videos the mean over frames.

    The longer edge of an image is resized to 224 pixels and the rest is black, as in the published evaluation, so that
    nothing is cropped.

    Args:
        weights: file of the state dict, folder with `HPS_v2.1_compressed.pt`, or id on the Hub.
        processor: folder or id of the tokenizer; by default that of the ViT-H/14 that HPSv2 was finetuned from.
        heads: number of attention heads of the vision and of the text tower, where they are not those of a published model.
        revision, device, dtype, batch, frames: see `TowerReward`.

    Raises:
        ValueError: the weights are not there or are not those of a CLIP model of open_clip, in one line.
    """

    weights: str | Path = MODEL.weights
    _: KW_ONLY
    heads: tuple[int, int] | None = None

    facts = MODEL

    def load(self, commit: str | None) -> tuple[Any, Callable[[Tensor], Tensor], Callable[[list[str]], dict[str, Tensor]]]:
        """Return the converted model, its preprocessing and its tokenizer."""
        file = loading.hub_file("hpsv2", self.weights, FILE, commit)
        model = to_clip_model("hpsv2", loading.read_tensors("hpsv2", file), file, heads=self.heads)
        place = loading.processor_of(file.parent, self.processor, VIT_H)
        side = model.config.vision_config.image_size

        def preprocess(images: Tensor) -> Tensor:
            """Return images as the input of the vision model; padding is black before the normalisation."""
            return normalised(pad_to_square(as_bytes(images) / 255, side), CLIP_MEAN, CLIP_STD)

        return model, preprocess, load_tokenize("hpsv2", model, *place)
