"""The rollout server, with the endpoints of sglang-diffusion that a trainer calls.

POST /rollout/generate            samples of a prompt with their log-probabilities, as msgpack (`engines.wire`)
GET  /health, /health_generate    200 once samples can be made
GET  /v1/models, /v1/model_info   the model, and the version of its weights
and the endpoints of `weight_routes`, which change the weights
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from torch import Tensor

from fluvial.engines.serve import asgi
from fluvial.engines.serve.asgi import RequestError, json_of, until_gone
from fluvial.engines.serve.batching import Batcher
from fluvial.engines.serve.rollout.orders import Ordered, SampleOrder, ServeLimits, orders_of
from fluvial.engines.serve.rollout.policy import Policy
from fluvial.engines.serve.rollout.sampling import Made
from fluvial.engines.wire.request import RolloutRequest, read_request
from fluvial.engines.wire.response import MSGPACK, RolloutSample, write_response
from fluvial.models.device import is_accelerator

GENERATE = "/rollout/generate"
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # sglang's names


class RolloutService:
    """The handlers of the rollout server.

    Args:
        policy: the model.
        batcher: makes the samples.
        limits: largest requests and responses.
        deadline: seconds that a request may take.
    """

    def __init__(self, policy: Policy, batcher: Batcher[SampleOrder, Made], *, limits: ServeLimits, deadline: float) -> None:
        self.policy, self.batcher, self.limits, self.deadline = policy, batcher, limits, deadline

    async def generate(self, request: Request) -> Response:
        """Return the samples of a request.

        Raises:
            RequestError: the request is wrong or too large, too many samples wait, or it took too long.
            RunError: the samples cannot be made.
        """
        value = await json_of(request, most_bytes=self.limits.body)
        asked = read_request(value, self.limits.request)
        ordered = await asyncio.to_thread(orders_of, asked, self.policy, self.limits)
        self.policy.check_version(asked.fluvial.version)
        self.policy.check_resumed()
        future = self.batcher.submit(ordered.orders)
        work = asyncio.wait_for(asyncio.wrap_future(future), self.deadline)
        try:
            samples = await until_gone(request, work)
        except TimeoutError:
            raise RequestError(
                504, f"the samples took more than {self.deadline:g} s: ask for fewer, or serve with a longer deadline"
            ) from None
        body = await asyncio.to_thread(_body, asked, ordered, samples, self.policy)
        return Response(body, media_type=MSGPACK)

    async def health(self, request: Request) -> JSONResponse:
        """Return that the server runs, and what it has made."""
        batcher = self.batcher
        found = {
            "status": "ok",
            "weight_version": self.policy.version,
            "released": self.policy.weights.released,
            "waiting": batcher.waiting,
            "batches": batcher.batches,
            "samples": batcher.rows,
        }
        return JSONResponse(found)

    async def ready(self, request: Request) -> JSONResponse:
        """Return that samples can be made.

        Raises:
            RequestError: the weights are released.
        """
        self.policy.check_resumed()
        return JSONResponse({"status": "ok", "weight_version": self.policy.version})

    async def models(self, request: Request) -> JSONResponse:
        """Return the model in the form of OpenAI's list of models."""
        return JSONResponse({"object": "list", "data": [{"id": self.policy.name, "object": "model", **self._about()}]})

    async def model_info(self, request: Request) -> JSONResponse:
        """Return what is served, and how."""
        policy = self.policy
        found = {
            "model_path": policy.name,
            **self._about(),
            "latent_shape": list(policy.shape),
            "num_inference_steps": policy.steps,
            "guidance_scale": policy.guidance.scale,
            "prediction": policy.model.prediction,
            "micro_batch": self.batcher.size,
            "weight_version": policy.version,
            "takes_options": True,
        }
        return JSONResponse(found)

    def _about(self) -> dict[str, Any]:
        """Return the fields that sglang adds to a model."""
        module, model = self.policy.weights.module, self.policy.model
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        encoders: Any = getattr(model, "dtype", torch.float32)
        return {
            "num_gpus": int(is_accelerator(self.policy.device)),
            "task_type": "T2I",
            "dit_precision": PRECISIONS.get(dtype, str(dtype)),
            "vae_precision": PRECISIONS.get(encoders, str(encoders)),
            "pipeline_name": self.policy.name,
            "pipeline_class": str(getattr(model, "pipeline", type(model).__name__)),
        }


def application(service: RolloutService, *, key: str = "", admin: str = "", control: Sequence[Route] = ()) -> ASGIApp:
    """Return the ASGI application of a service.

    Args:
        service: the handlers.
        key: API key that requests must send; empty asks for none.
        admin: key that requests to the control endpoints must send; empty asks for the API key.
        control: endpoints that change what is served.
    """
    routes = [
        Route(GENERATE, service.generate, methods=["POST"]),
        Route("/health", service.health),
        Route("/health_generate", service.ready),
        Route("/v1/models", service.models),
        Route("/v1/model_info", service.model_info),
        *control,
    ]
    paths = [route.path for route in control]
    return asgi.application(routes, close=service.batcher.close, key=key, admin=admin, control=paths)


def _body(asked: RolloutRequest, ordered: Ordered, samples: Sequence[Made], policy: Policy) -> bytes:
    """Return the body of a response."""
    name = secrets.token_hex(16)
    device = policy.device
    peak = torch.get_device_module(device).max_memory_allocated(device) / 2**20 if is_accelerator(device) else None
    return write_response(
        [
            RolloutSample(
                request_id=name,
                prompt=asked.prompt,
                seed=ordered.seed,
                generated_output=_output(sample.image, asked.rollout_video_dtype),
                rollout_log_probs=sample.log_probs,
                rollout_debug_tensors=sample.debug,
                denoising_env=sample.conditioning,
                dit_trajectory=sample.trajectory,
                inference_time_s=sample.seconds,
                peak_memory_mb=None if asked.suppress_logs else peak,
                weight_version=sample.version,
            )
            for sample in samples
        ]
    )


def _output(image: Tensor, video_dtype: str | None) -> Tensor:
    """Return an image or a video as it is sent; videos are quantised where that is asked for."""
    return (image * 255).round().to(torch.uint8) if video_dtype == "uint8" and image.ndim == 4 else image
