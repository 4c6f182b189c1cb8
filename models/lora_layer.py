"""Forward and backward pass of an adapted linear layer, with fewer operations than PEFT's.

PEFT runs four modules and about 14 operations per layer, and autograd some 30 more, mostly views and transposes. On a
small model they cost more than the products. Here a LoRA layer is one node of autograd, with 9 + 11 operations.

A DoRA layer multiplies by the factors and by the lengths of rows, whose norms take a product with A instead of the sum
W + s B A. A LoKr layer multiplies by the factors, too: PEFT builds the whole Kronecker product, and autograd keeps it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# How an adapted layer multiplies its input: by the factors, by the merged weight, or by whichever takes fewer operations.
Product = Literal["auto", "factors", "merged"]
SAMPLES = 4  # per forward pass; with fewer, auto may take more operations than the factors
MAGNITUDE = "lora_magnitude_vector"
# Attributes of PEFT's layers that hold an adapter's parameters, and names of these in its files.
PARTS = ("lora_A", "lora_B", MAGNITUDE, "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
TINY = 1e-30  # smallest square of a row's norm


def lighten(layer: Any, *, product: Product = "auto") -> None:
    """Switch an adapted layer of PEFT to the light pass, in place; PEFT's own pass remains where the light one cannot apply.

    The layer keeps its parameters, their names and PEFT's interface.

    Args:
        layer: adapted layer of PEFT.
        product: factors (`adapted_linear`), merged (`merged_linear`, for inputs in float32), or auto (`is_merged`).
    """
    from peft.tuners import lokr, lora

    if type(layer.base_layer) is not nn.Linear:
        return
    if type(layer) is lora.Linear:
        layer.__class__ = _make_light_linear(lora.Linear, product)  # type: ignore[arg-type]  # peft has no types: mypy sees no class
    elif type(layer) is lokr.Linear:
        layer.__class__ = _make_light_lokr(lokr.Linear)  # type: ignore[arg-type]


@cache
def _make_light_linear(kind: Any, product: Product) -> type:
    """Return PEFT's adapted layer with the light pass."""

    class LightLinear(kind):
        """PEFT's adapted linear layer with the light pass."""

        light_product = product

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """Return x W^T + bias + scale x A^T B^T."""
            if (lengths := _get_active(self, MAGNITUDE)) is not None:
                base, scale = self._modules["base_layer"], self.scaling[self._active_adapter[0]]
                a, b = (_get_active(self, part).weight for part in ("lora_A", "lora_B"))
                return dora_linear(x, base, a, b, lengths.weight, scale)
            quantised = type(self._modules["base_layer"]) is not nn.Linear
            if args or kwargs or is_transformed(x) or (quantised and product != "merged"):
                return super().forward(x, *args, **kwargs)
            if quantised and torch.is_grad_enabled():  # the backward pass recomputes the merged weight
                return checkpoint(self._multiply, x, use_reentrant=False)
            return self._multiply(x)

        def _multiply(self, x: Tensor) -> Tensor:
            """Return the layer's output, by the light pass where it applies."""
            factors, compiling = light_factors(self, x), torch.compiler.is_compiling()
            if factors is None:
                base = self._modules["base_layer"]
                bare = not compiling and _is_bare(self, x)
                return flat_linear(x, base.weight, base.bias) if bare else super().forward(x)
            merges = is_merged(product, x, factors[0])
            if not compiling:
                return merged_linear(x, *factors) if merges else adapted_linear(x, *factors)
            weight, bias, a, b, scale = factors
            if merges and weight.numel() <= 2 * len(a) * sum(weight.shape):  # autograd computes the gradient of the sum
                return nn.functional.linear(x, torch.addmm(weight, b, a, alpha=scale), bias)
            return super().forward(x)

    return LightLinear


@cache
def _make_light_lokr(kind: Any) -> type:
    """Return PEFT's LoKr layer with the light pass."""

    class LightLokr(kind):
        """PEFT's adapted linear layer with the light pass."""

        def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            """Return x W^T + bias + scale x (w1 (x) w2)^T."""
            out = _multiply_frozen(self._modules["base_layer"], x)
            active = {part: _get_active(self, part) for part in PARTS if part in self._modules}
            parts = {part: tensor for part, tensor in active.items() if tensor is not None}
            return out + multiply_lokr(x, parts, self.scaling[self._active_adapter[0]]) if parts else out

    return LightLokr


def _get_active(layer: Any, part: str) -> Any:
    """Return a part of the active adapter; None without one, or if adapters are disabled."""
    if layer._disable_adapters or layer.merged_adapters:
        return None
    tensors, active = layer._modules[part], layer._active_adapter
    return tensors[active[0]] if active and active[0] in tensors else None


def _multiply_frozen(base: Any, x: Tensor) -> Tensor:
    """Return x W^T + bias as the reference policy computes it."""
    return flat_linear(x, base.weight, base.bias) if type(base) is nn.Linear else base(x)


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in float32; a float64 tensor stays float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def compute_row_norms(weight: Tensor) -> Tensor:
    """Return the norms of the rows of a weight `[out, in]`, `[out]`, at least 1e-15; in the dtype of `widen`."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(weight, dim=1, dtype=dtype).clamp_min(TINY**0.5)


def compute_growth(weight: Tensor, a: Tensor, b: Tensor, longer: Tensor, scale: float) -> Tensor:
    """Return the factor from the rows of W + s B A to their trained lengths, minus 1: `[out]`.

    With n the norms of the rows w of W, d = `longer` and b the rows of B it is

        (n + d) / |w + s b A| - 1    |w + s b A|^2 = n^2 + 2 s (w A^T) b^T + s^2 b A A^T b^T

    The denominator is a constant in the backward pass (arXiv 2402.09353, section 4.3).

    Args:
        weight: frozen weight, `[out, in]`.
        a, b: factors, `[R, in]` and `[out, R]`.
        longer: trained lengths of the rows minus their norms, `[out]`.
        scale: alpha / R.

    Returns:
        Growth in the dtype of `widen(weight)`.
    """
    with torch.no_grad():
        norms, wide, factor = compute_row_norms(weight), widen(b) * scale, widen(a)
        cross = (widen(weight.mm(a.t())) * wide).sum(1)
        square = (wide.mm(factor.mm(factor.t())) * wide).sum(1)
        more = (2 * cross + square) / norms.square()
        root = (1 + more).clamp_min(0).sqrt()
        excess = more / (1 + root)  # root - 1, without cancellation
    return (widen(longer) / norms - excess) / root.clamp_min(TINY**0.5)


def dora_linear(x: Tensor, base: Any, a: Tensor, b: Tensor, longer: Tensor, scale: float) -> Tensor:
    """Return x (W + s B A)^T + bias, with the rows scaled to their trained lengths, `[..., out]`.

    With g = `compute_growth` and y = x W^T it is y + bias + g (y + z) + z for z = s x A^T B^T. So the output equals the
    frozen layer's to the bit if g and z are 0, and a small g keeps its digits in bfloat16.

    Args:
        x: input, `[..., in]`.
        base: frozen layer, plain or quantised.
        a, b, longer, scale: adapter, see `compute_growth`.
    """
    weight = base.weight if type(base) is nn.Linear else base.dequantise(x.dtype)
    a, b = a.to(x.dtype), b.to(x.dtype)
    out, more = _multiply_frozen(base, x), compute_growth(weight.detach().to(x.dtype), a, b, longer, scale).to(x.dtype)
    update = flat_linear(flat_linear(x, a) * scale, b)
    return out + ((out if base.bias is None else out - base.bias) + update) * more + update


def multiply_lokr(x: Tensor, parts: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return s x (w1 (x) w2)^T, `[..., out]`, without building the Kronecker product.

    With x as a matrix X of `[columns of w1, columns of w2]` it is s w1 X w2^T as a vector.

    Args:
        x: input, `[..., in]`.
        parts: `lokr_w1` `[l, m]`, and `lokr_w2` `[k, n]` or its factors `lokr_w2_a` `[k, R]` and `lokr_w2_b` `[R, n]`.
        scale: alpha / R.
    """
    parts = {part: tensor.to(x.dtype) for part, tensor in parts.items()}
    first = parts["lokr_w1"] * scale
    inner = x.unflatten(-1, (first.shape[1], -1))
    inner = flat_linear(inner, parts["lokr_w2"] if "lokr_w2" in parts else parts["lokr_w2_b"])
    inner = flat_linear(inner.mT, first).mT
    return (flat_linear(inner, parts["lokr_w2_a"]) if "lokr_w2_a" in parts else inner).flatten(-2)


def flat_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, `[..., out]`, by one matrix product."""
    return rows_linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def merge_weight(weight: Tensor, parts: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return the weight of a layer merged with its adapter, in the dtype of the weight; computed in the dtype of `widen`.

    Args:
        weight: frozen weight, `[out, in]`.
        parts: tensors of the adapter by `PARTS`.
        scale: alpha / R.
    """
    wide = widen(weight)
    parts = {part: tensor.to(wide.dtype) for part, tensor in parts.items()}
    if "lokr_w1" in parts:
        second = parts["lokr_w2"] if "lokr_w2" in parts else parts["lokr_w2_a"] @ parts["lokr_w2_b"]
        return (wide + torch.kron(parts["lokr_w1"], second) * scale).to(weight.dtype)
    a, b = parts["lora_A"], parts["lora_B"]
    total = wide + (b @ a) * scale
    if MAGNITUDE in parts:
        total = total + total * compute_growth(wide, a, b, parts[MAGNITUDE], scale)[:, None]
    return total.to(weight.dtype)


def is_merged(product: Product, x: Tensor, weight: Tensor) -> bool:
    """Return whether an adapted layer multiplies by the merged weight W + scale B A.

    In a lower precision than float32 it never does, because the sum would round small adapters away. auto merges if that
    takes no more operations, both forward alone and forward and backward. For N rows and rank R, the adapter takes
    N R (in + out) multiplications by the factors and R in out merged. With the backward pass it takes 3 N R (in + out), and
    merged 2 N R (in + out) + 2 R in out or, in narrow layers, about as many. So it merges if

        2 in out <= N (in + out)

    with the N tokens of `SAMPLES` samples. That does not depend on the batch of a call, so all passes over a sample multiply
    alike: those of a rollout, of its update and of a server.

    Args:
        x: input, `[..., in]`, or `[B, ..., in]` of B samples.
        weight: frozen weight, `[out, in]`.
    """
    if product == "factors" or x.dtype != torch.float32:
        return False
    out, into = weight.shape
    return product == "merged" or 2 * into * out <= SAMPLES * x.shape[1:-1].numel() * (into + out)


def _is_bare(layer: Any, x: Tensor) -> bool:
    """Return whether the base layer alone computes, with adapters disabled or merged, on plain tensors of one dtype.

    It then runs as a part of the light pass, so that a policy and its reference round alike: torch's own linear multiplies
    an input that is a view of a larger tensor and adds the bias in a second rounding.
    """
    if layer._disable_adapters == bool(layer.merged_adapters):
        return False
    base = layer._modules["base_layer"]
    tensors = [tensor for tensor in (x, base.weight, base.bias) if tensor is not None]
    return all(_is_plain(tensor) and tensor.dtype == x.dtype for tensor in tensors)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has no subclass; fake tensors of a simulated device count as plain."""
    return type(tensor) in (Tensor, nn.Parameter) or type(tensor).__name__ == "FakeTensor"


def is_transformed(x: Tensor) -> bool:
    """Return whether autocast or a transform of torch.func is active; both then run PEFT's own code."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return True
    return not torch.compiler.is_compiling() and (
        forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None
    )


def light_factors(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """Return (W, bias, A, B, scale) of the active adapter; None if the light pass does not apply.

    It applies to one adapter without dropout and trained lengths, over a frozen layer of plain tensors with one dtype.
    """
    active = layer._active_adapter
    if layer._disable_adapters or layer.merged_adapters or len(active) != 1 or isinstance(active, str):
        return None
    name, base = active[0], layer._modules["base_layer"]
    modules = layer._modules["lora_A"]._modules, layer._modules["lora_B"]._modules
    if name not in modules[0] or name in layer.lora_variant or _get_active(layer, MAGNITUDE) is not None:
        return None
    down, up = (factors[name] for factors in modules)
    dropout = layer._modules["lora_dropout"]._modules[name]
    weight, bias, a, b = base.weight, base.bias, down.weight, up.weight
    if type(dropout) is not nn.Identity or down.bias is not None or up.bias is not None or weight.requires_grad:
        return None
    plain = all(_is_plain(tensor) and tensor.dtype == x.dtype for tensor in (x, weight, a, b))
    if not plain or (bias is not None and (bias.requires_grad or bias.dtype != x.dtype)):
        return None
    return weight, bias, a, b, layer.scaling[name]


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return x W^T + bias + scale x A^T B^T, `[..., out]`, with gradients of x, A and B.

    The bits equal those of PEFT's layer if the scale is a power of two and the input contiguous. Otherwise they agree to
    rounding: the scale multiplies the R numbers between the factors instead of the output, and an input that is a view of a
    larger tensor is copied once and multiplied as one matrix.

    Args:
        x: input, `[..., in]`.
        weight, bias: frozen layer, `[out, in]` and `[out]`; None for no bias.
        a, b: factors of the adapter, `[R, in]` and `[out, R]`.
        scale: factor of the adapter's output, alpha / R.
    """
    if torch.is_grad_enabled() and (x.requires_grad or a.requires_grad or b.requires_grad):
        return _AdaptedLinear.apply(x, x, weight, bias, a, b, scale)
    return _compute_adapted(x, weight, bias, a, b, scale, reuse=True)[0]


def _compute_adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, *, reuse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and for the backward pass the input as a matrix and scale x A^T.

    `reuse`: whether to add to the layer's output in place. Selective checkpointing keeps that output, so training does not.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = rows_linear(rows, weight, bias)
    inner = rows.mm(a.t()) * scale
    out = out.addmm_(inner, b.t()) if reuse else torch.addmm(out, inner, b.t())
    return out.view(*x.shape[:-1], out.shape[-1]), rows, inner


def rows_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows W^T + bias of a matrix, in one rounding."""
    return rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())


class _AdaptedLinear(torch.autograd.Function):
    """`adapted_linear` as one node.

    The input is passed twice, once for each term, because autograd then adds the two gradients to those of other layers
    one by one and in the same order as for PEFT's layer. So the sums have the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, again: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """Return the output."""
        out, rows, inner = _compute_adapted(x, weight, bias, a, b, scale, reuse=False)
        ctx.save_for_backward(rows, inner, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x through the adapter and through the layer, of A and of B."""
        rows, inner, weight, a, b = ctx.saved_tensors
        need_x, _, _, _, need_a, need_b, _ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        db = grad.t().mm(inner) if need_b else None
        through = grad.mm(b).mul_(ctx.scale) if need_x or need_a else None
        da = through.t().mm(rows) if through is not None and need_a else None
        if not need_x:
            return None, None, None, None, da, db, None
        assert through is not None
        adapter, layer = (part.view(ctx.shape) for part in (through.mm(a), grad.mm(weight)))
        return adapter, layer, None, None, da, db, None


def merged_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return x (W + scale B A)^T + bias, `[..., out]`, with gradients of x, A and B.

    The sum is computed once per call. That takes fewer passes over the output than `adapted_linear`, and fewer operations
    if an input has more rows than in out / (in + out). The arguments are those of `adapted_linear`.
    """
    if torch.is_grad_enabled() and (x.requires_grad or a.requires_grad or b.requires_grad):
        return _MergedLinear.apply(x, weight, bias, a, b, scale)
    out = rows_linear(x.reshape(-1, x.shape[-1]), torch.addmm(weight, b, a, alpha=scale), bias)
    return out.view(*x.shape[:-1], out.shape[-1])


class _MergedLinear(torch.autograd.Function):
    """`merged_linear` as one node; its backward pass computes the merged weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return the output."""
        rows = x.reshape(-1, x.shape[-1])
        out = rows_linear(rows, torch.addmm(weight, b, a, alpha=scale), bias)
        ctx.save_for_backward(rows, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, A and B: through the gradient of the sum if that takes fewer operations per row."""
        rows, weight, a, b = ctx.saved_tensors
        need_x, _, _, need_a, need_b, _ = ctx.needs_input_grad
        grad, da, db = grad.reshape(-1, grad.shape[-1]), None, None
        if (need_a or need_b) and weight.numel() <= 2 * len(a) * sum(weight.shape):
            dense = grad.t().mm(rows).mul_(ctx.scale)
            da, db = b.t().mm(dense) if need_a else None, dense.mm(a.t()) if need_b else None
        else:
            da = grad.mm(b).mul_(ctx.scale).t().mm(rows) if need_a else None
            db = grad.t().mm(rows.mm(a.t()).mul_(ctx.scale)) if need_b else None
        dx = grad.mm(torch.addmm(weight, b, a, alpha=ctx.scale)).view(ctx.shape) if need_x else None
        return dx, None, None, da, db, None
