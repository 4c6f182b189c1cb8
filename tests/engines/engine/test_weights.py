"""Base weights are read shard by shard, and refused by name when they are not the model's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from helpers import launch
from helpers.large_layers import BYTES, tower
from helpers.tiny_models import Net, data
from safetensors.torch import save_file
from torch import Tensor

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.shards import load_weights
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.files import MODEL, digest_weights
from fluvial.models.digests import join_digests
from fluvial.models.handwriting import BASE, Handwriting
from fluvial.models.lora import LoraConfig, add_lora


@pytest.mark.slow
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    """On 4 ranks each grows by its quarter, and as much of the mapped file; and every shard holds its own rows."""
    with torch.no_grad():
        module = tower()
        for number, parameter in enumerate(module.parameters()):
            rows = torch.arange(len(parameter)) + 10000 * number
            parameter.copy_(rows.float().reshape(-1, *[1] * (parameter.ndim - 1)).expand_as(parameter))
    save(tmp_path, module.state_dict(), parts=2)
    save(tmp_path / "net", Net().state_dict())
    for found in launch.on_ranks(4, "workers.ranks:load_shards", tmp_path)[0].values():
        assert found["wrong"] == [[]] * 4
        assert max(found["grew"]) < 0.75 * BYTES, found["grew"]


@pytest.mark.parametrize("lora", [False, True])
def test_an_empty_module_becomes_the_loaded_one(one: World, lora: bool) -> None:
    """Parameters, buffers and adapters, to the bit; what is trained stays what is trained."""
    model = Handwriting()
    whole, empty = model.build(), model.build(empty=True)
    assert all(parameter.is_meta for parameter in empty.parameters())
    if lora:
        for module in (whole, empty):
            add_lora(module, LoraConfig(rank=2), model.lora_targets, seed=3)
    trained = {name for name, parameter in empty.named_parameters() if parameter.requires_grad}
    sharded = ShardedModule(empty, model.blocks(empty), one, EngineConfig(), weights=BASE)
    assert {name for name, parameter in sharded.module.named_parameters() if parameter.requires_grad} == trained
    shards = sharded.shards()
    expected = dict(whole.named_parameters())
    assert set(shards) == set(expected)
    assert all(torch.equal(shards[name], expected[name]) for name in expected)
    for name, buffer in whole.named_buffers():
        assert torch.equal(sharded.module.get_buffer(name), buffer)
    x, cond = torch.randn(2, *model.latent_shape()), model.encode(["0123", "9999"])
    with sharded.inference() as module:
        found = model.predict(module, x, torch.tensor([0.3, 0.9]), cond)
    assert torch.equal(found, model.predict(whole, x, torch.tensor([0.3, 0.9]), cond))


def test_any_module_can_come_with_its_weights(one: World) -> None:
    """Nothing has to be registered: a plain module with values is sharded as it is, and is the same function."""
    net, (items, _) = Net(), data(3)
    with ShardedModule(net, list(net.blocks), one, EngineConfig()).inference() as module:
        assert torch.equal(module(items["x"]), Net()(items["x"]))


def save(folder: Path, held: dict[str, Tensor], *, parts: int = 1) -> None:
    """Write weights as diffusers does, in one file or in several with their index."""
    folder.mkdir(exist_ok=True)
    names = sorted(held)
    if parts == 1:
        save_file(held, folder / f"{MODEL}.safetensors")
        return
    shares = {f"{MODEL}-{i + 1:05}-of-{parts:05}.safetensors": names[i::parts] for i in range(parts)}
    for file, share in shares.items():
        save_file({name: held[name] for name in share}, folder / file)
    index = {"weight_map": {name: file for file, share in shares.items() for name in share}}
    (folder / f"{MODEL}.safetensors.index.json").write_text(json.dumps(index))


def state() -> dict[str, Tensor]:
    """Return the net's tensors."""
    return {name: tensor.clone() for name, tensor in Net().state_dict().items()}


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, one: World) -> None:
    """Weights of another model, none, a damaged file or index, and no folder for a module without values."""
    held = state()
    file, index = f"{MODEL}.safetensors", f"{MODEL}.safetensors.index.json"
    written: list[tuple[Callable[[], Any], str]] = [
        (lambda: None, r"holds no weights: there is no diffusion_pytorch_model\.safetensors$"),
        (lambda: save(tmp_path, {**held, "head.weight": torch.zeros(2, 3)}), r"has shape \[2, 3\] there, \[1, 3\] here"),
        (
            lambda: save(tmp_path, {name: held[name] for name in held if name != "head.weight"}),
            "is incomplete: head.weight and 0 more tensors are missing",
        ),
        (lambda: save(tmp_path, {}), "is incomplete: "),
        (lambda: (tmp_path / file).write_bytes(b"no header"), r"\.safetensors cannot be read"),
        (lambda: (tmp_path / index).write_text("{"), "index.json cannot be read"),
        (lambda: (tmp_path / index).write_text('{"weight_map": {"a": "b.safetensors"}}'), "there is no b.safetens"),
    ]
    for write, says in written:
        write()
        with pytest.raises(UsageError, match=says):
            load_weights(Net(), tmp_path, world=one)
    with init_empty_weights(include_buffers=False):
        net = Net()
    with pytest.raises(ValueError, match="give the folder of their weights"):
        ShardedModule(net, list(net.blocks), one, EngineConfig())


@pytest.mark.parametrize("parts", [1, 3])
def test_other_variants_beside_the_weights_are_not_read(tmp_path: Path, one: World, parts: int) -> None:
    """Hubs keep float16 copies and older shards in the same folder; what is read is what `from_pretrained` would."""
    held = state()
    save(tmp_path, held, parts=parts)
    before = digest_weights(tmp_path)
    for name in ("diffusion_pytorch_model.fp16.safetensors", f"{MODEL}-00001-of-00009.safetensors", "zz.safetensors"):
        save_file({key: torch.full_like(tensor, 7) for key, tensor in held.items()}, tmp_path / name)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    load_weights(net, tmp_path, world=one)
    assert all(torch.equal(tensor, held[name]) for name, tensor in net.state_dict().items())
    assert digest_weights(tmp_path) == before


def test_digests_see_all_values_and_names(tmp_path: Path) -> None:
    """And not how the weights are split into files. The parts of ranks are the whole."""
    held = state()
    save(tmp_path / "one", held)
    save(tmp_path / "two", held, parts=2)
    save(tmp_path / "moved", {**held, "head.bias": held["head.bias"] + 1e-6})
    save(tmp_path / "renamed", {f"{name}x": tensor for name, tensor in held.items()})
    last = held["head.weight"].clone()
    last[-1, -1] += 1e-6
    save(tmp_path / "last", {**held, "head.weight": last})
    swapped = held["head.weight"].flip(1)  # with the sum of before
    save(tmp_path / "swapped", {**held, "head.weight": swapped})
    folders = ("one", "two", "moved", "renamed", "last", "swapped")
    prints = {folder: join_digests(digest_weights(tmp_path / folder)) for folder in folders}
    assert prints["one"] == prints["two"]
    assert len(set(prints.values())) == 5
    parts = [digest_weights(tmp_path / "two", share=slice(rank, None, 3)) for rank in range(3)]
    assert join_digests({**parts[2], **parts[0], **parts[1]}) == prints["one"]
