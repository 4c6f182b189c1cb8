"""Changes to a module's blocks: compilation, attention, selective checkpointing, deterministic algorithms."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from helpers import tiny_transformers
from helpers.tiny_models import Info, Net, squared
from torch import Tensor, nn
from torch._dynamo import eval_frame

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.parallelize import cast_samples
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.models.device import use_deterministic_algorithms
from fluvial.models.handwriting import Handwriting
from fluvial.models.lora import LoraConfig, add_lora, blend_adapter, find_adapter_parameters


class Block(nn.Module):
    """Attention and a two-layer network, the last product of which makes what the next block takes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Blocks of one kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean((1, 2))


def engine(one: World, **sharding: Any) -> Engine:
    """Return an engine over a tower."""
    tower = Tower()
    return Engine(tower, list(tower.blocks), OptimizerConfig(), one, updates=1, sharding=EngineConfig(**sharding))


def gradients(built: Engine) -> dict[str, Tensor]:
    """Return the gradients of an update of two micro-batches."""
    items = {"x": torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0)), "y": torch.zeros(4)}
    built.update(items, squared(built.module), torch.ones(4), count=4, micro_batch=2, pad_to=4)
    return tiny_transformers.gradients(built)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_blocks_that_are_alike_share_one_compiled_region(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks, one graph, and one more for the first, whose input needs no gradient.

    The gradients are those of eager mode, and FLOPs are counted all the same.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # traces, and needs no C++ compiler
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = engine(one), engine(one, compile=True)
    expected, found = gradients(eager), gradients(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert compiled.flops == eager.flops
    assert all(flops > 0 for flops in compiled.flops.values())
    checkpointed = engine(one, compile=True, checkpointing="block", comm="reshard")
    for name, gradient in gradients(checkpointed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_resumed_engine_runs_the_programs_that_a_straight_one_runs(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run uncompiled in the first micro-batch of each shape alone, which is not a new one after a resumption."""
    runs = list[str]()

    def compile_noted(forward: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append("eager" if eval_frame._stance.stance == "force_eager" else "compiled")
            return forward(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile_noted)

    def programs(engine: Engine, micro_batch: int) -> list[str]:
        runs.clear()
        items = {"x": torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0)), "y": torch.zeros(4)}
        engine.update(items, squared(engine.module), micro_batch=micro_batch)
        return runs.copy()

    straight, resumed = engine(one, compile=True), engine(one, compile=True)
    assert set(programs(straight, 2)) == {"eager", "compiled"}
    counters = json.loads(json.dumps(straight.counters()))
    resumed.restore(straight.state(), counters)
    assert resumed.flops == straight.flops
    for micro_batch in (2, 1):
        assert programs(resumed, micro_batch) == programs(straight, micro_batch)
    assert "eager" in runs  # of the shape that is new to both
    assert "flops" not in engine(one).counters()


def test_checkpointing_trades_memory_for_operations(one: World) -> None:
    """Selective keeps less than none and more than block, and recomputes less than block; gradients are the same."""
    from fluvial.models.flops import FlopCounter

    kept, again = {}, {}
    expected = gradients(engine(one))
    for kind in ("none", "selective", "block"):
        built = engine(one, checkpointing=kind)
        held: set[int] = set()

        def pack(tensor: Tensor, held: set[int] = held) -> Tensor:
            held.add(tensor.untyped_storage().data_ptr())
            return tensor

        x = torch.randn(2, 5, 8)
        with FlopCounter() as counter:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = built.module(x)
            out.sum().backward()
        kept[kind], again[kind] = len(held), counter.recomputed
        for name, gradient in gradients(engine(one, checkpointing=kind)).items():
            assert torch.equal(gradient, expected[name]), name
    assert kept["block"] < kept["none"]
    assert 0 == again["none"] < again["selective"] < again["block"]


def test_an_attention_backend_is_set_or_refused(one: World) -> None:
    """Where diffusers' model asks for one; else raises, also where diffusers itself would not."""
    net = tiny_transformers.flux()
    expected = tiny_transformers.flux_velocity(net, tiny_transformers.data())
    Engine(net, tiny_transformers.blocks(net), OptimizerConfig(), one, updates=1, sharding=EngineConfig(attention="native"))
    torch.testing.assert_close(tiny_transformers.flux_velocity(net, tiny_transformers.data()), expected)
    blocks: Any = net.transformer_blocks
    assert {block.attn.processor._attention_backend for block in blocks} == {"native"}
    for module, backend, says in (
        (tiny_transformers.flux(), "no_such", "engine.attention is no_such, which cannot be used"),
        (Handwriting(weights=None).build(), "native", "attention is 'native': SD3Transformer2DModel does not choose"),
        (Net(), "native", "attention is 'native': Net does not choose"),
    ):
        with pytest.raises(UsageError, match=says):
            Engine(module, [], OptimizerConfig(), one, updates=1, sharding=EngineConfig(attention=backend))


def test_deterministic_algorithms_and_back() -> None:
    """The flag is set within, an operation that has no such algorithm is refused, and all is as before afterwards."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    with use_deterministic_algorithms(False):
        assert torch.are_deterministic_algorithms_enabled() == before[0]
    with use_deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not memory.fill_uninitialized_memory
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before
    assert memory.fill_uninitialized_memory


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("model", tiny_transformers.MODELS)
def test_bfloat16_is_that_of_a_module_loaded_in_bfloat16(one: World, model: str, trained: bool) -> None:
    """To the bit: rotary embeddings keep their float32, which FSDP2 left to itself would cast at every block."""
    build, velocity = tiny_transformers.MODELS[model]
    items = {name: tensor.to(torch.bfloat16) for name, tensor in tiny_transformers.data().items() if name != "time"}
    items["time"] = tiny_transformers.data()["time"]
    loaded, net = build().to(torch.bfloat16), build().requires_grad_(trained)
    sharded = ShardedModule(net, tiny_transformers.blocks(net), one, EngineConfig(compute="bfloat16"))
    with sharded.inference() as module:
        found = velocity(module, items)
    assert torch.equal(found, velocity(loaded, items).detach())
    assert {shard.dtype for shard in sharded.shards().values()} == {torch.float32 if trained else torch.bfloat16}


def test_an_adapter_has_float32_masters_on_a_frozen_bfloat16_base(one: World) -> None:
    """Both in one unit of communication; an update moves the adapter alone."""
    model = Handwriting(weights=None)
    net = model.build()
    add_lora(net, LoraConfig(rank=2), model.lora_targets)
    built = Engine(
        net, model.blocks(net), OptimizerConfig(lr=0.1), one, updates=1, sharding=EngineConfig(compute="bfloat16")
    )
    before = {name: shard.clone() for name, shard in built.sharded.shards().items()}
    for name, shard in before.items():
        assert shard.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)

    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        v = model.predict(net, items["x"], items["sigma"], model.encode(["0123"] * len(items["x"])))
        error = v.float().square().mean((1, 2, 3))
        return error, Info(error.detach())

    items = {"x": torch.randn(2, *model.latent_shape()), "sigma": torch.tensor([0.2, 0.9])}
    assert not built.update(items, loss, torch.ones(2), count=2, micro_batch=1, pad_to=2).skipped
    moved = {name for name, shard in built.sharded.shards().items() if not torch.equal(shard, before[name])}
    assert moved
    assert all(".lora_" in name for name in moved)


def test_an_old_policy_follows_slowly_on_a_bfloat16_base(one: World) -> None:
    """By a thousandth of the way, which is below bfloat16's steps: adapters keep float32, trained or not."""
    model = Handwriting(weights=None)
    net = model.build()
    add_lora(net, LoraConfig(rank=2), model.lora_targets, adapters=("default", "old"))
    built = Engine(net, model.blocks(net), OptimizerConfig(), one, updates=1, sharding=EngineConfig(compute="bfloat16"))
    with torch.no_grad():
        for parameter in built.trainable.values():
            parameter.add_(1.0)
    before = {name: parameter.detach().clone() for name, parameter in find_adapter_parameters(net, "old").items()}
    blend_adapter(net, "default", "old", 0.999)
    for name, parameter in find_adapter_parameters(net, "old").items():
        moved = (parameter - before[name]).detach()
        torch.testing.assert_close(moved, torch.full(moved.shape, 1e-3), rtol=1e-3, atol=1e-7)


class _Timed(nn.Module):
    """A network as Kandinsky 5's, whose embedding of the timestep diffusers keeps in float32, and its input, too."""

    _keep_in_fp32_modules = ("time_embeddings",)

    def __init__(self) -> None:
        super().__init__()
        self.time_embeddings, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.out(x) + self.time_embeddings(time[:, None] * torch.arange(4, dtype=torch.float32))


def test_layers_that_diffusers_keeps_in_float32_compute_in_bfloat16() -> None:
    """As all others: their input, which the network makes in float32, is cast."""
    network, x = _Timed(), torch.randn(2, 4)
    expected = network(x, torch.tensor([0.5, 1.0]))
    cast_samples(network.to(torch.bfloat16), torch.bfloat16)
    found = network(x, torch.tensor([0.5, 1.0]))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
