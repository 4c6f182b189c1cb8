"""CLIPScore: the cosine similarity of an image and its prompt under CLIP.

Source: arXiv 2104.08718.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from fluvial.models.rewards.shared.clip import load_towers
from fluvial.models.rewards.shared.loading import LoadingError
from fluvial.models.rewards.table import REWARD_MODELS, VIT_L

MODEL = REWARD_MODELS["clipscore"]
# Function of the cosine c and of exp(logit_scale) s, by name.
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda c, s: c,  # UniRL, Flow-Factory
    "logits": lambda c, s: s * c / 30,  # flow_grpo
    "paper": lambda c, s: 2.5 * c.clamp(min=0),  # arXiv 2104.08718
}


class ClipScore:
    """cos(f(x), g(p)) with a CLIP model; of videos the mean over frames.

    Args:
        weights: folder of a CLIPModel of transformers, or id on the Hub.
        form: "cosine" c, "logits" exp(logit_scale) c / 30, or "paper" 2.5 max(c, 0).
        revision: commit on the Hub; by default that of the default weights.
        processor: folder or id of tokenizer and preprocessing; by default those in the folder of weights, or those of
            the published CLIP model.
        device: device of the model, e.g. "cuda:1"; by default that of the first images.
        dtype: "float32", "bfloat16" or "float16".
        batch: largest number of images per forward pass.
        frames: largest number of evenly spaced frames that a video is scored by.

    Raises:
        ValueError: the weights are not there or are no CLIP model, or the form is unknown; in one line.
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
        from transformers import CLIPModel

        if form not in FORMS:
            raise LoadingError(f"clipscore: form is {form!r}, expected one of {', '.join(FORMS)}")
        self.form = FORMS[form]
        commit = MODEL.commit(weights, revision)
        default = VIT_L if Path(weights).expanduser().is_dir() else (str(weights), commit)
        self.towers = load_towers(
            "clipscore", CLIPModel, weights, commit, processor=processor, default=default,
            device=device, dtype=dtype, batch=batch, frames=frames,
        )  # fmt: skip

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, differentiable in the images.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.
        """
        cosines = self.towers.cosines(images, prompts)
        return self.form(cosines, self.towers.model.logit_scale.float().exp()).mean(1)
