"""Base weights are read shard by shard, and refused by name when they are not the model's."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import small
import torch
from accelerate import init_empty_weights
from nets import Net, data
from safetensors.torch import save_file
from torch import Tensor
from towers import BYTES, tower

from fluvial.engines.distributed import World, world
from fluvial.engines.errors import UsageError
from fluvial.engines.loading import fingerprint, load_weights
from fluvial.engines.parallelize import EngineConfig
from fluvial.engines.sharded import Sharded
from fluvial.models.handwriting import BASE, Handwriting
from fluvial.models.lora import LoraConfig, add_lora

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with world() as processes:
        yield processes


@pytest.mark.slow
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    """On 4 ranks each grows by its quarter, and as much of the mapped file; and every shard holds its own rows."""
    with torch.no_grad():
        module = tower()
        for number, parameter in enumerate(module.parameters()):
            rows = torch.arange(len(parameter)) + 10000 * number
            parameter.copy_(rows.float().reshape(-1, *[1] * (parameter.ndim - 1)).expand_as(parameter))
    state = module.state_dict()
    for number, half in enumerate((list(state)[: len(state) // 2], list(state)[len(state) // 2 :])):
        save_file({name: state[name] for name in half}, tmp_path / f"part-{number}.safetensors")
    (tmp_path / "net").mkdir()
    save_file(Net().state_dict(), tmp_path / "net" / "net.safetensors")
    out = tmp_path / "result.json"
    done = subprocess.run(
        [*small.launcher(4), str(HERE / "loads.py"), str(tmp_path), str(out)],
        env=small.environment(helpers=True), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for found in json.loads(out.read_text()).values():
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
    sharded = Sharded(empty, model.blocks(empty), one, EngineConfig(), weights=BASE)
    assert {name for name, parameter in sharded.module.named_parameters() if parameter.requires_grad} == trained
    shards = sharded.shards()
    expected = dict(whole.named_parameters())
    assert set(shards) == set(expected)
    assert all(torch.equal(shards[name], expected[name]) for name in expected)
    for name, buffer in whole.named_buffers():
        assert torch.equal(sharded.module.get_buffer(name), buffer)
    x, cond = torch.randn(2, *model.latent_shape), model.encode(["0123", "9999"])
    with sharded.inference() as module:
        found = model.velocity(module, x, torch.tensor([0.3, 0.9]), cond)
    assert torch.equal(found, model.velocity(whole, x, torch.tensor([0.3, 0.9]), cond))


def test_any_module_can_come_with_its_weights(one: World) -> None:
    """Nothing has to be registered: a plain module with values is sharded as it is, and is the same function."""
    net, (items, _) = Net(), data(3)
    with Sharded(net, list(net.blocks), one, EngineConfig()).inference() as module:
        assert torch.equal(module(items["x"]), Net()(items["x"]))


def state() -> dict[str, Tensor]:
    """The net's tensors."""
    return {name: tensor.clone() for name, tensor in Net().state_dict().items()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop("head.weight"), "is incomplete: head.weight and 0 more tensors are missing"),
        (lambda held: held.update({"head.weight": torch.zeros(2, 3)}), r"has shape \[2, 3\] there, \[1, 3\] here"),
        (lambda held: held.clear(), "is incomplete: "),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, one: World, change: object, says: str) -> None:
    held = state()
    assert callable(change)
    change(held)
    save_file(held, tmp_path / "net.safetensors")
    with pytest.raises(UsageError, match=says):
        load_weights(Net(), tmp_path, world=one)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, one: World) -> None:
    """A folder without weights, a damaged file, and no folder at all for a module without values."""
    with pytest.raises(UsageError, match=r"holds no weights: there is no \.safetensors file"):
        load_weights(Net(), tmp_path, world=one)
    (tmp_path / "net.safetensors").write_bytes(b"no header")
    with pytest.raises(UsageError, match=r"net.safetensors cannot be read"):
        load_weights(Net(), tmp_path, world=one)
    with init_empty_weights(include_buffers=False):
        net = Net()
    with pytest.raises(ValueError, match="name the folder of their weights"):
        Sharded(net, list(net.blocks), one, EngineConfig())


def test_the_fingerprint_sees_training_and_names(tmp_path: Path) -> None:
    """And not how the weights are split into files."""
    held = state()
    for folder in ("one", "two", "moved", "renamed"):
        (tmp_path / folder).mkdir()
    save_file(held, tmp_path / "one" / "net.safetensors")
    names = sorted(held)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: held[name] for name in part}, tmp_path / "two" / f"{number}.safetensors")
    save_file({**held, "head.bias": held["head.bias"] + 1e-6}, tmp_path / "moved" / "net.safetensors")
    save_file({f"{name}x": tensor for name, tensor in held.items()}, tmp_path / "renamed" / "net.safetensors")
    prints = {folder: fingerprint(tmp_path / folder) for folder in ("one", "two", "moved", "renamed")}
    assert prints["one"] == prints["two"]
    assert len(set(prints.values())) == 3
