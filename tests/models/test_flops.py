"""Floating-point operations against what is worked out on paper and against PyTorch's own counter."""

from typing import Any

import pytest
import torch
from helpers.tiny_models import Net, data, squared
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.parallelize import checkpoint_blocks
from fluvial.engines.engine.world import World
from fluvial.models.flops import FORMULAS, FlopCounter
from fluvial.models.lora import LoraConfig, LowRank, add_lora

ROWS, IN, OUT = 5, 8, 16


def linear(*, weight: bool, inputs: bool) -> FlopCounter:
    layer = nn.Linear(IN, OUT, bias=False).requires_grad_(weight)
    x = torch.randn(ROWS, IN, requires_grad=inputs)
    with FlopCounter() as counter:
        out = layer(x)
        if weight or inputs:
            out.sum().backward()
    return counter


@pytest.mark.parametrize(
    ("weight", "inputs", "passes"), [(False, False, 1), (True, False, 2), (False, True, 2), (True, True, 3)]
)
def test_a_linear_layer_is_2mnk_a_pass(weight: bool, inputs: bool, passes: int) -> None:
    counter = linear(weight=weight, inputs=inputs)
    assert counter.model == passes * 2 * ROWS * IN * OUT
    assert counter.recomputed == 0


def test_lora_needs_no_gradient_of_the_frozen_weight() -> None:
    """Of the first layer's base only the forward pass, of the second's the input's gradient too, of the factors all."""
    rank = 4
    net = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN))
    add_lora(net, LoraConfig(rank=rank), ["0", "1"])
    with FlopCounter() as counter:
        net(torch.randn(ROWS, IN)).sum().backward()
    base, factors = 2 * ROWS * IN * OUT, 2 * ROWS * rank * (IN + OUT)
    # The first layer's input asks for no gradient: that spares the product with its A.
    assert counter.model == 2 * base + base + 2 * factors + 2 * 2 * factors - 2 * ROWS * rank * IN


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_counted_on_the_cpu(backward: bool) -> None:
    """Two products forward; backward four, and the scores once more as fused kernels compute them."""
    batch, heads, queries, keys, dim = 2, 3, 7, 9, 8
    q = torch.randn(batch, heads, queries, dim, requires_grad=True)
    k, v = (torch.randn(batch, heads, keys, dim, requires_grad=True) for _ in range(2))
    with FlopCounter() as counter:
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        if backward:
            out.sum().backward()
    product = 2 * batch * heads * queries * keys * dim
    assert counter.model == (2 + (5 if backward else 0)) * product


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradient_are_counted(mode: Any) -> None:
    layer, q = nn.Linear(IN, OUT), torch.randn(1, 2, 3, 4)
    with FlopCounter() as counter, mode():
        layer(torch.randn(ROWS, IN))
        nn.functional.scaled_dot_product_attention(q, q, q)
    assert counter.model == 2 * ROWS * IN * OUT + 2 * 2 * 2 * 3 * 3 * 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(4, 4, 3, padding=1)
        self.into, self.out = nn.Linear(IN, 3 * IN), nn.Linear(IN, IN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(self.mix(x))[:, None].chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention())


def test_counts_are_those_of_pytorch() -> None:
    net, x = blocks(), torch.randn(2, 4, IN)
    with sdpa_kernel(SDPBackend.MATH), FlopCounter() as ours:
        net(x).square().sum().backward()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as theirs:
        net(x).square().sum().backward()
    assert ours.model == theirs.get_total_flops() > 0


@pytest.mark.parametrize("selective", [False, True])
def test_what_checkpointing_computes_again_is_counted_apart(selective: bool) -> None:
    x = torch.randn(2, 4, IN)
    net, again = blocks(), blocks()
    with FlopCounter() as forward, torch.no_grad():
        net(x)
    with FlopCounter() as plain:
        net(x).square().sum().backward()
    checkpoint_blocks(list(again), EngineConfig(checkpointing="selective" if selective else "block"))
    with FlopCounterMode(display=False, custom_mapping=CPU) as everything, FlopCounter() as counter:
        again(x).square().sum().backward()
    assert counter.model == plain.model
    assert counter.model + counter.recomputed == everything.get_total_flops()
    # A block's last product need not be computed again: nothing saved comes after it.
    last = 2 * 2 * (2 * 4 * IN * IN)
    assert 0 < counter.recomputed <= forward.model
    if not selective:
        assert counter.recomputed in (forward.model, forward.model - last)


CPU = {operation: FORMULAS[operation] for operation in set(FORMULAS) - set(flop_registry)}
for formula in CPU.values():
    formula._get_raw = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_sharded_module_counts_as_the_plain_one(one: World, train: str, checkpointing: Any) -> None:
    items, weight = data(6)

    def net() -> Net:
        made = Net()
        if train == "lora":
            # The merged weight is computed once per pass, and the plain module makes one pass instead of two.
            add_lora(made, LoraConfig(rank=2, form=LowRank(product="factors")), ["blocks.0.0", "blocks.1.0"])
        return made

    plain = net()
    with FlopCounter() as expected:
        squared(plain)(items)[0].sum().backward()
    weights: list[dict[str, Any]] = []
    counter = FlopCounter()
    for counted in (True, False):
        module = net()
        trained = Engine(
            module,
            list(module.blocks),
            OptimizerConfig(lr=0.01),
            one,
            updates=2,
            sharding=EngineConfig(checkpointing=checkpointing),
        )
        arguments: dict[str, Any] = {"count": 6, "micro_batch": 3, "pad_to": 6}
        if counted:
            with counter:
                trained.update(items, squared(module), weight, **arguments)
        else:
            trained.update(items, squared(module), weight, **arguments)
        weights.append({name: tensor.detach().clone() for name, tensor in module.state_dict().items()})
    assert counter.model == expected.model
    assert (counter.recomputed > 0) == (checkpointing == "block")
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_operations_on_sharded_tensors_are_counted_once(one: World) -> None:
    a = distribute_tensor(torch.randn(ROWS, IN), one.mesh, [Shard(0)])
    b = distribute_tensor(torch.randn(IN, OUT), one.mesh, [Replicate()])
    with FlopCounter() as counter:
        a @ b
    assert counter.model == 2 * ROWS * IN * OUT
