"""Translation of requests to orders of single samples, which the batcher groups by their `BatchSpec`.

A prompt's images, videos and sounds are files in the server's folders, or data URLs.
"""

import base64
import binascii
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from stat import S_ISREG
from typing import NamedTuple

import torch
from msgspec.structs import replace as replace_fields

from fluvial.core.gaussian import Form
from fluvial.core.random import Key, key
from fluvial.core.table import step_coefficients
from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import convert_errors
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy
from fluvial.engines.extensions.wire.request import (
    ExtraParams,
    FluvialOptions,
    RequestLimits,
    RolloutRequest,
    check_steps,
    resolve_guidance,
)
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.tail import Tail
from fluvial.models.images import open_image
from fluvial.models.padding import trims_padding
from fluvial.models.replay.kinds import SOUND, VIDEO, check_pixels
from fluvial.models.replay.media import MediaPrompt, TextPrompt, find_list_arguments, list_arguments

MOST_NAME = 4096  # characters
FORMATS = ("PNG", "JPEG", "WEBP")  # decoders for untrusted input


def read_prompt(request: RolloutRequest, policy: ServedPolicy, *, most_bytes: int, most_pixels: int) -> Prompt:
    """Read the prompt of a request, with the images for the pipeline.

    Args:
        most_bytes: largest file of an image.
        most_pixels: largest image or video. An image's size is read from its header, before anything is decoded.

    Raises:
        RequestError: the images do not fit the recorded pipeline, or one cannot be read.
    """
    expected, images = list_arguments(policy.model), request.image_path or ()
    names = request.fluvial.media if request.fluvial.media is not None else expected
    if images and not expected:
        raise RequestError(
            "image_path is set, and this server samples from prompts without images: leave it out, or serve a pipeline "
            "that takes images with --prompts, a file of prompts with images"
        )
    if request.fluvial.media is None and len(expected) == 1:  # all images belong to the only argument
        names = expected * len(images)
    if len(images) != len(names) or {*names} != {*expected}:
        content = f"{len(images)} images" + (f" ({', '.join(names)})" if request.fluvial.media else "")
        raise RequestError(f"image_path holds {content}, expected {len(expected)}: {', '.join(expected) or 'none'}")
    lists = find_list_arguments(policy.model)
    for name in names:
        if (count := names.count(name)) > 1 and name not in lists:
            raise RequestError(f"image_path holds {count} images for {name}, expected one")
    media: dict[str, bytes | tuple[bytes, ...]] = {}
    for name, image in zip(names, images, strict=True):
        file = check_file(_read_file(image, policy, most_bytes), name, most_pixels)
        media[name] = (*media.get(name, ()), file) if name in lists else file
    return Prompt(request.prompt, media=media)


def _read_file(image: str, policy: ServedPolicy, most_bytes: int) -> bytes:
    if image.startswith("data:"):
        head, _, data = image.partition(",")
        if not head.endswith(";base64"):
            raise RequestError(f"image_path holds {head[:40]!r}, expected data:image/png;base64,...")
        try:
            content = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError("image_path holds a data URL whose base64 cannot be read") from None
    else:
        if len(image) > MOST_NAME:
            raise RequestError(f"image_path holds a name of {len(image)} characters, expected at most {MOST_NAME}")
        path = policy.weights.resolve_path(image)
        if not S_ISREG(path.stat().st_mode):
            raise RequestError(f"image_path holds {image!r}, which is not a file")
        if (size := path.stat().st_size) > most_bytes:
            raise RequestError(f"{image!r} has {size} bytes, expected at most {most_bytes}", 413)
        with convert_errors(RequestError, OSError, says=f"{str(path)!r} cannot be read"):
            content = path.read_bytes()
    if len(content) > most_bytes:
        raise RequestError(f"an image of image_path has {len(content)} bytes, expected at most {most_bytes}", 413)
    return content


def check_file(file: bytes, name: str, most_pixels: int) -> bytes:
    """Check that a file is an image or a video of at most `most_pixels`, or a WAV file, as its argument needs; return it."""
    if name in SOUND.arguments and not file.startswith(b"RIFF"):
        raise RequestError(f"image_path: {name} cannot be read as WAV")
    if name in SOUND.arguments:
        return file
    if name in VIDEO.arguments:
        with convert_errors(RequestError, ValueError, says=f"image_path: {name}"):
            check_pixels(file, most_pixels)
        return file
    try:
        with open_image(file, formats=FORMATS) as image:
            width, height = image.size
    except ValueError:
        raise RequestError(f"image_path: {name} cannot be read as {', '.join(FORMATS)}") from None
    if width * height > most_pixels:
        raise RequestError(f"image_path: {name} has {width} x {height} pixels, expected at most {most_pixels}", 413)
    return file


@dataclass(frozen=True)
class ServeLimits:
    """Largest requests and responses.

    Args:
        request: limits of a request's fields.
        body: bytes of a request's body.
        response: bytes of the tensors of a response, counted before they are computed.
    """

    request: RequestLimits
    body: int = 16_000_000
    response: int = 2_000_000_000


@dataclass(frozen=True)
class BatchSpec:
    """Settings that the samples of one batch share.

    Args:
        options: fluvial's own fields of the request, without those of single samples.
        sampler: name of the sampler of the stochastic steps; None has no such steps.
        eta: scale of the noise.
        window: the stochastic steps; None if each sample has its own window.
        window_size: number of stochastic steps.
        record: whether log-probabilities are recorded.
        shared: prompt and key of the samples that share the first steps.
    """

    shape: tuple[int, ...]
    steps: int
    guidance: Guidance
    form: Form
    options: FluvialOptions
    sampler: str | None = None
    eta: float = 0.0
    window: tuple[int, ...] | None = ()
    window_size: int = 0
    record: bool = False
    shared: tuple[TextPrompt, Key] | None = None


class SampleOrder(NamedTuple):
    """Single sample to generate."""

    spec: BatchSpec
    prompt: Prompt
    request: RolloutRequest
    key: Key
    id: int
    initial_id: int
    window: tuple[int, ...]  # its stochastic steps
    boundaries: tuple[int, ...]  # boundaries of steps whose latents are returned


OPTIONS = (BatchSpec, Guidance, Tail, RolloutRequest, ExtraParams, FluvialOptions)
CLASSES = (SampleOrder, Key, Prompt, MediaPrompt, *OPTIONS)  # classes within orders, for `on_all_ranks`


def build_orders(request: RolloutRequest, policy: ServedPolicy, limits: ServeLimits) -> tuple[int | None, list[SampleOrder]]:
    """Return the seed of a request, which may be None if its noise comes from a key, and its orders.

    Raises:
        RequestError: the model does not support the request, or the response would be too large.
        WireError: the request names steps outside its schedule.
    """
    fluvial_options, guidance = request.fluvial, resolve_guidance(request, policy.guidance)
    _check_texts(request, guidance, policy)
    prompt = read_prompt(request, policy, most_bytes=limits.body, most_pixels=limits.request.pixels)
    policy.check_guidance(guidance)
    policy.check_rate(request.fps)
    shape = policy.latent_shape(request.height, request.width, request.num_frames)
    steps = request.num_inference_steps or policy.steps
    check_steps(request, steps)
    with convert_errors(RequestError, ValueError):
        schedule = policy.schedule(steps, shape)
    # Without fields of single samples, and fields that the spec holds in another form.
    options = replace_fields(
        fluvial_options, **dict.fromkeys(("key", "ids", "initial_ids", "windows", "sampler", "form", "version", "media"))
    )
    spec = BatchSpec(
        shape, steps, guidance, request.form, replace_fields(options, debug=(), recorded_only=False, final=True)
    )
    first = 0 if fluvial_options.prefix is None else fluvial_options.prefix[0]
    if request.rollout and request.sampler != "ode":
        sampler = policy.bind_sampler(request.sampler, request.rollout_noise_level, schedule)
        positive = (step_coefficients(sampler, schedule.levels).std > 0).reshape(steps, -1).all(1).tolist()
        noisy = {step for step in range(steps) if request.form == "unscaled" or positive[step]}
        windows = _list_windows(request, steps, first)
        size = len(windows[0])
        has_windows = fluvial_options.windows is not None
        if has_windows and (size == 0 or not noisy.issuperset(step for window in windows for step in window)):
            raise RequestError(
                "windows are empty, or hold a step that takes no noise: expected stochastic steps for each sample"
            )
        if size:
            spec = replace(
                spec,
                sampler=request.sampler,
                eta=request.rollout_noise_level,
                window=None if has_windows else windows[0],
                window_size=size,
                record=not noisy.isdisjoint(windows[0]),
            )
    else:
        windows = [()] * request.outputs
        if fluvial_options.solver == "sa_solver":
            spec = replace(spec, eta=request.rollout_noise_level)
    _check_parts(request, spec, windows, policy)
    keys, ids, seed = _choose_noise(request)
    if fluvial_options.prefix is not None:
        spec = replace(spec, shared=(prompt.model_input, keys[0]))
    initial = ids if fluvial_options.initial_ids is None else fluvial_options.initial_ids
    traced = request.rollout and request.rollout_return_dit_trajectory
    orders = [
        SampleOrder(
            spec,
            prompt,
            request,
            keys[index],
            ids[index],
            initial[index],
            windows[index],
            _choose_boundaries(request, spec, windows[index]) if traced else (),
        )
        for index in range(request.outputs)
    ]
    _check_size(orders, limits)
    return seed, orders


def _check_texts(request: RolloutRequest, guidance: Guidance, policy: ServedPolicy) -> None:
    """Raise RequestError for prompts that the model cannot encode, and for an unsupported `text_tokens`."""
    texts = {"prompt": request.prompt}
    if guidance.negative and guidance.is_guided(policy.model):
        texts["negative_prompt"] = guidance.negative
    for field, text in texts.items():
        with convert_errors(RequestError, ValueError, says=f"{field}"):
            policy.model.check_prompt(text)
    tokens, most = request.fluvial.text_tokens, getattr(policy.model, "text_tokens", 0)
    if tokens is not None and (not trims_padding(policy.model) or tokens > most):
        raise RequestError(f"text_tokens is {tokens}, expected at most {most}, or null for a model that keeps its padding")


def _list_windows(request: RolloutRequest, steps: int, first: int) -> list[tuple[int, ...]]:
    """List the stochastic steps of each sample."""
    if request.fluvial.windows is not None:
        return list(request.fluvial.windows)
    shared = request.rollout_sde_step_indices
    return [tuple(range(first, steps)) if shared is None else shared] * request.outputs


def _check_parts(request: RolloutRequest, spec: BatchSpec, windows: Sequence[tuple[int, ...]], policy: ServedPolicy) -> None:
    """Raise RequestError for prefix, window, `after` and debug tensors that contradict each other."""
    options, stochastic = request.fluvial, [step for window in windows for step in window]
    if options.prefix is not None and (not stochastic or min(stochastic) < options.prefix[0]):
        raise RequestError(f"prefix has {options.prefix[0]} steps, expected stochastic steps after it, and none within")
    if options.after != Tail() and (spec.window is None or not stochastic or policy.model.prediction != "velocity"):
        raise RequestError("after is set, expected one window for all samples, and a model that predicts a velocity")
    if request.debug and len(_list_known_boundaries(spec)) < spec.steps + 1:
        raise RequestError("prefix or after is set, so not all steps are computed: set rollout_debug_mode false")


def _list_known_boundaries(spec: BatchSpec) -> list[int]:
    """List the step boundaries at which the latents of a batch are known."""
    first = 0 if spec.options.prefix is None else spec.options.prefix[0]
    if spec.options.after == Tail() or spec.window is None:
        return list(range(first, spec.steps + 1))
    return [*range(first, min(max(spec.window) + 2, spec.steps)), spec.steps]


def _choose_boundaries(request: RolloutRequest, spec: BatchSpec, window: tuple[int, ...]) -> tuple[int, ...]:
    """Return the boundaries whose latents are returned; RequestError if one of them is unknown."""
    if request.fluvial.recorded_only:
        last = {spec.steps} if request.fluvial.final else set[int]()
        return tuple(sorted({*window, *(step + 1 for step in window)} | last))
    indices = request.rollout_return_step_indices
    boundaries = tuple(range(spec.steps + 1)) if indices is None else indices
    if missing := sorted(set(boundaries) - set(_list_known_boundaries(spec))):
        raise RequestError(
            f"latents at boundary {missing[0]} are requested, but unknown because prefix or after is set: set "
            "rollout_return_step_indices, or recorded_only"
        )
    return boundaries


def _choose_noise(request: RolloutRequest) -> tuple[list[Key], tuple[int, ...], int | None]:
    """Return key and id of each sample's noise, and the seed, which is drawn if there is neither key nor seed."""
    options = request.fluvial
    if options.key is not None and options.ids is not None:
        return [Key(*options.key)] * request.outputs, options.ids, request.seed
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    return [key(seed + index) for index in range(request.outputs)], (0,) * request.outputs, seed


def _check_size(orders: Sequence[SampleOrder], limits: ServeLimits) -> None:
    """Raise RequestError if the tensors of the response, without images, take too many bytes."""
    spec, debug = orders[0].spec, len(orders[0].request.debug)
    numbers = sum(len(order.boundaries) + debug * spec.steps for order in orders)
    size = 4 * math.prod(spec.shape) * numbers
    if size > limits.response:
        raise RequestError(
            f"the response would have {size / 1e6:.0f} MB, expected at most {limits.response / 1e6:.0f}: request fewer "
            "samples, set rollout_return_step_indices, or rollout_debug_mode false",
            413,
        )


def stack_keys(keys: Sequence[Key], device: torch.device) -> Key:
    """Stack keys to tensors with one key per sample."""
    low, high = zip(*keys, strict=True)
    return Key(torch.tensor(low, device=device), torch.tensor(high, device=device))
