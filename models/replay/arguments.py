"""Arguments of a pipeline's call: those of a run, and those that make several samples of a prompt."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from PIL import Image
from torch import Tensor

from fluvial.models.replay.capture import SCALES
from fluvial.models.replay.media import TextPrompt, media_of, text_of

FRAMES = ("num_frames", "frames")  # names of the number of frames
SEVERAL = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
CACHE = "use_kv_cache"  # argument that lets a step reuse what the network computed in the step before
LYRICS = "lyrics"  # argument with a text for each prompt
# Pipelines that make inputs of one sample where they are asked for several of a prompt, and whose VAE takes one at a time.
ONE_OF_EACH = ("HunyuanVideo15Pipeline",)
UNSHOWN = ("output_type", "return_dict")  # arguments that the caller does not choose


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of the call of a pipeline's class that are of use here."""
    left_out = SEVERAL if kind.__name__ in ONE_OF_EACH else ()
    takes = inspect.signature(kind.__call__).parameters
    return {name: parameter for name, parameter in takes.items() if name not in left_out}


def arguments(
    pipeline: str,
    takes: Mapping[str, inspect.Parameter],
    size: tuple[int, int, int],
    steps: int,
    scale: float,
    negative: str,
    call: Mapping[str, Any],
    embedded: bool,
) -> dict[str, Any]:
    """Return the arguments of a pipeline's call apart from the prompt.

    Args:
        pipeline: class of the pipeline, for messages.
        takes: parameters of its call.
        size: height, width and number of frames.
        steps: number of steps of the schedule.
        scale, negative: scale of guidance, and its negative prompt.
        call: further arguments.
        embedded: whether the network takes the scale as an input.

    Raises:
        ValueError: the pipeline does not take one of them, or no prompt.
    """
    if "prompt" not in takes:
        raise ValueError(f"{pipeline} takes no prompt, it takes {', '.join(list(takes)[1:])}")
    height, width, frames = size
    asked: dict[str, Any] = {
        "num_inference_steps": steps,
        "output_type": "latent",
        "return_dict": False,
    }
    # A pipeline that takes no size makes images of the size of those that it is given.
    asked |= {name: pixels for name, pixels in (("height", height), ("width", width)) if name in takes}
    if (counted := next((name for name in FRAMES if name in takes), None)) is not None:
        asked[counted] = frames
    elif frames != 1:
        raise ValueError(f"frames is {frames}, expected 1: {pipeline} makes images")
    guidance = next((name for name in (SCALES if embedded else SCALES[::-1]) if name in takes), None)
    if guidance is not None:
        asked[guidance] = scale
    elif scale != 1:
        raise ValueError(f"the scale of guidance is {scale:g}, expected 1: {pipeline} has no guidance")
    if CACHE in takes:
        asked[CACHE] = False
    if scale != 1 and "negative_prompt" in takes:
        asked["negative_prompt"] = negative
    asked |= call
    if unknown := [name for name in asked if name not in takes]:
        raise ValueError(f"{pipeline} takes no {unknown[0]}, it takes {', '.join(list(takes)[1:])}")
    return asked


def forms(takes: Collection[str], prompt: TextPrompt, number: int) -> list[dict[str, Any]]:
    """Return the forms of a call that may make several samples of a prompt, to be tried in order."""
    text, media = text_of(prompt), media_of(prompt)
    several = next((name for name in SEVERAL if name in takes), None)
    if not media:
        return [*([{"prompt": text, several: number}] if several else []), {"prompt": [text] * number}]
    lists = {name: [image] * number for name, image in media.items()}
    once = [{"prompt": text, several: number, **given} for given in (media, lists)] if several else []
    return [*once, {"prompt": [text] * number, **media}, {"prompt": [text] * number, **lists}]


def called(takes: Mapping[str, inspect.Parameter], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call on a list of prompts, with lyrics for each of them."""
    lyrics = asked.get(LYRICS, takes[LYRICS].default if LYRICS in takes else None)
    prompts = asked.get("prompt")
    return asked | {LYRICS: [lyrics] * len(prompts)} if isinstance(lyrics, str) and isinstance(prompts, list) else asked


def shown(asked: Mapping[str, Any]) -> str:
    """Return the arguments of a pipeline's call in one line, for messages."""

    def short(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"tensor{list(value.shape)}"
        text = " ".join(repr(value).split())
        return text if len(text) <= 60 else f"{text[:60]}..."

    return ", ".join(f"{name}={short(value)}" for name, value in asked.items() if name not in UNSHOWN)


def exactly(asked: Mapping[str, Any]) -> str:
    """Return the arguments of a pipeline's call with all values of tensors and images, for a fingerprint."""

    def whole(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {value.tolist()}"
        return f"{value.size} {value.tobytes()!r}" if isinstance(value, Image.Image) else repr(value)

    return ", ".join(f"{name}={whole(value)}" for name, value in asked.items() if name not in UNSHOWN)
