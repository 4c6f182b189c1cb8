"""Rollout servers of the tiny net, in this process."""

import asyncio
import atexit
from typing import Any, NamedTuple

import torch
from helpers import asgi
from helpers import tiny_jobs as tiny
from torch import Tensor, nn

from fluvial.engines.extensions.servers.batching import Batcher
from fluvial.engines.extensions.servers.rollout.image_routes import build_image_routes
from fluvial.engines.extensions.servers.rollout.orders import SampleOrder, ServeLimits
from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy
from fluvial.engines.extensions.servers.rollout.sampling import build_batcher as batches_of
from fluvial.engines.extensions.servers.rollout.served_weights import ServedWeights
from fluvial.engines.extensions.servers.rollout.service import RolloutService, build_application
from fluvial.engines.extensions.servers.rollout.video_routes import build_video_routes
from fluvial.engines.extensions.servers.rollout.weight_routes import WeightRoutes, build_control_routes
from fluvial.engines.extensions.wire.request import RequestLimits
from fluvial.engines.extensions.wire.response import DitTrajectory, RolloutSample, read_response
from fluvial.engines.sampling.generate import NO_GUIDANCE, Guidance
from fluvial.models import DiffusionModel, Prediction

MICRO_BATCH = 3


class Server(NamedTuple):
    policy: ServedPolicy
    batcher: Batcher[SampleOrder, RolloutSample]
    app: Any

    def ask(self, **body: Any) -> asgi.Answer:
        return asyncio.run(asgi.call(self.app, "/rollout/generate", {"prompt": "1", **body}))

    def samples(self, **body: Any) -> list[RolloutSample]:
        found = self.ask(**body)
        assert found.status == 200, found.value
        assert found.headers["content-type"] == "application/msgpack"
        return read_response(found.value)

    def problem(self, **body: Any) -> tuple[int, str]:
        found = self.ask(**body)
        assert set(found.value) == {"detail", "error"}
        assert "\n" not in found.value["detail"]
        return found.status, found.value["detail"]


def policy(
    prediction: Prediction = "velocity",
    *,
    model: DiffusionModel | None = None,
    module: nn.Module | None = None,
    guidance: Guidance = NO_GUIDANCE,
) -> ServedPolicy:
    model = tiny.Tiny(prediction) if model is None else model
    weights = ServedWeights(model.build().eval() if module is None else module, roots=())
    return ServedPolicy(
        "tiny", model, weights, shape=tiny.SHAPE, steps=tiny.STEPS, guidance=guidance, device=torch.device("cpu")
    )


def served(
    of: ServedPolicy | None = None,
    *,
    micro_batch: int = MICRO_BATCH,
    linger: float = 0.0,
    most_waiting: int = 64,
    deadline: float = 60.0,
    key: str = "",
    admin: str = "",
    limits: ServeLimits | None = None,
) -> Server:
    of = policy() if of is None else of
    batcher = batches_of(of, micro_batch=micro_batch, linger=linger, most_waiting=most_waiting)
    atexit.register(batcher.close, wait=10.0)  # a thread within torch would abort the process at its end
    service = RolloutService(of, batcher, limits=limits or ServeLimits(RequestLimits()), deadline=deadline)
    control = build_control_routes(WeightRoutes(of.weights, of.run_between))
    return Server(
        of,
        batcher,
        build_application(
            service, key=key, admin=admin, control=control, more=[*build_image_routes(service), *build_video_routes(service)]
        ),
    )


def trajectory(sample: RolloutSample) -> DitTrajectory:
    assert sample.dit_trajectory is not None
    return sample.dit_trajectory


def log_probs(sample: RolloutSample) -> Tensor:
    assert sample.rollout_log_probs is not None
    return sample.rollout_log_probs


def same(one: RolloutSample, other: RolloutSample) -> bool:
    each = [(sample.generated_output, log_probs(sample), trajectory(sample).latents) for sample in (one, other)]
    return all(map(torch.equal, *each))
