"""PickScore: how well an image fits a prompt, learnt from people's choices between two images.

Source: arXiv 2305.01569; divided by 26, as flow_grpo does, which brings scores near 1.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fluvial.models.rewards.shared.clip import VIT_H, Processor, TowerReward
from fluvial.models.rewards.table import REWARD_MODELS

MODEL = REWARD_MODELS["pickscore"]


@dataclass(eq=False)
class PickScore(TowerReward):
    """exp(logit_scale) cos(f(x), g(p)) / 26, with a CLIP model finetuned on choices; of videos the mean over frames.

    Args:
        weights: folder of a CLIPModel of transformers, or id on the Hub.
        revision, processor, device, dtype, batch, frames: see `TowerReward`.

    Raises:
        ValueError: see `TowerReward`.
    """

    weights: str | Path = MODEL.weights

    facts = MODEL

    def score(self, cosines: Tensor) -> Tensor:
        """Return the scaled mean over frames."""
        return self.towers.model.logit_scale.float().exp() * cosines.mean(1) / 26

    def default_processor(self, commit: str | None) -> Processor:
        """Return that of the ViT-H/14 that PickScore was finetuned from."""
        return VIT_H
