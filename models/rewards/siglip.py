"""SigLIP similarity: how well an image fits a prompt under SigLIP or SigLIP 2.

Source: arXiv 2303.15343 and 2502.14786.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from torch import Tensor

from fluvial.models.rewards.shared.clip import TowerReward
from fluvial.models.rewards.table import REWARD_MODELS

MODEL = REWARD_MODELS["siglip"]
# Function of the cosine c, of exp(logit_scale) s and of logit_bias b, by name.
FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cosine": lambda c, s, b: c,
    "logit": lambda c, s, b: s * c + b,
    "probability": lambda c, s, b: (s * c + b).sigmoid(),
}


@dataclass(eq=False)
class Siglip(TowerReward):
    """cos(f(x), g(p)) with a SigLIP model; of videos the mean over frames.

    SigLIP 2 of a fixed resolution has the same architecture; its models of native aspect ratio (NaFlex) have another.

    Args:
        weights: folder of a SiglipModel of transformers, or id on the Hub.
        form: "cosine" c, "logit" exp(logit_scale) c + logit_bias, or "probability", the sigmoid of the logit.
        revision, processor, device, dtype, batch, frames: see `TowerReward`.

    Raises:
        ValueError: see `TowerReward`, or the form is unknown; in one line.
    """

    weights: str | Path = MODEL.weights
    _: KW_ONLY
    form: str = "cosine"

    facts, kind = MODEL, "SiglipModel"

    def __post_init__(self) -> None:
        self.check_form(self.form, list(FORMS))
        super().__post_init__()

    def score(self, cosines: Tensor) -> Tensor:
        """Return the mean over frames of the form."""
        model = self.towers.model
        return FORMS[self.form](cosines, model.logit_scale.float().exp(), model.logit_bias.float()).mean(1)
