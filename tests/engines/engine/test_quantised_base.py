"""A quantised base under adapters: the same bits in every pass and on every sharding, fewer bytes, and plain exports."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from diffusers import SD3Transformer2DModel
from helpers import lora_model
from helpers.lora_model import LORA, MODEL, adapted, inputs, velocity
from torch import Tensor

from fluvial.engines.engine import parallelize
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World
from fluvial.engines.export.model_folder import export, list_base_tensors
from fluvial.models.handwriting import BASE
from fluvial.models.lora import use_adapter
from fluvial.models.quantised import FORMATS, Base, find_quantised

SHORT = ("nf4",)
BASES = [base if base in SHORT else pytest.param(base, marks=pytest.mark.long) for base in get_args(Base)]


def engine(one: World, base: Any, *, seed: int = 0, **config: Any) -> Engine:
    """Return an engine over the handwriting model with adapters and a quantised base."""
    module = adapted(seed=seed)
    sharding = EngineConfig(base=base, **config)
    return Engine(module, MODEL.blocks(module), OptimizerConfig(lr=1e-2), one, sharding=sharding)


def steps(trained: Engine, count: int) -> list[float]:
    """Take updates towards a velocity of 0, and return their losses."""

    def loss(items: dict[str, Tensor]) -> Tensor:
        return velocity(trained.module, items).square().flatten(1).mean(1)

    return [trained.update(inputs(4), loss, micro_batch=2).loss for _ in range(count)]


def predicted(trained: Engine, adapter: str | None = "default") -> Tensor:
    """Return the velocity of fixed samples."""
    with trained.inference() as module, use_adapter(module, adapter):
        return lora_model.run(module)


@pytest.mark.parametrize("base", BASES)
def test_training_leaves_the_base_and_the_reference_alone(one: World, base: Base) -> None:
    trained = engine(one, base)
    layers = find_quantised(trained.module)
    before = {name: layer.quantised.codes.clone() for name, layer in layers.items()}
    reference = predicted(trained, None)
    losses = steps(trained, 4)
    assert losses[-1] < losses[0]
    assert torch.equal(predicted(trained, None), reference)
    assert not torch.equal(predicted(trained), reference)
    for name, layer in layers.items():
        assert torch.equal(layer.quantised.codes.view(torch.uint8), before[name].view(torch.uint8))


@pytest.mark.parametrize("base", BASES)
def test_the_base_takes_the_bytes_of_its_format(one: World, base: Base) -> None:
    """Storages that the module holds, counted, beside those of a module that is not quantised."""

    def held(trained: Engine) -> int:
        tensors = [*trained.sharded.shards().values(), *trained.module.buffers()]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    quantised, plain = engine(one, base), engine(one, "auto")
    layers = find_quantised(quantised.module).values()
    shapes = [(layer.out_features, layer.in_features) for layer in layers]
    saved = sum(4 * rows * columns - FORMATS[base].nbytes((rows, columns)) for rows, columns in shapes)
    assert held(plain) - held(quantised) == saved
    assert saved > 0.4 * held(plain)


@pytest.mark.parametrize("base", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_each_sharding_has_the_same_bits(one: World, base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2, a second forward pass and a base that waits on the host, against a whole copy."""
    expected = engine(one, base)
    assert expected.sharded.is_whole
    losses = steps(expected, 2)
    others = [engine(one, base, checkpointing="block"), engine(one, base, offload="phases")]
    monkeypatch.setattr(parallelize, "is_whole", lambda *_, **__: False)
    others += [engine(one, base), engine(one, base, comm="reshard")]
    for other in others:
        other.offload()
        layers = find_quantised(other.module).values()
        assert {layer.quantised.codes.untyped_storage().nbytes() for layer in layers} == {0}
        other.onload()
        assert steps(other, 2) == losses


@pytest.mark.parametrize("base", BASES)
def test_an_empty_module_is_quantised_as_it_is_read(one: World, base: Base) -> None:
    """To the bits of a module that came with its values."""
    empty = adapted(empty=True)
    read = ShardedModule(empty, MODEL.blocks(empty), one, EngineConfig(base=base), weights=BASE)
    expected = engine(one, base).module
    found = find_quantised(read.module)
    for name, layer in find_quantised(expected).items():
        for own, other in zip(found[name].quantised, layer.quantised, strict=True):
            assert torch.equal(own.view(torch.uint8), other.view(torch.uint8)), name
    with read.inference() as module:
        assert torch.equal(lora_model.run(module), lora_model.run(expected))


@pytest.mark.parametrize("base", BASES)
def test_merged_exports_hold_the_dequantised_weights(one: World, tmp_path: Path, base: Base) -> None:
    """W + (alpha / rank) B A over the dequantised W; diffusers opens the folder, which predicts the same."""
    trained = engine(one, base)
    steps(trained, 2)
    expected = predicted(trained)
    export(trained.module, tmp_path, merge=True, world=one)
    plain = SD3Transformer2DModel.from_pretrained(tmp_path)
    if not FORMATS[base].dynamic:  # whose products round the input, too
        torch.testing.assert_close(lora_model.run(plain.eval()), expected, rtol=1e-4, atol=1e-4)
    name, layer = next((name, each) for name, each in find_quantised(trained.module).items() if "to_q.base" in name)
    a, b = (trained.module.get_parameter(name.replace("base_layer", f"lora_{factor}.default.weight")) for factor in "AB")
    merged = layer.weight + LORA.alpha / LORA.rank * local(b) @ local(a)
    torch.testing.assert_close(plain.get_parameter(name.replace("base_layer", "weight")).data, merged)
    plain_tensors = list_base_tensors(trained.module)
    assert set(plain_tensors) == set(plain.state_dict())
    assert torch.equal(plain_tensors[name.replace("base_layer", "weight")], layer.weight)
