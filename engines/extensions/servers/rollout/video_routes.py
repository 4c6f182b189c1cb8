"""Endpoints of videos in OpenAI's format, with the fields that sglang adds to it.

POST   /v1/videos                JSON, or a form with a file `input_reference` (an image or a video); the answer names a job
GET    /v1/videos                the jobs, the last one first; /v1/videos/ID returns one
GET    /v1/videos/ID/content     MP4 of a completed job; `?variant=1` is its second video
DELETE /v1/videos/ID             removes it

The last `MOST_JOBS` jobs are kept in memory, and no file is written. Unsupported fields that would change a video are
refused unless they are off.
"""

import asyncio
import io
import secrets
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from fluvial.engines.errors import RunError
from fluvial.engines.extensions.servers.asgi import FORM, RequestError, read_body, read_json
from fluvial.engines.extensions.servers.rollout.image_routes import (
    UNSUPPORTED,
    SamplesRequest,
    parse_fields,
    read_media_form,
)
from fluvial.engines.extensions.servers.rollout.orders import build_orders
from fluvial.engines.extensions.servers.rollout.service import RolloutService
from fluvial.engines.extensions.wire.request import Positive, RolloutRequest, read_request

VIDEOS = "/v1/videos"
MOST_JOBS = 16
SECONDS, FPS = 4, 24  # defaults of a request with a size, as in sglang
# Unsupported fields of sglang 0.5.23 (openai/protocol.py of its entrypoints, VideoGenerationsRequest).
UNSUPPORTED_FOR_VIDEOS = (
    *UNSUPPORTED,
    *("guidance_scale_2", "output_compression", "x264_preset", "output_path"),
    *("enable_frame_interpolation", "frame_interpolation_model_path"),
)
LINKED = ("input_reference", "reference_url", "video_path", "video_url")  # images or videos, in a JSON body
NO_EFFECT = ("frame_interpolation_exp", "frame_interpolation_scale")  # parameters of unsupported fields
WRITE = "w"  # mode of PyAV's files, which are binary
VideoJob = dict[str, Any]


class VideosRequest(SamplesRequest, frozen=True, forbid_unknown_fields=True):
    """Request for videos of `num_frames` frames, or else of `seconds` times `fps`."""

    seconds: Positive | None = None
    fps: Positive | None = None
    num_frames: Positive | None = None

    @property
    def frames(self) -> int | None:
        """Number of frames; None takes the server's."""
        has_size = self.pixels != (None, None) or (self.seconds, self.fps) != (None, None)
        if self.num_frames is not None or not has_size:
            return self.num_frames
        return (self.fps or FPS) * (self.seconds or SECONDS)


class VideoJobs:
    """Handlers of the endpoints, with the jobs."""

    def __init__(self, service: RolloutService) -> None:
        self.service = service
        self.jobs, self.files = dict[str, VideoJob](), dict[str, list[bytes]]()
        self.tasks = dict[str, asyncio.Task[None]]()

    async def create(self, request: Request) -> JSONResponse:
        """Start a job, and return it; RequestError if the request is wrong or too many jobs are running."""
        limits, media = self.service.limits, list[str]()
        if (kind := request.headers.get("content-type", "")).lower().startswith(FORM):
            body = await read_body(request, most_bytes=limits.body)
            value, media, mask = await asyncio.to_thread(read_media_form, bytes(body), kind)
            media += [mask] * bool(mask)
        else:
            value = await read_json(request, dict[str, Any], most_bytes=limits.body)
            media = [str(link) for name in LINKED if (link := value.pop(name, None))]
            if str(value.get("seconds")).isdecimal():  # text in OpenAI's requests
                value["seconds"] = int(value["seconds"])
        value = {name: each for name, each in value.items() if name not in NO_EFFECT and each is not None}
        if "num_outputs_per_prompt" in value:
            value["n"] = value.pop("num_outputs_per_prompt")
        parsed = parse_fields(value, VideosRequest, UNSUPPORTED_FOR_VIDEOS, limits.request.outputs)
        if len(self.service.policy.shape) < 4:
            raise RequestError("this endpoint makes videos, and the model makes images: use POST /v1/images/generations")
        if find_spec("av") is None:
            raise RequestError("videos are written by PyAV, which is not installed: pip install 'fluvial[video]'", 501)
        if len(self.tasks) >= MOST_JOBS:
            raise RequestError(f"{MOST_JOBS} videos are being made: try again later", 429, retry_after=10)
        frames, rate = parsed.frames, getattr(self.service.policy.model, "rate", 1)
        if parsed.num_frames is None and frames is not None and rate > 1:
            frames = frames // rate * rate + 1  # as sglang and diffusers round it
        values = parsed.build_requests(media, num_frames=frames, fps=parsed.fps)
        requests = [await asyncio.to_thread(read_request, each, limits.request) for each in values]
        for each in requests:  # raises for a wrong request now, not in the job
            await asyncio.to_thread(build_orders, each, self.service.policy, limits)
        for old in [name for name in self.jobs if name not in self.tasks][: max(len(self.jobs) + 1 - MOST_JOBS, 0)]:
            self.remove(old)
        name, (width, height) = f"video_{secrets.token_hex(16)}", parsed.pixels
        self.jobs[name] = {
            **{"id": name, "object": "video", "model": self.service.policy.name, "status": "queued", "progress": 0},
            **{"size": f"{width}x{height}" if width and height else "", "seconds": str(parsed.seconds or SECONDS)},
            **{"created_at": int(time.time()), "quality": "standard"},
        }
        self.tasks[name] = asyncio.create_task(self._run_job(self.jobs[name], requests, fps=parsed.fps or FPS))
        return JSONResponse(self.jobs[name])

    async def _run_job(self, job: VideoJob, requests: Sequence[RolloutRequest], *, fps: int) -> None:
        try:
            samples = await self.service.generate_all(None, requests)
            files = [await asyncio.to_thread(encode_video, sample.generated_output, fps) for sample in samples]
        except Exception as error:  # also errors of the device: the job fails, and the server continues
            is_known = isinstance(error, RequestError | RunError)
            job |= {"status": "failed", "error": {"message": str(error) if is_known else type(error).__name__}}
        else:
            _, frames, height, width = samples[0].generated_output.shape
            job |= {
                **{"status": "completed", "progress": 100, "completed_at": int(time.time())},
                **{"size": f"{width}x{height}", "seconds": str(round(frames / fps)), "num_outputs": len(files)},
                "inference_time_s": max(sample.inference_time_s or 0.0 for sample in samples),
                "peak_memory_mb": samples[0].peak_memory_mb,
            }
            self.files[job["id"]] = files
        finally:
            self.tasks.pop(job["id"], None)

    async def list(self, request: Request) -> JSONResponse:
        """Return all jobs, the last one first; RequestError if the request has a query."""
        if request.query_params:
            raise RequestError(f"{next(iter(request.query_params))[:40]} is set, but the list is always complete: remove it")
        jobs = [*self.jobs.values()][::-1]
        ends = {"first_id": jobs[0]["id"], "last_id": jobs[-1]["id"]} if jobs else {}
        return JSONResponse({"object": "list", "data": jobs, "has_more": False, **ends})

    async def retrieve(self, request: Request) -> JSONResponse:
        """Return a job."""
        return JSONResponse(self._find(request))

    async def download(self, request: Request) -> Response:
        """Return a video of a job; RequestError if it is not completed, or has no such variant."""
        job, variant = self._find(request), request.query_params.get("variant", "0")
        if job["status"] != "completed":
            raise RequestError(f"the video is {job['status']}", 404)
        files = self.files[job["id"]]
        if not variant.isdecimal() or int(variant) >= len(files):
            raise RequestError(f"variant is {variant[:20]!r}, expected a number below {len(files)}", 404)
        return Response(files[int(variant)], media_type="video/mp4")

    async def delete(self, request: Request) -> JSONResponse:
        """Remove a job; samples that no batch has begun are not generated."""
        job = self._find(request)
        self.remove(job["id"])
        return JSONResponse({**job, "status": "deleted"})

    def remove(self, name: str) -> None:
        """Remove a job and its videos."""
        if (task := self.tasks.pop(name, None)) is not None:
            task.cancel()
        self.jobs.pop(name)
        self.files.pop(name, None)

    def _find(self, request: Request) -> VideoJob:
        if (job := self.jobs.get(request.path_params["video"])) is None:
            raise RequestError("there is no such video", 404)
        return job


def build_video_routes(service: RolloutService) -> list[Route]:
    """Build the endpoints of videos of a service."""
    jobs, one = VideoJobs(service), f"{VIDEOS}/{{video}}"
    return [
        Route(VIDEOS, jobs.create, methods=["POST"]),
        Route(VIDEOS, jobs.list),
        Route(one, jobs.retrieve),
        Route(one, jobs.delete, methods=["DELETE"]),
        Route(f"{one}/content", jobs.download),
    ]


def encode_video(video: Tensor, fps: int) -> bytes:
    """Encode a video `[3, F, H, W]`, in [0, 1] or uint8, as an MP4 file."""
    import av

    file, frames = io.BytesIO(), video if not video.is_floating_point() else (video.clamp(0, 1) * 255).round().byte()
    pixels = frames.expand(3, *frames.shape[1:]).permute(1, 2, 3, 0).contiguous().numpy()
    with av.open(file, WRITE, format="mp4") as container:
        stream = container.add_stream("libx264" if "libx264" in av.codecs_available else "mpeg4", rate=fps)
        stream.height, stream.width = pixels.shape[1:3]
        # yuv420p halves the colour resolution, so it needs an even width and height.
        stream.pix_fmt = "yuv444p" if (stream.height | stream.width) % 2 else "yuv420p"
        for each in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(each, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
