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
# What prompts may lack, and the column of their records; a parameter with a default keeps it then.
CONDITIONS = {"condition_images": "image", "condition_videos": "video", "condition_audios": "audio"}
KNOWN = (*SAMPLES, "audio_rate", "prompts", "metadata", "group", "model_inputs", *CONDITIONS)
FIRST = ("images", "prompts")  # what the first two parameters stand for, if their names say nothing else
EXPECTED = "a function of (images, prompts)"


class Samples(NamedTuple):
    """Samples that a reward is called with, B of them."""

    images: Tensor  # [B, C, H, W] in [0, 1], of videos [B, C, F, H, W]
    prompts: Sequence[Prompt]
    latents: Tensor | None = None  # [B, *event], the samples before they are decoded
    group: int | None = None  # number of their group in the rollout, where they are one whole group

    def part(self, rows: slice) -> "Samples":
        """Return some of the samples."""
        latents = None if self.latents is None else self.latents[rows]
        return Samples(self.images[rows], self.prompts[rows], latents, self.group)


@dataclass(frozen=True)
class Signature:
    """How a reward is called.

    Args:
        positional: what is passed by position, in this order; names of `KNOWN`.
        named: what is passed by name.
        optional: what is passed by name where all prompts have it; names of `CONDITIONS`.
    """

    positional: tuple[str, ...] = FIRST
    named: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Return whether the reward needs something."""
        return name in (*self.positional, *self.named)

    def accepts(self, name: str) -> bool:
        """Return whether the reward uses something, if it is there."""
        return self.takes(name) or name in self.optional

    def call(self, reward: Callable[..., Any], samples: Samples) -> Any:
        """Return what a reward returns for samples; UsageError if the samples lack an input of the reward."""
        values = [_value(name, samples) for name in self.positional]
        held = [
            name for name in self.optional if all(find_condition(prompt, name) is not None for prompt in samples.prompts)
        ]
        return reward(*values, **{name: _value(name, samples) for name in (*self.named, *held)})


def signature_of(reward: Any) -> Signature:
    """Return how a reward is called.

    Its first two parameters are the images and the prompts, or what their names say. A further parameter is passed what its
    name says; one of `CONDITIONS` with a default keeps it where a prompt has no such file. One of another name keeps its
    default.

    Raises:
        ValueError: it cannot be called as a reward; the message continues after the name of the reward.
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
    signature_read, problem = _read(signature)
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
    """Return why an object cannot be called as a reward, or None; a check for `plugins.load`."""
    try:
        signature_of(reward)
    except ValueError as error:
        return str(error)
    return None


def _read(signature: inspect.Signature) -> tuple[Signature, str | None]:
    """Return what each parameter is passed, and what is wrong with them."""
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


def _value(name: str, samples: Samples) -> Any:
    """Return what is passed for a parameter, which the reward may keep and change; UsageError if the samples lack it."""
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
        **{name: lambda name=name: [_condition(prompt, name, samples) for prompt in samples.prompts] for name in CONDITIONS},  # type: ignore[misc]
    }
    return values[name]()


def find_condition(prompt: Prompt, name: str) -> Path | bytes | None:
    """Return the file of a prompt's record that a name of `CONDITIONS` stands for; None without one."""
    condition: Path | bytes | None = getattr(prompt, CONDITIONS[name])
    return condition


def _condition(prompt: Prompt, name: str, samples: Samples) -> Any:
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
    """Return frames, images of PIL in colour, as `[3, F, H, W]` in [0, 1]."""
    import numpy as np

    return torch.from_numpy(np.stack([np.asarray(frame, dtype=np.float32) for frame in frames])).permute(3, 0, 1, 2) / 255
