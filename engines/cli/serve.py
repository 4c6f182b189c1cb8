"""`fluvial serve MODEL`: serve samples of a model with their log-probabilities over HTTP, for training runs elsewhere."""

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from fluvial.core.checks import check_fields
from fluvial.engines.cli.listing import may_be_model
from fluvial.engines.cli.parse import check_pipeline, check_server_packages, flags_in_errors, parse_config, parse_name
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance


@dataclass(frozen=True)
class ServeConfig:
    """Serve rollouts of a model over HTTP, with the requests and responses of sglang-diffusion (POST /rollout/generate).

    MODEL is as in train --model: handwriting, handwriting-unet, the folder or the Hub id of a pipeline of diffusers, your
    own module:name, or the folder of a run. Set host to serve other machines; the environment variable FLUVIAL_SERVE_KEY
    must then hold an API key, which clients send. Endpoints that change the weights require the key in
    FLUVIAL_SERVE_ADMIN_KEY, if it is set. On several processes (--processes N, or torchrun) each holds a part of the weights
    and denoises a part of the tokens of every sample, so that the model may be larger than one GPU.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one, which is printed.
        weights: Folder of other base weights, in the format of diffusers.
        steps: Default number of steps of the schedule.
        micro_batch: Number of samples per forward pass. Every batch is padded to it, so that the bits of a sample do not
            depend on other requests; they are those of a training run with the same number.
        linger_ms: Milliseconds that a batch which is not full waits for more requests.
        deadline: Seconds until a request is answered with 504.
        dtype: Dtype of the network; auto is bfloat16 on CUDA, else float32.
        deterministic: Use only deterministic algorithms, so that a GPU gives the same bits every time.
        weights_root: Folders of the weights, adapters and images that requests may name. By default this user's folder in
            the machine's shared memory, where trainers write them, and those of the model's own weights.
        prompts: Files of prompts, as in train --prompts, on which a pipeline without an adapter is recorded, as in the
            trainer. A pipeline with image inputs needs prompts with images.
        most_waiting: Largest number of waiting samples; further requests are answered with 429.
        most_steps: Largest number of steps of a request.
        most_outputs: Largest number of samples of a request.
        most_megapixels: Pixels of one sample, in millions.
        most_mb: Largest request, in megabytes.
        most_response_mb: Largest response, in megabytes.
        guidance: Default classifier-free guidance.
        pipeline: Default size of the samples, and how a pipeline is opened.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    weights: Path | None = None
    steps: int = 10
    micro_batch: int = 8
    linger_ms: float = 5.0
    deadline: float = 600.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    deterministic: bool = False
    weights_root: tuple[Path, ...] = ()
    prompts: tuple[str, ...] = ()
    most_waiting: int = 4096
    most_steps: int = 1000
    most_outputs: int = 256
    most_megapixels: int = 128
    most_mb: int = 16
    most_response_mb: int = 2000
    guidance: Guidance = field(default_factory=Guidance)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        counts = ["steps", "micro_batch", *(field.name for field in fields(self) if field.name.startswith("most_"))]
        limits = {name: (1, math.inf) for name in counts}
        check_fields(self, "", port=(0, 65535), linger_ms=(0, 10_000), deadline=(0.01, 1e6), **limits)


def run(args: list[str]) -> None:
    """Serve a model until SIGINT or SIGTERM."""
    if args and args[0] in ("-h", "--help"):
        parse_config(ServeConfig(), "fluvial serve MODEL", args[:1])
    name = parse_name("serve", args, tuple(MODELS), "a model", fits=may_be_model)
    config = parse_config(ServeConfig(), f"fluvial serve {name}", args[1:])
    with flags_in_errors(config):
        serve_model(name, config)


def serve_model(name: str, config: ServeConfig) -> None:
    """Load a model and serve it."""
    check_server_packages("serve")
    from fluvial.engines.engine.world import init_world
    from fluvial.engines.extensions.servers.asgi import check_address, read_admin_key, read_key, serve
    from fluvial.engines.extensions.servers.rollout.image_routes import build_image_routes
    from fluvial.engines.extensions.servers.rollout.orders import ServeLimits
    from fluvial.engines.extensions.servers.rollout.policy import open_policy
    from fluvial.engines.extensions.servers.rollout.sampling import build_batcher
    from fluvial.engines.extensions.servers.rollout.service import RolloutService, build_application
    from fluvial.engines.extensions.servers.rollout.video_routes import build_video_routes
    from fluvial.engines.extensions.servers.rollout.weight_routes import WeightRoutes, build_control_routes
    from fluvial.engines.extensions.wire.request import RequestLimits
    from fluvial.engines.run.process.heap import keep_freed_memory
    from fluvial.models.device import use_deterministic_algorithms

    key, admin = read_key(config.host), read_admin_key()
    check_pipeline(config.pipeline)
    if int(os.environ.get("RANK", 0)) == 0:
        check_address(config.host, config.port)  # before the model is loaded, which may take minutes
    keep_freed_memory()
    with init_world() as world, use_deterministic_algorithms(config.deterministic):
        policy = open_policy(
            name,
            weights=config.weights,
            steps=config.steps,
            guidance=config.guidance,
            pipeline=config.pipeline,
            dtype=config.dtype,
            roots=config.weights_root,
            prompts=config.prompts,
            world=world if world.size > 1 else None,
        )
        if policy.ranks is not None and not world.is_main:
            policy.ranks.follow(policy, policy.weights)
            return
        batches = build_batcher(
            policy, micro_batch=config.micro_batch, linger=config.linger_ms / 1000, most_waiting=config.most_waiting
        )
        limits = ServeLimits(
            RequestLimits(pixels=config.most_megapixels * 1_000_000, steps=config.most_steps, outputs=config.most_outputs),
            body=config.most_mb * 1_000_000,
            response=config.most_response_mb * 1_000_000,
        )
        service = RolloutService(policy, batches, limits=limits, deadline=config.deadline)
        control = build_control_routes(WeightRoutes(policy.weights, policy.run_between))

        def print_ready(address: str) -> None:
            print(f"serving {name} on {address}", flush=True)

        app = build_application(
            service, key=key, admin=admin, control=control, more=[*build_image_routes(service), *build_video_routes(service)]
        )
        serve(app, host=config.host, port=config.port, ready=print_ready)
        if policy.ranks is not None:
            policy.ranks.end()
