"""Quantisation of frozen linear layers: int8, int4, nf4 and fp8, in plain operations on any device.

A weight is stored as codes with one float32 scale per row or per block of 64 values, w = scale * level(code). Each pass
dequantises it, multiplies, and keeps only codes and scales for the backward pass, which computes the gradient of the input.
With fp8_dynamic the input is rounded in the same way, with a scale per row, and the codes are multiplied. Codes are buffers:
FSDP2 neither casts nor shards them, and the rollout and the update read the same ones.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from fluvial.models.device import has_values

Base = Literal["bfloat16", "int8", "int4", "nf4", "fp8", "fp8_dynamic"]

FP8_MAX = 448.0  # largest number of float8_e4m3fn
# Quantiles of a normal distribution, scaled to [-1, 1] (arXiv 2305.14314, appendix E; the numbers are bitsandbytes').
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Evenly spaced levels; the scale has the sign of the largest value, which is exact (as llama.cpp's Q4_0).
INT4 = tuple(step / 8 for step in range(-7, 9))


class WeightFormat(NamedTuple):
    """Layout of a quantised weight."""

    codes: torch.dtype
    block: int = 0  # values per scale, over the flattened weight; 0 means a row
    levels: tuple[float, ...] = ()  # levels of a 4-bit code, ascending; two codes share a byte
    signed: bool = False  # whether the scale has the sign of the value with the largest magnitude
    largest: float = 1.0  # code of the largest value of a row
    dynamic: bool = False  # whether a product rounds its input, too

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of codes, scales and levels of a weight `[out, in]`."""
        rows, columns = shape
        if self.levels:
            blocks = -(-rows * columns // self.block)
            return blocks * (self.block // 2 + 4) + 256 * 2 * 4
        return rows * columns * self.codes.itemsize + (4 * rows if self.codes != torch.bfloat16 else 0)


FORMATS: dict[Base, WeightFormat] = {
    "bfloat16": WeightFormat(torch.bfloat16),
    "int8": WeightFormat(torch.int8, largest=127.0),
    "int4": WeightFormat(torch.uint8, 64, INT4, signed=True),
    "nf4": WeightFormat(torch.uint8, 64, NF4),
    "fp8": WeightFormat(torch.float8_e4m3fn, largest=FP8_MAX),
    "fp8_dynamic": WeightFormat(torch.float8_e4m3fn, largest=FP8_MAX, dynamic=True),
}


class Quantised(NamedTuple):
    """A quantised weight."""

    codes: Tensor  # [out, in], or [n / 2] bytes of two codes each, the first one in the high half
    scale: Tensor  # float32: [out, 1], or [blocks, 1]; empty for bfloat16
    levels: Tensor  # float32 [256, 2]: levels of both codes of a byte; empty unless codes have four bits


def quantise(weight: Tensor, base: Base) -> Quantised:
    """Return codes and scales of a weight `[out, in]`, with the nearest code for each value."""
    form, empty = FORMATS[base], torch.empty(0, device=weight.device)
    if base == "bfloat16":
        return Quantised(weight.to(torch.bfloat16), empty, empty)
    weight = weight.detach().float()
    if not form.levels:
        return Quantised(*_round_rows(weight, form), empty)
    flat = nn.functional.pad(weight.flatten(), (0, -weight.numel() % form.block)).view(-1, form.block)
    scale = flat.gather(1, flat.abs().argmax(1, keepdim=True))
    scale = scale if form.signed else scale.abs()
    scaled = flat / torch.where(scale != 0, scale, 1.0)
    levels = torch.tensor(form.levels, device=weight.device)
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).flatten()
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)
    return Quantised(codes[::2] << 4 | codes[1::2], scale, pairs)


def _round_rows(x: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Return the codes of each row of a float32 matrix, and its scale `[rows, 1]`."""
    largest = x.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / form.largest, 1.0)
    codes = x / scale
    return (codes.round_() if form.codes == torch.int8 else codes).to(form.codes), scale


def multiply(x: Tensor, weight: Quantised, base: Base, shape: Sequence[int], bias: Tensor | None) -> Tensor:
    """Return x W^T + bias of rows `[rows, in]`, in their dtype.

    fp8_dynamic uses the hardware's product of fp8 matrices if available (Hopper, sizes divisible by 16, output in bfloat16),
    else a product of the same numbers in float32.
    """
    form = FORMATS[base]
    if not form.dynamic:
        return nn.functional.linear(x, dequantise(weight, base, shape, x.dtype), bias)
    rows, scale = _round_rows(x.float(), form)
    if _multiplies_fp8(x, shape):
        out = torch._scaled_mm(rows, weight.codes.t(), scale_a=scale, scale_b=weight.scale.t(), out_dtype=x.dtype)
    else:
        out = (rows.float() @ weight.codes.float().t()).mul_(scale).mul_(weight.scale.t()).to(x.dtype)
    return out if bias is None else out + bias


def _multiplies_fp8(x: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a matrix's device multiplies fp8 codes with a scale per row."""
    if x.dtype != torch.bfloat16 or any(size % 16 for size in shape):
        return False
    return not has_values(x.device) or (x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0))


def dequantise(weight: Quantised, base: Base, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return scale * level(code) as a weight `[out, in]`; the product is computed in float32."""
    codes, scale, levels = weight
    if base == "bfloat16":
        return codes.to(dtype)
    if not FORMATS[base].levels:
        return codes.float().mul_(scale).to(dtype)
    rows, columns = shape
    values = levels.index_select(0, codes.int()).view(-1, FORMATS[base].block).mul_(scale).to(dtype)
    return values.view(-1)[: rows * columns].view(rows, columns)


class QuantisedLinear(nn.Linear):
    """A frozen linear layer whose weight is quantised, with the interface of nn.Linear.

    Args:
        linear: layer to quantise. On the meta device it has no values until `fill`.
        base: format of the weight.
        dtype: dtype that the weight is rounded to first; exports have it, too.
    """

    def __init__(self, linear: nn.Linear, base: Base, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's __init__ would allocate a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.base, self.dtype, self.training = base, dtype, linear.training
        self.bias = linear.bias
        for name, tensor in quantise(linear.weight.to(dtype), base)._asdict().items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def quantised(self) -> Quantised:
        """Codes, scales and levels; they share the buffers' storage."""
        return Quantised(*(cast(Tensor, self._buffers[name]) for name in Quantised._fields))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Dequantised weight `[out, in]`, a new tensor at each access."""
        return self.dequantise(self.dtype)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the weight `[out, in]` in a dtype."""
        return dequantise(self.quantised, self.base, (self.out_features, self.in_features), dtype)

    def to_linear(self) -> nn.Linear:
        """Return a linear layer with the dequantised weight, on the same device."""
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, bias=False)
        layer.weight, layer.bias = nn.Parameter(self.weight, requires_grad=False), self.bias
        return layer.train(self.training)

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Quantise a weight into the layer, in place."""
        for stored, new in zip(self.quantised, quantise(weight.to(self.dtype), self.base), strict=True):
            stored.copy_(new)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + bias, `[..., out]`."""
        if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
            if FORMATS[self.base].dynamic:  # rounding has the derivative 1, as in the backward pass
                codes, scale = _round_rows(x.detach().float().flatten(0, -2), FORMATS[self.base])
                x = x + ((codes.float() * scale).view_as(x).to(x.dtype) - x.detach())
            return nn.functional.linear(x, self.dequantise(x.dtype), self.bias)
        return _QuantisedProduct.apply(x, self.bias, *self.quantised, self.base, (self.out_features, self.in_features))


class _QuantisedProduct(torch.autograd.Function):
    """Product x W^T + bias that keeps the quantised weight for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, levels: Tensor, base: Base, shape: Any
    ) -> Tensor:
        """Return the output."""
        ctx.save_for_backward(codes, scale, levels)
        ctx.base, ctx.shape = base, shape
        # As one matrix: torch would multiply a batch as many matrices, with bits that depend on processor and addresses.
        out = multiply(x.reshape(-1, shape[1]), Quantised(codes, scale, levels), base, shape, bias)
        return out.view(*x.shape[:-1], shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        weight = dequantise(Quantised(*ctx.saved_tensors), ctx.base, ctx.shape, grad.dtype)
        dx = (grad.reshape(-1, ctx.shape[0]) @ weight).view(*grad.shape[:-1], ctx.shape[1])
        return (dx, *(None,) * 6)


def find_quantised(module: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, QuantisedLinear)}


def find_frozen_linear(module: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers that can be quantised, as (parent, name in the parent, layer)."""
    return [
        (owner, name, layer)
        for path, owner in module.named_modules()
        for name, layer in owner.named_children()
        if type(layer) is nn.Linear and not layer.weight.requires_grad and ".lora_" not in f".{path}.{name}."
    ]


def quantise_linear(module: nn.Module, base: Base, dtype: torch.dtype) -> int:
    """Replace the frozen linear layers of a module by quantised ones, in place, and return their number.

    Adapters, trained layers and subclasses of nn.Linear stay as they are.

    Args:
        module: module with or without adapters, with values or on the meta device.
        base: format of the weights.
        dtype: dtype of the computation; weights are rounded to it first.
    """
    layers = find_frozen_linear(module)
    number = len(layers)
    while layers:  # each weight is freed before the next one is quantised
        owner, name, layer = layers.pop()
        setattr(owner, name, QuantisedLinear(layer, base, dtype))
    return number
