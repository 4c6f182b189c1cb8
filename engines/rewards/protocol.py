"""What a reward is: a function from images and their prompts to one number per image."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Union

from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

# One finite real number per image: a tensor or an array `[B]` of any real dtype (bool counts as 0 and 1), or a list.
Scores = Union[Tensor, "np.ndarray", Sequence[float]]


class Reward(Protocol):
    """A reward, or an evaluator, which is a reward that training never sees.

    Any callable of two positional arguments is one; it needs no base class and no registration.

        def bright(images, prompts):
            return images.flatten(1).mean(1)

    One with an argument named `metadata` also receives the record of each prompt, a dict with the further columns of the
    file that the prompt comes from.

        def counted(images, prompts, metadata):
            return [float(count(image) == record["count"]) for image, record in zip(images, metadata)]

    It runs on a thread of its own while the next chunk of samples is generated, on every rank, with that rank's images. It
    may keep state, use the GPU or call a server. Its score of an image must not depend on the other images of the call: how
    the samples of a rollout are cut into calls depends on `micro_batch` and on the number of ranks.
    """

    def __call__(self, images: Tensor, prompts: Sequence[str], /) -> Scores:
        """Return the score of each image; a higher one is better.

        Args:
            images: `[B, C, H, W]`, float in [0, 1], on the model's device; of videos `[B, C, F, H, W]`.
            prompts: prompt of each image.
        """
        ...
