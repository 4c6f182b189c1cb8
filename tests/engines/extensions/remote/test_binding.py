"""The probe of an adapter: each way in which a server binds a part of it is found, and no honest push is suspected."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from helpers import asgi, rollout_servers
from helpers import tiny_jobs as tiny
from helpers.fake_rollouts import respond
from helpers.fake_servers import loopback
from helpers.marks import long
from helpers.weight_servers import move
from torch import Tensor, nn

from fluvial.core.random import key
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.parallelize import cast_samples
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.remote.binding import Binding
from fluvial.engines.extensions.remote.remote import RemoteSource
from fluvial.engines.extensions.remote.weight_sync import WeightSync
from fluvial.engines.extensions.servers.rollout.served_weights import ServedWeights
from fluvial.engines.extensions.wire import client
from fluvial.engines.sampling.config import RolloutConfig, SamplingConfig, ServersConfig
from fluvial.engines.sampling.generate import Requests, Sampling
from fluvial.engines.sampling.source import Copy
from fluvial.models.lora import LoraConfig, LowRank, add_lora, find_lora_layers
from fluvial.models.pipelines.wan import EXPERTS

LAYERS, ROWS, WIDTH = ("to_q", "to_k", "to_v", "to_out.0"), 32, 16
MODULES = 2 * 2 * len(LAYERS)


class Attention(nn.Module):
    """Layers by the names of a transformer's, all square, so that any adapter fits on any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.to_out[0](torch.tanh(self.to_q(x)) * torch.sigmoid(self.to_k(x)) + self.to_v(x))
        return x + out


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, rows: Tensor, time: Tensor) -> Tensor:
        hidden = x.flatten(1) + torch.nn.functional.pad(rows, (0, WIDTH - 6)) + time[:, None]
        hidden = hidden.to(x.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.unflatten(1, x.shape[1:])


class Experts(nn.ModuleDict):
    """Two networks, one for high noise and one for low."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__({name: Expert() for name in EXPERTS})

    def forward(self, x: Tensor, rows: Tensor, time: Tensor) -> Tensor:
        return self[EXPERTS[0] if float(time[0]) > 0.7 else EXPERTS[1]](x, rows, time)


@dataclass(frozen=True)
class Model(tiny.Tiny):
    lora_targets: Any = LAYERS

    def build(self, *, empty: bool = False) -> nn.Module:
        return Experts()

    def blocks(self, module: nn.Module) -> Any:
        return ()


Fault = Callable[[dict[str, Any], int], None]  # changes the adapted layers of a server, by name, after a number of pushes


class Server:
    """A server of the two networks that takes adapters over with a fault."""

    def __init__(self, roots: Sequence[Path], dtype: torch.dtype = torch.float32) -> None:
        module = Experts().eval()
        cast_samples(module, dtype)
        policy = rollout_servers.policy(model=Model(), module=module.to(dtype))
        policy.weights = ServedWeights(policy.weights.module, roots=roots)
        self.app = rollout_servers.served(policy, micro_batch=ROWS).app
        self.weights, sampling = policy.weights, policy.hold_weights
        self.take(lambda layers, pushes: None)

        @contextmanager
        def with_fault() -> Iterator[nn.Module]:
            with sampling() as module:
                path = next((each.adapters[0].path for each in self.weights.adapters.values()), "")
                if path not in self.seen:
                    self.seen.append(path)
                    with torch.no_grad():
                        self.fault(find_lora_layers(module), len(self.seen))
                yield module

        policy.hold_weights = with_fault  # type: ignore[method-assign]

    def take(self, fault: Fault) -> None:
        """Take the next adapters over with a fault."""
        self.fault, self.seen = fault, list[str]()


def adapted() -> nn.Module:
    module = Experts()
    add_lora(module, LoraConfig(rank=2, alpha=4.0, form=LowRank(product="factors")), LAYERS)
    return module


class Probe:
    """A trainer and its source of samples, with one server.

    Args:
        address: of the server; by default it is asked without a network.
    """

    def __init__(self, server: Server, world: World, root: Path, address: str = "") -> None:
        self.server, self.engine = server, Engine(adapted(), [], OptimizerConfig(), world, updates=1)
        config = RolloutConfig(source=address or "http://127.0.0.1:1", servers=ServersConfig(timeout=20, patience=1))
        options: dict[str, Any] = {"adapter": lambda version: "default", "sizes": {}, "world": world}
        options["sync"] = WeightSync(world, folder=root, verify=False)  # as with a server that renames layers
        with mock.patch.object(
            client, "_build_transport", (lambda url: asgi.Transport(server.app)) if not address else client._build_transport
        ):
            rollout = SamplingConfig(prompts=1, group=ROWS, steps=tiny.STEPS)
            self.source = RemoteSource(config, rollout, Model(), behaviour=self.engine.inference, **options)
        self.asked = (
            Requests([Prompt("1")] * ROWS, range(ROWS), key(3)),
            Sampling(tiny.SHAPE, Model().schedule(4, tiny.SHAPE)),
        )
        self.source.push(self.engine, 0)

    def find(self) -> Binding:
        (found,) = self.source._probe(self.engine, *self.asked).values()
        return found


Layers = dict[str, Any]


def drop(*parts: str) -> Fault:
    """Return a fault that ignores the layers whose names hold one of the parts."""

    def fault(layers: Layers, pushes: int) -> None:
        for name, layer in layers.items():
            if any(part in name for part in parts):
                layer.lora_B["default"].weight.zero_()

    return fault


def scale(factor: Callable[[str, int], float]) -> Fault:
    def fault(layers: Layers, pushes: int) -> None:
        for name, layer in layers.items():
            layer.scaling["default"] *= factor(name, pushes)

    return fault


def give(source: Callable[[str], str]) -> Fault:
    """Return a fault that gives each layer the factors of another."""

    def fault(layers: Layers, pushes: int) -> None:
        held = {name: [getattr(layer, part)["default"].weight.clone() for part in PARTS] for name, layer in layers.items()}
        for name, layer in layers.items():
            for part, factor in zip(PARTS, held[source(name)], strict=True):
                getattr(layer, part)["default"].weight.copy_(factor)

    return fault


def transpose(layers: Layers, pushes: int) -> None:
    layer = layers["transformer.blocks.0.to_v"]
    a, b = (getattr(layer, part)["default"].weight for part in PARTS)
    first = a.clone()
    a.copy_(b.T)
    b.copy_(first.T)


def swap(name: str, *pair: str) -> str:
    found = next((part for part in pair if part in name), None)
    return name if found is None else name.replace(found, pair[1 - pair.index(found)], 1)


PARTS, FIRST = ("lora_A", "lora_B"), "transformer.blocks.0.to_q"
FAULTS: dict[str, tuple[Fault, Sequence[str]]] = {  # with parts of the names of the modules that are named, if no others are
    "wrong prefix": (drop("transformer"), ["blocks"]),
    "to_out.0 dropped": (drop("to_out.0"), ["to_out.0"]),
    "a network ignored": (drop("transformer_2"), ["transformer_2"]),
    "half of the layers": (drop("blocks.1"), ["blocks.1"]),
    "one layer ignored": (drop(FIRST), [FIRST]),
    "alpha / 2": (scale(lambda name, pushes: 0.5), ["blocks"]),
    "scale of an earlier push": (scale(lambda name, pushes: 0.5 if pushes > 1 else 1.0), ["blocks"]),
    "one layer twice": (scale(lambda name, pushes: 1.0 + (name == FIRST)), [FIRST]),
    "another sign": (scale(lambda name, pushes: -1.0), ["blocks"]),
    "transposed": (transpose, []),
    "factors of to_k for to_q": (give(lambda name: swap(name, "to_q", "to_k")), []),
    "networks exchanged": (give(lambda name: swap(name, "transformer.", "transformer_2.")), []),
    "a layer's factors in another, too": (give(lambda name: FIRST if name == "transformer.blocks.1.to_q" else name), []),
}


LATER = FAULTS.keys() - {"scale of an earlier push"}


@pytest.mark.parametrize("faults", [FAULTS.keys() - LATER, long(LATER)], ids=["one", "others"])
def test_each_fault_is_found(one: World, tmp_path: Path, faults: set[str]) -> None:
    """Each is named by modules that have it; the trainer and the server have their own adapter again at the end."""
    probe = Probe(Server([tmp_path]), one, tmp_path)
    move(probe.engine, seed=0)
    before, names = probe.engine.sharded.shards(), [*find_lora_layers(probe.engine.module)]
    held = {name: shard.clone() for name, shard in before.items()}
    assert str(found := probe.find()) == f"{MODULES} of {MODULES} modules of the adapter are bound"
    assert not found.problem
    for what in sorted(faults):
        fault, parts = FAULTS[what]
        probe.server.take(fault)
        found, faulty = probe.find(), [name for name in names if any(part in name for part in parts)]
        assert found.problem, what
        if parts:
            assert {*found.wrong} <= {*faulty}, (what, found)
            assert len(found.wrong) > len(faulty) / 2, (what, found)
    assert all(torch.equal(held[name], shard) for name, shard in before.items())
    layers, own = find_lora_layers(probe.server.weights.module), find_lora_layers(probe.engine.module)
    assert all(torch.equal(layers[name].lora_B["default"].weight, own[name].lora_B["default"].weight) for name in names)
    assert {layer.scaling["default"] for layer in layers.values()} == {2.0}
    probe.source.close()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_honest_pushes_raise_no_alarm_and_faults_do(one: World, tmp_path: Path, dtype: torch.dtype) -> None:
    """200 of trained adapters, of both ways to multiply, half of them to a server in bfloat16, which has other numbers."""
    probe = Probe(Server([tmp_path], dtype), one, tmp_path)
    for seed in range(100):
        move(probe.engine, seed=seed)
        probe.source.sync.product = ("factors", "merged")[seed % 2]
        probe.source._push(probe.engine, 0, f"-{seed}")
        found = probe.find()
        assert not found.problem, (seed, found.problem)
        assert len(found.factors) >= MODULES - 2, (seed, str(found))
    for what, (fault, _) in FAULTS.items():
        probe.server.take(fault)
        assert probe.find().problem, what
    probe.source.close()


@pytest.mark.long
def test_the_copy_that_samples_ahead_is_probed(one: World, tmp_path: Path) -> None:
    """Its weights are pushed, so that its predictions are compared, without those of the engine."""
    probe = Probe(Server([tmp_path]), one, tmp_path)
    probe.source.behaviour = cast(Any, None)
    copy = Copy(adapted(), [], one, EngineConfig(), adapter=lambda version: None)
    (found,) = probe.source._probe(copy, *probe.asked).values()
    assert str(found) == f"{MODULES} of {MODULES} modules of the adapter are bound"
    probe.source.close()


def test_a_server_that_ignores_an_adapter_of_zeros_ends_the_run(one: World, tmp_path: Path) -> None:
    """Over HTTP. The adapter of a run that begins changes nothing, so that its samples are right."""
    server = Server([tmp_path])

    def handle(handler: Any) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0))) if handler.command == "POST" else None
        answer = asyncio.run(asgi.call(server.app, handler.path, body=body))
        packed = isinstance(answer.value, bytes)
        reply = answer.value if packed else json.dumps(answer.value).encode()
        respond(handler, reply, answer.status, media="application/msgpack" if packed else "application/json")

    with loopback(handle) as address:
        probe = Probe(server, one, tmp_path, address)
        server.take(drop("to_out.0"))
        with pytest.raises(
            RunError, match=rf"^{address}: 12 of 16 modules of the adapter are bound: [^\n]*to_out.0 acts with -?0.0"
        ):
            probe.source.probe(probe.engine, *probe.asked)
        probe.source.close()
