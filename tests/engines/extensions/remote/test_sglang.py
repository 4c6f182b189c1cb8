"""Samples by sglang's own rollout controller, hooks and responses, around the tiny network, read by the client."""

import base64
import io
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import httpx2
import msgpack
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from helpers import real_sglang, tiny_conditioned
from helpers import tiny_jobs as tiny
from helpers.fake_rollouts import MICRO_BATCH, planned, respond
from helpers.fake_servers import loopback
from helpers.weight_servers import adapted, base, engine_of, move, served
from safetensors.torch import load_file

from fluvial.core.random import key
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.remote import replies
from fluvial.engines.extensions.remote.remote import RemoteSource
from fluvial.engines.extensions.remote.weight_sync import WeightSync
from fluvial.engines.methods.table import Dppo
from fluvial.engines.sampling.config import ReadingConfig, RolloutConfig, SamplingConfig, ServersConfig
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, StochasticSteps
from fluvial.engines.sampling.samplers import SAMPLERS, Stochastic
from fluvial.engines.sampling.window import RandomWindow
from fluvial.models.guidance import guided_velocity
from fluvial.models.lora import find_lora_layers
from fluvial.models.pipelines.layouts import FRAME, PLAIN, TOKENS, ServerLayout, find_layout
from fluvial.models.pipelines.open import open_model

pytestmark = pytest.mark.long  # it installs a wheel
NEAR = 1e-5  # of log-probs, in nats per dimension


class Sglang:
    """Handler of a server whose samples sglang's own code makes, in its layout of latents."""

    def __init__(
        self, layout: ServerLayout, image: Any, *, model: Any = None, shape: tuple[int, ...] = tiny.SHAPE, order: int = 1
    ) -> None:
        self.layout, self.image, self.model, self.shape, self.order = layout, image, model or tiny.Tiny(), shape, order
        self.module, self.read = self.model.build().eval(), image_loader()
        self.asked, self.one = list[dict[str, Any]](), threading.Lock()
        self.api = real_sglang.part("entrypoints.post_training.rollout_api")
        self.hooks = real_sglang.part("post_training.rollout_hooks")
        self.schedulers = real_sglang.part("models.schedulers.scheduling_flow_match_euler_discrete")

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        if handler.path != "/rollout/generate":
            respond(handler, json.dumps({"model_path": "tiny"}).encode())
            return
        request = self.api.RolloutRequest(**json.loads(body))
        with self.one:
            self.asked.append(self.api._build_sampling_kwargs(request))
            batch, images = self.made(self.asked[-1])
        result = SimpleNamespace(output=images, metrics=None, peak_memory_mb=0.0)
        result.rollout_trajectory_data = batch.rollout_trajectory_data
        found = self.api._build_response("request", request.prompt, request.seed, request.rollout, result)
        respond(handler, msgpack.packb([each.model_dump() for each in found]), media="application/msgpack")

    @torch.no_grad()
    def made(self, asked: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        hooks = self.hooks
        count, schedule = asked["num_outputs_per_prompt"], self.model.schedule(asked["num_inference_steps"], self.shape)
        scheduler = self.schedulers.FlowMatchEulerDiscreteScheduler()
        scheduler.sigmas, scheduler.timesteps = schedule.levels.clone(), 1000 * schedule.levels[:-1]
        noise = [torch.Generator().manual_seed(asked["seed"] + row) for row in range(count)]
        start = torch.cat([torch.randn(1, *self.shape, generator=generator) for generator in noise])
        names = {name: value for name, value in asked.items() if name.startswith("rollout")}
        optional = dict.fromkeys(("rollout_sde_step_indices", "rollout_return_step_indices", "rollout_trajectory_data"))
        latents = self.layout.from_event(start)
        batch = SimpleNamespace(**{**optional, **names}, scheduler=scheduler, generator=noise, latents=latents)
        config = SimpleNamespace(shard_latents_for_sp=lambda batch, latents: (latents, False))
        hooks.prepare_rollout_if_enabled(batch=batch, pipeline_config=config)
        env: dict[str, Any] = {"image_kwargs": {}, "pos_cond_kwargs": {}, "neg_cond_kwargs": {}, "guidance": None}
        hooks.init_rollout_env_if_enabled(batch=batch, **env)
        guidance = Guidance(asked["guidance_scale"], asked.get("negative_prompt", ""))
        media = {"image": tuple(map(self.read, asked["image_path"]))[:: self.order]} if "image_path" in asked else {}
        cond = guidance.encode(self.model, [Prompt(asked["prompt"], media=media)] * count, None)
        for number, timestep in enumerate(scheduler.timesteps):
            x, level = self.layout.to_event(latents, self.shape), schedule.levels[number].expand(count)
            v = guided_velocity(self.model, self.module, x, level, cond, timestep=timestep.expand(count))
            step = hooks.rollout_step_kwargs(batch)
            latents = scheduler.step(self.layout.from_event(v), timestep, latents, **step, return_dict=False)[0]
        end = {"num_inference_steps": len(scheduler.timesteps), "final_timestep": scheduler.timesteps.new_zeros(())}
        hooks.finalize_rollout_if_enabled(batch=batch, latents=latents, pipeline_config=config, **end)
        return batch, self.image(self.model.decode(self.layout.to_event(latents, self.shape)))


def image_loader() -> Callable[[str], bytes]:
    """Return sglang's own functions that read an image of a request; the image is a PNG then."""
    read = real_sglang.function("srt/utils/common.py", "get_image_bytes", pybase64=base64)
    names = {"PIL": PIL, "os": os, "BytesIO": io.BytesIO, "srt_get_image_bytes": read}
    load = real_sglang.function("multimodal_gen/runtime/utils/vision.py", "load_image", **names)

    def png(image: str) -> bytes:
        load(image).save(file := io.BytesIO(), "PNG")
        return file.getvalue()

    return png


@contextmanager
def source_of(server: Sglang, sampling: ReadingConfig, world: World) -> Iterator[RemoteSource]:
    sync = SimpleNamespace(push=lambda *args, **kwargs: {}, repeat=lambda peer: None, close=lambda: None)
    with loopback(server) as url:
        options: dict[str, Any] = {"adapter": lambda version: "default", "world": world, "sizes": {}, "sync": sync}
        config = RolloutConfig(source=url, servers=ServersConfig(timeout=60, patience=1))
        source = RemoteSource(config, sampling, server.model, behaviour=lambda: nullcontext(server.module), **options)
        try:
            source.push(cast(Engine, SimpleNamespace(world=world)), 0)
            yield source
        finally:
            source.close()


ROLLOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all steps": ({}, {}),
    "a window": ({"window": RandomWindow(2, low=1, high=3)}, {}),
    "a window at the end": ({"window": RandomWindow(3, low=1)}, {}),
    "cps": ({"sampler": Stochastic("cps", eta=0.5)}, {}),
    "guidance": ({"guidance": Guidance(2.0, "3")}, {}),
    "residuals": ({}, {"form": "unscaled"}),
    "velocities": ({}, {"method": Dppo(), "train": "lora"}),
}


@pytest.mark.parametrize("name", ROLLOUTS)
@pytest.mark.parametrize("layout", [PLAIN, TOKENS, FRAME], ids=["plain", "tokens", "frame"])
def test_replies_of_sglang_are_read(one: World, monkeypatch: pytest.MonkeyPatch, layout: ServerLayout, name: str) -> None:
    """Its log-probs are the trainer's, its steps lead from latents to latents, and its images come from the last ones."""
    monkeypatch.setattr(replies, "find_layout", lambda model: layout)
    changes, others = ROLLOUTS[name]
    asked = replace(SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5)), **changes)
    spec = planned(one, asked, **others)
    server = Sglang(layout, lambda images: images.unsqueeze(2) if layout is TOKENS else images)
    with source_of(server, asked, one) as source:
        made = list(source.generate(spec.requests, spec.sampling, micro_batch=MICRO_BATCH))
        alike, ids = [spec.requests.prompts[0]] * MICRO_BATCH, list(range(MICRO_BATCH))
        found = source.compare_with_servers(Requests(alike, ids, key(8)), spec.sampling)
    assert found.kind == "sglang"
    assert found.largest < NEAR
    window = asked.window.count(asked.steps) - (name == "cps")  # whose last step is deterministic
    assert len(found.differences) == window
    for chunk in made:
        trajectory = chunk.trajectory
        assert trajectory.x.shape == (MICRO_BATCH, window, *tiny.SHAPE)
        assert torch.equal(trajectory.x_next[:, :-1], trajectory.x[:, 1:])
        torch.testing.assert_close(chunk.images, server.model.decode(trajectory.final).clamp(0, 1))
        assert (trajectory.velocity is not None) == (name == "velocities")
        if trajectory.velocity is not None:
            assert trajectory.velocity.shape == trajectory.x.shape


@pytest.mark.parametrize("order", [1, -1], ids=["their order", "reversed"])
def test_sglang_edits_images(one: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: int) -> None:
    """Qwen-Image-Edit-Plus, two images per prompt, one sample per request; images in another order are noticed."""
    tiny_conditioned.without_scaling(monkeypatch)
    folder = tiny_conditioned.save("qwen-edit-plus", tmp_path / "edit")
    model = open_model(folder, height=16, width=16, text_tokens=300, device="cpu")
    shape = model.latent_shape(16, 16)
    files = [tiny_conditioned.draw_image(tmp_path / f"{number}.png", number) for number in range(3)]
    prompts = [Prompt("a red fox", media={"image": (files[row], files[row + 1])}) for row in (0, 0, 1, 1)]
    rollout = SamplingConfig(prompts=2, group=2, steps=3, sampler=Stochastic(eta=0.5))
    schedule = model.schedule(3, shape)
    steps = StochasticSteps(SAMPLERS["flow_sde"].bind(0.5, schedule.levels), (0, 1))
    sampling = Sampling(shape, schedule, Guidance(2.0, "dull"), stochastic=steps)
    server = Sglang(find_layout(model), lambda images: images.unsqueeze(2), model=model, shape=shape, order=order)
    with source_of(server, rollout, one) as source:
        (chunk,) = source.generate(Requests(prompts, [5, 6, 7, 8], key(1)), sampling, micro_batch=4)
        assert [asked["num_outputs_per_prompt"] for asked in server.asked] == [1] * 4
        assert len({asked["seed"] for asked in server.asked}) == 4
        found = source.compare_with_servers(Requests(prompts, [0, 1, 2, 3], key(8)), sampling)
    torch.testing.assert_close(chunk.images, model.decode(chunk.trajectory.final).clamp(0, 1))
    assert (found.largest < NEAR) == (order == 1), found.largest


def test_sglang_takes_the_image_alone(one: World) -> None:
    """A mask has no place in its requests; a server of fluvial without images is told apart from it."""
    for takes in (("image", "mask_image"), ("control_image",)):
        server = Sglang(PLAIN, None, model=type("Conditioned", (tiny.Tiny,), {"takes": takes})())
        with pytest.raises(UsageError, match=r"takes no images with a prompt, .* have .*image.*: use fluvial serve"):
            source_of(server, SamplingConfig(prompts=2, group=2), one).__enter__()


def test_sglang_holds_one_adapter_after_many_pushes(one: World, tmp_path: Path) -> None:
    """Its own function that loads an adapter drops the one of the same nickname; each push has a path that it loads.

    Its layers scale by alpha / rank of the last push, which its own functions read from the file: half of it, then all.
    """
    held: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    settings = SimpleNamespace(lora_path=None, pipeline_config=mock.MagicMock())
    pipeline = SimpleNamespace(lora_adapters=held, server_args=settings, modules=mock.MagicMock(), device="cpu")
    pipeline.loaded_adapter_paths, pipeline.loaded_adapter_alphas = {}, {}
    path, peft = (
        "multimodal_gen/runtime/pipelines_core/lora/pipeline.py",
        real_sglang.part("pipelines_core.lora.peft_adapter"),
    )
    load = real_sglang.function(
        path,
        "load_lora_adapter",
        maybe_download_lora=lambda path, weight_name: next(Path(path).rglob("*.safetensors")),
        dist=SimpleNamespace(is_initialized=lambda: False),
        load_file=load_file,
        load_peft_config=peft.load_peft_config,
        normalize_lora_state_dict=lambda tensors, **options: tensors,
        get_peft_lora_alpha=peft.get_peft_lora_alpha,
        get_param_names_mapping=lambda mapping: lambda name: (name, None, None),
        _swap_peft_swiglu_fc1_lora_b=lambda name, target, weight: weight,
        _store_fused_lora_groups=lambda *args: None,
        BaseDiT=int,
        defaultdict=defaultdict,
        logger=mock.Mock(),
    )
    apply = real_sglang.function(path, "_apply_lora_to_layers", logger=mock.Mock())
    engine = engine_of(adapted(base()), one)
    adapted_layers: Any = find_lora_layers(engine.module)
    layers: dict[str, Any] = {f"transformer.{name}": mock.Mock() for name in adapted_layers}
    server, handled, pushed, scales = served(tmp_path), [], list[Any](), list[set[float]]()
    transport = cast(Any, server.client.transport)
    handle = transport.handle_request

    def noted(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/set_lora":
            body = json.loads(request.read())
            if pipeline.loaded_adapter_paths.get(body["lora_nickname"]) != body["lora_path"]:  # as its `set_lora` does
                load(pipeline, body["lora_path"], body["lora_nickname"], 0)
            apply(pipeline, layers, [body["lora_nickname"]], [body["lora_path"]], 0, [body["strength"]], merge_weights=False)
            scales.append({layer.lora_alpha / layer.lora_rank for layer in layers.values()})
            handled.append(body["lora_path"])
            pushed.append({name: tensor.clone() for name, tensor in held[body["lora_nickname"]].items()})
        return handle(request)

    transport.handle_request = noted
    sync = WeightSync(one, folder=tmp_path)
    for version, factor in ((1, 1), (2, 2), (3, 1 / 2)):
        cast(Any, engine.module).peft_config["default"].lora_alpha *= factor
        for layer in adapted_layers.values():
            layer.scaling["default"] *= factor
        move(engine, seed=version)
        assert sync.push(engine, version, [server.client]) == {}
    sync.close()
    assert len(held) == 1
    assert len({*handled}) == len(pushed) == 3
    assert scales == [{1.5}, {3.0}, {1.5}]
    assert {len(tensors) for tensors in pushed} == {2 * len(find_lora_layers(engine.module))}
    for before, after in pairwise(pushed):
        assert any(not torch.equal(before[name], after[name]) for name in after)
