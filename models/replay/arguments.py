"""Arguments of a pipeline's call: those of a run, and those that make several samples of a prompt."""

import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from fluvial.models.pipelines.folder import entries, read_index
from fluvial.models.replay.capture import SCALES
from fluvial.models.replay.checks import foreign
from fluvial.models.replay.kinds import VIDEO, Sound
from fluvial.models.replay.media import TextPrompt, get_media, get_text

FRAMES = ("num_frames", "frames")  # names of the number of frames
SEVERAL = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
AREA = "max_area"  # pixels that FLUX Kontext scales the height and width of its images to
# Arguments whose default is not what a replay can have: use of what the network computed in the step before, prompts that a
# language model rewrites at random, and a list of scales of guidance in place of one.
OUR_DEFAULTS = {"use_kv_cache": False, "enable_prompt_rewrite": False, "use_pe": False, "guidance_schedule": None}
PERTURBED = "pag_scale"  # argument with the scale of perturbed attention guidance
INFERENCE = "force_inference_output"  # setting of HiDream's network, whose experts have no gradient as it is sampled from
# Arguments of pipelines whose samples are no rollout at one noise level per step, and why.
OTHERWISE = {
    "ar_step": "it denoises each frame at a noise level of its own (diffusion forcing)",
    "prev_segment_conditioning_frames": "it makes a video in segments, each from the last frames of the one before",
}
CRF = "image_crf"  # argument with the strength of H.264 that LTX-2 compresses one image by, and no list of them
LYRICS = "lyrics"  # argument with a text for each prompt
# Pipelines that make inputs of one sample where they are asked for several of a prompt, or decode one sample at a time: the
# VAE takes no more, or the first frames are scaled by a mean over the batch (Kandinsky 5).
ONE_OF_EACH = ("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline", "Kandinsky5I2VPipeline")
UNSHOWN = ("output_type", "return_dict")  # arguments that the caller does not choose


def class_of(folder: Path, component: str) -> tuple[type, str]:
    """Return the class of diffusers of a pipeline's folder, and that of its network.

    Raises:
        ValueError: diffusers does not have it, or it has no network of that name.
    """
    import diffusers

    name, network = str(read_index(folder).get("_class_name")), entries(folder).get(component)
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise ValueError(f"{folder} holds a {name}, which diffusers {diffusers.__version__} does not have")
    if network is None:
        raise ValueError(
            f"{folder} holds a {name}, which there is no adapter for, and without one only flow pipelines with a "
            f"{component} can be trained (fluvial models)"
        )
    if "vae" not in inspect.signature(kind.__init__).parameters:
        raise ValueError(f"{name} cannot be trained without an adapter: it has no VAE, and makes images of pixels")
    takes = inspect.signature(kind.__call__).parameters
    if (why := next((reason for argument, reason in OTHERWISE.items() if argument in takes), None)) is not None:
        raise ValueError(f"{name} cannot be trained without an adapter: {why}")
    made = getattr(diffusers, network, None)
    if made is not None and INFERENCE in inspect.signature(made.__init__).parameters:
        raise ValueError(
            f"{name} cannot be trained without an adapter: its network has other operations in training than for samples "
            f"({INFERENCE}), so that no policy would be on policy"
        )
    return kind, network


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
    embedded: bool | None,
) -> dict[str, Any]:
    """Return the arguments of a pipeline's call apart from the prompt.

    Args:
        pipeline: class of the pipeline, for messages.
        takes: parameters of its call.
        size: height, width and number of frames.
        steps: number of steps of the schedule.
        scale, negative: scale of guidance, and its negative prompt.
        call: further arguments.
        embedded: whether the network takes the scale as an input, as a distilled one does; None where that is unknown. A
            scale of 1 is no classifier-free guidance, and leaves such an input at the pipeline's default.

    Raises:
        ValueError: the pipeline does not take one of them, or no prompt.
    """
    if "prompt" not in takes:
        raise ValueError(f"{pipeline} takes no prompt, it takes {', '.join(list(takes)[1:])}")
    height, width, frames = size
    asked: dict[str, Any] = {"num_inference_steps": steps, "output_type": "latent", "return_dict": False}
    # A pipeline that takes no size makes images of the size of those that it is given.
    asked |= {name: pixels for name, pixels in (("height", height), ("width", width)) if name in takes}
    if AREA in takes:
        asked[AREA] = height * width
    if (counted := next((name for name in FRAMES if name in takes), None)) is not None:
        asked[counted] = frames
    elif frames != 1 and not {*VIDEO.arguments} & {*takes}:  # else its videos are as long as those that it is given
        raise ValueError(f"frames is {frames}, expected 1: {pipeline} makes images")
    guidance = next((name for name in (SCALES[::-1] if embedded is False else SCALES) if name in takes), None)
    if guidance is not None:
        asked[guidance] = takes[guidance].default if embedded and scale == 1 and guidance == SCALES[0] else scale
    elif scale != 1:
        raise ValueError(f"the scale of guidance is {scale:g}, expected 1: {pipeline} has no guidance")
    if call.get(PERTURBED, getattr(takes.get(PERTURBED), "default", 0)):
        raise ValueError(
            f"{pipeline} exchanges layers of its network during the call, for perturbed attention guidance (PAG), and is "
            f"replayed without: --pipeline.call {PERTURBED}=0"
        )
    asked |= {name: value for name, value in OUR_DEFAULTS.items() if name in takes}
    if scale != 1 and "negative_prompt" in takes:
        asked["negative_prompt"] = negative
    asked |= call
    if unknown := [name for name in asked if name not in takes]:
        raise ValueError(f"{pipeline} takes no {unknown[0]}, it takes {', '.join(list(takes)[1:])}")
    return asked


class CallForm(NamedTuple):
    """A form of a pipeline's call that may make several samples of a prompt."""

    several: dict[str, Any]  # arguments of several samples
    one: dict[str, Any]  # of one sample
    single: bool = False  # whether `several` is one sample as well, of a pipeline that makes no more in a call


def forms(
    takes: Collection[str], prompt: TextPrompt, number: int, *, steps: Sequence[int], rate: int | None = None, crf: int = 0
) -> list[CallForm]:
    """Return the forms of a call that may make several samples of a prompt, to be tried in order.

    Forms that make single samples, which no batch can be compared with, come last.

    Args:
        takes: names of the arguments that the call has.
        prompt: the prompt, with or without media.
        number: number of samples.
        steps: numbers of steps to ask for; one of them makes the pipeline take as many as wanted.
        rate: numbers per second and channel of the pipeline's sounds.
        crf: strength of the compression that the pipeline applies to an image of its own; lists of images are given to it
            compressed.

    Raises:
        ValueError: a sound of the prompt has another rate.
    """
    text, media = get_text(prompt), get_media(prompt)
    several = next((name for name in SEVERAL if name in takes), None)
    call_forms = []
    for media_arguments, count in product(_as_tensors(media, rate), steps):
        once = {**media_arguments, "num_inference_steps": count}
        lists = once | {name: _repeat(_compress(value, crf), number) for name, value in media_arguments.items()}
        lists |= {CRF: 0} if crf else {}
        values = [once, lists] if media else [once]
        asked = [{"prompt": text, several: number, **each} for each in values] if several else []
        asked += [{"prompt": [text] * number, **each} for each in values]
        alone = {"prompt": text, **once}
        call_forms += [*(CallForm(each, alone) for each in asked), CallForm(alone, alone, single=True)]
    return sorted(call_forms, key=lambda form: form.single)


def _as_tensors(media: Mapping[str, Any], rate: int | None) -> Iterator[dict[str, Any]]:
    """Yield media with sounds as tensors: with a batch dimension, `[1, channels, n]`, then without."""
    sounds = {name: value for name, value in media.items() if isinstance(value, Sound)}
    for name, sound in sounds.items():
        if rate is not None and sound.rate != rate:
            raise ValueError(
                f"the {name} of a prompt has {sound.rate} numbers per second, and the pipeline takes {rate}: resample it"
            )
    yield {**media, **{name: sound.wave[None] for name, sound in sounds.items()}}
    if sounds:
        yield {**media, **{name: sound.wave for name, sound in sounds.items()}}


def compression(pipe: Any, asked: Mapping[str, Any]) -> int:
    """Return the strength of H.264 that a pipeline compresses an image by, by default its own; 0 if it does not."""
    if CRF not in inspect.signature(pipe.__call__).parameters:
        return 0
    from diffusers.pipelines.ltx2.utils import resolve_default_image_crf

    number = asked.get(CRF)
    return int(resolve_default_image_crf(pipe.text_encoder) if number is None else number)


def _compress(value: Any, crf: int) -> Any:
    """Return an image compressed as LTX-2 does; anything else as it is."""
    if not crf or not isinstance(value, Image.Image):
        return value
    from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf

    with foreign("LTX-2", "compress an image"):
        return Image.fromarray(apply_image_conditioning_crf(np.array(value.convert("RGB")), crf))


def _repeat(value: Any, number: int) -> Any:
    """Return one image, video or sound per sample."""
    if not isinstance(value, Tensor):
        return [value] * number
    return (value if value.ndim == 3 else value[None]).repeat(number, 1, 1)


def build_arguments(takes: Mapping[str, inspect.Parameter], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call on a list of prompts, with lyrics for each of them."""
    lyrics = asked.get(LYRICS, takes[LYRICS].default if LYRICS in takes else None)
    prompts = asked.get("prompt")
    return asked | {LYRICS: [lyrics] * len(prompts)} if isinstance(lyrics, str) and isinstance(prompts, list) else asked


def format_arguments(asked: Mapping[str, Any]) -> str:
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


def parse_argument(word: str) -> tuple[str, Any]:
    """Return the name and the value of name=value; the value is JSON, or else text."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
