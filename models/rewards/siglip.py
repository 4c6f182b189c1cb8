"""SigLIP similarity: how well an image fits a prompt under SigLIP or SigLIP 2.

Source: arXiv 2303.15343 and 2502.14786.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from fluvial.models.rewards.shared.clip import load_towers
from fluvial.models.rewards.shared.loading import LoadingError
from fluvial.models.rewards.table import REWARD_MODELS

MODEL = REWARD_MODELS["siglip"]
# Function of the cosine c, of exp(logit_scale) s and of logit_bias b, by name.
FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cosine": lambda c, s, b: c,
    "logit": lambda c, s, b: s * c + b,
    "probability": lambda c, s, b: (s * c + b).sigmoid(),
}


class Siglip:
    """cos(f(x), g(p)) with a SigLIP model; of videos the mean over frames.

    SigLIP 2 of a fixed resolution has the same architecture; its models of native aspect ratio (NaFlex) have another.

    Args:
        weights: folder of a SiglipModel of transformers, or id on the Hub.
        form: "cosine" c, "logit" exp(logit_scale) c + logit_bias, or "probability", the sigmoid of the logit.
        revision: commit on the Hub; by default that of the default weights.
        processor: folder or id of tokenizer and preprocessing; by default those in the folder of weights, or of `weights`.
        device: device of the model, e.g. "cuda:1"; by default that of the first images.
        dtype: "float32", "bfloat16" or "float16".
        batch: largest number of images per forward pass.
        frames: largest number of evenly spaced frames that a video is scored by.

    Raises:
        ValueError: the weights are not there or are no SigLIP model, or the form is unknown; in one line.
    """

    def __init__(
        self,
        weights: str | Path = MODEL.weights,
        *,
        form: str = "cosine",
        revision: str | None = None,
        processor: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch: int = 16,
        frames: int = 8,
    ) -> None:
        from transformers import SiglipModel

        if form not in FORMS:
            raise LoadingError(f"siglip: form is {form!r}, expected one of {', '.join(FORMS)}")
        self.form = FORMS[form]
        commit = MODEL.commit(weights, revision)
        self.towers = load_towers(
            "siglip", SiglipModel, weights, commit, processor=processor, default=(str(weights), commit),
            device=device, dtype=dtype, batch=batch, frames=frames,
        )  # fmt: skip

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.
        """
        model = self.towers.model
        cosines = self.towers.cosines(images, prompts)
        return self.form(cosines, model.logit_scale.float().exp(), model.logit_bias.float()).mean(1)
