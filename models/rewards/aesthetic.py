"""Aesthetic score: a linear head on CLIP's image embedding, trained on people's ratings from 1 to 10.

Source: LAION's improved aesthetic predictor; used as a reward by DDPO, arXiv 2305.13301.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from torch import Tensor

from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.clip import TowerReward
from fluvial.models.rewards.shared.heads import LinearHead
from fluvial.models.rewards.table import REWARD_MODELS, VIT_L

MODEL = REWARD_MODELS["aesthetic"]
# sac+logos+ava1-l14-linearMSE.pth, as TRL publishes it.
HEAD, REVISION, FILE = "trl-lib/ddpo-aesthetic-predictor", "cf4bd10345610935a80a5d3be9a3133c50f121e4", "aesthetic-model.pth"


@dataclass(eq=False)
class Aesthetic(TowerReward):
    """h(f(x) / |f(x)|), with f the image tower of CLIP ViT-L/14 and h linear layers 768-1024-128-64-16-1.

    There are no activations between the layers. Of videos the mean over frames. Prompts are not used.

    Args:
        weights: folder of a CLIPModel of transformers, or id on the Hub.
        head: file of the head, folder with `aesthetic-model.pth`, or id on the Hub.
        dtype: dtype of the tower, "float32", "bfloat16" or "float16"; the head is computed in float32.
        revision, processor, device, batch, frames: see `TowerReward`; `revision` is that of `weights`.

    Raises:
        ValueError: the weights or the head are not there, or do not fit together; in one line.
    """

    weights: str | Path = MODEL.weights
    _: KW_ONLY
    head: str | Path = HEAD

    facts, folder_processor = MODEL, VIT_L

    def __post_init__(self) -> None:
        file = loading.hub_file("aesthetic", self.head, FILE, REVISION if self.head == HEAD else None)
        tensors = loading.read_tensors("aesthetic", file)
        super().__post_init__()
        self.layers = LinearHead("aesthetic", tensors, self.towers.model.config.projection_dim, file)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: not used.
        """
        return self.layers(self.towers.embed_images(images)).mean(1)
