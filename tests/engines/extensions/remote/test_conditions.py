"""All that a sample depends on reaches the server that makes it, or the run is refused when it is built."""

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

import httpx2
import optree
import pytest
import torch
from helpers import asgi, rollout_servers
from helpers import tiny_jobs as tiny
from torch import Tensor

from fluvial.core.random import key
from fluvial.core.transitions import bind
from fluvial.engines.data.records import Prompt
from fluvial.engines.data.sizes import Size
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.remote.remote import RemoteSource
from fluvial.engines.extensions.remote.requests import RequestBuilder
from fluvial.engines.extensions.wire import client
from fluvial.engines.extensions.wire.response import read_response
from fluvial.engines.methods import BranchGrpo, Grpo, Nft
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import RolloutConfig, SamplingConfig, ServersConfig
from fluvial.engines.sampling.generate import Chunk, Guidance, Requests, Sampling, SharedPrefix, StochasticSteps
from fluvial.engines.sampling.samplers import Ode, SaSolver, Stochastic
from fluvial.engines.sampling.source import InProcess
from fluvial.engines.sampling.tail import Tail
from fluvial.engines.sampling.window import RandomWindow, Splits
from fluvial.models.step_cache import FirstBlockCache

URL, COUNT, ETA = "http://127.0.0.1:1", 4, 0.5
SIZES = {tiny.SHAPE: (Size(4, 4), 1), (1, 2, 8): (Size(2, 8), 1), (1, 4, 2, 2): (Size(2, 2), 4)}
IDS = (7, 0, 3, 5)


@dataclass(frozen=True)
class Model(tiny.Tiny):
    """The tiny net over samples of several sizes, and prompts whose padding can be cut off."""

    text_tokens = 6

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        return (1, height, width) if frames == 1 else (1, frames, height, width)

    def count_prompt_tokens(self, cond: tiny.TinyCond) -> Tensor:
        return (cond.rows != 0).long().argmax(1) + 1

    def trim_cond(self, cond: tiny.TinyCond, tokens: int) -> tiny.TinyCond:
        return tiny.TinyCond(cond.rows * (torch.arange(6) < tokens))


MODEL = Model()


class RequestCase(NamedTuple):
    """Another value of a field that a sample depends on."""

    rollout: dict[str, Any] = {}  # noqa: RUF012
    guidance: dict[str, Any] = {}  # noqa: RUF012
    sampling: dict[str, Any] = {}  # noqa: RUF012
    stochastic: dict[str, Any] | None = {}  # noqa: RUF012
    requests: dict[str, Any] = {}  # noqa: RUF012
    same: bool = False


def shaped(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"shape": shape, "schedule": MODEL.schedule(tiny.STEPS, shape)}


GUIDED = {"scale": 2.0, "negative": "4"}
PROMPTS = [Prompt("1"), Prompt("1"), Prompt("2"), Prompt("1")]
AGAINST = [Prompt("1", negative="5"), Prompt("1", negative="3"), Prompt("2"), Prompt("1", negative="5")]
TWO = {"initial_ids": (0, 0, 1, 1), "prompts": [Prompt("1"), Prompt("1"), Prompt("2"), Prompt("2")]}
# By object and field. Each object is one that `generate` takes, so that a sample depends on nothing else but the weights.
CARRIED: dict[str, list[RequestCase]] = {
    "Requests.prompts": [RequestCase(requests={"prompts": [Prompt("3")] * COUNT})],
    "Requests.ids": [RequestCase(requests={"ids": (1, 2, 8, 9)})],
    "Requests.key": [RequestCase(requests={"key": key(2**40)})],
    "Requests.initial_ids": [RequestCase(requests={"initial_ids": (2, 2, 0, 0)})],
    "Prompt.text": [RequestCase(requests={"prompts": [Prompt("0"), Prompt("3"), Prompt("0"), Prompt("1")]})],
    "Prompt.negative": [RequestCase(guidance=GUIDED, requests={"prompts": AGAINST})],
    "Guidance.scale": [RequestCase(guidance=each) for each in (GUIDED, {**GUIDED, "scale": 3.5}, {"scale": 0.0})],
    "Guidance.negative": [RequestCase(guidance={**GUIDED, "negative": text}) for text in ("", "2")],
    "Guidance.forwards": [RequestCase(guidance={**GUIDED, "forwards": "two"}, same=True)],
    "Sampling.shape": [RequestCase(sampling=shaped((1, 2, 8))), RequestCase(sampling=shaped((1, 4, 2, 2)))],
    "Sampling.schedule": [RequestCase(sampling={"schedule": MODEL.schedule(6, tiny.SHAPE)})],
    "Sampling.guidance": [RequestCase(guidance=GUIDED)],
    "Sampling.stochastic": [RequestCase(rollout={"sampler": Ode()}, stochastic=None)],
    "Sampling.autocast": [RequestCase(sampling={"autocast": True})],
    "Sampling.prefix": [RequestCase(sampling={"prefix": SharedPrefix(1, 2)}, stochastic={"window": (1, 2)}, requests=TWO)],
    "Sampling.text_tokens": [RequestCase(sampling={"text_tokens": 2})],
    "Sampling.after": [RequestCase(sampling={"after": Tail(fraction=0.5)}, stochastic={"window": (0, 1)})],
    "Sampling.reuse": [RequestCase(sampling={"reuse": name}, same=True) for name in ("all", "outside_blocks")],
    "Sampling.final": [RequestCase(sampling={"final": False}, stochastic=each) for each in ({"window": (1,)}, {})],
    "StochasticSteps.transition": [
        *(RequestCase(rollout={"sampler": Stochastic(name, eta=ETA)}) for name in ("cps", "dance_sde", "wan_sde")),
        RequestCase(rollout={"sampler": Stochastic(eta=0.9)}),
    ],
    "StochasticSteps.window": [
        RequestCase(stochastic={"window": (1, 2)}),
        RequestCase(stochastic={"window": lambda ids: torch.tensor([[own % 3, own % 3 + 1] for own in ids])}),
    ],
    "StochasticSteps.record": [RequestCase(stochastic={"record": False})],
    "StochasticSteps.form": [RequestCase(stochastic={"form": "unscaled"}), RequestCase(stochastic={"form": "no_const"})],
    "StochasticSteps.reduction": [RequestCase(stochastic={"reduction": "sum"})],
    "StochasticSteps.keep_velocity": [RequestCase(stochastic={"keep_velocity": True})],
}
# A size is of the plan, and there of its shape.
OF_PROMPTS: dict[str, Any] = {"image": b"png", "video": b"gif", "audio": b"wav", "weight": 2.0, "tag": "counting"}
OF_PROMPTS |= {"source": "a.txt", "metadata": {"count": 3}, "size": Size(4, 4)}
# A value that changes nothing of what is asked for: of the update, of rewards and metrics, or a choice of kernels.
LOCAL: dict[str, RequestCase] = {
    "Guidance.gradient": RequestCase(guidance={**GUIDED, "gradient": "conditional"}),
    "Guidance.update": RequestCase(guidance={**GUIDED, "update": "conditional"}),
    "StochasticSteps.implementation": RequestCase(stochastic={"implementation": "reference"}),
    **{
        f"Prompt.{name}": RequestCase(requests={"prompts": [replace(prompt, **{name: value}) for prompt in PROMPTS]})
        for name, value in OF_PROMPTS.items()
    },
}
# No run with servers has them.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "StochasticSteps.noise": (
        {"method": BranchGrpo(), "sampling.window": Splits((0,)), "sampling.group": 2, "train": "full"},
        r"sampling.window is 'splits', expected another than splits or candidates: a server",
    ),
    "Sampling.solver": ({"sampling.sampler": Ode("unipc")}, r"sampling.sampler.solver is 'unipc', expected euler: servers"),
    "Sampling.eta": ({"sampling.sampler": SaSolver(0.5)}, r"sampler.solver is 'sa_solver', expected euler: servers"),
    "Sampling.keep_keys": ({"rollout.reuse": "keys"}, r"rollout.reuse is 'keys', expected exact: servers keep no keys"),
    "Sampling.graphs": ({"engine.compile": "reduce-overhead"}, r"rollout.source is 'http://.*, expected nothing: with"),
    "Sampling.step_cache": (
        {"rollout.step_cache": FirstBlockCache(), "sampling.window": RandomWindow(2)},
        r"rollout.step_cache is 'first_block', expected none: servers",
    ),
}
UNUSED = {"Sampling.observe"}  # of runs
# Carried for pipelines without an adapter, see test_served_runs.py and servers/rollout/test_images.py.
OF_PIPELINES = {"Prompt.media"}


def test_the_tables_have_every_field_of_what_samples_are_made_from() -> None:
    known = [*CARRIED, *LOCAL, *REFUSED, *UNUSED, *OF_PIPELINES]
    made = {
        f"{kind.__name__}.{field.name}" for kind in (Sampling, StochasticSteps, Guidance, Prompt) for field in fields(kind)
    }
    assert sorted(known) == sorted(made | {f"Requests.{name}" for name in Requests._fields})


@pytest.fixture(scope="module")
def server() -> rollout_servers.Server:
    """The rollout server of the model, as `fluvial serve` has it."""
    return rollout_servers.served(rollout_servers.policy(model=MODEL), micro_batch=COUNT)


def asked_for(row: RequestCase) -> tuple[Requests, Sampling, SamplingConfig]:
    config = SamplingConfig(**{"steps": tiny.STEPS, "sampler": Stochastic(eta=ETA), **row.rollout})
    schedule = row.sampling.get("schedule", MODEL.schedule(tiny.STEPS, tiny.SHAPE))
    stochastic = None
    if row.stochastic is not None:
        window = range(len(schedule.timesteps))
        sampler = bind(config.sampler.kind, config.sampler.eta, schedule.levels)
        stochastic = StochasticSteps(**{"transition": sampler, "window": window, **row.stochastic})
    sampling = {"shape": tiny.SHAPE, "schedule": schedule, "guidance": Guidance(**row.guidance), "stochastic": stochastic}
    requests = {"prompts": PROMPTS, "ids": IDS, "key": key(3), **row.requests}
    return Requests(**requests), Sampling(**{**sampling, **row.sampling}), config


class Made(NamedTuple):
    """What a server was asked, and made; and what this process made of the same."""

    bodies: list[Any]
    replies: list[bytes]
    served: Chunk
    inside: Chunk


def made(row: RequestCase, server: rollout_servers.Server, world: World, monkeypatch: pytest.MonkeyPatch) -> Made:
    requests, sampling, config = asked_for(row)
    bodies, replies, transport = list[Any](), list[bytes](), asgi.Transport(server.app)
    handle = transport.handle_request

    def noted(request: Any) -> Any:
        if request.url.path == "/rollout/generate":
            bodies.append(json.loads(request.read()))
        reply = handle(request)
        if request.url.path == "/rollout/generate":
            replies.append(reply.read())
            return httpx2.Response(reply.status_code, headers=reply.headers, stream=httpx2.ByteStream(replies[-1]))
        return reply

    transport.handle_request = noted  # type: ignore[method-assign]
    monkeypatch.setattr(client, "_build_transport", lambda url: transport)
    module = server.policy.weights.module
    inside = InProcess(MODEL, lambda: nullcontext(module))
    sync = SimpleNamespace(push=lambda *args, **options: {}, repeat=lambda peer: None, close=lambda: None)
    source = RemoteSource(
        RolloutConfig(source=URL, servers=ServersConfig(patience=1)),
        config,
        MODEL,
        behaviour=lambda: nullcontext(module),
        adapter=lambda version: "default",
        world=world,
        sizes=SIZES,
        sync=cast(Any, sync),
    )
    try:
        source.push(cast(Any, SimpleNamespace(world=world)), 0)
        chunks = [next(each.generate(requests, sampling, micro_batch=COUNT)) for each in (source, inside)]
    finally:
        source.close()
    return Made(sorted(bodies, key=str), replies, *chunks)


def bits(chunk: Chunk) -> list[Tensor]:
    return optree.tree_leaves((chunk.trajectory, chunk.images))


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(*pair) for pair in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def plain(server: rollout_servers.Server, one: World) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        return made(RequestCase(), server, one, patch)


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in CARRIED for number in range(len(CARRIED[name]))])
def test_a_server_is_told_everything_that_a_sample_depends_on(
    name: str, number: int, server: rollout_servers.Server, plain: Made, one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field is in the request, and the samples have the bits of those in process with the same value."""
    row = CARRIED[name][number]
    found = made(row, server, one, monkeypatch)
    assert same(bits(found.served), bits(found.inside))
    assert found.bodies != plain.bodies
    # Else the value would do nothing, and the row would show nothing.
    assert row.same or not same(bits(found.inside), bits(plain.inside))


def test_the_latents_of_a_reply_are_those_of_the_recorded_steps(
    server: rollout_servers.Server, one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step has two, and W steps in a row W + 1; the final ones are sent only where they are needed."""
    rows = ((0,), False, 2), ((1,), False, 2), ((1,), True, 3), ((3,), True, 2), ((1, 2), False, 3), ((0, 2), False, 4)
    for window, final, count in rows:
        row = RequestCase(stochastic={"window": window}, sampling={"final": final})
        samples = [sample for reply in made(row, server, one, monkeypatch).replies for sample in read_response(reply)]
        assert [len(cast(Any, sample.dit_trajectory).latents) for sample in samples] == [count] * COUNT, window


def test_final_latents_are_asked_for_where_they_are_needed(
    server: rollout_servers.Server, one: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By rewards of latents, objectives on clean samples, and a store; not for one that trains on recorded steps."""

    def latent(latents: Tensor, prompts: list[str]) -> Tensor:
        return latents.flatten(1).mean(1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "_build_transport", lambda url: asgi.Transport(server.app))
    rows: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"rollout.store": Path("stored")}, True),
        ({"method": Nft(), "train": "lora", "sampling.sampler": Ode()}, True),
        ({"rewards": ("latent",)}, True),
        ({"rollout.source": "", "rollout.servers": ServersConfig()}, True),
    ]
    for changes, final in rows:
        asked = {"sampling": SamplingConfig(2, 2, steps=tiny.STEPS), "rollout.source": URL}
        config = tiny.config(tmp_path / "run", **{**asked, "rollout.servers": ServersConfig(patience=1), **changes})
        job = tiny.job(model=MODEL, rewards={"brightness": tiny.brightness, "latent": latent})
        with Trainer(config, job, one) as trainer:
            root = key(1)
            assert trainer.sampler.specify(root, trainer.sampler.choose_prompts(root, 0), 0).sampling.final == final


@pytest.mark.parametrize("kind", ["fluvial", "sglang"])
def test_images_of_prompts_are_sent_with_their_arguments(kind: Any) -> None:
    """Each image of a list has that of the list; sglang, which makes one sample per request, is sent no names."""
    media = [{"mask_image": b"m", "image": images} for images in (b"1", b"1", (b"2", b"3"))]
    builder, sampling = RequestBuilder(kind, "flow_sde", ETA, "velocity", SIZES), plain_sampling()
    requests = Requests([Prompt("1", media=each) for each in media], (5, 6, 7), key(1))
    orders = builder.build_orders(requests, sampling, micro_batch=COUNT, guided=False)
    assert [order.ids for order in orders] == ([(5, 6), (7,)] if kind == "fluvial" else [(5,), (6,), (7,)])
    for order, images in zip((orders[0], orders[-1]), (["MQ=="], ["Mg==", "Mw=="]), strict=True):
        asked = builder.build_request(order, key(1), sampling, version=0)
        assert asked.image_path == tuple(f"data:image/png;base64,{image}" for image in ("bQ==", *images))
        assert asked.fluvial.media == (("mask_image", *["image"] * len(images)) if kind == "fluvial" else None)


def plain_sampling() -> Sampling:
    return Sampling(tiny.SHAPE, MODEL.schedule(tiny.STEPS, tiny.SHAPE), Guidance())


class Unbuilt(Model):
    """A model without a network."""

    def build(self, *, empty: bool = False) -> NoReturn:
        raise AssertionError("the network is built")


def test_a_folder_of_frames_is_sent_to_no_server(one: World, tmp_path: Path) -> None:
    """A request has files: it is refused before the network is built."""
    prompts = [Prompt("0"), Prompt("1", media={"video": tmp_path})]
    job = replace(tiny.job(model=Unbuilt()), prompts=tuple(prompts))
    shown = f"{tmp_path}, a folder of frames, in video"
    with pytest.raises(UsageError, match=f"^prompt '1' has {re.escape(shown)}, which cannot be sent to a server: "):
        Trainer(tiny.config(tmp_path / "run", **{"rollout.source": URL}), job, one)
    with pytest.raises(AssertionError, match="the network is built"):
        Trainer(tiny.config(tmp_path / "run"), job, one)


@pytest.mark.parametrize("name", LOCAL)
def test_what_samples_do_not_depend_on_stays_with_the_trainer(
    name: str, server: rollout_servers.Server, one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = LOCAL[name]
    found = made(row, server, one, monkeypatch)
    without = made(RequestCase(guidance=GUIDED if row.guidance else {}), server, one, monkeypatch)
    assert same(bits(found.served), bits(without.served))
    assert found.bodies == without.bodies
    assert [*found.served.prompts] == [*asked_for(row)[0].prompts]


def test_a_server_with_another_schedule_is_found_out(
    server: rollout_servers.Server, one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = MODEL.schedule(tiny.STEPS, tiny.SHAPE).levels ** 1.1
    row = RequestCase(sampling={"schedule": MODEL.schedule(tiny.STEPS, tiny.SHAPE)._replace(levels=levels)})
    with pytest.raises(RunError, match=r"has sigma .* serve with the trainer's scheduler and shift"):
        made(row, server, one, monkeypatch)


def test_what_no_server_can_do_is_refused_when_the_run_is_configured() -> None:
    """In one line that names the field; without servers it is taken."""
    custom = {"sampling.sampler": Stochastic(own_sampler, eta=ETA)}
    own = {"StochasticSteps.transition": (custom, r"sampling.sampler is '.*own_sampler', expected one of flow_sde")}
    for name, (changes, says) in {**REFUSED, **own}.items():
        method = Grpo() if name.startswith(("Stochastic", "Sampling.step")) else Nft()
        needed = {"method": method, "train": "lora", **changes}
        tiny.config(Path("out"), **needed)
        with pytest.raises(UsageError, match=says) as caught:
            tiny.config(Path("out"), **needed, **{"rollout.source": URL})
        assert "\n" not in str(caught.value)


def own_sampler(level: Any, level_next: Any, *, eta: float) -> Any:
    raise AssertionError
