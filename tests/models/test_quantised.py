"""Quantised linear layers: bits, errors, gradients, and agreement with the libraries whose formats they are."""

import warnings
from typing import Any, get_args

import pytest
import torch
from helpers import real_torchao
from torch import nn
from torch.func import jvp

from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.models.lora import LoraConfig, LowRank, add_lora
from fluvial.models.quantised import FORMATS, Base, QuantisedLinear, dequantise, quantise, quantise_linear

BASES: tuple[Base, ...] = get_args(Base)
# Largest error of a value as a fraction of the largest magnitude that shares its scale: half a step of the codes.
ERROR = {"bfloat16": 2**-8, "int8": 0.5 / 127, "int4": 1 / 8, "nf4": 0.16, "fp8": 2**-4, "fp8_dynamic": 2**-4}


@pytest.mark.parametrize("shape", [(128, 64), (3, 7), (1, 1), (41, 130)])
@pytest.mark.parametrize("base", BASES)
def test_each_value_becomes_the_nearest_level(base: Base, shape: tuple[int, int]) -> None:
    """The error is bounded by the format's step, the largest value of a scale is exact, and a second rounding adds none."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    held = quantise(weight, base)
    found = dequantise(held, base, shape, torch.float32)
    assert (found - weight).abs().max() <= ERROR[base] * weight.abs().max()
    if base != "bfloat16":
        place = weight.abs().argmax()
        torch.testing.assert_close(found.flatten()[place], weight.flatten()[place], rtol=1e-6, atol=0)
    again = dequantise(quantise(found, base), base, shape, torch.float32)
    torch.testing.assert_close(again, found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("base", BASES)
def test_bytes_are_those_of_the_format_and_zeros_stay_zeros(base: Base) -> None:
    shape = (96, 256)
    assert sum(tensor.nbytes for tensor in quantise(torch.randn(shape), base)) == FORMATS[base].nbytes(shape)
    bits = {"bfloat16": 16, "int8": 8, "int4": 4.5, "nf4": 4.5, "fp8": 8, "fp8_dynamic": 8}[base]
    assert FORMATS[base].nbytes((3072, 12288)) * 8 / (3072 * 12288) == pytest.approx(bits, rel=0.005)
    weight = torch.randn(4, 64)
    weight[1] = 0
    assert not dequantise(quantise(weight, base), base, weight.shape, torch.float32)[1].any()


def test_int4_and_nf4_have_their_levels() -> None:
    """w / d rounded to -8 ... 7, d the largest value over -8; `quantize_4bit` of bitsandbytes 0.50.2 for two blocks."""
    weight = torch.randn(8, 64)
    largest = weight.gather(1, weight.abs().argmax(1, keepdim=True))
    scale = largest / -8
    expected = (weight / scale).round().clamp(-8, 7) * scale
    found = dequantise(quantise(weight, "int4"), "int4", weight.shape, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    held = quantise(torch.linspace(-3, 2, 128).reshape(2, 64), "nf4")
    codes = (
        "0000000000001111111111111111112222222222223333333334444444455555"
        "45555566667777788889999aaaaabbbbccccccdddddddeeeeeeeeeeeffffffff"
    )
    assert bytes(held.codes.tolist()).hex() == codes
    assert held.scale.flatten().tolist() == [3.0, 2.0]


def test_int8_agrees_with_torchao() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library: Any = real_torchao.load("torchao.quantization")
        linear = nn.Linear(64, 32, bias=False)
        weight = linear.weight.detach().clone()
        library.quantize_(linear, library.Int8WeightOnlyConfig(version=2))
        expected = linear.weight.dequantize()
    found = dequantise(quantise(weight, "int8"), "int8", weight.shape, torch.float32)
    assert ((found - expected).abs() <= weight.abs().amax(1, keepdim=True) / 127).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("base", [base for base in BASES if not FORMATS[base].dynamic])
def test_output_and_gradient_are_those_of_the_dequantised_layer(base: Base, dtype: torch.dtype) -> None:
    linear = nn.Linear(48, 40).requires_grad_(False)
    layer = QuantisedLinear(linear, base, torch.float32)
    plain = nn.Linear(48, 40).requires_grad_(False)
    plain.load_state_dict({"weight": layer.weight, "bias": linear.bias})
    plain, layer.bias = plain.to(dtype), nn.Parameter(linear.bias.to(dtype), requires_grad=False)
    x = torch.randn(2, 5, 48, dtype=dtype)
    grad = torch.randn(2, 5, 40, dtype=dtype)
    pairs: list[Any] = []
    for each in (layer, plain):
        leaf = x.clone().requires_grad_()
        out = each(leaf)
        out.backward(grad)
        pairs.append((out.detach(), leaf.grad))
    assert torch.equal(pairs[0][0], pairs[1][0])
    torch.testing.assert_close(pairs[0][1], pairs[1][1])


@pytest.mark.parametrize("base", BASES)
def test_a_filled_layer_equals_one_of_the_weight(base: Base) -> None:
    """A weight of a file is rounded to the dtype first, too."""
    first, second = (nn.Linear(48, 40).requires_grad_(False) for _ in range(2))
    expected, layer = (QuantisedLinear(each, base, torch.bfloat16) for each in (first, second))
    layer.fill(first.weight)
    assert all(map(torch.equal, layer.quantised, expected.quantised))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_fp8_is_torchs(dtype: torch.dtype) -> None:
    """`torch._scaled_mm` of codes with a scale per row; no row depends on the others, and a row of zeros stays one."""
    layer = QuantisedLinear(nn.Linear(48, 32).requires_grad_(False), "fp8_dynamic", torch.float32)
    layer.bias, rows = nn.Parameter(layer.bias.to(dtype), requires_grad=False), torch.randn(6, 48, dtype=dtype)
    rows[2], rows[3] = 0, 1000 * rows[3]
    scale = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    scales: Any = {"scale_a": scale, "scale_b": layer.quantised.scale.t(), "out_dtype": dtype}
    product = torch._scaled_mm((rows.float() / scale).to(torch.float8_e4m3fn), layer.quantised.codes.t(), **scales)
    found = layer(rows.view(2, 3, 48))
    terms = rows.float().abs() @ layer.weight.abs().t()  # sums of 48 products in float32, then rounded to the dtype
    bound = 48 * 2**-23 * terms + 2 * torch.finfo(dtype).eps * (terms + layer.bias.float().abs())
    assert ((found.view(6, 32) - product - layer.bias).float().abs() <= bound).all()
    assert torch.equal(found[0, 2], layer.bias)
    error = (found.view(6, 32) - nn.functional.linear(rows, layer.weight.to(dtype), layer.bias)).float().norm(dim=1)
    assert (error[[0, 1, 4, 5]] > 0).all()
    assert (error <= 2**-3 * rows.float().norm(dim=1)).all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("base", ["fp8_dynamic", "nf4"])
def test_the_gradient_is_that_of_the_weight(base: Base) -> None:
    """In the backward pass and in forward mode; of fp8 straight through the rounding of the input."""
    layer = QuantisedLinear(nn.Linear(48, 32).requires_grad_(False), base, torch.float32)
    x, grad, tangent = (torch.randn(3, size) for size in (48, 32, 48))
    x.requires_grad_()
    out = layer(x)
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.weight)
    primal, slope, *_ = jvp(layer, (x.detach(),), (tangent,))
    torch.testing.assert_close(primal, out.detach())
    torch.testing.assert_close(slope, tangent @ layer.weight.t())


@pytest.mark.parametrize("base", BASES)
def test_the_backward_pass_keeps_no_dequantised_weight(base: Base) -> None:
    layer = QuantisedLinear(nn.Linear(64, 64).requires_grad_(False), base, torch.float32)
    kept = list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    own = {tensor.untyped_storage()._cdata for tensor in layer.quantised}
    assert kept
    assert {tensor.untyped_storage()._cdata for tensor in kept} <= own


@pytest.mark.parametrize("disabled", [False, True])
def test_a_merged_product_dequantises(disabled: bool) -> None:
    """x (W + scale B A)^T over the dequantised W, with the gradients of a plain layer; the backward pass keeps no W."""
    torch.manual_seed(0)
    modules: list[Any] = [nn.Sequential(nn.Linear(64, 64)) for _ in range(2)]
    with torch.no_grad():
        own = modules[0][0].weight
        modules[1].load_state_dict(modules[0].state_dict())
        modules[1][0].weight.copy_(dequantise(quantise(own, "int4"), "int4", own.shape, own.dtype))
    found = []
    x = torch.randn(3, 64)
    for module in modules:
        add_lora(module, LoraConfig(rank=4, form=LowRank(product="merged")), ("0",), seed=1)
        torch.nn.init.ones_(module[0].lora_B["default"].weight)
        if module is modules[0]:
            quantise_linear(module, "int4", torch.float32)
        module[0]._disable_adapters = disabled
        leaf = x.clone().requires_grad_()
        with LiveStorages([*module.parameters(), *module.buffers()]) as live:
            out = module(leaf)
            kept = live.now
        out.square().sum().backward()
        found.append((out, leaf.grad, *(p.grad for p in module.parameters() if p.requires_grad)))
        assert kept < 64 * 64 * 4
    torch.testing.assert_close(found[0], found[1])
