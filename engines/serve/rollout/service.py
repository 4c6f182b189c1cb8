"""The rollout server, with the endpoints of sglang-diffusion that a trainer calls.

POST /rollout/generate            samples of a prompt with their log-probabilities, as msgpack (`engines.wire`)
GET  /health, /health_generate    200 once samples can be made
GET  /v1/models, /v1/model_info   the model, and the version of its weights
and the endpoints of `weight_routes`, which change the weights
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fluvial.engines.serve.asgi import KeyCheck, RequestError, answered, json_of, until_gone
from fluvial.engines.serve.rollout.batching import RolloutBatcher, wrong_version
from fluvial.engines.serve.rollout.orders import Ordered, ServeLimits, orders_of
from fluvial.engines.serve.rollout.policy import Policy
from fluvial.engines.serve.rollout.sampling import Made
from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.request import RolloutRequest, read_request
from fluvial.engines.wire.response import MSGPACK, RolloutSample, write_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    Endpoint = Callable[[Request], Awaitable[Response]]

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

    def __init__(self, policy: Policy, batcher: RolloutBatcher, *, limits: ServeLimits, deadline: float) -> None:
        self.policy, self.batcher, self.limits, self.deadline = policy, batcher, limits, deadline

    async def generate(self, request: "Request") -> "Response":
        """Return the samples of a request.

        Raises:
            RequestError: the request is wrong or too large, too many samples wait, or it took too long.
            RunError: the samples cannot be made.
        """
        from starlette.responses import Response

        value = await json_of(request, most_bytes=self.limits.body)
        try:
            asked = read_request(value, self.limits.request)
            ordered = await asyncio.to_thread(orders_of, asked, self.policy, self.limits)
        except WireError as error:
            raise RequestError(400, str(error)) from None
        if asked.fluvial.version not in (None, self.policy.version):
            raise wrong_version(asked.fluvial.version, self.policy.version)
        if self.policy.weights.released:
            raise RequestError(503, "the weights are released: POST /resume_memory_occupation", retry_after=1)
        future = self.batcher.submit(ordered, deadline=self.deadline)
        work = asyncio.wait_for(asyncio.wrap_future(future), self.deadline)
        try:
            samples = await until_gone(request, work)
        except TimeoutError:
            raise RequestError(
                504, f"the samples took more than {self.deadline:g} s: ask for fewer, or serve with a longer deadline"
            ) from None
        body = await asyncio.to_thread(_body, asked, ordered, samples, self.policy)
        return Response(body, media_type=MSGPACK)

    async def health(self, request: "Request") -> dict[str, Any]:
        """Return that the server runs, and what it has made."""
        batcher = self.batcher
        return {
            "status": "ok", "weight_version": self.policy.version, "released": self.policy.weights.released,
            "waiting": batcher.waiting, "batches": batcher.batches, "samples": batcher.rows,
        }  # fmt: skip

    async def ready(self, request: "Request") -> dict[str, Any]:
        """Return that samples can be made.

        Raises:
            RequestError: the weights are released.
        """
        if self.policy.weights.released:
            raise RequestError(503, "the weights are released: POST /resume_memory_occupation", retry_after=1)
        return {"status": "ok", "weight_version": self.policy.version}

    async def models(self, request: "Request") -> dict[str, Any]:
        """Return the model in the form of OpenAI's list of models."""
        return {"object": "list", "data": [{"id": self.policy.name, "object": "model", **self._about()}]}

    async def model_info(self, request: "Request") -> dict[str, Any]:
        """Return what is served, and how."""
        policy = self.policy
        return {
            "model_path": policy.name, **self._about(), "latent_shape": list(policy.shape),
            "num_inference_steps": policy.steps, "guidance_scale": policy.guidance.scale,
            "prediction": policy.model.prediction, "micro_batch": self.batcher.micro_batch,
            "weight_version": policy.version,
        }  # fmt: skip

    def _about(self) -> dict[str, Any]:
        """Return the fields that sglang adds to a model."""
        module, model = self.policy.weights.module, self.policy.model
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        encoders: Any = getattr(model, "dtype", torch.float32)
        return {
            "num_gpus": int(self.policy.device.type == "cuda"), "task_type": "T2I",
            "dit_precision": PRECISIONS.get(dtype, str(dtype)), "vae_precision": PRECISIONS.get(encoders, str(encoders)),
            "pipeline_name": self.policy.name, "pipeline_class": str(getattr(model, "pipeline", type(model).__name__)),
        }  # fmt: skip


def application(
    service: RolloutService, *, key: str = "", admin: str = "", control: Mapping[tuple[str, str], "Endpoint"] | None = None
) -> "ASGIApp":
    """Return the ASGI application of a service.

    Args:
        service: the handlers.
        key: API key that requests must send; empty asks for none.
        admin: key that requests to the control endpoints must send; empty asks for the API key.
        control: endpoints that change what is served, by method and path.
    """
    from starlette.applications import Starlette
    from starlette.routing import Route

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.batcher.close()

    routes = [
        Route(GENERATE, answered(service.generate), methods=["POST"]),
        Route("/health", answered(service.health)),
        Route("/health_generate", answered(service.ready)),
        Route("/v1/models", answered(service.models)),
        Route("/v1/model_info", answered(service.model_info)),
        *(Route(path, endpoint, methods=[method]) for (method, path), endpoint in (control or {}).items()),
    ]
    paths = frozenset(path for _, path in control or {})
    return KeyCheck(Starlette(routes=routes, lifespan=lifespan), key, admin=admin, control=paths)


def _body(asked: RolloutRequest, ordered: Ordered, samples: Sequence[Made], policy: Policy) -> bytes:
    """Return the body of a response."""
    name = secrets.token_hex(16)
    peak = torch.cuda.max_memory_allocated(policy.device) / 2**20 if policy.device.type == "cuda" else None
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
