"""Quantisation of frozen linear layers: int8, int4, nf4 and fp8, in plain operations on any device.

A weight is stored as codes and one float32 scale per row or per block of 64 values, and is w = scale * level(code). Each
pass dequantises it, multiplies, and keeps codes and scales alone for the backward pass, which has the gradient of the
input. With fp8_dynamic the input is rounded in the same way, a scale per row, and the codes are multiplied. Codes are
buffers: FSDP2 neither casts nor shards them, and the rollout and the update read the same ones.
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
# Evenly spaced; the scale carries the sign of the largest value, which is exact (as llama.cpp's Q4_0).
INT4 = tuple(step / 8 for step in range(-7, 9))


class Format(NamedTuple):
    """Layout of a quantised weight."""

    codes: torch.dtype
    block: int = 0  # values per scale, over the flattened weight; 0 means a row
    levels: tuple[float, ...] = ()  # of a code of four bits, ascending; two codes share a byte
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


FORMATS: dict[Base, Format] = {
    "bfloat16": Format(torch.bfloat16),
    "int8": Format(torch.int8, largest=127.0),
    "int4": Format(torch.uint8, 64, INT4, signed=True),
    "nf4": Format(torch.uint8, 64, NF4),
    "fp8": Format(torch.float8_e4m3fn, largest=FP8_MAX),
    "fp8_dynamic": Format(torch.float8_e4m3fn, largest=FP8_MAX, dynamic=True),
}


class Quantised(NamedTuple):
    """A quantised weight."""

    codes: Tensor  # [out, in], or [n / 2] bytes of two codes each, the first one in the high half
    scale: Tensor  # float32: [out, 1], or [blocks, 1]; empty for bfloat16
    levels: Tensor  # float32 [256, 2]: levels of both codes of a byte; empty unless codes have four bits


def quantise(weight: Tensor, base: Base) -> Quantised:
    """Return codes and scales of a weight `[out, in]`; the nearest code of each value."""
    form, nothing = FORMATS[base], torch.empty(0, device=weight.device)
    if base == "bfloat16":
        return Quantised(weight.to(torch.bfloat16), nothing, nothing)
    weight = weight.detach().float()
    if not form.levels:
        return Quantised(*_round_rows(weight, form), nothing)
    flat = nn.functional.pad(weight.flatten(), (0, -weight.numel() % form.block)).view(-1, form.block)
    scale = flat.gather(1, flat.abs().argmax(1, keepdim=True))
    scale = scale if form.signed else scale.abs()
    scaled = flat / torch.where(scale != 0, scale, 1.0)
    levels = torch.tensor(form.levels, device=weight.device)
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).flatten()
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)
    return Quantised(codes[::2] << 4 | codes[1::2], scale, pairs)


def _round_rows(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Return the codes of each row of a float32 matrix, and its scale `[rows, 1]`."""
    largest = x.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / form.largest, 1.0)
    codes = x / scale
    return (codes.round_() if form.codes == torch.int8 else codes).to(form.codes), scale


def multiply(x: Tensor, weight: Quantised, base: Base, shape: Sequence[int], bias: Tensor | None) -> Tensor:
    """Return x W^T + bias of rows `[rows, in]`, in their dtype.

    The product of two matrices of fp8 is that of the hardware where it has one (Hopper, with sizes that 16 divides and an
    output in bfloat16), else that of the same numbers in float32.
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
    """Return whether the device of a matrix multiplies codes of fp8 with a scale per row."""
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
        linear: layer whose weight is quantised. On the meta device it has no values until `fill`.
        base: format of the weight.
        dtype: dtype that the weight is rounded to first, and that exports have.
    """

    def __init__(self, linear: nn.Linear, base: Base, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.base, self.dtype, self.training = base, dtype, linear.training
        self.bias = linear.bias
        for name, tensor in quantise(linear.weight.to(dtype), base)._asdict().items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def quantised(self) -> Quantised:
        """Codes, scales and levels; they share the buffers' storage."""
        held = self._buffers
        return Quantised(*(cast(Tensor, held[name]) for name in Quantised._fields))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantised weight `[out, in]`; each access makes another tensor."""
        return self.dequantise(self.dtype)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the weight `[out, in]` in a dtype."""
        return dequantise(self.quantised, self.base, (self.out_features, self.in_features), dtype)

    def plain(self) -> nn.Linear:
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
            if FORMATS[self.base].dynamic:  # its derivative is that of the input as it is, in the backward pass too
                codes, scale = _round_rows(x.detach().float().flatten(0, -2), FORMATS[self.base])
                x = x + ((codes.float() * scale).view_as(x).to(x.dtype) - x.detach())
            return nn.functional.linear(x, self.dequantise(x.dtype), self.bias)
        return _Product.apply(x, self.bias, *self.quantised, self.base, (self.out_features, self.in_features))


class _Product(torch.autograd.Function):
    """x W^T + bias, which keeps the quantised weight for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, levels: Tensor, base: Base, shape: Any
    ) -> Tensor:
        """Return the output."""
        ctx.save_for_backward(codes, scale, levels)
        ctx.base, ctx.shape = base, shape
        # As one matrix: torch would multiply a batch as many, whose bits depend on the processor and the addresses.
        out = multiply(x.reshape(-1, shape[1]), Quantised(codes, scale, levels), base, shape, bias)
        return out.view(*x.shape[:-1], shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        weight = dequantise(Quantised(*ctx.saved_tensors), ctx.base, ctx.shape, grad.dtype)
        return (
            (grad.reshape(-1, ctx.shape[0]) @ weight).view(*grad.shape[:-1], ctx.shape[1]),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def find_quantised(module: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, QuantisedLinear)}


def frozen_linear(module: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers that can be quantised, each with the module and the name that it is registered under."""
    return [
        (owner, name, layer)
        for place, owner in module.named_modules()
        for name, layer in owner.named_children()
        if type(layer) is nn.Linear and not layer.weight.requires_grad and ".lora_" not in f".{place}.{name}."
    ]


def quantise_linear(module: nn.Module, base: Base, dtype: torch.dtype) -> int:
    """Replace the frozen linear layers of a module by quantised ones, in place, and return their number.

    Adapters, trained layers and subclasses of nn.Linear stay as they are.

    Args:
        module: module with or without adapters, with values or on the meta device.
        base: format of the weights.
        dtype: dtype of the computation, which weights are rounded to first.
    """
    layers = frozen_linear(module)
    number = len(layers)
    while layers:  # each weight is freed before the next one is quantised
        owner, name, layer = layers.pop()
        setattr(owner, name, QuantisedLinear(layer, base, dtype))
    return number
