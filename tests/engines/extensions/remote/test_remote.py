"""Samples by servers: the same bits as in process, and whatever servers do wrong is one line or a retry."""

import pickle
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optree
import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.fake_rollouts import MICRO_BATCH, FakeRollouts, Fault, changed, of_trajectory, planned, respond
from helpers.fake_servers import loopback
from torch import nn

from fluvial.core.random import key
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.remote import servers
from fluvial.engines.extensions.remote.remote import RemoteSource
from fluvial.engines.extensions.wire.client import UnreachableError
from fluvial.engines.methods.table import Nft
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.batch import RolloutSpec
from fluvial.engines.sampling.config import ReadingConfig, RolloutConfig, SamplingConfig, ServersConfig, Truncate
from fluvial.engines.sampling.generate import Chunk, Guidance, Requests, Sampling, generate, move_schedule
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.source import Holder, InProcess
from fluvial.engines.sampling.tail import Tail
from fluvial.engines.sampling.window import Branches, RandomWindow
from fluvial.models.pipelines.base import check_still

STEPS = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
QUICK = ServersConfig(timeout=5, patience=1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a server that failed after a moment whether it is back."""
    monkeypatch.setattr(servers, "FIRST_PROBE", 0.05)
    monkeypatch.setattr(servers, "BUSY", 0.05)
    monkeypatch.setattr(servers, "TRIES", 2)


class FakeSync:
    """Weights are shared; only their version is given."""

    def __init__(self, fakes: Sequence[FakeRollouts]) -> None:
        self.fakes, self.repeated = fakes, list[str]()
        self.is_down, self.pushes = False, 0

    def push(
        self, engine: Holder, version: int, peers: Sequence[Any], *, adapter: str = "default", label: str = ""
    ) -> dict[str, str]:
        self.pushes += 1
        if self.is_down:
            raise UnreachableError(f"no server took the weights of update {version}: it restarts")
        self.version = version
        for fake in self.fakes:
            fake.version = version
        return {}

    def repeat(self, peer: Any) -> str | None:
        self.repeated.append(peer.address)
        for fake in self.fakes:
            fake.version = self.version
        return None

    def close(self) -> None:
        """Do nothing."""


def remote(
    config: RolloutConfig, fakes: Sequence[FakeRollouts], world: World, sampling: ReadingConfig = STEPS
) -> RemoteSource:
    options: dict[str, Any] = {"adapter": lambda version: "default", "sizes": {}, "sync": FakeSync(fakes)}
    return RemoteSource(
        config, sampling, tiny.Tiny(), behaviour=lambda: nullcontext(fakes[0].module), world=world, **options
    )


@contextmanager
def served(
    *fakes: FakeRollouts, world: World, sampling: ReadingConfig = STEPS, config: ServersConfig = QUICK, **rollout: Any
) -> Iterator[RemoteSource]:
    with ExitStack() as stack:
        urls = ",".join(stack.enter_context(loopback(fake)) for fake in fakes)
        source = remote(RolloutConfig(source=urls, servers=config, **rollout), fakes, world, sampling)
        stack.callback(source.close)
        source.push(cast(Engine, SimpleNamespace(world=world)), 3)
        yield source


@pytest.mark.parametrize(("filled", "says"), [(16, False), (17, True), (64, True)])
def test_a_server_that_fills_larger_batches_than_it_is_asked_for_is_named(one: World, filled: int, says: bool) -> None:
    """Two requests at a time, of one group of 8 each, are 16 samples."""
    fake = FakeRollouts(tiny.Tiny().build())
    fake.filled = filled
    config, rollout = replace(QUICK, in_flight=2), replace(STEPS, group=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with served(fake, world=one, sampling=rollout, config=config):
            pass
    expected = f"at most 16 at a time: it computes {filled / 16:.3g} times as many; serve with --micro-batch 16 or less"
    assert [expected in str(warning.message) for warning in said] == [True] * says


def chunks(source: Any, spec: RolloutSpec, micro_batch: int = MICRO_BATCH) -> list[Chunk]:
    return list(source.generate(spec.requests, spec.sampling, micro_batch=micro_batch))


def net() -> nn.Module:
    return tiny.Tiny().build()


# How trainers ask for samples; that each field of a request counts is tested in test_conditions.py.
VARIED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"window": RandomWindow(1, high=3, draw="call")}, {}),
    ({"window": Branches(1, 2, high=2)}, {}),
    ({"sampler": Ode()}, {"method": Nft(), "train": "lora"}),  # clean samples are their last latents alone
]


@pytest.mark.parametrize(("rollout", "changes"), VARIED, ids=lambda value: " ".join(map(str, value)) or "as it is")
def test_chunks_have_the_bits_of_those_in_process(one: World, rollout: dict[str, Any], changes: dict[str, Any]) -> None:
    """Whatever the sampler, the window, the noise that samples share and the guidance."""
    asked, fakes = replace(STEPS, **rollout), [FakeRollouts(net()) for _ in range(2)]
    spec = planned(one, asked, **changes)
    inside = InProcess(tiny.Tiny(), lambda: nullcontext(fakes[0].module))
    inside.push(cast(Engine, None), 3)
    with served(*fakes, world=one, sampling=asked) as source:
        found, expected = chunks(source, spec), chunks(inside, spec)
    for own, other in zip(found, expected, strict=True):
        assert [*own.prompts] == [*other.prompts]
        assert own.version == other.version == 3
        leaves = (optree.tree_leaves((chunk.trajectory, chunk.cond, chunk.images)) for chunk in (own, other))
        for tensor, wanted in zip(*leaves, strict=True):
            assert tensor.dtype == wanted.dtype
            assert torch.equal(tensor, wanted)
    assert all(fake.requests for fake in fakes)  # the load is spread


def test_requests_to_sglang_have_its_fields_alone(one: World) -> None:
    """One per prompt, with a seed each; the trajectory is taken from the reply, and is scored alike here."""
    rollout, fake = replace(STEPS, window=RandomWindow(2)), FakeRollouts(net(), "sglang")
    spec = planned(one, rollout)
    with served(fake, world=one, sampling=rollout) as source:
        made = chunks(source, spec)
        handshake = source.compare_with_servers(
            spec.requests._replace(prompts=[Prompt("1")] * 4, ids=range(4), key=key(8)), spec.sampling
        )
    window = sorted(cast(Any, spec.sampling.stochastic).choose_steps([0]))
    for request in fake.requests:
        assert "extra_sampling_params" not in request
        assert request["rollout_sde_step_indices"] == window
        assert request["rollout_return_step_indices"] == sorted({*window, *(step + 1 for step in window), tiny.STEPS})
        assert request["rollout_debug_mode"] is False
        assert (request["rollout_return_dit_trajectory"], request["num_outputs_per_prompt"]) == (True, 4)
    assert len({request["seed"] for request in fake.requests}) == len(fake.requests) == 3
    assert max(request["seed"] for request in fake.requests) > 2**40  # drawn from so many that rollouts share none
    assert handshake.largest == 0.0
    assert handshake.kind == "sglang"
    assert {chunk.version for chunk in made} == {3}


def test_sglang_sends_the_timesteps_of_the_returned_boundaries(one: World) -> None:
    """For some windows they are as many as the four steps, and not the timesteps of these."""
    for size, low in ((1, 0), (2, 0), (2, 2), (3, 0), (3, 1), (4, 0)):
        rollout = replace(STEPS, window=RandomWindow(size, low=low, high=low + size))
        fake, spec = FakeRollouts(net(), "sglang"), planned(one, rollout)
        with served(fake, world=one, sampling=rollout) as source:
            assert len(chunks(source, spec)) == 2
            fake.faults = [of_trajectory(timesteps=lambda value: value + torch.eye(len(value))[-1])] * 9
            with pytest.raises(RunError, match="has timestep 1, expected 0"):
                chunks(source, spec._replace(requests=spec.requests._replace(key=key(9))))


def test_what_sglang_cannot_do_is_refused(one: World) -> None:
    """In one line that names the setting: when the run is built, and a form of numbers when it is first asked for."""
    rollouts: list[dict[str, Any]] = [
        {"sampler": Stochastic("dance_sde", eta=0.5)},
        {"shared_noise": True},
        {"window": RandomWindow(2, low=1, share_prefix=True)},
        {"window": RandomWindow(1, high=3, draw="sample")},
        {"window": Branches(1, 2, high=2)},
        {"window": RandomWindow(1, high=2, tail=Tail(fraction=0.5))},
        {"guidance": Guidance(scale=0.5)},
    ]
    for rollout in rollouts:
        with pytest.raises(UsageError, match=r"^sampling\.[^\n]*sglang[^\n]*$"):
            served(FakeRollouts(net(), "sglang"), world=one, sampling=replace(STEPS, **rollout)).__enter__()
    with pytest.raises(UsageError, match=r"rollout.autocast is True; sglang"):
        served(FakeRollouts(net(), "sglang"), world=one, autocast=True).__enter__()
    for name, value in {"form": "no_const", "reduction": "sum"}.items():
        spec = planned(one, STEPS, **{name: value})
        says = rf"{name} is {value}.*; sglang does not support this"
        with served(FakeRollouts(net(), "sglang"), world=one) as source, pytest.raises(UsageError, match=says):
            chunks(source, spec)


def hang_up(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"\x91")
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def huge(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/msgpack")
    handler.send_header("Content-Length", str(10**10))
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(bytes(1 << 20))
    except OSError:
        pass


def twice(handler: Any) -> None:
    for _ in range(2):
        respond(handler, b"\x90", media="application/msgpack")


FAULTS: dict[str, tuple[Any, str]] = {
    "killed in mid-request": (Fault(hang_up), "cannot be reached: peer closed connection"),
    "ten gigabytes": (Fault(huge), "a reply of more than 1 MB"),
    "two replies": (Fault(twice), "0 samples came, expected 4"),
    "500": (Fault(lambda handler: respond(handler, b'{"detail": "out of memory"}', 500)), "answered 500: .*out of memory"),
    "503": (Fault(lambda handler: respond(handler, b"", 503)), "answered 503"),
    "a page": (Fault(lambda handler: respond(handler, b"<html>", media="text/html")), "of type 'text/html'"),
    "JSON": (Fault(lambda handler: respond(handler, b"{}")), "response: Expected .?array"),
    "a pickle": (lambda samples: pickle.dumps(time.sleep), "response: Expected .?array"),
    "fewer samples": (lambda samples: samples[:-1], "3 samples came, expected 4"),
    "more samples": (lambda samples: samples * 2, "8 samples came, expected 4"),
    "other weights": (changed(weight_version=2), "weights of version 2, expected 3"),
    "unknown weights": (changed(weight_version=None), "has no weight_version, expected 3"),
    "another prompt": (changed(prompt="5"), "has the prompt '5'"),
    "no trajectory": (changed(dit_trajectory=None), "has no dit_trajectory"),
    "no log-probs": (changed(rollout_log_probs=None), r"shape none, expected \[4\]"),
    "NaN": (changed(rollout_log_probs=torch.full((4,), torch.nan)), "not finite"),
    "images of another shape": (changed(generated_output=torch.ones(2, 4, 4)), r"an image of shape \[2, 4, 4\]"),
    "a row of pixels": (changed(generated_output=torch.ones(4)), r"generated_output is torch.float32 \[4\]"),
    "a black hole": (changed(generated_output=torch.full((1, 4, 4), 7.0)), "an image from 7 to 7"),
    "other latents": (of_trajectory(latents=lambda value: value[..., :2]), r"latents of shape \[1, 4, 2\], expected"),
    "infinite latents": (of_trajectory(latents=lambda value: value / 0), "latents are not finite"),
    "other levels": (of_trajectory(sigmas=lambda value: value * 0.99), "has sigma 0.99 at step 0"),
    "other timesteps": (of_trajectory(timesteps=lambda value: value + 1), "has timestep 1001, expected 1000"),
    "no last latents": (
        of_trajectory(latents=lambda value: value[:-1], latent_step_indices=lambda value: value[:-1]),
        "no latents at boundary 4",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_retry_or_one_line(one: World, name: str) -> None:
    """On another server the rollout is completed, with the bits it would have had; servers that all fail end it."""
    fault, says = FAULTS[name]
    fakes, spec, config = [FakeRollouts(net()) for _ in range(2)], planned(one, STEPS), replace(QUICK, most_mb=1)
    expected = chunks(InProcess(tiny.Tiny(), lambda: nullcontext(fakes[0].module)), spec)
    with served(*fakes, world=one, config=config) as source:
        fakes[0].faults = [fault]
        found = chunks(source, spec)
        assert all(torch.equal(own.images, other.images) for own, other in zip(found, expected, strict=True))
        for fake in fakes:
            fake.faults = [fault] * 20
        with pytest.raises(RunError, match=says) as caught:
            chunks(source, spec)
        assert "\n" not in str(caught.value)


def test_a_server_that_answers_after_the_deadline_is_not_waited_for(one: World) -> None:
    """Its late reply is nobody's."""
    over, spec = threading.Event(), planned(one, STEPS)
    silent = Fault(lambda handler: cast(Any, over.wait(60)))
    fakes = [FakeRollouts(net()) for _ in range(2)]
    with served(*fakes, world=one, config=replace(QUICK, timeout=2)) as source:
        fakes[0].faults = [silent]
        assert len(chunks(source, spec)) == 2
        fakes[0].faults = fakes[1].faults = [silent] * 9
        with pytest.raises(RunError, match=r"did not answer within 2 s"):
            chunks(source, spec)
        over.set()


def test_a_wrong_request_is_not_sent_to_other_servers(one: World) -> None:
    """It is wrong everywhere. A server that has too much to do is asked again, which does not count as a failure."""
    fakes, spec = [FakeRollouts(net()) for _ in range(2)], planned(one, STEPS)
    with served(*fakes, world=one) as source:
        for fake in fakes:
            fake.faults = [Fault(lambda handler: respond(handler, b'{"detail": "no such sampler"}', 400))] * 9
        with pytest.raises(RunError, match=r"answered 400: .*no such sampler"):
            chunks(source, spec)
    assert sum(len(fake.requests) for fake in fakes) <= 2  # one per prompt
    with served(fakes[0], world=one) as source:
        fakes[0].faults = [Fault(lambda handler: respond(handler, b"", 429))] * 9
        assert len(chunks(source, spec)) == 2


def test_a_server_that_died_comes_back_with_the_weights_of_now(one: World) -> None:
    """A rollout is completed by the other one; the first is given the weights again before it is asked for samples."""
    fakes, spec = [FakeRollouts(net()) for _ in range(2)], planned(one, STEPS)
    with served(*fakes, world=one) as source:
        fakes[0].faults, fakes[0].is_ready = [Fault(hang_up)] * 2, False
        chunks(source, spec)
        assert [server.address for server in source.pool.live] == [source.pool.servers[1].address]
        fakes[0].is_ready, fakes[0].version, fakes[0].faults = True, 0, []
        begun = time.monotonic()
        while len(source.pool.live) < 2 and time.monotonic() - begun < 60:
            time.sleep(0.02)
        assert cast(FakeSync, source.sync).repeated == [source.pool.servers[0].address]
        assert len(chunks(source, spec._replace(requests=spec.requests._replace(key=key(9))))) == 2
        assert len(fakes[0].requests) > 1


def test_a_restart_during_a_push_is_waited_for(one: World) -> None:
    """For the patience of the run, and then the weights are given again."""
    fake, spec, engine = FakeRollouts(net()), planned(one, STEPS), cast(Engine, SimpleNamespace(world=one))
    with served(fake, world=one, config=replace(QUICK, patience=3)) as source:
        sync = cast(FakeSync, source.sync)
        sync.is_down, fake.is_ready = True, False

        def come_back() -> None:
            sync.is_down, fake.is_ready = False, True

        back = threading.Timer(1.0, come_back)
        back.start()
        source.push(engine, 4)
        back.join()
        assert fake.version == 4
        assert sync.pushes == 3
        assert len(chunks(source, spec)) == 2
        sync.is_down = True  # it says that it is ready, and takes nothing
        with pytest.raises(RunError, match=r"no server has answered for 3 s: no server took the weights .* it restarts"):
            source.push(engine, 5)


def test_images_have_the_size_of_the_samples(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def latent_shape(self: Any, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        check_still(frames)
        return (1, height, width)

    monkeypatch.setattr(tiny.Tiny, "latent_shape", latent_shape)
    spec = planned(one, STEPS)
    for shape, says in (
        ((1, 2, 4), r"an image of shape \[1, 2, 4\], of latents \[1, 2, 4\], expected \[1, 4, 4\]"),
        ((1, 2, 4, 4), r"an image of shape \[1, 2, 4, 4\]: frames is 2"),
        ((1, 1, 4, 4), ""),  # a video of one frame
    ):
        fake = FakeRollouts(net())
        with served(fake, world=one) as source, pytest.raises(RunError, match=says) if says else nullcontext():
            fake.faults = [changed(generated_output=torch.ones(shape))] * 9
            assert {chunk.images.shape for chunk in chunks(source, spec)} == {(MICRO_BATCH, 1, 4, 4)}


def test_the_summary_is_of_served_samples_too(one: World) -> None:
    """With a correction the update's own numbers take the place of the servers', and a first ratio of these is 0."""
    fake = FakeRollouts(net())
    with torch.no_grad():
        for parameter in fake.module.parameters():
            parameter.mul_(1 + 1e-5)
    config = tiny.config(cast(Any, None), sampling=STEPS, correction=Truncate(), **{"engine.micro_batch": MICRO_BATCH})
    with served(fake, world=one) as source, Trainer(config, tiny.job(), one) as trainer:
        for part in (trainer, trainer.run, trainer.sampler):
            part.config = replace(config, rollout=source.rollout)
        trainer.sampler.source = source
        record = trainer.update()
        assert record["first_pass_max_abs_log_ratio"] == 0.0
        assert 0 < record["correction"]["gap_p99"] <= record["correction"]["gap_max"] < 1e-3
        assert trainer.progress.max_log_ratio == record["correction"]["gap_max"]


def test_a_sample_of_the_rollout_before_is_found_out(one: World) -> None:
    """In a rollout with another key, the first reply holds samples of the last one; nor is one used twice in a rollout."""
    fake, spec, known = FakeRollouts(net()), planned(one, STEPS), dict[str, Any]()
    following, noted_one = spec.requests._replace(key=key(9)), threading.Event()

    def noted(samples: Any) -> Any:
        known[samples[0].prompt] = samples
        noted_one.set()
        return samples

    def repeated(samples: Any) -> Any:
        assert noted_one.wait(20)  # the requests are under way at once
        first = next(iter(known.values()))
        return [replace(sample, prompt=own.prompt) for sample, own in zip(first, samples, strict=True)]

    with served(fake, world=one) as source:
        fake.faults = [noted] * 20
        chunks(source, spec)
        fake.faults = [lambda samples: known[samples[0].prompt]]
        with pytest.raises(RunError, match="sent the same sample twice"):
            chunks(source, spec._replace(requests=following))
        fake.faults = []
        assert len(chunks(source, spec._replace(requests=following._replace(key=key(10))))) == 2
    known.clear()
    noted_one.clear()
    with served(fake, world=one) as source:
        fake.faults = [noted, repeated]
        with pytest.raises(RunError, match="sent the same sample twice"):
            chunks(source, spec)


def test_servers_that_cannot_be_used_are_refused(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has one kind of server, and each once; nothing hangs without any, neither when the run is built, nor later."""
    with pytest.raises(UsageError, match="different programs"):
        served(FakeRollouts(net()), FakeRollouts(net(), "sglang"), world=one).__enter__()
    with pytest.raises(UsageError, match="names a server twice"):
        servers.ServerPool(["http://a:1", "http://a:1/"], QUICK)
    fake, spec = FakeRollouts(net()), planned(one, STEPS)
    with served(fake, world=one) as source:
        fake.is_ready, fake.faults = False, [Fault(hang_up)] * 9
        with pytest.raises(RunError, match=r"no server has answered for 1 s|tries failed"):
            chunks(source, spec)
    with pytest.raises(RunError, match="cannot be reached"):
        remote(RolloutConfig(source="http://127.0.0.1:9", servers=QUICK), [fake], one)
    with loopback(lambda handler: respond(handler, b"{}", 404)) as url:
        says = f"{url} has no /v1/model_info: fluvial serve and sglang have it, vLLM-omni only makes images"
        with pytest.raises(RunError, match=says):
            remote(RolloutConfig(source=url, servers=QUICK), [fake], one)
    fake.server.policy.model, fake.is_ready = type("Text", (tiny.Tiny,), {"takes": ()})(), True
    monkeypatch.setattr(tiny.Tiny, "takes", ("image",), raising=False)
    says = "takes no images with a prompt, and the run's prompts have image: use fluvial serve"
    with pytest.raises(UsageError, match=says):
        served(fake, world=one).__enter__()


def test_the_handshake_says_how_far_servers_are(one: World) -> None:
    """0 where they compute the same, more where their weights are others."""
    fake, spec = FakeRollouts(net()), planned(one, STEPS)
    requests = spec.requests._replace(prompts=[Prompt("1")] * 4, ids=list(range(4)))
    with served(fake, world=one) as source:
        handshake = source.compare_with_servers(requests, spec.sampling)
        assert handshake.largest == 0.0
        assert [*handshake.differences] == [0, 1, 2, 3]
        assert handshake.record["sigmas"] == spec.sampling.schedule.levels.tolist()
        assert "|log-prob by server - by trainer| per step  0: 0 1: 0 2: 0 3: 0" in str(handshake)
        own, fake.module = fake.module, tiny.Tiny(seed=1).build()
        source.behaviour = lambda: nullcontext(own)
        assert source.compare_with_servers(requests, spec.sampling).largest > 1e-3


def test_chunks_are_those_of_generate_with_the_version_that_was_pushed() -> None:
    """The network is open while chunks are made, and closed when the last is taken or the rest is not wanted."""
    model, opened = tiny.Tiny(), list[str]()
    module = model.build()

    @contextmanager
    def behaviour() -> Iterator[nn.Module]:
        opened.append("open")
        try:
            yield module
        finally:
            opened.append("closed")

    source = InProcess(model, behaviour)
    sampling = Sampling(tiny.SHAPE, move_schedule(model.schedule(2, tiny.SHAPE), torch.device("cpu")))
    requests = Requests([Prompt("1")] * 4, [0, 1, 2, 3], key(5))
    source.push(cast(Engine, None), 7)
    expected = list(generate(model, module, requests, sampling, micro_batch=2))
    found = list(source.generate(requests, sampling, micro_batch=2))
    assert [chunk.version for chunk in found] == [7, 7]
    assert all(torch.equal(own.images, other.images) for own, other in zip(found, expected, strict=True))
    assert opened == ["open", "closed"]
    chunks = source.generate(requests, sampling, micro_batch=2)
    next(chunks)
    chunks.close()
    assert opened == ["open", "closed"] * 2


SOURCES = "ftp://a", "http://a,b", "http//a", "replayed:", "stored:x", "somewhere"


def test_sources_of_another_kind_are_refused(tmp_path: Path) -> None:
    """When the configuration is made."""
    wrong: dict[str, dict[str, Any]] = {
        "rollout.servers has no effect without servers": {"servers": QUICK},
        r"rollout\.store has no effect with rollouts that are stored": {"source": "replayed:x", "store": tmp_path},
        **{f"source is '{source}', expected addresses of servers": {"source": source} for source in SOURCES},
    }
    for says, options in wrong.items():
        with pytest.raises(ValueError, match=says):
            RolloutConfig(**options)
