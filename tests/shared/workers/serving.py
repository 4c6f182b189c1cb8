"""Serves a small FLUX transformer whose tokens and weights are split over ranks, for test_ranks.py."""

import asyncio
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from helpers import asgi, rollout_servers, tiny_token_job
from helpers import tiny_transformers as tiny
from safetensors.torch import save_file
from workers.pushes import adapted_tokens

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World
from fluvial.engines.export.model_folder import list_base_tensors
from fluvial.engines.extensions.remote.weight_sync import FACTOR_METHODS, WeightSync
from fluvial.engines.extensions.servers.rollout.policy import open_policy
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import NO_GUIDANCE

ASKED = {"seed": 3, "num_outputs_per_prompt": 3, "rollout_return_dit_trajectory": True, "rollout_debug_mode": False}


def serve(world: World, folder: str) -> dict[str, Any]:
    """Return samples, checksums and refusals, before and after all weights and adapters are pushed.

    A trainer in the main rank pushes one adapter in each way, the first time with another base than the server's.
    """
    warnings.simplefilter("ignore")  # deprecations within diffusers
    policy = open_policy(
        "helpers.tiny_token_job:Toy",
        weights=None,
        steps=4,
        guidance=NO_GUIDANCE,
        pipeline=PipelineConfig(height=tiny_token_job.TOKENS, width=tiny.WIDTH),
        roots=[Path(folder)],
        world=world if world.size > 1 else None,
    )
    sys.addaudithook(refuse_pickles)
    own, alone = [*policy.weights.module.parameters()], world.alone()
    found: dict[str, Any] = {"numbers": sum(local(each).numel() for each in own), "all": sum(each.numel() for each in own)}
    if policy.ranks is not None and not world.is_main:
        policy.ranks.follow(policy, policy.weights)
        return found
    server = rollout_servers.served(policy)

    def post(path: str, **body: Any) -> Any:
        answer = asyncio.run(asgi.call(server.app, path, body))
        assert answer.status == 200, answer.value
        return answer.value

    def draw(**body: Any) -> dict[str, Any]:
        made = server.samples(prompt="bb", **ASKED, **body)
        return {
            "images": [each.generated_output.tolist() for each in made],
            "log_probs": [rollout_servers.log_probs(each).tolist() for each in made],
            "versions": [each.weight_version for each in made],
            "sums": post("/get_weights_checksum"),
        }

    found["first"] = draw()
    post("/update_weights_from_disk", model_path=f"{folder}/full", weight_version="5")
    found["pushed"] = draw()
    post("/v1/set_lora", lora_nickname="x", lora_path=f"{folder}/x.safetensors")
    found["adapted"] = draw()
    found["refused"] = [server.problem(prompt="bb", width=tiny.WIDTH, height=7)] if world.size > 1 else []
    post("/release_memory_occupation")
    post("/resume_memory_occupation")
    found["again"] = draw()
    engine = Engine(adapted_tokens(), [], OptimizerConfig(), alone, updates=1)
    for number, factor in enumerate(engine.sharded.shards(trainable=True).values()):
        factor.fill_(0.01 * (number + 1))
    peer = HttpClient("http://127.0.0.1:1", patience=0, transport=asgi.Transport(server.app))
    for way in FACTOR_METHODS:  # each takes the adapter before off
        sync = WeightSync(alone, folder=Path(folder), method=way, bucket_bytes=200)
        assert sync.push(engine, 7, [peer]) == {}
        found[way] = draw()
        sync.close()
    if policy.ranks is not None:
        policy.ranks.end()
    return found


def refuse_pickles(event: str, args: Any) -> None:
    """Refuse to unpickle classes and functions, as an audit hook."""
    assert event != "pickle.find_class", args


def write(folder: Path) -> None:
    """Write all weights of another network, and an adapter."""
    net, generator = tiny.flux(), torch.Generator().manual_seed(4)
    moved = {
        name: each + 0.05 * torch.randn(each.shape, generator=generator) for name, each in list_base_tensors(net).items()
    }
    (folder / "full/transformer").mkdir(parents=True)
    save_file(moved, folder / "full/transformer/diffusion_pytorch_model.safetensors")
    layer = "transformer_blocks.0.attn.to_q"
    rows, columns = net.get_parameter(f"{layer}.weight").shape
    shapes = {"lora_A": (2, columns), "lora_B": (rows, 2)}
    factors = {f"{layer}.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(factors, folder / "x.safetensors")
