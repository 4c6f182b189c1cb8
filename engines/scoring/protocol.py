"""Protocol of a reward: a function from images and their prompts to one number per image."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, Union

from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

# One real number per image: a tensor or an array `[B]` of any real dtype (bool counts as 0 and 1), or a list.
Scores = Union[Tensor, "np.ndarray", Sequence[float]]
Returned = Scores | Mapping[str, Scores]


class Reward(Protocol):
    """A reward, or an evaluator, which is a reward that training never sees.

    Any callable of two positional arguments is one; it needs no base class and no registration.

        def bright(images, prompts):
            return images.flatten(1).mean(1)

    Its parameters name what it is passed. The names are read once, when the run is built. It may keep and change what it is
    passed, which are copies.

        images             `[B, C, H, W]`, float in [0, 1], on the model's device; of videos `[B, C, F, H, W]`
        videos             `[B, C, F, H, W]`; a run that makes images cannot use the reward
        latents            `[B, *event]`, the samples before they are decoded
        audios             `[B, channels, n]` in [-1, 1], of a model that makes sounds, alone or beside a video
        audio_rate         numbers per second and channel of audios
        prompts            prompt of each sample
        metadata           record of each prompt: a dict of the further columns of the file that the prompt comes from
        condition_images   image of each prompt's record, a list of `[C, H, W]` in [0, 1]; a default makes it optional
        condition_videos   video of each prompt's record, a list of `[3, F, H, W]` in [0, 1]; a default makes it optional
        condition_audios   sound of each prompt's record, a list of `(wave, rate)`: `[channels, n]` in [-1, 1], and numbers
                           per second and channel; a default makes it optional
        model_inputs       what the model encoded of each prompt: its text, or a `MediaPrompt` of a prompt with media
        group              number of the group; the reward is then called with all samples of one group at once

        def counted(images, prompts, metadata):
            return [float(count(image) == record["count"]) for image, record in zip(images, metadata)]

        def preferred(images, prompts, group):      # how often each sample wins against the others of its group
            return [fmean(wins(a, b, prompts[0]) for b in images if b is not a) for a in images]

    It returns one number per sample, or a mapping of several numbers per sample: `score` is learnt from, and all are logged.
    A sample that cannot be scored gets NaN or None; a call that raises gives none of its samples a score. The groups of such
    samples are left out of the update. The run stops if they are more than `rollout.max_invalid` of a rollout.

    A reward that waits for something slow, such as a person, returns a `concurrent.futures.Future` of its scores. It is
    called with the next samples meanwhile, and its scores may take longer than the ten minutes that a call may. One that
    waits for people has an attribute `waits_for_people`, the most seconds of it: a run that cannot wait so long is refused.

    A reward runs on a thread of its own while the next chunk of samples is generated, on every rank, with that rank's
    samples. It may keep state, use the GPU or call a server. Unless it names `group`, its score of a sample must not depend
    on the other samples of the call: how the samples of a rollout are cut into calls depends on `engine.micro_batch` and on
    the number of ranks.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> "Returned | Future[Returned]":
        """Return the score of each sample; a higher one is better."""
        ...
