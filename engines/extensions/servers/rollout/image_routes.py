"""Endpoints of images in OpenAI's format, with the fields that sglang adds to it.

POST /v1/images/generations    JSON
POST /v1/images/edits          a form: files `image` and `mask`, or `url`, data URLs or files in the server's folders

Images are returned as base64 in `b64_json`; nothing is written to disk, so there are no URLs. Fields without an influence on
samples are ignored (`IGNORED`). Unsupported fields that would change a sample are refused unless they are off. Unknown
fields are refused.
"""

import asyncio
import base64
import io
import json
import re
import time
from collections.abc import Sequence
from email.message import Message
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from fluvial.engines.extensions.servers.asgi import FORM, RequestError, read_body, read_json
from fluvial.engines.extensions.servers.rollout.service import RolloutService
from fluvial.engines.extensions.wire.decode import convert
from fluvial.engines.extensions.wire.request import Id, Positive, Scale, read_request
from fluvial.engines.extensions.wire.response import RolloutSample
from fluvial.models.images import to_image

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
MOST_FIELDS = 64
OFF: tuple[Any, ...] = (None, False, "", "auto", "opaque")
# Unsupported fields of sglang 0.5.23 (openai/protocol.py of its entrypoints, ImageGenerationsRequest).
UNSUPPORTED = (
    *("enhance_prompt", "background", "max_sequence_length", "flow_shift", "enable_teacache", "enable_upscaling"),
    *("upscaling_model_path", "diffusers_kwargs", "progressive_mode", "perf_dump_path", "profile"),
    *("enable_cache_dit", "cache_dit_params"),
)
# Fields of a form, including those of videos.
FILES, MASK = ("image", "image[]", "input_reference", "video_reference"), "mask"
LINKS = ("url", "url[]", "reference_url", "video_url", "video_path")
NUMBERS = (
    *("n", "output_compression", "seed", "guidance_scale", "true_cfg_scale", "num_inference_steps"),
    *("width", "height", "num_frames", "fps", "seconds", "num_outputs_per_prompt"),
)

IGNORED = {
    *("model", "quality", "style", "user", "output_quality", "generator_device"),
    # Parameters of unsupported fields.
    *("upscaling_scale", "num_profiled_timesteps", "profile_all_stages", "progressive_levels", "progressive_delta"),
}


class SamplesRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request for samples of a prompt.

    Args:
        n: number of samples; sample i has the seed `seed` + i, or the i-th of a list of seeds.
        size: "WIDTHxHEIGHT" in pixels; None or "auto" takes the server's. `width` and `height` take precedence.
    """

    prompt: str
    n: Positive = 1
    size: Annotated[str, Meta(pattern=r"^([0-9]{1,6}x[0-9]{1,6}|auto)?$")] | None = None
    width: Positive | None = None
    height: Positive | None = None
    task_type: Literal["T2I", "I2I", "TI2I", "T2V", "I2V", "TI2V", "V2V"] | None = None
    seed: Id | Annotated[list[Id], Meta(min_length=1, max_length=4096)] | None = None
    negative_prompt: str | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    num_inference_steps: Positive | None = None

    @property
    def pixels(self) -> tuple[int | None, int | None]:
        """Width and height; None takes the server's."""
        if (self.width, self.height) == (None, None) and self.size not in (None, "", "auto"):
            width, height = map(int, str(self.size).split("x"))
            return width, height
        return self.width, self.height

    def build_requests(self, media: Sequence[str] = (), mask: str = "", **more: Any) -> list[dict[str, Any]]:
        """Build the rollout requests of the samples, as JSON values.

        Args:
            media, mask: images to edit and mask, in the form of `image_path`.
            more: further fields.

        Raises:
            RequestError: the numbers of seeds and samples differ.
        """
        width, height = self.pixels
        names = ("prompt", "negative_prompt", "guidance_scale", "true_cfg_scale", "num_inference_steps")
        shared = {
            **{name: getattr(self, name) for name in names},
            "width": width,
            "height": height,
            "rollout": False,
            "image_path": [*media, *([mask] if mask else [])] or None,
            "extra_sampling_params": {"fluvial": {"media": [*["image"] * len(media), "mask_image"]} if mask else {}},
            **more,
        }
        if not isinstance(self.seed, list):
            return [{**shared, "seed": self.seed, "num_outputs_per_prompt": self.n}]
        if len(self.seed) != self.n:
            raise RequestError(f"seed has {len(self.seed)} items, expected n, {self.n}")
        return [{**shared, "seed": seed} for seed in self.seed]


class ImagesRequest(SamplesRequest, frozen=True, forbid_unknown_fields=True):
    """Request for images.

    Args:
        output_compression: quality of a JPEG or WebP file, 0 to 100.
    """

    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Meta(ge=0, le=100)] = 95


Parsed = TypeVar("Parsed", bound=SamplesRequest)


def parse_fields(value: dict[str, Any], kind: type[Parsed], unsupported: Sequence[str], most: int) -> Parsed:
    """Parse the fields of a body.

    Args:
        unsupported: fields that this server does not support.
        most: largest number of samples.

    Raises:
        RequestError: an unsupported field is not off, or there are too many samples.
        WireError: a field is wrong or unknown.
    """
    if unknown := [name for name in unsupported if value.get(name) not in OFF]:
        raise RequestError(f"{unknown[0]} is {str(value[unknown[0]])[:40]!r}, which this server does not support: remove it")
    supported = {name: each for name, each in value.items() if name not in IGNORED and name not in unsupported}
    request = convert(supported, kind, lenient=True)
    if request.n > most:
        raise RequestError(f"n is {request.n}, expected at most {most}")
    return request


def build_image_routes(service: RolloutService) -> list[Route]:
    """Build the endpoints of images of a service."""

    async def generate_images(request: Request) -> JSONResponse:
        return await respond(request, await read_json(request, dict[str, Any], most_bytes=service.limits.body))

    async def edit_images(request: Request) -> JSONResponse:
        body = await read_body(request, most_bytes=service.limits.body)
        values, images, mask = await asyncio.to_thread(read_media_form, bytes(body), request.headers["content-type"])
        if values.get("num_frames") == 1:
            del values["num_frames"]
        if not images:
            raise RequestError("the form has no image: expected a file named image, or a url")
        return await respond(request, values, images, mask)

    async def respond(request: Request, value: dict[str, Any], images: Sequence[str] = (), mask: str = "") -> JSONResponse:
        parsed = parse_fields(value, ImagesRequest, UNSUPPORTED, service.limits.request.outputs)
        if parsed.response_format == "url":
            raise RequestError("response_format is url, and this server keeps no files: expected b64_json")
        if len(service.policy.shape) > 3:
            raise RequestError("this endpoint makes images, and the model makes videos: use POST /v1/videos")
        requests = [read_request(each, service.limits.request) for each in parsed.build_requests(images, mask)]
        samples = await service.generate_all(request, requests)
        return JSONResponse(await asyncio.to_thread(_build_answer, parsed, samples))

    return [Route(GENERATIONS, generate_images, methods=["POST"]), Route(EDITS, edit_images, methods=["POST"])]


def read_media_form(body: bytes, content_type: str) -> tuple[dict[str, Any], list[str], str]:
    """Return the values of a form, its files and links, and its mask; empty and false values are left out."""
    values, images, masks = dict[str, Any](), list[str](), list[str]()
    for field in read_form(body, content_type):
        if field.name in (*FILES, MASK):
            data = base64.b64encode(field.data).decode("ascii")
            (masks if field.name == MASK else images).append(f"data:image/png;base64,{data}")
            continue
        text = field.data.decode("utf-8", "replace")
        if field.name in LINKS:
            images.append(text)
        elif text.lower() not in ("", "false"):
            number = field.name in NUMBERS and re.fullmatch(r"-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,20})?", text.strip())
            values[field.name] = json.loads(text) if number else text
    return values, images, masks[0] if masks else ""


class Field(NamedTuple):
    """Field of a form; a file has a file name."""

    name: str
    data: bytes
    file: str | None


def read_form(body: bytes, content_type: str) -> list[Field]:
    """Read the fields of a form (RFC 7578) in their order; RequestError if it is malformed or has over `MOST_FIELDS`."""
    match = re.fullmatch(rf'{FORM};.*?boundary="?([\w\'()+,./:=? -]{{1,70}})"?(;.*)?', content_type.strip(), re.IGNORECASE)
    if match is None:
        raise RequestError(f"the content type is {content_type[:60]!r}, expected {FORM} with a boundary", 415)
    line = b"\r\n--" + match[1].encode()
    if (b"\r\n" + body).count(line) > MOST_FIELDS + 1:
        raise RequestError(f"the form has more than {MOST_FIELDS} fields", 413)
    before, *parts = (b"\r\n" + body).split(line)
    if before.strip() or not parts or not parts[-1].startswith(b"--"):
        raise RequestError("the form is cut off or malformed")
    return [_read_field(part) for part in parts[:-1]]


def _read_field(part: bytes) -> Field:
    head, separator, data = part.partition(b"\r\n\r\n")
    header = Message()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        title, _, value = line.partition(":")
        if title.strip().lower() == "content-disposition":
            header["content-disposition"] = value.strip()
    name, file = (header.get_param(each, header="content-disposition") for each in ("name", "filename"))
    if not separator or not isinstance(name, str):
        raise RequestError("a field of the form has no name")
    return Field(name, data, file if isinstance(file, str) else None)


def _build_answer(request: ImagesRequest, samples: list[RolloutSample]) -> dict[str, Any]:
    return {
        "id": samples[0].request_id,
        "created": int(time.time()),
        "data": [
            {"b64_json": _encode_image(each.generated_output, request), "revised_prompt": request.prompt} for each in samples
        ],
        "inference_time_s": max(sample.inference_time_s or 0.0 for sample in samples),
        "peak_memory_mb": samples[0].peak_memory_mb,
    }


def _encode_image(image: Tensor, request: ImagesRequest) -> str:
    """Encode an image `[C, H, W]` in [0, 1] as the base64 of a file."""
    file, kind = io.BytesIO(), request.output_format.upper()
    to_image(image, width=1).save(file, format=kind, **({} if kind == "PNG" else {"quality": request.output_compression}))
    return base64.b64encode(file.getvalue()).decode("ascii")
