"""Inputs of a reward: read once from the names of its parameters, and passed with every call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.engines.data.images import read_image
from fluvial.engines.data.records import Prompt, copy_metadata, model_inputs, texts
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.models.host_values import to_device
from fluvial.models.replay.kinds import read_sound, read_video

SAMPLES = ("images", "videos", "latents", "audios")  # a reward takes at least one of these
# Optional media of prompts, by the column of their records. If it is missing, a parameter keeps its default.
CONDITIONS = {"condition_images": "image", "condition_videos": "video", "condition_audios": "audio"}
KNOWN = (*SAMPLES, "audio_rate", "prompts", "metadata", "group", "model_inputs", *CONDITIONS)
FIRST = ("images", "prompts")  # inputs of the first two parameters, unless their names are in `KNOWN`
EXPECTED = "a function of (images, prompts)"


class Samples(NamedTuple):
    """B samples, the input of a reward."""

    images: Tensor  # [B, C, H, W] in [0, 1], of videos [B, C, F, H, W]
    prompts: Sequence[Prompt]
    latents: Tensor | None = None  # [B, *event], the samples before they are decoded
    group: int | None = None  # index of their group in the rollout, if they are one full group

    def part(self, rows: slice) -> "Samples":
        """Return a slice of the samples."""
        latents = None if self.latents is None else self.latents[rows]
        return Samples(self.images[rows], self.prompts[rows], latents, self.group)


@dataclass(frozen=True)
class Signature:
    """Call signature of a reward.

    Args:
        positional: inputs passed by position, in this order; names of `KNOWN`.
        named: inputs passed by name.
        optional: inputs passed by name if all prompts have them; names of `CONDITIONS`.
    """

    positional: tuple[str, ...] = FIRST
    named: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Return whether the reward needs an input."""
        return name in (*self.positional, *self.named)

    def accepts(self, name: str) -> bool:
        """Return whether the reward uses an input, if it is available."""
        return self.takes(name) or name in self.optional

    def call(self, reward: Callable[..., Any], samples: Samples) -> Any:
        """Call a reward with samples; UsageError if they lack one of its inputs."""
        values = [_copy_input(name, samples) for name in self.positional]
        available = [
            name for name in self.optional if all(find_condition(prompt, name) is not None for prompt in samples.prompts)
        ]
        return reward(*values, **{name: _copy_input(name, samples) for name in (*self.named, *available)})


def signature_of(reward: Any) -> Signature:
    """Return the call signature of a reward.

    Its first two parameters are images and prompts, unless their names are in `KNOWN`. Further parameters get the input of
    their name; one of `CONDITIONS` with a default keeps it if a prompt has no such file. Parameters with other names keep
    their defaults.

    Raises:
        ValueError: it cannot be called as a reward; the message completes a sentence that begins with the reward's name.
    """
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None)):  # noqa: B004
        raise ValueError(f"is an async function, expected {EXPECTED}: define it with def")
    if not callable(reward) or inspect.isclass(reward):
        kind = "a class" if inspect.isclass(reward) else f"of type {type(reward).__name__}"
        raise ValueError(f"is {kind}, expected {EXPECTED}")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some functions written in C have none
        return Signature()
    signature_read, problem = _read_parameters(signature)
    names = (*signature_read.positional, *signature_read.named, *signature_read.optional)
    if problem is None and len({*names}) < len(names):
        problem = "two of its parameters stand for the same"
    if problem is None and "prompts" not in names:
        problem = "it takes no prompts"
    if problem is None and not {*SAMPLES} & {*names}:
        problem = f"it takes none of {', '.join(SAMPLES)}"
    if problem is not None:
        others = ", ".join(name for name in KNOWN if name not in FIRST)
        raise ValueError(f"has the signature {signature}, expected {EXPECTED}, and of any of {others}: {problem}")
    return signature_read


def reward_problem(reward: Any) -> str | None:
    """Describe why an object cannot be called as a reward, or return None; a check for `plugins.load`."""
    try:
        signature_of(reward)
    except ValueError as error:
        return str(error)
    return None


def _read_parameters(signature: inspect.Signature) -> tuple[Signature, str | None]:
    """Return the inputs of all parameters, and a problem or None."""
    positional, named, optional = list[str](), list[str](), list[str]()
    for place, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += FIRST[len(positional) :]
            continue
        by_place = parameter.kind is not parameter.KEYWORD_ONLY and place == len(positional) < len(FIRST)
        if by_place:
            positional.append(name if name in KNOWN else FIRST[place])
        elif name in KNOWN and parameter.kind is not parameter.POSITIONAL_ONLY:
            (named if name not in CONDITIONS or parameter.default is parameter.empty else optional).append(name)
        elif parameter.default is parameter.empty:
            return Signature(), f"there is nothing to pass for its parameter {name}"
    return Signature(tuple(positional), tuple(named), tuple(optional)), None


def _copy_input(name: str, samples: Samples) -> Any:
    """Return a copy of a parameter's input; UsageError if the samples lack it."""
    if name == "videos" and samples.images.ndim != 5:
        raise UsageError(
            f"it takes videos, and these are images {list(samples.images.shape[1:])}: name its parameter images"
        )
    if name == "latents" and samples.latents is None:
        raise UsageError("it takes latents, and there are only images here: use a reward of images")
    if name in ("audios", "audio_rate"):
        raise UsageError("it takes audios, and there are only images here: use a reward of images")
    if name == "group" and samples.group is None:
        raise UsageError(
            "it compares the samples of a group, and there are no groups here: use a reward that scores each image alone"
        )
    values: Mapping[str, Callable[[], Any]] = {
        "images": samples.images.clone,
        "videos": samples.images.clone,
        "prompts": lambda: texts(samples.prompts),
        "metadata": partial(copy_metadata, samples.prompts),
        "group": lambda: samples.group,
        "model_inputs": lambda: model_inputs(samples.prompts),
        "latents": lambda: None if samples.latents is None else samples.latents.clone(),
        **{name: lambda name=name: [_read_media(p, name, samples) for p in samples.prompts] for name in CONDITIONS},  # type: ignore[misc]
    }
    return values[name]()


def find_condition(prompt: Prompt, name: str) -> Path | bytes | None:
    """Return the file in a prompt's record for a name of `CONDITIONS`, or None."""
    condition: Path | bytes | None = getattr(prompt, CONDITIONS[name])
    return condition


def _read_media(prompt: Prompt, name: str, samples: Samples) -> Any:
    """Return the image, video or sound of a prompt's record, see `Reward`, on the device of the samples."""
    file, device = find_condition(prompt, name), samples.images.device
    if file is None:
        raise UsageError(
            f"it takes {name}, and prompt {prompt.text!r} has none: give its record a column {CONDITIONS[name]}"
        )
    if name == "condition_images":
        return to_device(read_image(file), device)
    with convert_errors(UsageError, ValueError):
        if name == "condition_videos":
            return to_device(stack_frames(read_video(file)), device)
        sound = read_sound(file)
        return sound._replace(wave=to_device(sound.wave, device))


def stack_frames(frames: Sequence[Any]) -> Tensor:
    """Stack RGB frames, as PIL images, to `[3, F, H, W]` in [0, 1]."""
    import numpy as np

    return torch.from_numpy(np.stack([np.asarray(frame, dtype=np.float32) for frame in frames])).permute(3, 0, 1, 2) / 255
