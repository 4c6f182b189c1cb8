"""Handlers of the rollout server, with the endpoints of sglang-diffusion that a trainer calls.

POST /rollout/generate            samples of a prompt with their log-probabilities, as msgpack (`engines.extensions.wire`)
GET  /health, /liveness           200 while the server runs
GET  /health_generate             200 while the weights are not released
GET  /v1/models, /v1/model_info   the model, and the version of its weights
GET  /model_info, /server_info    the same, for gateways

`image_routes` and `video_routes` have further endpoints for samples, and `weight_routes` those that change the weights.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fluvial.engines.extensions.servers import asgi
from fluvial.engines.extensions.servers.asgi import RequestError, read_json, run_until_disconnect
from fluvial.engines.extensions.servers.batching import Batcher
from fluvial.engines.extensions.servers.rollout.orders import SampleOrder, ServeLimits, build_orders
from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy
from fluvial.engines.extensions.wire.request import RolloutRequest, read_request
from fluvial.engines.extensions.wire.response import MSGPACK, RolloutSample, write_response
from fluvial.engines.extensions.wire.weight_buckets import PRECISIONS
from fluvial.models.device import is_accelerator
from fluvial.models.replay.media import list_arguments

GENERATE = "/rollout/generate"
NAMES = {dtype: name for name, dtype in PRECISIONS.items()}


class RolloutService:
    """Handlers of the rollout server."""

    def __init__(
        self, policy: ServedPolicy, batcher: Batcher[SampleOrder, RolloutSample], *, limits: ServeLimits, deadline: float
    ) -> None:
        self.policy, self.batcher, self.limits, self.deadline = policy, batcher, limits, deadline
        self.started = int(time.time())

    async def generate(self, request: Request) -> Response:
        """Return the samples of a request.

        Raises:
            RequestError: the request is wrong or too large, too many samples wait, or it took too long.
            RunError: sampling failed.
        """
        value = await read_json(request, dict[str, Any], most_bytes=self.limits.body)
        rollout_request = await asyncio.to_thread(read_request, value, self.limits.request)
        samples = await self.generate_all(request, [rollout_request])
        return Response(await asyncio.to_thread(write_response, samples), media_type=MSGPACK)

    async def generate_all(self, request: Request | None, rollout_requests: Sequence[RolloutRequest]) -> list[RolloutSample]:
        """Return the samples of rollout requests, in their order.

        Args:
            request: HTTP request that waits for the samples, whose body has been read; work ends when its client
                disconnects.

        Raises:
            RequestError: a request is wrong or too large, too many samples wait, or it took too long.
            RunError: sampling failed.
        """
        name, seeds, orders = secrets.token_hex(16), list[int | None](), list[SampleOrder]()
        for each in rollout_requests:
            seed, new_orders = await asyncio.to_thread(build_orders, each, self.policy, self.limits)
            self.policy.check_version(each.fluvial.version)
            seeds += [seed] * len(new_orders)
            orders += new_orders
        self.policy.check_resumed()
        work = asyncio.wait_for(asyncio.wrap_future(self.batcher.submit(orders)), self.deadline)
        try:
            samples = await (work if request is None else run_until_disconnect(request, work))
        except TimeoutError:
            raise RequestError(
                f"the samples took more than {self.deadline:g} s: request fewer, or serve with a longer deadline", 504
            ) from None
        peak = None
        if is_accelerator(self.policy.device) and not rollout_requests[0].suppress_logs:
            peak = torch.get_device_module(self.policy.device).max_memory_allocated(self.policy.device) / 2**20
        return [
            replace(sample, request_id=name, seed=seed, peak_memory_mb=peak)
            for sample, seed in zip(samples, seeds, strict=True)
        ]

    async def report_health(self, request: Request) -> JSONResponse:
        """Report that the server runs, and its counters."""
        batcher = self.batcher
        answer = {
            "status": "ok",
            "weight_version": self.policy.version,
            "released": self.policy.weights.released,
            "waiting": batcher.waiting,
            "batches": batcher.batches,
            "samples": batcher.rows,
        }
        return JSONResponse(answer)

    async def report_readiness(self, request: Request) -> JSONResponse:
        """Report that the server can sample; RequestError if the weights are released."""
        self.policy.check_resumed()
        return JSONResponse({"status": "ok", "weight_version": self.policy.version})

    async def list_models(self, request: Request) -> JSONResponse:
        """Return the model in OpenAI's form of a list of models."""
        return JSONResponse({"object": "list", "data": [self._build_card()]})

    async def show_model(self, request: Request) -> JSONResponse:
        """Return the model by its name; RequestError if it has another name."""
        name = request.path_params["model"]
        if name != self.policy.name:
            raise RequestError(f"there is no model {name[:80]!r}, expected {self.policy.name}", 404)
        return JSONResponse(self._build_card())

    async def show_info(self, request: Request) -> JSONResponse:
        """Describe the served model and its settings."""
        policy = self.policy
        answer = {
            "model_path": policy.name,
            "served_model_name": policy.name,
            "is_generation": True,
            "model_type": "diffusion",
            "architectures": [self._describe_model()["pipeline_class"]],
            "has_image_understanding": bool(list_arguments(policy.model)),
            "has_audio_understanding": False,
            "output_types": ["VIDEO" if self._makes_videos else "IMAGE"],
            "is_image_gen": not self._makes_videos,
            "tp_size": 1,
            "dp_size": 1,
            "version": version("fluvial"),
            **self._describe_model(),
            "latent_shape": list(policy.shape),
            "num_inference_steps": policy.steps,
            "guidance_scale": policy.guidance.scale,
            "prediction": policy.model.prediction,
            "micro_batch": self.batcher.size,
            "media": list(list_arguments(policy.model)),
            "weight_version": policy.version,
            "takes_options": True,
        }
        return JSONResponse(answer)

    @property
    def _makes_videos(self) -> bool:
        return len(self.policy.shape) > 3

    def _build_card(self) -> dict[str, Any]:
        """Describe the model in OpenAI's form."""
        name = self.policy.name
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "fluvial",
            "root": name,
            "parent": None,
            "max_model_len": None,
            **self._describe_model(),
        }

    def _describe_model(self) -> dict[str, Any]:
        """Return the fields that sglang adds to a model."""
        module, model = self.policy.weights.module, self.policy.model
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        encoders: Any = getattr(model, "dtype", torch.float32)
        task = "T2V" if self._makes_videos else "T2I"
        return {
            "num_gpus": int(is_accelerator(self.policy.device)),
            "task_type": task,
            "supported_task_types": [task],
            "dit_precision": NAMES.get(dtype, str(dtype)),
            "vae_precision": NAMES.get(encoders, str(encoders)),
            "pipeline_name": self.policy.name,
            "pipeline_class": str(getattr(model, "pipeline", type(model).__name__)),
        }


def build_application(
    service: RolloutService, *, key: str = "", admin: str = "", control: Sequence[Route] = (), more: Sequence[Route] = ()
) -> ASGIApp:
    """Build the ASGI application of a service.

    Args:
        key: API key that requests must send; empty requires none.
        admin: key that requests to the control endpoints must send; empty requires the API key.
        control: endpoints that change the weights.
        more: further endpoints for samples.
    """
    routes = [
        Route(GENERATE, service.generate, methods=["POST"]),
        Route("/health", service.report_health),
        Route("/health_generate", service.report_readiness),
        Route("/v1/models", service.list_models),
        Route("/v1/models/{model:path}", service.show_model),
        *(Route(path, service.show_info) for path in ("/v1/model_info", "/model_info", "/server_info")),
        Route("/liveness", service.report_health),
        *more,
        *control,
    ]
    paths = [route.path for route in control]
    return asgi.build_application(routes, close=service.batcher.close, key=key, admin=admin, control=paths)
