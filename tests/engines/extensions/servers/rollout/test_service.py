"""Replies of a rollout server to requests that are wrong, too many, too late, or whose client goes."""

import asyncio
import base64
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from helpers import asgi
from helpers import rollout_servers as servers
from helpers import tiny_jobs as tiny
from helpers.rollout_servers import MICRO_BATCH, Server
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from fluvial.engines.extensions.servers.rollout.orders import ServeLimits
from fluvial.engines.extensions.wire.decode import convert
from fluvial.engines.extensions.wire.request import RequestLimits
from fluvial.engines.extensions.wire.response import ServerInfo, read_response
from fluvial.engines.sampling.generate import Guidance

GENERATE = "/rollout/generate"


@pytest.fixture(scope="module")
def server() -> Server:
    return servers.served()


def own(**options: Any) -> dict[str, Any]:
    return {"extra_sampling_params": {"fluvial": options}}


SHARED = own(key=[1, 2], ids=[0], initial_ids=[0], prefix=[2, 1])
TRAJECTORY = {"rollout_debug_mode": False, "rollout_return_dit_trajectory": True}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "x"}, "prompt: prompt 'x' is no digit"),
        ({"rollout_noise_level": float("nan")}, "the body is not JSON"),
        ({"negative_prompt": "\ud800"}, "the body is not JSON"),
        ({"rollout_sde_step_indices": [4]}, "holds 4, expected 0 to 3 for 4 steps"),
        ({"rollout_return_step_indices": [5]}, "holds 5, expected 0 to 4 for 4 steps"),
        ({"width": 64}, "one of width and height is missing"),
        ({"num_frames": 5}, "one of width and height is missing"),
        ({"width": 100_000, "height": 100_000}, "got 10000000000, expected at most"),
        ({"num_inference_steps": 100_000}, "num_inference_steps: got 100000, expected at most 1000"),
        ({"num_outputs_per_prompt": 1000}, "num_outputs_per_prompt: got 1000, expected at most 256"),
        ({"image_path": ["/etc/passwd"]}, "image_path is set, and this server samples from prompts without images"),
        ({"image_path": ["a"] * 17}, "image_path: Expected `array` of length <= 16"),
        ({"guidance_scale": 2, "negative_prompt": "x"}, "negative_prompt: prompt 'x' is no digit"),
        (own(sampler="ddim"), "sampler is ddim, which needs a model that predicts epsilon"),
        (own(text_tokens=64), "text_tokens is 64, expected at most 0"),
        (own(windows=[[]]), "windows are empty"),
        ({**own(windows=[[3]]), "rollout_sde_type": "cps"}, "hold a step that takes no noise"),
        (own(after={"fraction": 0.5}, windows=[[1]]), "after is set, expected one window"),
        ({**own(after={"fraction": 0.5}), "rollout_sde_step_indices": [0]}, "set rollout_debug_mode false"),
        ({**own(after={"fraction": 0.5}), "rollout_sde_step_indices": []}, "after is set, expected one window"),
        ({**SHARED, "rollout_sde_step_indices": [1]}, "prefix has 2 steps"),
        ({**SHARED, **TRAJECTORY, "rollout_return_step_indices": [1, 2]}, "latents at boundary 1 are requested"),
    ],
)
def test_a_wrong_request_is_400_with_one_line(server: Server, body: dict[str, Any], says: str) -> None:
    status, problem = server.problem(**body)
    assert (status, says in problem) == (400, True), problem


def test_sizes_are_known_before_anything_is_made() -> None:
    """Of the response, of the body, and of a body that only announces its size."""
    limits = ServeLimits(RequestLimits(outputs=10**6), body=1000, response=10_000)
    server = servers.served(limits=limits)
    status, problem = server.problem(num_outputs_per_prompt=1000)
    assert (status, "MB, expected at most 0: request fewer samples" in problem) == (413, True)
    assert server.problem(negative_prompt="a" * 1000) == (413, "the request has more than 0 MB: send less at once")
    announced = asyncio.run(asgi.call(server.app, GENERATE, body=b"{}", headers={"content-length": str(10**10)}))
    assert announced.status == 413
    assert asyncio.run(asgi.call(server.app, GENERATE, body=b"{")).status == 400
    assert asyncio.run(asgi.call(server.app, GENERATE, body=b"[" * 900)).status == 400
    assert server.batcher.batches == 0


@contextmanager
def held(server: Server) -> Iterator[Callable[[], None]]:
    """Keep batches from being made in this block, or until the function is called that it yields."""
    free, holds = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        free.wait(30)

    thread = threading.Thread(target=lambda: asyncio.run(server.policy.run_between(hold)))
    thread.start()
    assert holds.wait(30)
    try:
        yield free.set
    finally:
        free.set()
        thread.join(30)


def test_too_many_samples_are_429() -> None:
    """With the seconds after which to try again; what waits is made."""
    server = servers.served(most_waiting=6)

    async def crowd() -> list[asgi.Answer]:
        first = asyncio.create_task(asgi.call(server.app, GENERATE, {"prompt": "1", "num_outputs_per_prompt": 3}))
        while server.batcher.begun < MICRO_BATCH:
            await asyncio.sleep(0.01)
        more = [asyncio.create_task(asgi.call(server.app, GENERATE, {"prompt": "1", "num_outputs_per_prompt": 5}))]
        while server.batcher.waiting < 5:
            await asyncio.sleep(0.01)
        refused = await asgi.call(server.app, GENERATE, {"prompt": "1", "num_outputs_per_prompt": 2})
        free()
        return [await first, *(await asyncio.gather(*more)), refused]

    with held(server) as free:
        first, second, refused = asyncio.run(crowd())
    assert (first.status, second.status, refused.status) == (200, 200, 429)
    assert refused.value["detail"].startswith("5 samples are waiting: try again in ")
    assert int(refused.headers["retry-after"]) >= 1
    assert server.samples()


def test_a_request_beyond_its_deadline_is_504() -> None:
    server = servers.served(deadline=0.2)
    with held(server):
        status, problem = server.problem(num_outputs_per_prompt=MICRO_BATCH + 2)
        assert status == 504
        assert problem == "the samples took more than 0.2 s: request fewer, or serve with a longer deadline"
        assert server.batcher.waiting == 0
    asyncio.run(server.policy.run_between(lambda: None))
    assert server.batcher.rows <= MICRO_BATCH  # at most the batch that had begun


def test_samples_of_a_client_that_goes_are_not_made() -> None:
    server = servers.served()
    with held(server):
        body = {"prompt": "1", "num_outputs_per_prompt": 5}
        first = asyncio.run(asgi.call(server.app, GENERATE, body, hangs_up=True))
        assert first.status == 499
        assert server.batcher.waiting == 0
    assert server.samples()
    assert server.batcher.rows <= MICRO_BATCH + 1  # at most the batch that had begun, and the last sample


class Fragile(nn.Module):
    """A net that fails for one prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny.Tiny().build()

    def forward(self, x: torch.Tensor, rows: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        if rows[:, 3].any():
            raise RuntimeError("CUDA error:\nout of memory")
        found: torch.Tensor = self.net(x, rows, time)
        return found


def test_a_request_fails_alone() -> None:
    server = servers.served(servers.policy(module=Fragile().eval()), linger=0.05)

    async def both() -> list[asgi.Answer]:
        return list(await asyncio.gather(*(asgi.call(server.app, GENERATE, {"prompt": p, "seed": 1}) for p in "131")))

    good, bad, other = asyncio.run(both())
    assert (bad.status, bad.value["detail"]) == (500, "sampling failed: CUDA error: out of memory")
    assert good.status == other.status == 200
    assert torch.equal(read_response(good.value)[0].generated_output, read_response(other.value)[0].generated_output)


def test_samples_say_which_weights_made_them(server: Server) -> None:
    """A request for other weights fails; one that waits while they change fails or is made by the new ones."""
    assert server.samples(**own(version=0))[0].weight_version == 0
    expected = "the weights have version 0, and the request needs 7: push these weights first"
    assert server.problem(**own(version=7)) == (409, expected)
    other = servers.served()

    async def changed() -> list[asgi.Answer]:
        tasks = [
            asyncio.create_task(asgi.call(other.app, GENERATE, {"prompt": "1", "seed": 1, **body}))
            for body in (own(version=0), {})
        ]
        while other.batcher.begun < 1:
            await asyncio.sleep(0.01)
        other.policy.weights.version = 1
        free()
        return list(await asyncio.gather(*tasks))

    with held(other) as free:
        stale, fresh = asyncio.run(changed())
    assert stale.status == 409
    assert read_response(fresh.value)[0].weight_version == 1


def test_the_version_is_compared_when_no_push_can_come_between(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that waits goes before the batch, after the batch was put together."""
    policy = server.policy
    sampling = policy.hold_weights

    @contextmanager
    def pushed_first() -> Iterator[Any]:
        with sampling() as module:
            monkeypatch.setattr(policy.weights, "version", 1)
            yield module

    monkeypatch.setattr(policy, "hold_weights", pushed_first)
    expected = "the weights have version 1, and the request needs 0: push these weights first"
    assert server.problem(**own(version=0)) == (409, expected)


def test_released_weights_make_no_samples() -> None:
    server = servers.served()
    before = server.samples(seed=3)[0]

    def post(path: str) -> asgi.Answer:
        return asyncio.run(asgi.call(server.app, path, {}))

    assert post("/release_memory_occupation").status == 200
    status, problem = server.problem(seed=3)
    assert (status, "POST /resume_memory_occupation" in problem) == (503, True)
    assert asyncio.run(asgi.call(server.app, "/health_generate")).status == 503
    assert asyncio.run(asgi.call(server.app, "/health")).value["released"] is True
    assert post("/resume_memory_occupation").status == 200
    assert asyncio.run(asgi.call(server.app, "/health_generate")).status == 200
    assert torch.equal(server.samples(seed=3)[0].generated_output, before.generated_output)


def get(server: Server, path: str, key: str = "", value: Any = None) -> asgi.Answer:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return asyncio.run(asgi.call(server.app, path, value, headers=headers))


def test_the_model_is_described(server: Server) -> None:
    """Also to gateways, which read sglang's own `/model_info` and `/server_info`."""
    (model,) = get(server, "/v1/models").value["data"]
    assert (model["id"], model["pipeline_class"], model["dit_precision"], model["num_gpus"]) == ("tiny", "Tiny", "fp32", 0)
    assert get(server, "/v1/models/tiny").value == model
    assert get(server, "/v1/models/other").status == 404
    info = get(server, "/v1/model_info").value
    assert convert(info, ServerInfo) == ServerInfo(True, "velocity", 0, MICRO_BATCH)
    expected = {"latent_shape": [1, 4, 4], "num_inference_steps": 4, "weight_version": 0, "model_path": "tiny"}
    assert expected.items() <= info.items()
    closed = servers.served(key="k")
    for path, fields in {
        "/model_info": {"model_path": "tiny", "is_generation": True, "model_type": "diffusion", "task_type": "T2I"},
        "/server_info": {"served_model_name": "tiny", "tp_size": 1, "dp_size": 1},
    }.items():
        assert get(closed, path).status == 401
        assert fields.items() <= get(closed, path, "k").value.items()
    assert get(closed, "/liveness").value["status"] == "ok"


def images(server: Server, **body: Any) -> asgi.Answer:
    return asyncio.run(asgi.call(server.app, "/v1/images/generations", {"prompt": "1", **body}))


def test_images_are_files_of_the_samples(server: Server) -> None:
    """With consecutive seeds, or with those of a list; without a size they have the server's own."""
    first = images(server, n=2, seed=4, quality="high", size="auto").value["data"]
    listed = images(server, n=2, seed=[4, 5], size="4x4").value["data"]
    assert [each["b64_json"] for each in first] == [each["b64_json"] for each in listed]
    assert first[0]["b64_json"] != first[1]["b64_json"]
    (sample,) = server.samples(seed=5, rollout=False)
    with Image.open(io.BytesIO(base64.b64decode(first[1]["b64_json"]))) as image:
        found = torch.tensor(np.asarray(image)[..., 0])
    assert torch.equal(found, (sample.generated_output[0] * 255).round().to(torch.uint8))


def test_a_wrong_request_for_images_is_400_with_one_line(server: Server) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "x"}, "prompt: prompt 'x' is no digit"),
        ({"n": 257}, "n is 257, expected at most 256"),
        ({"n": 0}, "n: Expected `int` >= 1"),
        ({"n": 3, "seed": [1, 2]}, "seed has 2 items, expected n, 3"),
        ({"size": "4"}, "size: Expected `str` matching regex"),
        ({"size": "100000x100000"}, "got 10000000000, expected at most"),
        ({"response_format": "url"}, "response_format is url, and this server keeps no files"),
        ({"background": "transparent"}, "background is 'transparent', which this server does not support"),
        ({"enable_teacache": True}, "enable_teacache is 'True', which this server does not support"),
        ({"guidence_scale": 2.0}, "the body: Object contains unknown field `guidence_scale`"),
    ]
    for body, says in wrong:
        answer = images(server, **body)
        assert (answer.status, says in answer.value["detail"]) == (400, True), answer.value
        assert "\n" not in answer.value["detail"]


def test_keys_open_their_endpoints() -> None:
    """The admin key opens all; the API key all but control; health needs none."""
    both = servers.served(key="k", admin="a")
    for path, control in (("/v1/models", False), ("/v1/list_loras", True), ("/rollout/generate", False)):
        value = {"prompt": "1"} if path == "/rollout/generate" else None
        found = {key: get(both, path, key, value).status for key in ("", "k", "a", "x")}
        assert found == {"": 401, "k": 401 if control else 200, "a": 200, "x": 401}
    assert get(both, "/health").status == get(both, "/health_generate").status == 200
    assert "needs the admin key" in get(both, "/v1/list_loras", "k").value["detail"]
    only_admin = servers.served(admin="a")
    assert (get(only_admin, "/v1/models").status, get(only_admin, "/v1/list_loras").status) == (200, 401)
    only_key = servers.served(key="k")
    assert (get(only_key, "/v1/list_loras").status, get(only_key, "/v1/list_loras", "k").status) == (401, 200)


def test_a_server_s_own_guidance_is_what_requests_leave_open() -> None:
    server = servers.served(servers.policy(guidance=Guidance(2.0, "3")))
    given = server.samples(seed=1, guidance_scale=2.0, negative_prompt="3")[0]
    assert torch.equal(server.samples(seed=1)[0].generated_output, given.generated_output)
    assert not torch.equal(server.samples(seed=1, guidance_scale=1.0)[0].generated_output, given.generated_output)


FIELDS: Any = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.sampled_from(["1", "2", "x", ""]),
        "seed": st.integers(-1, 2**63),
        "num_outputs_per_prompt": st.integers(0, 4),
        "num_inference_steps": st.integers(0, 6),
        "guidance_scale": st.sampled_from([None, 1, 2.5, -1, float("nan")]),
        "rollout": st.booleans(),
        "rollout_sde_type": st.sampled_from(["sde", "cps", "ode", "x"]),
        "rollout_noise_level": st.sampled_from([0, 0.5, 1.0, 2.0, -1]),
        "rollout_log_prob_no_const": st.booleans(),
        "rollout_debug_mode": st.booleans(),
        "rollout_return_denoising_env": st.booleans(),
        "rollout_return_dit_trajectory": st.booleans(),
        "rollout_sde_step_indices": st.none() | st.sets(st.integers(0, 5)).map(sorted),
        "rollout_return_step_indices": st.none() | st.sets(st.integers(0, 6)).map(sorted),
        "extra_sampling_params": st.fixed_dictionaries(
            {},
            optional={
                "key": st.just([1, 2]),
                "ids": st.lists(st.integers(0, 9), max_size=4),
                "initial_ids": st.lists(st.integers(0, 2), max_size=4),
                "sampler": st.sampled_from(["flow_sde", "dance_sde", "wan_sde", "ddim", "ode"]),
                "solver": st.sampled_from(["euler", "dpmpp_2m", "unipc", "sa_solver"]),
                "windows": st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2).map(sorted), max_size=3),
                "recorded_only": st.booleans(),
                "form": st.sampled_from(["density", "no_const", "unscaled"]),
                "forwards": st.sampled_from(["one", "two"]),
                "after": st.sampled_from([{"fraction": 0.5}, {"solver": "dpmpp_2m"}]),
                "prefix": st.just([1, 2]),
            },
        ).map(lambda options: {"fluvial": options}),
    },
)


@settings(max_examples=60)
@given(FIELDS)
def test_any_request_is_samples_or_one_line(server: Server, body: dict[str, Any]) -> None:
    found = server.ask(**body)
    if found.status != 200:
        assert found.status in (400, 413), (found.status, found.value, body)
        assert "\n" not in found.value["detail"]
        return
    for sample in read_response(found.value):
        assert sample.generated_output.isfinite().all()
        if sample.rollout_log_probs is not None:
            assert servers.log_probs(sample).isfinite().all()
