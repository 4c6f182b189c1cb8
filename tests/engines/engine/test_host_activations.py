"""Activations on the host, and checkpointing of some blocks: the same bits, and fewer bytes by what the blocks take in."""

from itertools import pairwise
from typing import Any

import optree
import pytest
import torch
from helpers import tiny_transformers
from torch import Tensor, nn

from fluvial.engines import offload as host_activations
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.parallelize import checkpoint_blocks
from fluvial.engines.engine.world import World
from fluvial.engines.extensions.plan.memory import measure_activations
from fluvial.models.handwriting import Handwriting

CPU = torch.device("cpu")
WIDTH, BLOCKS, ROWS = 16, 6, 32
INPUT = 4 * ROWS * WIDTH  # bytes of what a block takes in


class Tower(nn.Module):
    """Blocks whose hidden layer is eight times as wide as what they take in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.mean(1)


def updated(one: World, **sharding: Any) -> dict[str, Tensor]:
    """Return the weights after two updates."""
    tower = Tower()
    engine = Engine(tower, list(tower.blocks), OptimizerConfig(lr=0.01), one, sharding=EngineConfig(**sharding))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        engine.update(x, lambda rows: (tower(rows) - 1).square(), micro_batch=4)
    return dict(engine.weights())


@pytest.mark.parametrize("sharding", [{"checkpointing": "host"}, {"checkpointing": "host", "checkpointed": 2}], ids=str)
def test_the_bits_are_those_without_checkpointing(one: World, sharding: dict[str, Any]) -> None:
    expected = updated(one)
    for name, tensor in updated(one, **sharding).items():
        assert torch.equal(tensor, expected[name]), name


def peak(**engine: Any) -> int:
    """Return the bytes at the peak of a forward and backward pass, on paper."""
    with torch.device("meta"):
        tower, x = Tower(), torch.empty(ROWS, WIDTH)
    found = measure_activations(
        tower, list(tower.blocks), lambda module: module(x), engine=EngineConfig(**engine), device=CPU, grad=True
    )
    return max(stretch.peak for stretch in found)


def test_the_host_holds_what_the_blocks_take_in() -> None:
    """At the peak, in the last block's backward pass, all inputs but its own and that which came before are on the host."""
    block, host = peak(checkpointing="block"), peak(checkpointing="host")
    assert block - host == pytest.approx((BLOCKS - 2) * INPUT, rel=0.1)


def test_each_block_that_is_checkpointed_saves_its_own_activations() -> None:
    """The hidden layer before and after its activation function: 16 inputs; the last block computes them in any case."""
    peaks = [peak(), *(peak(checkpointing="block", checkpointed=number) for number in range(1, BLOCKS + 1))]
    saved = [before - after for before, after in pairwise(peaks[:BLOCKS])]
    assert saved == pytest.approx([16 * INPUT] * (BLOCKS - 1), rel=0.1)
    assert peaks[-1] <= peaks[-2]


def test_saved_tensors_are_copied_once_each_way() -> None:
    """What is saved lies in another storage, which the backward pass reads."""
    packed: list[host_activations.SavedOnHost] = []
    x = torch.randn(3, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        pack = host_activations._pack
        patch.setattr(host_activations, "_pack", lambda tensor: packed.append(pack(tensor)) or packed[-1])  # type: ignore[func-returns-value]
        y = host_activations.call_with_offload(torch.exp, x)
    assert [saved.host.data_ptr() == y.data_ptr() for saved in packed if saved.host is not None] == [False]
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # type: ignore[arg-type]


def velocity(name: str) -> tuple[nn.Module, list[nn.Module], Any]:
    """Return a network, its blocks and a function that returns its velocity."""
    if name == "sd3":
        model = Handwriting(weights=None)
        net, x = model.build(), torch.randn(2, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
        conditioning = model.encode(["0123", "4567"])
        return net, list(model.blocks(net)), lambda: model.predict(net, x, torch.tensor([0.2, 0.9]), conditioning)
    build, predict = tiny_transformers.MODELS[name]
    net, items = build(), tiny_transformers.data()
    return net, tiny_transformers.blocks(net), lambda: predict(net, items)


@pytest.mark.parametrize("name", ["flux", "qwen", "sd3"])
def test_inputs_by_keyword_go_to_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As diffusers' networks call their blocks: all inputs that need a gradient, and no others; gradients are the same."""
    net, blocks, call = velocity(name)
    call().square().sum().backward()
    expected = {key: parameter.grad for key, parameter in net.named_parameters()}
    net, blocks, call = velocity(name)
    given, packed, pack = list[int](), list[int](), host_activations._pack

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (each for each in optree.tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        given.extend(each.data_ptr() for each in tensors if each.requires_grad)

    for block in blocks:
        block.register_forward_pre_hook(note, with_kwargs=True)
    checkpoint_blocks(blocks, EngineConfig(checkpointing="host"))

    def count(tensor: Tensor) -> Any:
        packed.extend([tensor.data_ptr()] if tensor.numel() else [])  # torch 2.11 keeps an empty one of its own per block
        return pack(tensor)

    monkeypatch.setattr(host_activations, "_pack", count)
    out = call()
    assert packed == given
    assert len(given) >= len(blocks)
    out.square().sum().backward()
    for key, parameter in net.named_parameters():
        gradient, wanted = parameter.grad, expected[key]
        assert (gradient is None) == (wanted is None), key
        assert gradient is None or wanted is None or torch.equal(gradient, wanted), key
