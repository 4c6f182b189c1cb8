"""Exports open in diffusers and computes the same: whole, sharded, merged, averaged, or an adapter alone."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from helpers import launch
from helpers.exported import INDEX, SINGLE, contents, moved, opened
from helpers.lora_model import MODEL, adapted, perturb, run
from safetensors.torch import load_file, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.export.model_folder import export, write_lora
from fluvial.engines.gathered import gather_weights, layout
from fluvial.models.lora import merge_lora, use_adapter


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that two ranks exported to, with what they found in result.json."""
    out = tmp_path_factory.mktemp("ranks")
    found = launch.on_ranks(2, "workers.export_ranks:exports", out)[0]
    (out / "result.json").write_text(json.dumps(found))
    return out


def sharded(module: nn.Module, one: World, **sharding: Any) -> nn.Module:
    """Return the module as an engine holds it."""
    return Engine(module, MODEL.blocks(module), OptimizerConfig(), one, updates=1, sharding=EngineConfig(**sharding)).module


@pytest.mark.parametrize("offload", ["none", "always"])
@pytest.mark.parametrize("size", ["5GB", "1MB"])
def test_an_export_opens_and_computes_the_same(tmp_path: Path, one: World, size: str, offload: str) -> None:
    """To the bit, from one file or several; the files are those that diffusers itself writes of the plain module."""
    module = sharded(MODEL.build(), one, offload=offload)
    export(module, tmp_path / "ours", max_shard_size=size, world=one)
    assert torch.equal(run(opened(tmp_path / "ours")), run(MODEL.build()))
    plain = MODEL.build()
    assert isinstance(plain, SD3Transformer2DModel)
    plain.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert (INDEX in contents(tmp_path / "ours")) == (size == "1MB")


def test_weights_are_copies(one: World) -> None:
    """What was yielded stays as it is while training goes on."""
    module = sharded(MODEL.build(), one)
    first = dict(gather_weights(module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    want = MODEL.build().state_dict()
    assert list(first) == list(want)
    assert all(torch.equal(first[name], want[name]) for name in want)


def test_merged_is_the_adapted_module(tmp_path: Path, one: World) -> None:
    """In the names and order of the plain one; the module itself keeps its adapters."""
    module = sharded(moved("default", "old"), one)
    before = run(module)
    export(module, tmp_path / "merged", merge=True, world=one)
    torch.testing.assert_close(run(opened(tmp_path / "merged")), before, rtol=1e-5, atol=1e-5)
    merged = moved()
    merge_lora(merged)
    found = dict(gather_weights(module, merge=True))
    assert list(found) == list(merged.state_dict())
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    with use_adapter(module, "old"):
        other = run(module)
    export(module, tmp_path / "averaged", merge=True, average=as_default(module, "old"), world=one)
    torch.testing.assert_close(run(opened(tmp_path / "averaged")), other, rtol=1e-5, atol=1e-5)
    old = dict(gather_weights(module, merge=True, adapter="old"))
    averaged = dict(gather_weights(module, merge=True, average=as_default(module, "old")))
    assert all(torch.equal(old[name], averaged[name]) for name in merged.state_dict())
    assert torch.equal(run(module), before)


def as_default(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Return another adapter's parameters, as an average of the trained one."""
    state = module.state_dict().items()  # named_parameters would be what a forward pass gathered
    return {name.replace(f".{adapter}.", ".default."): tensor for name, tensor in state if f".{adapter}." in name}


def test_merging_is_in_float32_and_cast_at_the_end() -> None:
    """Weights in bfloat16 take in what is smaller than their own steps, and are rounded once."""
    layer = nn.Sequential(nn.Linear(4, 4, bias=False)).to(torch.bfloat16)
    nn.init.ones_(layer.get_parameter("0.weight"))
    peft.inject_adapter_in_model(peft.LoraConfig(r=1, lora_alpha=3, target_modules=["0"]), layer)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.data = torch.full_like(parameter, 0.01, dtype=torch.float32)
    ((name, tensor),) = gather_weights(layer, merge=True, dtype=torch.float32)
    assert name == "0.weight"
    torch.testing.assert_close(tensor, torch.full((4, 4), 1.0003), rtol=0, atol=1e-7)
    assert [tensor.dtype for _, tensor in gather_weights(layer, merge=True)] == [torch.bfloat16]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_adapter_alone_is_loaded_by_a_pipeline(tmp_path: Path, one: World, dtype: torch.dtype | None) -> None:
    """With its own alpha, which is not its rank: the transformer computes what ours does."""
    module = sharded(moved("default", "old"), one)
    write_lora(module, tmp_path / "lora", adapter="old", dtype=dtype, world=one)
    assert list(contents(tmp_path / "lora")) == ["pytorch_lora_weights.safetensors"]
    found = load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    known = peft.get_peft_model_state_dict(moved("default", "old"), adapter_name="old")
    assert set(found) == {f"transformer.{name}" for name in known}
    assert {tensor.dtype for tensor in found.values()} == {dtype or torch.float32}
    assert all(
        torch.equal(found[f"transformer.{name}"], tensor.to(dtype or torch.float32)) for name, tensor in known.items()
    )
    names = ("vae", *(f"{kind}{place}" for kind in ("text_encoder", "tokenizer") for place in ("", "_2", "_3")))
    pipeline = StableDiffusion3Pipeline(
        transformer=MODEL.build(), scheduler=FlowMatchEulerDiscreteScheduler(), **dict.fromkeys(names)
    )
    base = run(pipeline.transformer)
    pipeline.load_lora_weights(tmp_path / "lora")
    with use_adapter(module, "old"):
        want = run(module)
    tolerance = 1e-5 if dtype is None else 0.03
    assert (base - want).abs().max() > 3 * tolerance
    torch.testing.assert_close(run(pipeline.transformer), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"merge": True}, {"adapter": "old"}])
def test_the_layout_is_that_of_the_weights(options: dict[str, Any]) -> None:
    """Names, order, shapes and dtypes, on meta; tensors of whole numbers keep theirs."""
    module = adapted("default", "old") if options else MODEL.build()
    module.register_buffer("count", torch.tensor(3))
    for dtype in (None, torch.bfloat16):
        found = layout(module, dtype=dtype, **options)
        assert all(tensor.is_meta for tensor in found.values())
        want = [(name, tensor.shape, tensor.dtype) for name, tensor in gather_weights(module, dtype=dtype, **options)]
        assert [(name, tensor.shape, tensor.dtype) for name, tensor in found.items()] == want
        assert {dtype for name, _, dtype in want if name == "count"} <= {torch.int64}


def test_averages_are_written_in_place_of_weights(tmp_path: Path, one: World) -> None:
    """Sharded or full; what has none is the module's own."""
    module, want = sharded(MODEL.build(), one, offload="always"), MODEL.build()
    average: dict[str, Tensor] = {}
    for k, (name, parameter) in enumerate(module.named_parameters()):
        assert isinstance(parameter, DTensor)
        if k % 3:
            average[name] = parameter.detach() * 2 if k % 3 == 1 else parameter.full_tensor().detach() * 2
            want.get_parameter(name).data *= 2
    export(module, tmp_path, average=average, world=one)
    found = load_file(tmp_path / SINGLE)
    assert all(torch.equal(found[name], tensor) for name, tensor in want.state_dict().items())


def test_a_module_of_torch_is_written_without_config(tmp_path: Path, one: World) -> None:
    """Tied weights are written under both names."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    export(net, tmp_path, world=one)
    assert list(contents(tmp_path)) == [SINGLE]
    found = load_file(tmp_path / SINGLE)
    assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())


def test_what_cannot_be_exported_is_an_error(one: World, tmp_path: Path) -> None:
    """It is named. Without adapters merging is nothing to do."""
    for options, message in (
        ({}, "name one with `adapter`, or set merge=True"),
        ({"adapter": "ref"}, "there is no adapter ref: the module has default, old"),
        ({"merge": True, "average": {"nowhere": torch.zeros(2)}}, r"nowhere has shape \[2\], the module has nothing there"),
        ({"merge": True, "average": {"proj_out.weight": torch.zeros(2)}}, r"shape \[2\], the module has \[4, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            list(gather_weights(adapted("default", "old"), **options))
    want = MODEL.build().state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in gather_weights(MODEL.build(), merge=True))
    with pytest.raises(ValueError, match="the module has none"):
        write_lora(MODEL.build(), tmp_path, world=one)


@pytest.mark.parametrize("options", [{}, {"merge": True}, {"adapter": "old"}])
def test_one_layer_is_gathered_at_a_time(
    tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """When a tensor is gathered none of an earlier layer's is left: one at a time, three where two factors are merged."""
    module = sharded(adapted("default", "old") if options else MODEL.build(), one, offload="always")
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    gather = DTensor.full_tensor

    def counting(tensor: DTensor, **kwargs: Any) -> Tensor:
        nonlocal most
        full = gather(tensor, **kwargs).clone()
        alive.append(weakref.ref(full, alive.remove))
        most = max(most, len(alive))
        return full

    monkeypatch.setattr(DTensor, "full_tensor", counting)
    if options.get("adapter"):
        for _ in gather_weights(module, **options):
            pass
    else:
        export(module, tmp_path, world=one, **options)
    gc.collect()
    assert most == (3 if options.get("merge") else 1)
    assert not alive


def test_two_ranks_write_what_one_does(tmp_path: Path, one: World, two: Path) -> None:
    """The same bytes from sharded modules as from a plain one: whole, in shards, merged from an average, and adapters."""
    export(MODEL.build(), tmp_path / "plain", world=one)
    export(MODEL.build(), tmp_path / "sharded", max_shard_size="1MB", world=one)
    module = adapted("default", "old", "ref")
    perturb(module, "default", seed=0)
    perturb(module, "old", seed=1)
    average = {name: parameter.detach() * 0.5 for name, parameter in module.named_parameters() if parameter.requires_grad}
    export(module, tmp_path / "merged", average=average, merge=True, dtype=torch.bfloat16, world=one)
    write_lora(module, tmp_path / "lora", adapter="old", world=one)
    write_lora(module, tmp_path / "averaged", average=average, world=one)
    for name in ("plain", "sharded", "merged"):
        assert contents(two / name) == contents(tmp_path / name), name
    for name in ("lora", "averaged"):  # the order of the two entries of metadata is safetensors' whim
        left, right = (folder / name / "pytorch_lora_weights.safetensors" for folder in (two, tmp_path))
        assert tensors_and_metadata(left) == tensors_and_metadata(right), name
        assert json.loads(tensors_and_metadata(left)[1]["lora_adapter_metadata"])["transformer.lora_alpha"] == 3.0


def tensors_and_metadata(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the bytes of each tensor, and the metadata, of a file."""
    tensors = {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
    with safe_open(path, framework="pt") as file:
        return tensors, file.metadata()


def test_adapters_and_a_full_disk_on_two_ranks(two: Path) -> None:
    """An update changes the trained adapter alone; copies and blends reach every rank's shards.

    A full disk is a line of the rank that writes, and a pointer to it of the other; what was exported before is whole.
    """
    result = json.loads((two / "result.json").read_text())
    assert all(result["adapters"].values()), result
    assert len(result["adapters"]) == 6
    assert result["full disk"] == [
        f"RunError: weights cannot be written to {two / 'plain'}: the disk is full",
        "ElsewhereError: rank 0 failed; its own message says why",
    ]
    assert torch.equal(run(opened(two / "plain")), run(MODEL.build()))
