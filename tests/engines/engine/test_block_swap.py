"""Block swap: frozen blocks on the host train and sample to the same bits, with at most two of them on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import lora_model, tiny_transformers
from helpers.lora_model import MODEL, adapted, inputs, velocity
from helpers.marks import long
from helpers.tiny_models import gather_state
from torch import Tensor

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.offload import BlockSwap, count_copied_bytes, list_frozen_tensors

PASSES = 3


def engine(one: World, **sharding: Any) -> Engine:
    """Return an engine over the handwriting model with adapters."""
    module = adapted()
    config = EngineConfig(**sharding)
    return Engine(module, MODEL.blocks(module), OptimizerConfig(lr=1e-2), one, sharding=config)


def update(trained: Engine) -> float:
    """Take an update of `PASSES` micro-batches towards a velocity of 0, and return its loss."""

    def loss(items: dict[str, Tensor]) -> Tensor:
        return velocity(trained.module, items).square().flatten(1).mean(1)

    return trained.update(inputs(2 * PASSES), loss, micro_batch=2).loss


@contextmanager
def counted(trained: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[int], list[int]]]:
    """Yield which blocks are brought, and how many are on the device after each copy, in the order of the copies."""
    brought, here, bring, swap = list[int](), list[int](), BlockSwap._bring, trained.sharded.swap
    assert swap is not None

    def note(self: BlockSwap, place: int) -> None:
        before = len(self._here)
        bring(self, place)
        if len(self._here) > before:
            brought.append(place)
        filled = [block.there.untyped_storage().nbytes() > 0 for block in self._blocks]
        here.append(sum(filled))

    with monkeypatch.context() as patch:
        patch.setattr(BlockSwap, "_bring", note)
        yield brought, here


@pytest.mark.parametrize(
    ("offload", "sharding"),
    [
        (3, {"compute": "bfloat16"}),
        pytest.param("blocks", {"base": "int8", "checkpointing": "block"}, marks=pytest.mark.long),
        pytest.param("blocks", {"checkpointing": "host"}, marks=pytest.mark.long),
        pytest.param(3, {"base": "nf4", "checkpointing": "selective"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_swapped_blocks_change_no_bit(one: World, offload: Any, sharding: dict[str, Any]) -> None:
    plain, swapped = engine(one, **sharding), engine(one, **sharding, offload=offload)
    for _ in range(2):
        assert update(swapped) == update(plain)
        for each in (plain, swapped):
            with each.inference() as module:
                each.seen = lora_model.run(module)  # type: ignore[attr-defined]
        assert torch.equal(swapped.seen, plain.seen)  # type: ignore[attr-defined]
    found, expected = gather_state(swapped), gather_state(plain)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    exported, wanted = (dict(each.weights(merge=True)) for each in (swapped, plain))
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("checkpointing", ["none", long("block")])
def test_one_block_is_brought_ahead(one: World, checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass visits the blocks in reverse; what is there where the direction turns is not copied again."""
    trained = engine(one, offload="blocks", checkpointing=checkpointing)
    count = len(MODEL.blocks(trained.module))
    forward, back = [*range(2, count)], [*reversed(range(count - 2))]
    with counted(trained, monkeypatch) as (brought, here):
        update(trained)
        assert brought == [0, 1, *PASSES * [*forward, *back]]
        assert max(here) == 2
        assert not trained.sharded.swap._here  # type: ignore[union-attr]
        brought.clear()
        with trained.inference() as module:
            for _ in range(2):
                lora_model.run(module)
        assert brought == [*range(count), *range(count), 0]
        assert max(here) == 2
    sizes = [sum(tensor.nbytes for tensor in list_frozen_tensors(block)) for block in MODEL.blocks(trained.module)]
    assert count_copied_bytes(sizes, backward=True) == sum(sizes[place] for place in [*forward, *back])
    assert count_copied_bytes(sizes, backward=False) == sum(sizes)


@pytest.mark.parametrize("name", ["flux", long("qwen")])
def test_blocks_with_two_streams_called_by_keyword(name: str) -> None:
    """As diffusers calls them: the gradient of one stream arrives before the block's backward pass has ended."""
    build, predict = tiny_transformers.MODELS[name]
    found = list[tuple[Tensor, Tensor]]()
    for swaps in (False, True):
        net, items = build().requires_grad_(False), tiny_transformers.data()
        first = next(net.parameters()).requires_grad_(True)
        if swaps:
            BlockSwap(tiny_transformers.blocks(net), torch.device("cpu"))
        out = predict(net, items)
        out.square().sum().backward()
        assert first.grad is not None
        found.append((out.detach(), first.grad))
    for plain, swapped in zip(*found, strict=True):
        assert torch.equal(plain, swapped)


@pytest.mark.long
def test_a_pass_that_ends_halfway_leaves_nothing(one: World) -> None:
    """The next update is as if it had not been."""
    plain, swapped = engine(one), engine(one, offload="blocks")
    swap = swapped.sharded.swap
    assert swap is not None
    hook = MODEL.blocks(swapped.module)[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), swapped.inference() as module:
        lora_model.run(module)
    hook.remove()
    assert not swap._here
    assert update(swapped) == update(plain)


@pytest.mark.parametrize(
    ("sharding", "says"),
    [
        ({"offload": 99}, r"engine.offload is 99, expected at most the \d+ blocks of the network"),
        ({"offload": "blocks", "comm": "reshard"}, "engine.comm is 'reshard', expected keep: .*whole weights"),
        ({"offload": 2, "context_parallel": 2}, "engine.context_parallel is 2, expected 1: engine.offload is 2"),
    ],
    ids=str,
)
def test_what_cannot_be_swapped_is_refused(one: World, sharding: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        engine(one, **sharding)


def test_blocks_without_frozen_weights_are_refused(one: World) -> None:
    module = MODEL.build()
    with pytest.raises(UsageError, match="no block of SD3Transformer2DModel has frozen weights"):
        Engine(module, MODEL.blocks(module), OptimizerConfig(), one, sharding=EngineConfig(offload="blocks"))
