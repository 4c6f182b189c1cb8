"""The reward server's application: what clients send comes back as what the reward gives, in batches and within limits."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import asgi
from helpers.fake_servers import FakeClock
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.judges.formats import FlowFactory, UniRL
from fluvial.engines.extensions.servers.asgi import KEY_ENV, read_key
from fluvial.engines.extensions.servers.formats import ScoringLimits
from fluvial.engines.extensions.servers.rewards import RewardService, build_application
from fluvial.engines.extensions.wire.client import HttpClient

IMAGES = torch.arange(5 * 3 * 2 * 4).view(5, 3, 2, 4) / 255
PROMPTS = ("a", "bb", "ccc", "bad", "e")


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.double().flatten(1).mean(1)


def fragile(images: Tensor, prompts: Sequence[str]) -> list[float]:
    if "bad" in prompts:
        raise RuntimeError("CUDA error:\nout of memory")
    return [float(len(prompt)) for prompt in prompts]


def weighed(images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[float]:
    return [float(record["weight"]) for record in metadata]


def app(*rewards: Any, key: str = "", **options: Any) -> Any:
    """Return an application that serves rewards by the names of their functions."""
    return build_application(RewardService({reward.__name__: reward for reward in rewards}, **options), key=key)


def client(served: Any, path: str = "") -> HttpClient:
    return HttpClient(f"http://localhost:1{path}", transport=asgi.Transport(served), clock=FakeClock())


def test_both_formats_give_what_the_reward_gives() -> None:
    served = app(brightness, weighed)
    expected = brightness(IMAGES, PROMPTS).float()
    assert torch.equal(FlowFactory(client(served, "/brightness"), batch=2)(IMAGES, PROMPTS), expected)
    records: Any = [{"weight": number} for number in range(5)]
    found = UniRL(client(served), rewards=("brightness", "weighed"), quality=100)(IMAGES, PROMPTS, records)
    assert isinstance(found, dict)
    assert torch.allclose(found["brightness"], expected, atol=0.02)  # JPEG
    assert found["weighed"].tolist() == [0, 1, 2, 3, 4]
    assert FlowFactory(client(app(brightness)))(IMAGES, PROMPTS).shape == (5,)  # one alone needs no name
    with pytest.raises(RunError, match=r"answered 404: .*there is no reward '', expected /NAME/compute, one of bright"):
        FlowFactory(client(served))(IMAGES, PROMPTS)
    videos = IMAGES.unsqueeze(2).repeat(1, 1, 3, 1, 1)
    assert torch.allclose(FlowFactory(client(served, "/brightness"))(videos, PROMPTS), expected)


def test_a_sample_that_fails_harms_no_other() -> None:
    """It is null there, with the reason here; a request of failures alone is an error."""
    served = app(fragile)
    found = FlowFactory(client(served))(IMAGES, PROMPTS)
    assert found.nan_to_num(-1).tolist() == [1, 2, 3, -1, 1]
    only = UniRL(client(served), rewards=("fragile",))
    assert only(IMAGES[2:4], PROMPTS[2:4], [{}, {}]).isnan().tolist() == [False, True]  # type: ignore[union-attr]
    reason = "raised RuntimeError .CUDA error: out of memory."
    with pytest.raises(RunError, match=reason):
        only(IMAGES[3:4], PROMPTS[3:4], [{}])
    with pytest.raises(RunError, match=f"answered 500: .*{reason}.*3 tries"):
        FlowFactory(client(served))(IMAGES[3:4], PROMPTS[3:4])


def test_flow_factorys_client_is_served() -> None:
    """Its health check, which is under the reward's path, and an error where it has no number to read.

    Source: Flow-Factory, `src/flow_factory/rewards/my_reward_remote.py`: it raises the reply's `error`, if there is one, and
    makes a tensor of `rewards` otherwise.
    """

    async def asked() -> Any:
        served, body = app(brightness, fragile), request(4)
        return [
            await asgi.call(served, "/brightness/health"),
            await asgi.call(served, "/nothing/health"),
            await asgi.call(served, "/brightness/compute", body),
            await asgi.call(served, "/fragile/compute", {**body, "prompt": list(PROMPTS[:4])}),
        ]

    health, missing, whole, partly = asyncio.run(asked())
    assert health[:2] == (200, {"status": "ok", "rewards": {"brightness": "ok"}})
    assert missing.status == 404
    assert set(whole.value) == {"rewards"}
    assert torch.tensor(whole.value["rewards"]).shape == (4,)
    assert partly.value["rewards"] == [1, 2, 3, None]
    assert partly.value["error"] == "1 of 4 samples have no score: raised RuntimeError (CUDA error: out of memory)"


def several(images: Tensor, prompts: Sequence[str]) -> dict[str, Any]:
    return {
        "score": [1.0, float("nan"), 3.0, None][: len(prompts)],
        "length": [float(len(prompt)) for prompt in prompts],
        "odd": [float("nan")] * len(prompts),
    }


def test_all_numbers_of_a_reward_are_sent() -> None:
    """UniRL's format has a place for them; a score that is no number is null, or an error with its reason."""
    served = app(several)
    assert FlowFactory(client(served))(IMAGES[:3], PROMPTS[:3]).nan_to_num(-1).tolist() == [1, -1, 3]
    image = FlowFactory(client(None))._build_payload(IMAGES[:4], list(PROMPTS[:4]))["image"]
    turns = [[{"text": text, "image_b64": file}] for text, file in zip(PROMPTS[:4], image, strict=True)]
    body = {"requests": [{"history": turn, "required_rewards": ["several"]} for turn in turns]}
    found = asyncio.run(asgi.call(served, "/score", body)).value
    assert found["results"] == [{"several": {"score": 1, "length": 1}}, {}, {"several": {"score": 3, "length": 3}}, {}]
    assert "reward 'several' is nan for prompt 'bb'" in found["errors"][1]["several"]
    assert f"reward 'several' is None for prompt '{PROMPTS[3]}'" in found["errors"][3]["several"]


def test_the_image_of_a_prompt_reaches_the_reward() -> None:
    def likeness(images: Tensor, prompts: Sequence[str], condition_images: Sequence[Tensor]) -> list[float]:
        return [float((image - other).abs().sum() == 0) for image, other in zip(images, condition_images, strict=True)]

    body = request(2)
    body["condition_images"] = [[body["image"][0]], [body["image"][0]]]
    found = asyncio.run(asgi.call(app(likeness), "/compute", body))
    assert found.value == {"rewards": [1.0, 0.0]}
    client_of = FlowFactory(client(app(likeness)), batch=2)
    assert client_of(IMAGES, PROMPTS, [IMAGES[0], *IMAGES[1:4], IMAGES[0]]).tolist() == [1, 1, 1, 1, 0]
    missing = asyncio.run(asgi.call(app(likeness), "/compute", request(1)))
    assert missing.status == 500
    assert "takes condition_images" in missing.value["detail"]


def test_names_health_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    served, key = app(brightness, fragile, key="secret"), {"authorization": "Bearer secret"}

    def get(path: str, headers: dict[str, str] | None = None) -> asgi.Answer:
        return asyncio.run(asgi.call(served, path, headers=headers))

    assert get("/health")[:2] == (200, {"status": "ok", "rewards": {"brightness": "ok", "fragile": "ok"}})
    assert get("/rewards", key)[:2] == (200, {"rewards": ["brightness", "fragile"]})
    assert (get("/rewards").status, get("/rewards", {"authorization": "Bearer no"}).status) == (401, 401)
    assert get("/nothing", key).status == 404
    monkeypatch.delenv(KEY_ENV, raising=False)
    assert [read_key(host) for host in ("127.0.0.1", "localhost", "::1")] == ["", "", ""]
    for host in ("0.0.0.0", "example.org", "::"):
        with pytest.raises(UsageError, match=f"host is {host}, which other machines reach, and there is no API key"):
            read_key(host)
    monkeypatch.setenv(KEY_ENV, "secret")
    assert read_key("0.0.0.0") == "secret"


def test_what_cannot_be_served_is_refused() -> None:
    def preferred(images: Tensor, prompts: Sequence[str], group: int) -> list[float]:
        return [0.0] * len(prompts)

    def heard(audios: Tensor, prompts: Sequence[str]) -> list[float]:
        return [0.0] * len(prompts)

    for reward, what in ((preferred, "group"), (heard, "audios")):
        with pytest.raises(UsageError, match=f"reward '{reward.__name__}' takes {what}, which requests do not hold"):
            app(reward)
    with pytest.raises(UsageError, match="there are no rewards to serve"):
        app()


def request(count: int, size: str = "a") -> dict[str, Any]:
    file = FlowFactory(client(None))._build_payload(IMAGES[:count], [size] * count)
    return {"prompt": file["prompt"], "image": file["image"]}


def test_requests_that_come_together_are_scored_together() -> None:
    """But images of several sizes apart."""
    calls: list[tuple[int, ...]] = []

    def noted(images: Tensor, prompts: Sequence[str]) -> list[float]:
        calls.append(tuple(images.shape))
        return [float(prompt) for prompt in prompts]

    async def many() -> Any:
        served = app(noted, batch=6, linger=0.2)
        wide = FlowFactory(client(None))._build_payload(torch.ones(2, 3, 2, 8), ["5", "5"])
        requests = [*(request(2, str(number)) for number in range(5)), wide]
        return await asyncio.gather(*(asgi.call(served, "/compute", each) for each in requests))

    assert [answer.value["rewards"] for answer in asyncio.run(many())] == [[number] * 2 for number in range(6)]
    assert (2, 3, 2, 8) in calls
    assert sorted(shape[0] for shape in calls if shape[3] == 4) == [4, 6]


def test_a_full_queue_answers_429_and_samples_of_a_client_that_has_gone_are_not_scored() -> None:
    go, seen = threading.Event(), list[str]()

    def slow(images: Tensor, prompts: Sequence[str]) -> list[float]:
        seen.extend(prompts)
        assert go.wait(60)
        return [0.0] * len(prompts)

    async def many() -> Any:
        service = RewardService({"slow": slow}, batch=1, linger=0, most_waiting=3)
        served, batcher = build_application(service), service.batchers["slow"]
        first = asyncio.create_task(asgi.call(served, "/compute", request(1, "first")))
        while batcher.begun < 1:
            await asyncio.sleep(0.01)
        gone = await asgi.call(served, "/compute", request(1, "gone"), hangs_up=True)
        waiting = asyncio.create_task(asgi.call(served, "/compute", request(5, "waits")))
        while batcher.waiting < 5:
            await asyncio.sleep(0.01)
        refused = await asgi.call(served, "/compute", request(1))
        go.set()
        return refused, gone.status, (await first).status, (await waiting).status

    refused, *statuses = asyncio.run(asyncio.wait_for(many(), 30))
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert "5 samples are waiting" in refused.value["detail"]
    assert statuses == [499, 200, 200]
    assert seen == ["first", *["waits"] * 5]


def test_a_request_that_is_too_large_is_not_read() -> None:
    """Announced or not; nor are images decoded that have too many pixels."""
    served = app(brightness, limits=ScoringLimits(most_bytes=3000, most_pixels=20))

    async def sizes() -> Any:
        big = b"[" + b"1," * 5000
        announced = await asgi.call(served, "/compute", body=big)
        streamed = await asgi.call(served, "/score", body=big, headers={"content-length": "12"})
        return (
            announced,
            streamed,
            await asgi.call(served, "/compute", request(3)),
            await asgi.call(served, "/compute", body=b"<"),
        )

    found = asyncio.run(sizes())
    assert [answer.status for answer in found] == [413, 413, 413, 400]
    assert all(set(answer.value) == {"detail", "error"} for answer in found)
