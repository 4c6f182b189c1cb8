"""CLIPScore: the cosine similarity of an image and its prompt under CLIP.

Source: arXiv 2104.08718.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from torch import Tensor

from fluvial.models.rewards.shared.clip import TowerReward
from fluvial.models.rewards.table import REWARD_MODELS, VIT_L

MODEL = REWARD_MODELS["clipscore"]
# Function of the cosine c and of exp(logit_scale) s, by name.
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda c, s: c,  # UniRL, Flow-Factory
    "logits": lambda c, s: s * c / 30,  # flow_grpo
    "paper": lambda c, s: 2.5 * c.clamp(min=0),  # arXiv 2104.08718
}


@dataclass(eq=False)
class ClipScore(TowerReward):
    """cos(f(x), g(p)) with a CLIP model; of videos the mean over frames.

    Args:
        weights: folder of a CLIPModel of transformers, or id on the Hub.
        form: "cosine" c, "logits" exp(logit_scale) c / 30, or "paper" 2.5 max(c, 0).
        revision, processor, device, dtype, batch, frames: see `TowerReward`.

    Raises:
        ValueError: see `TowerReward`, or the form is unknown; in one line.
    """

    weights: str | Path = MODEL.weights
    _: KW_ONLY
    form: str = "cosine"

    facts, folder_processor = MODEL, VIT_L

    def __post_init__(self) -> None:
        self.check_form(self.form, list(FORMS))
        super().__post_init__()

    def score(self, cosines: Tensor) -> Tensor:
        """Return the mean over frames of the form."""
        return FORMS[self.form](cosines, self.towers.model.logit_scale.float().exp()).mean(1)
