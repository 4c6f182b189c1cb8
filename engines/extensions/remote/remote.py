"""Rollouts from servers: `fluvial serve`, or sglang's diffusion server."""

import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.random import Key
from fluvial.core.rollout import Trajectory
from fluvial.engines.data.records import Prompt
from fluvial.engines.data.sizes import Size
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import FluvialError, RunError, UsageError, convert_errors
from fluvial.engines.export.model_folder import list_components
from fluvial.engines.extensions.remote.binding import NUMBERS, Binding, has_probe, measure_binding, open_probe
from fluvial.engines.extensions.remote.replies import Expected, ServedSample, read_samples
from fluvial.engines.extensions.remote.requests import RequestBuilder, RequestOrder, check_sglang, check_sglang_steps
from fluvial.engines.extensions.remote.servers import Server, ServerPool
from fluvial.engines.extensions.remote.weight_sync import WeightSync
from fluvial.engines.extensions.wire.client import START, UnreachableError, is_success, run_in_threads
from fluvial.engines.extensions.wire.decode import WireError, convert
from fluvial.engines.extensions.wire.request import write_request
from fluvial.engines.extensions.wire.response import Kind, ServerInfo
from fluvial.engines.sampling.config import ReadingConfig, RolloutConfig
from fluvial.engines.sampling.generate import Chunk, Requests, Sampling, StochasticSteps, build_velocity
from fluvial.engines.sampling.handshake import Handshake, compare
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.engines.sampling.source import Behaviour, Copy, Holder, RolloutSource
from fluvial.engines.sampling.tail import Tail
from fluvial.models import DiffusionModel
from fluvial.models.lora import find_lora_layers
from fluvial.models.lora_layer import Product
from fluvial.models.replay.media import list_arguments

GENERATE, INFO = "/rollout/generate", "/v1/model_info"
ETA = 0.5  # noise of the samples with which an adapter is probed
REMEMBERED = 2  # rollouts whose samples are compared with new ones, to detect repeats


class ServedSteps(NamedTuple):
    """Recorded steps of a server's samples, with its predictions."""

    x: Tensor  # [B, S, *event]
    v: Tensor


class RemoteSource(RolloutSource):
    """Rollout source whose samples come from servers.

    Args:
        model: adapter of the architecture, which encodes the prompts.
        behaviour: opens the trainer's copy of the network that generates the rollouts.
        adapter: returns the name of the adapter that generates rollouts after a number of updates.
        world: process group; each rank requests its own samples.
        sizes: size in pixels and number of frames by the shape of a sample, for servers with several sizes.

    Raises:
        UsageError: the servers do not support these samples, or one is not a rollout server.
        RunError: no server answers.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        sampling: ReadingConfig,
        model: DiffusionModel,
        *,
        behaviour: Behaviour,
        adapter: Callable[[int], str],
        world: World,
        sizes: Mapping[tuple[int, ...], tuple[Size, int]],
        sync: WeightSync,
    ) -> None:
        self.rollout, self.sampling, self.model, self.behaviour, self.adapter = rollout, sampling, model, behaviour, adapter
        self.world, self.sync, self.version = world, sync, -1
        self.pool = ServerPool(rollout.source.split(","), rollout.servers, revive=self._revive)
        self._weights = threading.Lock()  # held during a push
        self._seen: dict[Key, set[bytes]] = {}  # last latents of the samples, by rollout
        try:
            self.kind = self._identify_servers()
            if self.kind == "sglang":
                check_sglang(sampling, model.prediction, autocast=rollout.autocast)
        except BaseException:
            self.pool.close()
            raise
        self.builder = RequestBuilder(self.kind, sampling.sampler.kind, sampling.sampler.eta, model.prediction, sizes)

    def generate(self, requests: Requests, sampling: Sampling, *, micro_batch: int) -> Generator[Chunk, None, None]:
        """Yield the requested samples, each chunk as soon as it is complete, see `RolloutSource`."""
        if self.kind == "sglang":
            check_sglang_steps(sampling.stochastic)
        guided = sampling.guidance.is_guided(self.model)
        orders = self.builder.build_orders(requests, sampling, micro_batch=micro_batch, guided=guided)
        expected = Expected(self.kind, self.model, sampling, max(self.version, 0), self.rollout.servers.most_mb)
        steps = {
            sample_id: recorded for order in orders for sample_id, recorded in zip(order.ids, order.recorded, strict=True)
        }
        self._seen = dict([*((key, seen) for key, seen in self._seen.items() if key != requests.key)][-REMEMBERED:])
        self._seen[requests.key] = set()

        def ask(order: RequestOrder) -> dict[int, ServedSample]:
            body = _encode_request(self.builder, order, requests.key, sampling, expected.version)
            samples = self.pool.ask(GENERATE, body, lambda reply, server: read_samples(reply, order, expected, server))
            return dict(zip(order.ids, samples, strict=True))

        threads = self.rollout.servers.in_flight * len(self.pool.servers)
        with run_in_threads(ask, orders, at_once=threads) as results:
            known: dict[int, ServedSample] = {}
            for start in range(0, len(requests.ids), micro_batch):
                part = slice(start, start + micro_batch)
                ids, prompts = requests.ids[part], requests.prompts[part]
                while not known.keys() >= {*ids}:
                    _, samples = next(results)
                    if isinstance(samples, FluvialError):
                        raise samples
                    if isinstance(samples, BaseException):  # a bug
                        raise RunError(f"a reply could not be read: {type(samples).__name__}: {samples}") from samples
                    self._check_unseen(samples, requests.key)
                    known |= samples
                yield self._build_chunk([known[each] for each in ids], [steps[each] for each in ids], prompts, sampling)

    def push(self, engine: Holder, version: int) -> None:
        """Push the current weights to the servers that answer, see `RolloutSource`.

        A `Copy` is unsharded: rank 0 pushes it alone, and the other ranks only set the version.
        """
        if version == self.version:
            return
        world = engine.world
        if world.size < self.world.size and not self.world.is_main:
            self.version = version
            return
        failed_at: float | None = None
        while self.version != version:
            with world.agreed():
                if self.world.is_main:
                    self.pool.wait(failed_at or time.monotonic())
            try:
                self._push(engine, version)
            except UnreachableError:  # the servers may come back within `patience`
                failed_at = failed_at or time.monotonic()

    def _push(self, engine: Holder, version: int, label: str = "") -> None:
        """Push weights to all ready servers, once; raise UnreachableError if all of them are away."""
        with self._weights:
            peers = [server.control for server in self.pool.ready] if self.world.is_main else []
            addresses = engine.world.gather_items([peer.address for peer in peers])[0]
            try:
                failed = self.sync.push(engine, version, peers, adapter=self.adapter(version), label=label)
            except UnreachableError as error:
                self.pool.keep((), dict.fromkeys(addresses, str(error)))
                raise
            self.version = version
            self.pool.keep({address for address in addresses if address not in failed}, failed)

    @collective
    def compare_with_servers(self, requests: Requests, sampling: Sampling) -> Handshake:
        """Compare the servers' log-probabilities for some samples with the trainer's."""
        with self.world.agreed():
            (chunk,) = self.generate(requests, sampling, micro_batch=len(requests.ids))
        with self.behaviour() as module:
            servers = [server.address for server in self.pool.servers]
            return compare(self.model, module, chunk, sampling, kind=self.kind, servers=servers)

    @collective
    def probe(self, engine: Holder, requests: Requests, sampling: Sampling) -> dict[str, Binding]:
        """Measure how the adapter's modules act in the answers of each server, see `RolloutSource`.

        Returns an empty dict if the samples have fewer than two numbers per module.

        It takes three pushes, three requests of a few samples per server, and two forward passes of these per module.
        """
        if not has_probe(engine.module):
            return {}
        bindings, alone = dict[str, Binding](), engine.world.size < self.world.size  # a `Copy` is unsharded
        with self.world.agreed() if alone else nullcontext():
            if not alone or self.world.is_main:
                bindings = self._probe(engine, requests, sampling)
        bindings = self.world.gather_items(bindings)[0]
        if wrong := [f"{address}: {binding.problem}" for address, binding in bindings.items() if binding.problem]:
            raise RunError(
                f"{'; '.join(wrong)}. Such a server samples from another policy than the trained one: compare its layer "
                "names with those of the adapter's file, and its scale with alpha / rank"
            )
        return bindings

    def _probe(self, engine: Holder, requests: Requests, sampling: Sampling) -> dict[str, Binding]:
        adapter, modules = self.adapter(self.version), len(find_lora_layers(engine.module))
        event, steps = math.prod(sampling.shape), len(sampling.schedule.timesteps)
        name = "flow_sde" if self.model.prediction == "velocity" else "ddim"
        rule, count = SAMPLERS[name], min(-(-NUMBERS * modules // event), len(set(requests.ids)))
        window = [*range(steps - rule.last_step_is_deterministic)]
        if count * event >= NUMBERS * modules:  # the last step shows a network that acts only at low noise
            window = [window[0], *window[-1:][: len(list_components(engine.module)) - 1]]
        if count * event * len(window) < 2 * modules:  # too few numbers for the unknowns and a residual
            return {}
        bound = rule.bind(ETA, sampling.schedule.levels)
        stochastic = StochasticSteps(bound, tuple(window), keep_velocity=True)
        sampling = replace(sampling, solver="euler", eta=0.0, stochastic=stochastic, prefix=None, after=Tail(), final=False)
        builder, ids = replace(self.builder, sampler=name, eta=ETA), list(dict.fromkeys(requests.ids))[:count]
        prompts = [requests.prompts[requests.ids.index(sample_id)] for sample_id in ids]
        requests = Requests(prompts, ids, requests.key)
        chosen = torch.randperm(count * len(window) * event, generator=torch.Generator().manual_seed(0))
        chosen, cond = chosen[: NUMBERS * modules], sampling.encode(self.model, prompts)
        levels, device = sampling.schedule.levels.to(engine.world.device), engine.world.device

        # With rollouts ahead, the copy is pushed and probed.
        behaviour = engine.behaviour if isinstance(engine, Copy) else self.behaviour

        def predict(x: Tensor) -> Tensor:
            parts = []
            with behaviour() as module, torch.no_grad():
                velocity = build_velocity(self.model, module, cond, sampling)
                for number, step in enumerate(window):
                    level = levels[step].expand(count, *levels.shape[1:]).contiguous()
                    parts.append(velocity(x[:, number].to(device), level, step))
            return pick(torch.stack(parts, 1))

        def pick(values: Tensor) -> Tensor:
            return values.flatten().cpu()[chosen].double()

        def ask() -> dict[str, ServedSteps]:
            answers = dict[str, ServedSteps]()
            with engine.world.agreed():
                if engine.world.is_main:
                    answers = self._sample_on_each(builder, requests, sampling)
            return engine.world.gather_items(answers)[0]

        def subtract_predictions(answers: Mapping[str, ServedSteps]) -> dict[str, Tensor]:
            return {address: pick(answer.v) - predict(answer.x) for address, answer in answers.items()}

        answers = ask()
        first, compute = next(iter(answers.values())), engine.sharded.config.compute_dtype(device)
        norm, eps = float(pick(first.v).norm()), torch.finfo(torch.bfloat16 if sampling.autocast else compute).eps
        trained = subtract_predictions(answers)
        with open_probe(engine, adapter) as probe:
            probe.write(probe.zeros)
            self._push(engine, self.version, label="-zeros")
            zeros = subtract_predictions(ask())
            # Minimum of two: a server that ignores adapters is far off with the trained one, and a server that keeps its
            # first adapter is far off with zeros.
            noises = {name: float(min(trained[name].norm(), zeros[name].norm())) for name in zeros if name in trained}
            probe.write(probe.values)
            noise = max(max(noises.values()) / norm, eps)
            probe.equalize(probe.find_effects(lambda: predict(first.x)), noise=noise, norm=norm)
            with probe.double_alpha():
                self._push(engine, self.version, label="-probe")
            answers = ask()
            effects = probe.find_effects(lambda: predict(next(iter(answers.values())).x))
            probed = subtract_predictions(answers)
        self._push(engine, self.version)
        return {
            name: measure_binding(effects, probed[name] - zeros[name], noises[name]) for name in probed if name in noises
        }

    def _sample_on_each(self, builder: RequestBuilder, requests: Requests, sampling: Sampling) -> dict[str, ServedSteps]:
        """Return the steps of the same samples from every live server; RunError if one fails."""
        guided = sampling.guidance.is_guided(self.model)
        orders = builder.build_orders(requests, sampling, micro_batch=len(requests.ids), guided=guided)
        expected, steps_of = Expected(self.kind, self.model, sampling, self.version, self.rollout.servers.most_mb), {}
        for server in self.pool.live:
            samples = list[ServedSample]()
            for order in orders:
                body = _encode_request(builder, order, requests.key, sampling, self.version)
                reply, problem = server.client.attempt(GENERATE, body)
                if reply is None or not is_success(reply):
                    raise RunError(problem)
                with convert_errors(RunError, WireError, says=f"{server.address} sent a reply that cannot be used"):
                    samples += read_samples(reply, order, expected, server.address)
            velocity = [sample.velocity for sample in samples if sample.velocity is not None]
            steps_of[server.address] = ServedSteps(torch.stack([sample.x for sample in samples]), torch.stack(velocity))
        return steps_of

    def leave_out(self, addresses: Collection[str]) -> bool:
        """Send no more requests to servers, see `RolloutSource`."""
        return self.pool.remove(addresses)

    def hurry(self) -> None:
        """Reduce the patience with servers that do not answer to a few seconds, see `RolloutSource`."""
        self.pool.patience = min(self.pool.patience, START)

    def close(self) -> None:
        """End the threads, and remove the folder for pushes."""
        self.pool.close()
        self.sync.close()

    def _build_chunk(
        self,
        samples: Sequence[ServedSample],
        recorded: Sequence[tuple[int, ...]],
        prompts: Sequence[Prompt],
        sampling: Sampling,
    ) -> Chunk:
        """Stack samples to a chunk on the device, in the form that `generate` yields."""
        device = sampling.schedule.timesteps.device
        if len({sample.image.shape for sample in samples}) > 1:
            raise RunError("servers sent images of different sizes for one rollout: serve the same model on all of them")

        def stack(*tensors: Tensor) -> Tensor:
            return torch.stack(tensors).to(device)

        velocity = [sample.velocity for sample in samples if sample.velocity is not None]
        trajectory = Trajectory(
            x=stack(*(sample.x for sample in samples)),
            x_next=stack(*(sample.x_next for sample in samples)),
            steps=torch.tensor([list(steps) for steps in recorded], dtype=torch.int64, device=device),
            log_prob=stack(*(sample.log_prob for sample in samples)),
            velocity=stack(*velocity) if velocity else None,
            final=stack(*(sample.final for sample in samples)),
            debug=None,
        )
        images = stack(*(sample.image for sample in samples))
        version = min(sample.version for sample in samples)
        return Chunk(
            prompts, sampling.encode(self.model, prompts), trajectory, images, version, [sample.server for sample in samples]
        )

    def _check_unseen(self, samples: Mapping[int, ServedSample], key: Key) -> None:
        """Raise RunError if a sample repeats one of this rollout or of the latest ones."""
        for sample_id, sample in samples.items():
            last = sample.x_next[-1] if len(sample.x_next) else sample.final
            content = last.contiguous().numpy().tobytes()[-4096:]
            if any(content in seen for seen in self._seen.values()):
                raise RunError(
                    f"a server sent the same sample twice, the second time as sample {sample_id}: its noise does not depend "
                    "on the request"
                )
            self._seen[key].add(content)

    def _identify_servers(self) -> Kind:
        """Return the kind of the servers; raise UsageError if they differ, or do not fit the model."""
        infos: dict[str, ServerInfo] = {}
        for server in self.pool.servers:
            try:
                infos[server.address] = convert(server.control.get(INFO), ServerInfo)
            except (RunError, WireError) as error:
                missing = f"{server.address} has no {INFO}: fluvial serve and sglang have it, vLLM-omni only makes images"
                self.pool.drop(server, missing if "answered 404" in str(error) else str(error))
        if not infos:
            raise RunError(f"rollout.source: {'; '.join(server.problem for server in self.pool.servers)}")
        kinds = {address: info.kind for address, info in infos.items()}
        if len(set(kinds.values())) > 1:
            raise UsageError(f"`rollout.source` names servers of different programs: {kinds}")
        for address, info in infos.items():
            if info.prediction not in (None, self.model.prediction):
                raise UsageError(
                    f"{address} serves a model that predicts {info.prediction}, and the run trains one that predicts "
                    f"{self.model.prediction}: serve the model of the run"
                )
            expected = {*list_arguments(self.model)}
            # sglang takes the image, or images, of an edit or a video, but does not report that.
            if expected != {*info.media} and (info.kind, expected) != ("sglang", {"image"}):
                images = [", ".join(names) or "no images" for names in (info.media, sorted(expected))]
                raise UsageError(
                    f"{address} takes {images[0]} with a prompt, and the run's prompts have {images[1]}: use fluvial serve, "
                    "with --prompts set to the run's file"
                )
            most = self.rollout.servers.in_flight * self.sampling.group * self.world.size
            if info.micro_batch is not None and info.micro_batch > most:
                warnings.warn(
                    f"{address} pads its batches to {info.micro_batch} samples, and gets at most {most} at a time: it "
                    f"computes {info.micro_batch / most:.3g} times as many; serve with --micro-batch {most} or less",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return next(iter(kinds.values()))

    def _revive(self, server: Server) -> str | None:
        """Push the current weights to a server that has come back; return the problem, None if it has them."""
        if self.version < 0:
            return None
        with self._weights:
            if not self.world.is_main:
                if convert(server.probe.get(INFO), ServerInfo).weight_version == self.version:
                    return None
                return f"{server.address} lacks the weights of update {self.version}, which rank 0 pushes"
            return self.sync.repeat(server.control)


def _encode_request(builder: RequestBuilder, order: RequestOrder, key: Key, sampling: Sampling, version: int) -> bytes:
    return json.dumps(write_request(builder.build_request(order, key, sampling, version=version))).encode()


def open_remote(
    rollout: RolloutConfig,
    sampling: ReadingConfig,
    model: DiffusionModel,
    behaviour: Behaviour,
    world: World,
    *,
    adapter: Callable[[int], str],
    product: Product,
    sizes: Mapping[tuple[int, ...], tuple[Size, int]],
    copy: Copy | None,
) -> RemoteSource:
    """Open the servers that `rollout.source` names, see `sampling.build.build_source`.

    Raises:
        UsageError: the servers do not support these samples, or one is not a rollout server.
        RunError: no server answers.
    """
    config = rollout.servers
    sync = WeightSync(
        world if copy is None else copy.world,
        folder=config.weights_folder,
        method=config.weights,
        verify=config.weights_verify,
        product=product,
    )
    try:
        return RemoteSource(
            rollout, sampling, model, behaviour=behaviour, adapter=adapter, world=world, sizes=sizes, sync=sync
        )
    except BaseException:
        sync.close()
        raise
