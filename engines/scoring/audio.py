"""Rewards on audio: sounds are decoded from the samples when such a reward is called."""

import inspect
from collections.abc import Mapping
from typing import Any

from fluvial.engines.errors import UsageError
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.signature import signature_of
from fluvial.models.protocol import DiffusionModel, find_sound_rate

SOUNDS, RATE = "audios", "audio_rate"  # parameters of a reward
DECODER_INPUTS = ("latents", "model_inputs")  # inputs of the sound decoder


class AudioReward:
    """Adapter that calls a reward on audio with sounds decoded from the samples.

    Args:
        reward: reward that takes `audios`, `[B, channels, n]` in [-1, 1], and optionally `audio_rate`.
        model: model with `decode_sounds` and `sound_rate`.
    """

    def __init__(self, reward: Reward, model: Any) -> None:
        self.reward, self.model = reward, model
        self._signature = inspect.signature(reward)
        others = [p for name, p in self._signature.parameters.items() if name not in (SOUNDS, RATE, *DECODER_INPUTS)]
        named = [p.replace(kind=p.KEYWORD_ONLY) for p in others if p.kind is not p.VAR_KEYWORD]
        decoder_inputs = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in DECODER_INPUTS]
        self.__signature__ = inspect.Signature([*decoder_inputs, *named])

    def __call__(self, *, latents: Any, model_inputs: Any, **arguments: Any) -> Any:
        """Return the scores of samples."""
        sounds = self.model.decode_sounds(latents, model_inputs)
        parameters = self._signature.parameters
        extra = {SOUNDS: sounds.waves, RATE: sounds.rate, "latents": latents, "model_inputs": model_inputs}
        inputs = {**arguments, **{name: value for name, value in extra.items() if name in parameters}}
        positional = [inputs.pop(name) for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY and name in inputs]
        return self.reward(*positional, **inputs)


def with_audio(rewards: Mapping[str, Reward], model: DiffusionModel) -> dict[str, Reward]:
    """Return rewards for a run of the model; those on audio are wrapped in `AudioReward`.

    Raises:
        UsageError: a reward takes sounds but the model generates none, or images but it generates only sounds.
    """
    rate = find_sound_rate(model)
    wrapped = dict[str, Reward]()
    for name, reward in rewards.items():
        signature = signature_of(reward)
        if signature.takes(SOUNDS):
            if rate is None:
                raise UsageError(f"reward {name!r} takes audios, and the model makes no sounds: use a reward of images")
            wrapped[name] = AudioReward(reward, model)
            continue
        if not getattr(model, "makes_images", True) and any(signature.takes(what) for what in ("images", "videos")):
            raise UsageError(
                f"reward {name!r} takes images, and the model makes sounds: set `rewards` to one with a parameter audios"
            )
        wrapped[name] = reward
    return wrapped
