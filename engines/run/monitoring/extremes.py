"""The best and the worst samples of an evaluation, whichever rank they are on."""

import io
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from fluvial.engines.engine.world import World
from fluvial.engines.run.evaluation.evaluate import Scores
from fluvial.models.images import as_image

LARGEST, LOSSLESS, WIDTH = 512, 128, 256  # pixels per side


class ExtremeSamples(NamedTuple):
    """Samples that are shown, with their prompts and scores."""

    images: list[Image.Image]
    prompts: list[str]
    scores: list[float]


class KeptImages:
    """Keeps the images of this rank's samples in an evaluation, compressed, as its `keep`; until all scores are known."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # by name of the sample

    def __call__(self, names: Sequence[str], images: Tensor) -> None:
        for name, image in zip(names, images, strict=True):
            shown, buffer = as_image(image, width=1), io.BytesIO()
            if max(shown.size) <= LOSSLESS:
                shown.save(buffer, "png", compress_level=1)
            else:
                shown.thumbnail((LARGEST, LARGEST))
                shown.save(buffer, "jpeg", quality=90)
            self.files[name] = buffer.getvalue()

    def extremes(self, scores: Scores, world: World, *, count: int) -> tuple[ExtremeSamples, ExtremeSamples]:
        """Return the samples of the highest scores by the last evaluator, and of the lowest; every rank must take part.

        No sample is in both. Of equal scores the earlier sample comes first.

        Args:
            scores: scores of the samples of all ranks; there must be an evaluator.
        """
        values: list[float] = scores.values[:, -1].tolist()
        count = min(count, len(values) // 2)
        ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
        best, worst = ranked[:count], sorted(ranked[len(ranked) - count :], key=lambda i: (values[i], i))
        own = {i: self.files[scores.names[i]] for i in (*best, *worst) if scores.names[i] in self.files}
        found = {i: file for part in world.gather_items(own) for i, file in part.items()}

        def show(chosen: Sequence[int]) -> ExtremeSamples:
            images = [_enlarge(found[i]) for i in chosen]
            return ExtremeSamples(images, [scores.prompts[i].text for i in chosen], [values[i] for i in chosen])

        return show(best), show(worst)


def _enlarge(file: bytes) -> Image.Image:
    """Return an image, enlarged by a whole factor to at most 256 pixels unless it is wider, as `as_image` does."""
    with Image.open(io.BytesIO(file)) as image:
        factor = max(WIDTH // image.width, 1)
        return image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
