"""The light pass of adapted layers computes what PEFT's layer does, and leaves to PEFT what it does not support."""

from typing import Any

import peft
import pytest
import torch
from helpers.marks import Patch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fluvial.models import LoraConfig, add_lora
from fluvial.models import lora_layer as light
from fluvial.models.lora import LowRank


def layers(scale: float, *, bias: bool = True, rank: int = 2, product: light.Product = "factors") -> tuple[Any, Any]:
    pair = []
    for lightened in (False, True):
        torch.manual_seed(0)
        module = nn.ModuleDict({"to_q": nn.Linear(6, 5, bias=bias)})
        add_lora(module, LoraConfig(rank=rank, alpha=rank * scale, form=LowRank(product=product)), ["to_q"])
        layer: Any = module["to_q"]
        nn.init.normal_(layer.lora_B["default"].weight)
        if not lightened:
            layer.__class__ = peft.tuners.lora.Linear
        pair.append(layer)
    return pair[0], pair[1]


def passes(layer: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(torch.arange(out.numel(), dtype=torch.float32).reshape(out.shape).cos())
    return [out, *(given(t.grad) for t in (x, layer.lora_A["default"].weight, layer.lora_B["default"].weight))]


def given(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("product", "scale", "rank"),
    [("factors", 2.0, 2), ("factors", 1.5, 2), ("merged", 1.5, 1), ("merged", 1.5, 2)],  # of 5 x 6, rank 1 takes the factors
)
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (1, 1, 6), (2, 3, 4, 6)])
def test_the_light_pass_is_that_of_peft(
    shape: tuple[int, ...], product: light.Product, scale: float, rank: int, bias: bool
) -> None:
    theirs, ours = layers(scale, bias=bias, rank=rank, product=product)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for left, right in zip(passes(theirs, x), passes(ours, x), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        alone = ours(x)
    assert torch.equal(alone, ours(x))


def counted(product: light.Product, shape: tuple[int, ...], out: int, *, backward: bool) -> int:
    module = nn.ModuleDict({"to_q": nn.Linear(shape[-1], out)})
    add_lora(module, LoraConfig(rank=2, form=LowRank(product=product)), ["to_q"])
    with FlopCounterMode(display=False) as counter:
        result = module["to_q"](torch.randn(shape, requires_grad=True))
        if backward:
            result.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("out", [12, 24, 48])
@pytest.mark.parametrize("shape", [(4, 12), (4, 1, 12), (4, 4, 12), (4, 16, 12), (4, 3, 20, 12)])
def test_auto_takes_as_few_operations_as_it_can(shape: tuple[int, ...], out: int, backward: bool) -> None:
    products: tuple[light.Product, ...] = ("auto", "factors", "merged")
    auto, factors, merged = (counted(product, shape, out, backward=backward) for product in products)
    assert shape[0] == light.SAMPLES
    assert auto == min(factors, merged) if backward else auto <= factors


def test_auto_does_not_depend_on_the_batch_of_a_call() -> None:
    """So that a rollout, an update and a server with passes of other sizes multiply a sample alike."""
    weight, x = torch.ones(12, 12), torch.randn(8, 4, 12)
    for batch in (1, 4, 8):
        assert light.is_merged("auto", x[:batch], weight)
        assert not light.is_merged("auto", x[:batch, :2], weight)
        assert not light.is_merged("auto", x[:batch].bfloat16(), weight)
        assert light.is_merged("merged", x[:batch, :2], weight)
        assert not light.is_merged("factors", x[:batch], weight)


@pytest.mark.parametrize(
    ("product", "width", "expected"),
    [("factors", 6, 3), ("merged", 6, 1), ("auto", 6, 1), ("auto", 60, 3), ("merged", 60, 3)],
)
def test_a_compiler_sees_the_merged_product_of_narrow_layers(product: light.Product, width: int, expected: int) -> None:
    """As one linear layer with the sum as its weight; wide layers and the factors are PEFT's three."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"to_q": nn.Linear(width, width)})
    add_lora(module, LoraConfig(rank=2, form=LowRank(product=product)), ["to_q"])
    layer: Any = module["to_q"]
    nn.init.normal_(layer.lora_B["default"].weight)
    linear = list[Any]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        linear.extend(node for node in graph.graph.nodes if node.target is torch._C._nn.linear)
        return graph.forward

    compiled = torch.compile(layer.forward, backend=backend, fullgraph=True)
    x, found = torch.randn(4, 3, width), []
    for forward in (layer.forward, compiled):
        rows = x.clone().requires_grad_()
        layer.zero_grad()
        out = forward(rows)
        out.square().sum().backward()
        factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        found.append([out, given(rows.grad), *(given(factor.grad).clone() for factor in factors)])
    assert len(linear) == expected
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_gradients_of_the_merged_product_take_the_shorter_way(monkeypatch: Patch) -> None:
    """Through the gradient of the whole weight, out x in numbers per row, or through the factors, 2 R (out + in)."""
    taken, matmul = [], Tensor.mm

    def spy(left: Tensor, right: Tensor) -> Tensor:
        taken.append((left.shape[0], right.shape[1]))
        return matmul(left, right)

    monkeypatch.setattr(Tensor, "mm", spy)
    for rank, dense in ((1, False), (2, True)):
        taken.clear()
        a, b = torch.randn(rank, 6, requires_grad=True), torch.randn(5, rank, requires_grad=True)
        light.merged_linear(torch.randn(9, 6), torch.randn(5, 6), None, a, b, 1.0).sum().backward()
        assert ((5, 6) in taken) is dense


def test_the_merged_product_is_for_float32_alone(monkeypatch: Patch) -> None:
    """In bfloat16 the sum W + scale B A would lose small adapters."""
    seen: list[torch.dtype] = []
    merged = light.merged_linear

    def spy(x: Tensor, *args: Any) -> Tensor:
        seen.append(x.dtype)
        return merged(x, *args)

    monkeypatch.setattr(light, "merged_linear", spy)
    for product, expected in (("factors", []), ("merged", [torch.float32])):
        layer = layers(2.0, product=product)[1]  # type: ignore[arg-type]
        x = torch.randn(3, 6)
        single = layer(x)
        torch.testing.assert_close(layer.to(torch.bfloat16)(x.bfloat16()).float(), single, rtol=5e-2, atol=5e-2)
        assert seen == expected


def test_a_part_of_a_batch_that_is_not_contiguous_has_the_same_gradients() -> None:
    theirs, ours = layers(2.0)
    joint = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(2))
    found = []
    for layer in (theirs, ours):
        tokens = joint.clone().requires_grad_()
        layer(tokens[:, :4]).square().sum().backward()
        found.append(given(tokens.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert not found[1][:, 4:].any()


def test_what_the_light_pass_does_not_support_is_left_to_peft(monkeypatch: Patch) -> None:
    """A trained base layer, dropout, autocast, another dtype, no adapter and torch.func."""
    own, seen, x = light.adapted_linear, list[int](), torch.randn(3, 6)
    monkeypatch.setattr(light, "adapted_linear", lambda *args: seen.append(1) or own(*args))  # type: ignore[func-returns-value]
    theirs, ours = layers(2.0)
    ours(x)
    assert len(seen) == 1
    ours.base_layer.weight.requires_grad_()
    ours(x).sum().backward()
    assert given(ours.base_layer.weight.grad).any()
    ours.base_layer.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    torch.testing.assert_close(torch.func.vmap(ours)(x), theirs(x))
    ours._disable_adapters = True
    torch.testing.assert_close(ours(x), ours.base_layer(x))
    ours._disable_adapters = False
    ours.lora_dropout["default"] = nn.Dropout(0.5)
    ours(x)
    assert len(seen) == 1


@pytest.mark.parametrize("product", ["factors", "merged"])
def test_what_needs_no_gradient_gets_none(product: light.Product) -> None:
    _, ours = layers(2.0, product=product)
    ours.lora_A["default"].weight.requires_grad_(False)
    ours(torch.randn(3, 6)).sum().backward()
    assert ours.lora_A["default"].weight.grad is None
    assert given(ours.lora_B["default"].weight.grad).any()


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", ["factors", "merged"])
def test_an_adapter_of_zeros_has_the_bits_of_the_layer_without_it(product: light.Product, dtype: torch.dtype) -> None:
    """A policy begins exactly as its reference, for an input that is part of a larger tensor, too."""
    layer = layers(2.0, product=product)[1].to(dtype)
    nn.init.zeros_(layer.lora_B["default"].weight)
    layer.base_layer.requires_grad_(False)
    for x in (torch.randn(3, 9, 6), torch.randn(3, 9, 6)[:, 2:7], torch.randn(9, 6)):
        adapted = layer(x.to(dtype))
        layer._disable_adapters = True
        assert torch.equal(layer(x.to(dtype)), adapted)
        layer._disable_adapters = False
