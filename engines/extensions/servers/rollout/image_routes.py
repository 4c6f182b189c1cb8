"""POST /v1/images/generations: images of a prompt in the format of OpenAI, with the fields that sglang adds to it.

Images come back as base64 in `b64_json`; nothing is written to disk, so there are no URLs. Fields that change no sample here
are ignored (`IGNORED`). Fields that would change one, and that this server lacks, are refused unless they are off, and
unknown fields are refused.
"""

import asyncio
import base64
import io
import time
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from fluvial.engines.extensions.servers.asgi import RequestError, json_of
from fluvial.engines.extensions.servers.rollout.service import RolloutService
from fluvial.engines.extensions.wire.decode import convert
from fluvial.engines.extensions.wire.request import Id, Positive, Scale, read_request
from fluvial.engines.extensions.wire.response import RolloutSample
from fluvial.models.images import as_image

GENERATIONS = "/v1/images/generations"
OFF: tuple[Any, ...] = (None, False, "", "auto", "opaque")
# Fields of sglang 0.5.23 that this server lacks (openai/protocol.py of its entrypoints, ImageGenerationsRequest).
UNSUPPORTED = (
    "enhance_prompt",
    "background",
    "max_sequence_length",
    "flow_shift",
    "enable_teacache",
    "enable_upscaling",
    "upscaling_model_path",
    "diffusers_kwargs",
    "progressive_mode",
    "perf_dump_path",
    "profile",
)

IGNORED = {
    *("model", "quality", "style", "user", "output_quality", "generator_device"),
    # Numbers of what is refused above.
    *("upscaling_scale", "num_profiled_timesteps", "profile_all_stages", "progressive_levels", "progressive_delta"),
}


class ImagesRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Images to make.

    Args:
        n: number of images; image i has the seed `seed` + i, or the i-th of a list of seeds.
        size: "WIDTHxHEIGHT" in pixels; without it, or with auto, the server's own. `width` and `height` go before it.
        output_compression: quality of a JPEG or WebP file, 0 to 100.
    """

    prompt: str
    n: Positive = 1
    size: Annotated[str, Meta(pattern=r"^([0-9]{1,6}x[0-9]{1,6}|auto)$")] | None = None
    width: Positive | None = None
    height: Positive | None = None
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Meta(ge=0, le=100)] = 95
    task_type: Literal["T2I"] | None = None
    seed: Id | Annotated[list[Id], Meta(min_length=1, max_length=4096)] | None = None
    negative_prompt: str | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    num_inference_steps: Positive | None = None

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests of a rollout that make the images, as JSON values.

        Raises:
            RequestError: there is another number of seeds than of images.
        """
        width, height = self.width, self.height
        if (width, height) == (None, None) and self.size not in (None, "auto"):
            width, height = map(int, str(self.size).split("x"))
        names = ("prompt", "negative_prompt", "guidance_scale", "true_cfg_scale", "num_inference_steps")
        shared = {
            **{name: getattr(self, name) for name in names},
            "width": width,
            "height": height,
            "rollout": False,
            "extra_sampling_params": {"fluvial": {}},
        }
        if not isinstance(self.seed, list):
            return [{**shared, "seed": self.seed, "num_outputs_per_prompt": self.n}]
        if len(self.seed) != self.n:
            raise RequestError(f"seed has {len(self.seed)} items, expected n, {self.n}")
        return [{**shared, "seed": seed} for seed in self.seed]


def image_routes(service: RolloutService) -> list[Route]:
    """Return the endpoint.

    Args:
        service: service that makes the samples.
    """

    async def generations(request: Request) -> JSONResponse:
        value = await json_of(request, dict[str, Any], most_bytes=service.limits.body)
        if found := [name for name in UNSUPPORTED if value.get(name) not in OFF]:
            raise RequestError(f"{found[0]} is {str(value[found[0]])[:40]!r}, which this server lacks: leave it out")
        read = {name: each for name, each in value.items() if name not in IGNORED and name not in UNSUPPORTED}
        asked = convert(read, ImagesRequest, lenient=True)
        if asked.response_format == "url":
            raise RequestError("response_format is url, and this server keeps no files: expected b64_json")
        if len(service.policy.shape) > 3:
            raise RequestError(f"the model makes videos, which {GENERATIONS} does not: POST /rollout/generate")
        if asked.n > service.limits.request.outputs:
            raise RequestError(f"n is {asked.n}, expected at most {service.limits.request.outputs}")
        wanted = [read_request(each, service.limits.request) for each in asked.requests()]
        return JSONResponse(await asyncio.to_thread(_answer, asked, await service.generate_all(request, wanted)))

    return [Route(GENERATIONS, generations, methods=["POST"])]


def _answer(asked: ImagesRequest, samples: list[RolloutSample]) -> dict[str, Any]:
    """Return the response to a request."""
    return {
        "id": samples[0].request_id,
        "created": int(time.time()),
        "data": [{"b64_json": _encode(each.generated_output, asked), "revised_prompt": asked.prompt} for each in samples],
        "inference_time_s": max(sample.inference_time_s or 0.0 for sample in samples),
        "peak_memory_mb": samples[0].peak_memory_mb,
    }


def _encode(image: Tensor, asked: ImagesRequest) -> str:
    """Return an image `[C, H, W]` in [0, 1] as the base64 of a file."""
    file, kind = io.BytesIO(), asked.output_format.upper()
    as_image(image, width=1).save(file, format=kind, **({} if kind == "PNG" else {"quality": asked.output_compression}))
    return base64.b64encode(file.getvalue()).decode("ascii")
