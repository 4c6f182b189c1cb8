"""A sample depends on its seed, or on its key and id, and on nothing else: not on batch-mates, their order or number."""

import asyncio
import random
from typing import Any

import pytest
from helpers import asgi
from helpers import rollout_servers as servers
from helpers.rollout_servers import Server

from fluvial.engines.extensions.wire.response import RolloutSample, read_response
from fluvial.models.handwriting import Handwriting

pytestmark = pytest.mark.bits


@pytest.fixture(scope="module")
def server() -> Server:
    """A server of batches of three, which wait for others."""
    return servers.served(linger=0.02)


def bodies(count: int) -> list[dict[str, Any]]:
    """Return requests of one seed each, of two prompts, two samplers and two windows."""
    kinds: list[dict[str, Any]] = [{}, {"rollout_sde_type": "cps"}, {"rollout_sde_step_indices": [1, 2]}]
    each = {"rollout_return_dit_trajectory": True, "rollout_debug_mode": False}
    return [{"prompt": "12"[seed % 2], "seed": seed, **each, **kinds[seed % 3]} for seed in range(count)]


def asked(server: Server, requests: list[dict[str, Any]]) -> list[list[RolloutSample]]:
    async def all_of_them() -> list[asgi.Answer]:
        return list(await asyncio.gather(*(asgi.call(server.app, "/rollout/generate", body) for body in requests)))

    return [read_response(answer.value) for answer in asyncio.run(all_of_them())]


def test_samples_of_requests_at_once_are_those_of_each_alone(server: Server) -> None:
    """In any order; fewer batches than requests show that they were made together."""
    requests = bodies(12)
    alone = [server.samples(**body)[0] for body in requests]
    before = server.batcher.batches
    for seed in range(3):
        order = list(range(len(requests)))
        random.Random(seed).shuffle(order)
        found = asked(server, [requests[number] for number in order])
        assert all(servers.same(sample, alone[number]) for number, (sample,) in zip(order, found, strict=True))
    assert server.batcher.batches - before < 3 * len(requests)


def test_keys_and_ids_may_be_spread_over_requests(server: Server) -> None:
    def body(ids: list[int]) -> dict[str, Any]:
        own = {"fluvial": {"key": [3, 4], "ids": ids, "initial_ids": [0] * len(ids)}}
        asked = {"prompt": "1", "num_outputs_per_prompt": len(ids), "rollout_return_dit_trajectory": True}
        return {**asked, "extra_sampling_params": own}

    (whole,) = asked(server, [body([0, 1, 2, 3, 4])])
    parts = asked(server, [body([4, 1]), body([0]), body([3, 2])])
    found = [parts[1][0], parts[0][1], parts[2][1], parts[2][0], parts[0][0]]
    assert all(servers.same(a, b) for a, b in zip(whole, found, strict=True))


def test_a_transformer_keeps_its_bits_too() -> None:
    """The handwriting model's attention and matrix products, at every place of a batch."""
    model = Handwriting()
    policy = servers.policy(model=model)
    policy.shape = model.latent_shape()
    server = servers.served(policy, micro_batch=4, linger=0.02)
    requests = [
        {"prompt": prompt, "seed": seed, "rollout_return_dit_trajectory": True, "rollout_debug_mode": False}
        for seed, prompt in enumerate(["0427", "1999", "3141", "8650"])
    ]
    alone = [server.samples(**body)[0] for body in requests]
    for order in ([3, 1, 0, 2], [2, 0]):
        found = asked(server, [requests[number] for number in order])
        assert all(servers.same(sample, alone[number]) for number, (sample,) in zip(order, found, strict=True))
