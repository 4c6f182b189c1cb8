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

from fluvial.models.pipelines.folder import read_entries, read_index
from fluvial.models.replay.capture import SCALES
from fluvial.models.replay.checks import wrap_errors
from fluvial.models.replay.kinds import VIDEO, Sound
from fluvial.models.replay.media import TextPrompt, get_media, get_text

FRAMES = ("num_frames", "frames")  # arguments with the number of frames
SEVERAL = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
AREA = "max_area"  # argument with the number of pixels that FLUX Kontext scales its images to
# Arguments whose defaults cannot be replayed: the cache of an earlier step's keys and values, prompts that a language model
# rewrites at random, and a list of guidance scales.
OUR_DEFAULTS = {"use_kv_cache": False, "enable_prompt_rewrite": False, "use_pe": False, "guidance_schedule": None}
PERTURBED = "pag_scale"  # argument with the scale of perturbed attention guidance
INFERENCE = "force_inference_output"  # setting of HiDream's network, whose experts have no gradient during sampling
# Arguments of pipelines whose sampling is not a rollout with one noise level per step, and why.
UNSUPPORTED = {
    "ar_step": "it denoises each frame at a noise level of its own (diffusion forcing)",
    "prev_segment_conditioning_frames": "it makes a video in segments, each from the last frames of the one before",
}
CRF = "image_crf"  # argument with the H.264 strength that LTX-2 compresses a single image with; it ignores lists
LYRICS = "lyrics"  # argument with a text for each prompt
# Pipelines that build the inputs of one sample when several per prompt are requested, or decode one sample at a time: the
# VAE takes no more, or the first frames are scaled by a mean over the batch (Kandinsky 5).
ONE_OF_EACH = ("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline", "Kandinsky5I2VPipeline")
INTERNAL = ("output_type", "return_dict")  # arguments that the caller does not choose


def find_classes(folder: Path, component: str) -> tuple[type, str]:
    """Return the diffusers class of a pipeline's folder, and the class name of its network.

    Raises:
        ValueError: diffusers lacks the class, or the pipeline cannot be trained without an adapter.
    """
    import diffusers

    name, network = str(read_index(folder).get("_class_name")), read_entries(folder).get(component)
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise ValueError(f"{folder} holds a {name}, which diffusers {diffusers.__version__} does not have")
    if network is None:
        raise ValueError(
            f"{folder} holds a {name}, which has no adapter, and without one only flow pipelines with a {component} can be "
            "trained (fluvial models)"
        )
    if "vae" not in inspect.signature(kind.__init__).parameters:
        raise ValueError(f"{name} cannot be trained without an adapter: it has no VAE, and generates pixels directly")
    takes = inspect.signature(kind.__call__).parameters
    if (why := next((reason for argument, reason in UNSUPPORTED.items() if argument in takes), None)) is not None:
        raise ValueError(f"{name} cannot be trained without an adapter: {why}")
    network_class = getattr(diffusers, network, None)
    if network_class is not None and INFERENCE in inspect.signature(network_class.__init__).parameters:
        raise ValueError(
            f"{name} cannot be trained without an adapter: its network computes differently in training and in inference "
            f"({INFERENCE}), so every rollout would be off-policy"
        )
    return kind, network


def list_call_parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a pipeline class' call, without those for several samples if it makes one at a time."""
    excluded = SEVERAL if kind.__name__ in ONE_OF_EACH else ()
    takes = inspect.signature(kind.__call__).parameters
    return {name: parameter for name, parameter in takes.items() if name not in excluded}


def build_call_arguments(
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
        scale, negative: guidance scale and negative prompt.
        call: further arguments.
        embedded: whether the network takes the scale as an input, as a distilled one does; None if unknown. A scale of 1
            means no classifier-free guidance, and leaves such an input at the pipeline's default.

    Raises:
        ValueError: the pipeline does not take an argument, or takes no prompt.
    """
    if "prompt" not in takes:
        raise ValueError(f"{pipeline} takes no prompt, it takes {', '.join(list(takes)[1:])}")
    height, width, frames = size
    arguments: dict[str, Any] = {"num_inference_steps": steps, "output_type": "latent", "return_dict": False}
    # A pipeline without these arguments makes images of the size of its input images.
    arguments |= {name: pixels for name, pixels in (("height", height), ("width", width)) if name in takes}
    if AREA in takes:
        arguments[AREA] = height * width
    if (frames_argument := next((name for name in FRAMES if name in takes), None)) is not None:
        arguments[frames_argument] = frames
    elif frames != 1 and not {*VIDEO.arguments} & {*takes}:  # with an input video, the output is as long as it
        raise ValueError(f"frames is {frames}, expected 1: {pipeline} makes images")
    guidance = next((name for name in (SCALES[::-1] if embedded is False else SCALES) if name in takes), None)
    if guidance is not None:
        arguments[guidance] = takes[guidance].default if embedded and scale == 1 and guidance == SCALES[0] else scale
    elif scale != 1:
        raise ValueError(f"the guidance scale is {scale:g}, expected 1: {pipeline} has no guidance")
    if call.get(PERTURBED, getattr(takes.get(PERTURBED), "default", 0)):
        raise ValueError(
            f"{pipeline} exchanges layers of its network during the call, for perturbed attention guidance (PAG), which "
            f"cannot be replayed: switch it off with --pipeline.call {PERTURBED}=0"
        )
    arguments |= {name: value for name, value in OUR_DEFAULTS.items() if name in takes}
    if scale != 1 and "negative_prompt" in takes:
        arguments["negative_prompt"] = negative
    arguments |= call
    if unknown := [name for name in arguments if name not in takes]:
        raise ValueError(f"{pipeline} takes no {unknown[0]}, it takes {', '.join(list(takes)[1:])}")
    return arguments


class CallForm(NamedTuple):
    """A form of a pipeline's call that may make several samples of a prompt."""

    several: dict[str, Any]  # arguments for several samples
    one: dict[str, Any]  # arguments for one sample
    single: bool = False  # whether `several`, too, makes one sample, for a pipeline that makes one per call


def list_call_forms(
    takes: Collection[str], prompt: TextPrompt, number: int, *, steps: Sequence[int], rate: int | None = None, crf: int = 0
) -> list[CallForm]:
    """Return the forms of a call that may make several samples of a prompt, to be tried in order.

    Forms that make single samples come last, because there is no batch to compare them with.

    Args:
        takes: names of the call's arguments.
        prompt: the prompt, with or without media.
        number: number of samples.
        steps: candidate numbers of steps to request, see `replay.start.find_step_counts`.
        rate: sampling rate of the pipeline's sounds.
        crf: strength of the compression that the pipeline applies to a single image; images of lists are compressed here.

    Raises:
        ValueError: a sound of the prompt has another rate.
    """
    text, media = get_text(prompt), get_media(prompt)
    several = next((name for name in SEVERAL if name in takes), None)
    call_forms = []
    for media_arguments, count in product(_convert_sounds(media, rate), steps):
        once = {**media_arguments, "num_inference_steps": count}
        lists = once | {name: _repeat(_compress(value, crf), number) for name, value in media_arguments.items()}
        lists |= {CRF: 0} if crf else {}
        values = [once, lists] if media else [once]
        batches = [{"prompt": text, several: number, **each} for each in values] if several else []
        batches += [{"prompt": [text] * number, **each} for each in values]
        single = {"prompt": text, **once}
        call_forms += [*(CallForm(batch, single) for batch in batches), CallForm(single, single, single=True)]
    return sorted(call_forms, key=lambda form: form.single)


def _convert_sounds(media: Mapping[str, Any], rate: int | None) -> Iterator[dict[str, Any]]:
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


def find_compression(pipe: Any, arguments: Mapping[str, Any]) -> int:
    """Return the H.264 strength of a pipeline's image compression, set by its call or by default; 0 if it has none."""
    if CRF not in inspect.signature(pipe.__call__).parameters:
        return 0
    from diffusers.pipelines.ltx2.utils import resolve_default_image_crf

    crf = arguments.get(CRF)
    return int(resolve_default_image_crf(pipe.text_encoder) if crf is None else crf)


def _compress(value: Any, crf: int) -> Any:
    """Compress an image as LTX-2 does; anything else is returned unchanged."""
    if not crf or not isinstance(value, Image.Image):
        return value
    from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf

    with wrap_errors("LTX-2", "compress an image"):
        return Image.fromarray(apply_image_conditioning_crf(np.array(value.convert("RGB")), crf))


def _repeat(value: Any, number: int) -> Any:
    """Repeat an image, video or sound per sample."""
    if not isinstance(value, Tensor):
        return [value] * number
    return (value if value.ndim == 3 else value[None]).repeat(number, 1, 1)


def repeat_lyrics(takes: Mapping[str, inspect.Parameter], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call; with a list of prompts, the lyrics are repeated for each of them."""
    lyrics = arguments.get(LYRICS, takes[LYRICS].default if LYRICS in takes else None)
    prompts = arguments.get("prompt")
    if not isinstance(lyrics, str) or not isinstance(prompts, list):
        return arguments
    return arguments | {LYRICS: [lyrics] * len(prompts)}


def format_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a pipeline's call in one line, for messages."""

    def shorten(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"tensor{list(value.shape)}"
        text = " ".join(repr(value).split())
        return text if len(text) <= 60 else f"{text[:60]}..."

    return ", ".join(f"{name}={shorten(value)}" for name, value in arguments.items() if name not in INTERNAL)


def serialise_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a pipeline's call with all values of tensors and images, for a fingerprint."""

    def serialise(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {value.tolist()}"
        return f"{value.size} {value.tobytes()!r}" if isinstance(value, Image.Image) else repr(value)

    return ", ".join(f"{name}={serialise(value)}" for name, value in arguments.items() if name not in INTERNAL)


def parse_argument(word: str) -> tuple[str, Any]:
    """Split name=value; the value is parsed as JSON, or else kept as text."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
