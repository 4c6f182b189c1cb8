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

    Any callable with two positional arguments is a reward; it needs no base class and no registration.

        def bright(images, prompts):
            return images.flatten(1).mean(1)

    The names of its parameters select its inputs. They are read once, when the run is built. Inputs are copies, which it may
    keep and change.

        images             `[B, C, H, W]`, float in [0, 1], on the model's device; of videos `[B, C, F, H, W]`
        videos             `[B, C, F, H, W]`; a run that generates images cannot use the reward
        latents            `[B, *event]`, the samples before they are decoded
        audios             `[B, channels, n]` in [-1, 1], of a model that generates sounds, alone or with a video
        audio_rate         sampling rate of audios, in Hz
        prompts            prompt of each sample
        metadata           record of each prompt: a dict of the other columns of the prompt file
        condition_images   image of each prompt's record, a list of `[C, H, W]` in [0, 1]; a default makes it optional
        condition_videos   video of each prompt's record, a list of `[3, F, H, W]` in [0, 1]; a default makes it optional
        condition_audios   sound of each prompt's record, a list of `(wave, rate)`: `[channels, n]` in [-1, 1], and the
                           sampling rate in Hz; a default makes it optional
        model_inputs       input of the model's encoder for each prompt: its text, or a `MediaPrompt` with its media
        group              index of the group; the reward is then called once per group, with all of its samples

        def counted(images, prompts, metadata):
            return [float(count(image) == record["count"]) for image, record in zip(images, metadata)]

        def preferred(images, prompts, group):      # how often each sample wins against the others of its group
            return [fmean(wins(a, b, prompts[0]) for b in images if b is not a) for a in images]

    It returns one number per sample, or a mapping of several: `score` is trained on, and all are logged. NaN or None marks a
    sample that cannot be scored; a call that raises invalidates all of its samples. Groups with invalid samples are dropped
    from the update. The run stops if their share of a rollout exceeds `rollout.max_invalid`.

    A reward that waits for something slow, such as a person, returns a `concurrent.futures.Future` of its scores. It is
    called with the next samples meanwhile, and its scores may take longer than the ten minutes of a call. If it waits for
    people, its attribute `waits_for_people` is the longest wait in seconds: a run that cannot wait so long raises.

    On every rank, a reward runs on its own thread with that rank's samples, while the next chunk is generated. It may keep
    state, use the GPU or call a server. Unless it names `group`, its score of a sample must not depend on the other samples
    of the call: how a rollout is split into calls depends on `engine.micro_batch` and on the number of ranks.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> "Returned | Future[Returned]":
        """Return the score of each sample; a higher one is better."""
        ...
