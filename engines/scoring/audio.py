"""Rewards of sounds: they are decoded from the samples where such a reward is called."""

import inspect
from collections.abc import Mapping
from typing import Any

from fluvial.engines.errors import UsageError
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.signature import signature_of
from fluvial.models.protocol import DiffusionModel, sound_rate

SOUNDS, RATE = "audios", "audio_rate"  # parameters of a reward
OF_MODEL = ("latents", "model_inputs")  # what sounds are decoded from


class AudioReward:
    """A reward of sounds as one of samples, which it is given the sounds of.

    Args:
        reward: the reward; it takes `audios`, `[B, channels, n]` in [-1, 1], and perhaps `audio_rate`.
        model: model with `sounds` and `sound_rate`.
    """

    def __init__(self, reward: Reward, model: Any) -> None:
        self.reward, self.model = reward, model
        self._own = inspect.signature(reward)
        kept = [entry for name, entry in self._own.parameters.items() if name not in (SOUNDS, RATE, *OF_MODEL)]
        named = [entry.replace(kind=entry.KEYWORD_ONLY) for entry in kept if entry.kind is not entry.VAR_KEYWORD]
        of_model = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in OF_MODEL]
        self.__signature__ = inspect.Signature([*of_model, *named])

    def __call__(self, *, latents: Any, model_inputs: Any, **arguments: Any) -> Any:
        """Return the scores of samples."""
        sounds = self.model.sounds(latents, model_inputs)
        takes = self._own.parameters
        further = {SOUNDS: sounds.waves, RATE: sounds.rate, "latents": latents, "model_inputs": model_inputs}
        every = {**arguments, **{name: value for name, value in further.items() if name in takes}}
        placed = [every.pop(name) for name, entry in takes.items() if entry.kind is not entry.KEYWORD_ONLY and name in every]
        return self.reward(*placed, **every)


def with_audio(rewards: Mapping[str, Reward], model: DiffusionModel) -> dict[str, Reward]:
    """Return rewards as a run of the model calls them: those of sounds are given the model's.

    Raises:
        UsageError: a reward takes sounds and the model makes none, or images and it makes sounds alone.
    """
    rate = sound_rate(model)
    heard = dict[str, Reward]()
    for name, reward in rewards.items():
        signature = signature_of(reward)
        if signature.takes(SOUNDS):
            if rate is None:
                raise UsageError(f"reward {name!r} takes audios, and the model makes no sounds: use a reward of images")
            heard[name] = AudioReward(reward, model)
            continue
        if not getattr(model, "makes_images", True) and any(signature.takes(what) for what in ("images", "videos")):
            raise UsageError(
                f"reward {name!r} takes images, and the model makes sounds: set `rewards` to one with a parameter audios"
            )
        heard[name] = reward
    return heard
