"""A server of weights alone, without a network, and engines that push to it."""

import asyncio
import json
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar

import torch
from helpers import asgi
from helpers.fake_rollouts import respond
from helpers.tiny_jobs import Tiny
from torch import Tensor, nn

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.extensions.servers.rollout.served_weights import ServedWeights
from fluvial.engines.extensions.servers.rollout.weight_routes import WeightRoutes, build_control_routes
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.models.lora import Form, LoraConfig, LowRank, add_lora
from fluvial.models.lora_layer import Product

Result = TypeVar("Result")
TINY = Tiny()
PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Served:
    """A server in this process: its weights, and a client of it.

    Args:
        module: the network.
        roots: folders that clients may name.
        name: host name of its address.
    """

    def __init__(self, module: nn.Module, roots: Sequence[Path], name: str = "localhost") -> None:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        self.weights = ServedWeights(module, roots=roots)
        dtype = next(module.parameters()).dtype

        async def models(request: Any) -> Any:
            return JSONResponse({"data": [{"id": "tiny", "dit_precision": PRECISION[dtype]}]})

        self.routes = WeightRoutes(self.weights, between)
        routes = [Route("/v1/models", models), *build_control_routes(self.routes)]
        self.app = Starlette(routes=routes)
        transport = asgi.Transport(self.app)
        self.requests = transport.paths
        self.client = HttpClient(f"http://{name}", patience=0, transport=transport)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request over HTTP, as `fake_servers.loopback` takes a handler."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0))) if handler.command == "POST" else None
        answer = asyncio.run(asgi.call(self.app, handler.path, body=body))
        respond(handler, json.dumps(answer.value).encode(), answer.status)


async def between(function: Callable[[], Result], /) -> Result:
    """Run a function; nothing is sampled here."""
    return function()


def served(*roots: Path, name: str = "localhost", dtype: torch.dtype = torch.float32) -> Served:
    return Served(base().eval().to(dtype), roots, name)


def ask(server: Served, path: str, **value: Any) -> asgi.Answer:
    return asyncio.run(asgi.call(server.app, path, value))


def engine_of(module: nn.Module, world: World, **sharding: Any) -> Engine:
    return Engine(module, TINY.blocks(module), OptimizerConfig(), world, updates=1, sharding=EngineConfig(**sharding))


def listed(server: Served) -> Any:
    return asyncio.run(asgi.call(server.app, "/v1/list_loras")).value


def base() -> nn.Module:
    return TINY.build()


def moved_base() -> nn.Module:
    return Tiny(seed=1).build()


def adapted(module: nn.Module, *adapters: str, product: Product = "factors", form: Form | None = None) -> nn.Module:
    """Return a net with adapters, `default` if none is named; alpha / rank is no power of two."""
    add_lora(
        module,
        LoraConfig(rank=2, alpha=3.0, form=form or LowRank(product=product)),
        TINY.lora_targets,
        adapters=adapters or ("default",),
    )
    return module


def run(module: nn.Module) -> Tensor:
    dtype = next(module.parameters()).dtype
    x, rows = torch.linspace(-2, 2, 5 * 16).reshape(5, 1, 4, 4), torch.eye(6)[:5]
    with torch.no_grad():
        return module(x.to(dtype), rows.to(dtype), torch.linspace(0.1, 0.9, 5).to(dtype))


def move(engine: Engine, *, seed: int) -> None:
    """Set B of an engine's adapter to other values, the same on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name, shard in engine.sharded.shards(trainable=True).items():
        if ".lora_B." in name or ".lokr_w1." in name:
            shard.fill_(0.2 * torch.rand((), generator=generator).item())
