"""A rollout server in this process over the tiny job's network, which can be told to fail."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from helpers import asgi, rollout_servers
from helpers import tiny_jobs as tiny
from torch import nn

from fluvial.core.random import key
from fluvial.engines.engine.world import World
from fluvial.engines.extensions.servers.rollout.service import GENERATE
from fluvial.engines.extensions.wire.request import RolloutRequest, write_request
from fluvial.engines.extensions.wire.response import RolloutSample, read_response, write_response
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.batch import RolloutSpec
from fluvial.engines.sampling.config import ReadingConfig

MICRO_BATCH = 4
Change = Callable[[list[RolloutSample]], Any]  # of a reply: samples, or the bytes of a body


class FakeRollouts:
    """Handler of a rollout server, as `fake_servers.loopback` takes it: the application of `fluvial serve`.

    Args:
        module: its network.
        kind: fluvial, which knows keys and versions, or sglang.
    """

    def __init__(self, module: nn.Module, kind: str = "fluvial") -> None:
        self.kind = kind
        self.server = rollout_servers.served(rollout_servers.policy(module=module), micro_batch=MICRO_BATCH)
        self.requests: list[dict[str, Any]] = []
        self.faults: list[Any] = []  # of the next requests: a function of the handler, a `Change`, or None
        self.is_ready, self.filled = True, MICRO_BATCH

    @property
    def module(self) -> nn.Module:
        return self.server.policy.weights.module

    @module.setter
    def module(self, module: nn.Module) -> None:
        self.server.policy.weights.module = module

    @property
    def version(self) -> int:
        return self.server.policy.version

    @version.setter
    def version(self, version: int) -> None:
        self.server.policy.weights.version = version

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        if handler.path != GENERATE:
            about = asyncio.run(asgi.call(self.server.app, "/v1/model_info")).value | {"micro_batch": self.filled}
            about = about if self.kind == "fluvial" else {"model_path": about["model_path"]}
            respond(handler, json.dumps(about).encode(), 200 if self.is_ready else 503)
            return
        self.requests.append(json.loads(body))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Fault):
            fault.act(handler)
            return
        answer = asyncio.run(asgi.call(self.server.app, GENERATE, body=body))
        if answer.status != 200:
            respond(handler, json.dumps(answer.value).encode(), answer.status)
            return
        samples = self._read(answer)
        reply = samples if fault is None else fault(samples)
        respond(handler, reply if isinstance(reply, bytes) else write_response(reply), media="application/msgpack")

    def samples(self, request: RolloutRequest) -> list[RolloutSample]:
        return self._read(asyncio.run(asgi.call(self.server.app, GENERATE, write_request(request))))

    def _read(self, answer: asgi.Answer) -> list[RolloutSample]:
        """Return the samples of a reply; those of sglang name neither their weights nor the boundaries of their latents."""
        samples = read_response(answer.value)
        if self.kind == "sglang":
            samples = of_trajectory(latent_step_indices=lambda value: None)(changed(weight_version=None)(samples))
        return samples


class Fault:
    """A fault of the connection.

    Args:
        act: function of the handler, which answers wrongly or not at all.
    """

    def __init__(self, act: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.act = act


def respond(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, *, media: str = "application/json") -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", media)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def changed(**changes: Any) -> Change:
    return lambda samples: [replace(sample, **changes) for sample in samples]


def of_trajectory(**changes: Callable[[Any], Any]) -> Change:
    def change(samples: list[RolloutSample]) -> list[RolloutSample]:
        found = []
        for sample in samples:
            before = sample.dit_trajectory
            assert before is not None
            values = {name: function(getattr(before, name)) for name, function in changes.items()}
            found.append(replace(sample, dit_trajectory=replace(before, **values)))
        return found

    return change


def planned(world: World, rollout: ReadingConfig, /, **changes: Any) -> RolloutSpec:
    """Return what a trainer asks for in its first rollout."""
    config = tiny.config(cast(Any, None), sampling=rollout, **changes, **{"engine.micro_batch": MICRO_BATCH})
    with Trainer(config, tiny.job(), world) as trainer:
        root = key(1)
        return trainer.sampler.specify(root, trainer.sampler.choose_prompts(root, 0), 0)
