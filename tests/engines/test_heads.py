"""Heads: a number per sample from the middle block, which changes nothing of the network."""

from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from torch import Tensor, nn
from torch.testing import assert_close

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.parallelize import checkpoint_blocks
from fluvial.engines.errors import UsageError
from fluvial.engines.heads import FeatureHead, add_head, find_width, list_head_parameters, read_head
from fluvial.models.handwriting import Handwriting
from fluvial.models.lora import HEADS, is_adapter


def test_it_is_the_mean_over_the_tokens_of_all_streams() -> None:
    """In float64, against its formula; the order of tokens is nothing, and a feature per sample is one token."""
    torch.manual_seed(0)
    head = FeatureHead(6).double()
    image, text = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    want = []
    for tokens in torch.cat([image, text], dim=1):
        numbers = []
        for token in tokens:
            hidden = head.into.weight @ token + head.into.bias
            hidden = (hidden - hidden.mean()) / (hidden.var(unbiased=False) + 1e-5).sqrt()
            numbers.append(head.out.weight[0] @ torch.where(hidden > 0, hidden, 0.2 * hidden) + head.out.bias[0])
        want.append(torch.stack(numbers).mean())
    assert_close(head([image, text]), torch.stack(want).float())
    assert_close(head([text.flip(1), image]), torch.stack(want).float())
    assert_close(head([image[:, 0]]), head([image[:, :1]]))


class Blocks(nn.Module):
    """Three blocks that return their input and features of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_a_head_reads_the_middle_block_and_changes_nothing(checkpointing: Any) -> None:
    """Also of a checkpointed block, which runs again in the backward pass; its gradient reaches the blocks before it."""
    net, x = Blocks(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    before = net(x)
    blocks = list(net.blocks)
    add_head(net, blocks, "critic", seed=3)
    checkpoint_blocks(blocks, EngineConfig(checkpointing=checkpointing))
    with read_head(net, blocks, "critic") as said:
        after = net(x)
    assert torch.equal(before, after)
    assert torch.equal(net(x), before)  # and outside nothing is read
    (number,) = said
    head = net.get_submodule(f"{HEADS}.critic")
    assert torch.equal(number, head([blocks[1](blocks[0](x))]))
    number.sum().backward()
    assert len(said) == 1
    assert [block.weight.grad is not None for block in blocks] == [True, True, False]
    assert all(parameter.grad is not None for parameter in head.parameters())


@pytest.mark.long
def test_heads_of_a_seed_are_the_same_and_no_part_of_the_base() -> None:
    nets = [Handwriting(None).build() for _ in range(3)]
    for net, seed in zip(nets, (0, 0, 1), strict=True):
        add_head(net, Handwriting(None).blocks(net), "fake", seed=seed)
    names = list_head_parameters(nets[0], "fake")
    assert len(names) == 6
    assert all(is_adapter(name) for name in names)
    assert list_head_parameters(nets[0], "other") == []
    weights = [dict(net.named_parameters())["fluvial_heads.fake.into.weight"] for net in nets]
    assert weights[0].shape == (32, 64)  # of the width of SD3's tokens
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_what_takes_no_head() -> None:
    """A network without blocks, blocks without linear layers, and a block whose results have another width."""
    without: list[tuple[nn.Module, list[nn.Module]]] = [(nn.Linear(2, 2), []), (nn.Sequential(nn.Tanh()), [nn.Tanh()])]
    for net, blocks in without:
        with pytest.raises(UsageError, match="takes no head"):
            add_head(net, blocks, "fake", seed=0)
    net = tiny.Tiny().build()
    wide = nn.Sequential(nn.Linear(24, 7), nn.Tanh())
    assert find_width(wide) == 24
    add_head(net, [wide], "fake", seed=0)
    narrow = pytest.raises(UsageError, match=r"its Sequential returned no tensor \[B, tokens, 24\]")
    with narrow, read_head(net, [wide], "fake"):
        wide(torch.zeros(2, 24))
