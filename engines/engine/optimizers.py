"""The table of optimizers: how each is built, and how its state is laid out. A new optimizer is one row.

A state tensor is sharded like its parameter (by rows) or replicated on every rank. An 8- or 4-bit one is a torchao tensor of
codes, with one scale per block of values. Blocks never cross rows, so codes and scales are also sharded by rows and can be
loaded on another number of ranks.

Trained weights in bfloat16 take each step in float32 and are rounded stochastically: a value x between bfloat16 neighbours
a < b becomes b with probability (x - a) / (b - a), so its mean is x. Rounding to nearest would lose every step smaller than
half the distance of neighbours, 2^-9 of the value.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import SGD, AdamW, Muon, Optimizer

from fluvial.core import random
from fluvial.core.random import DRAWN_AT_ONCE, Key, bits, fold_in
from fluvial.engines.engine.config import OptimizerConfig, OptimizerName
from fluvial.engines.engine.shards import first_row, local, plain, set_lr, shard_like, sum_over_shards
from fluvial.engines.errors import UsageError
from fluvial.engines.streams import Stream

START = 1e-6  # d before the first step


class Prodigy(Optimizer):
    """Prodigy (arXiv 2306.06101), AdamW that estimates its own step size, for row-sharded parameters.

    With G the gradient, W0 the first weights, c = sqrt(b2), h = d lr, and sums over all parameters and ranks:

        m <- b1 m + (1 - b1) d G    v <- b2 v + (1 - b2) d^2 G^2    s <- c s + d h G / d0
        r <- c r + d h sum(G (W0 - W)) / d0    d' = max(d, r / sum |s|)
        W <- W (1 - weight_decay h) - h m / (sqrt(v) + d' eps)    d <- d'

    d estimates the distance to the solution from below, so it never falls; lr is a factor, 1 as published. This is the rule
    of the package prodigyopt without bias correction. That package sums over the parameters on the host, stores d outside
    the optimizer state, and does not support FSDP2. This class uses one all-reduce per step and no read on the host, and
    checkpoints include d and r.
    """

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        super().__init__(params, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._betas, self._eps = config.betas, config.eps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        (group,) = self.param_groups
        with_grad = [p for p in group["params"] if p.grad is not None]
        states = [{key: local(value) for key, value in self.state[p].items()} for p in with_grad]
        (b1, b2), c = self._betas, math.sqrt(self._betas[1])
        d, r = states[0]["estimate"].clone().unbind()  # equal for all parameters
        d = d.clamp(min=START)
        h, sums = d * group["lr"], []
        for p, state in zip(with_grad, states, strict=True):
            gradient = local(p.grad)
            state["step"] += 1
            if state["step"] == 1:
                state["first"].copy_(local(p))
            state["exp_avg"].mul_(b1).add_(gradient * ((1 - b1) * d))
            state["exp_avg_sq"].mul_(b2).add_((gradient * d).square() * (1 - b2))
            state["sum"].mul_(c).add_(gradient * (d * h / START))
            distance = (gradient * (state["first"] - local(p))).sum() * (d * h / START)
            sums.append(torch.stack([distance, state["sum"].abs().sum()]))
        numerator, denominator = torch.stack(sum_over_shards(sums, with_grad)).sum(0)
        r = c * r + numerator
        estimate = torch.maximum(d, torch.where(denominator > 0, r / denominator, 0))
        for p, state in zip(with_grad, states, strict=True):
            step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + estimate * self._eps)
            local(p).mul_(1 - group["weight_decay"] * h).sub_(step * h)
            state["estimate"].copy_(torch.stack([estimate, r]))


MOMENTUM = 0.95


class MuonAdamW(Optimizer):
    """Muon (arXiv 2502.16982) for row-sharded matrices, with AdamW for all other parameters.

    With G the gradient of a matrix of m rows and n columns, and O(U) = A B^T of the singular value decomposition U = A S B^T
    by five Newton-Schulz steps:

        M <- 0.95 M + 0.05 G    U = 0.05 G + 0.95 M    W <- W (1 - lr weight_decay) - 0.2 sqrt(max(m, n)) lr O(U)

    The factor gives a step the RMS of AdamW's, so that AdamW's learning rate can be reused. O needs full matrices: they are
    gathered one at a time, orthogonalised identically on every rank, and freed. Momentum stays sharded.
    """

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        params = list(params)
        super().__init__(params, {"lr": config.lr, "weight_decay": config.weight_decay})
        non_matrices = [p for p in params if p.ndim != 2]
        options: Any = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay, "fused": True}
        self._adamw = AdamW(non_matrices, lr=config.lr, **options) if non_matrices else None
        if self._adamw is not None:
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.ndim != 2:
                    continue
                momentum, gradient, weight = local(self.state[p]["momentum_buffer"]), local(p.grad), local(p)
                momentum.lerp_(gradient, 1 - MOMENTUM)
                update = shard_like(p, gradient.lerp(momentum, MOMENTUM))
                step = _orthogonal_step(update.full_tensor() if isinstance(update, DTensor) else update, group["lr"])
                first = first_row(p)
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(step[first : first + len(weight)])
        if self._adamw is not None:
            set_lr(self._adamw, self.param_groups[0]["lr"])
            with plain(self._adamw):
                self._adamw.step()


def _orthogonal_step(update: Tensor, lr: float) -> Tensor:
    """Return Muon's step for a full matrix, without momentum."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    Muon([matrix], lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    return matrix.detach()


SEED = 0  # of stochastic rounding, in every run
Shape = tuple[int, ...]
Bits = Literal["float32", "signed8", "unsigned8", "signed4", "unsigned4"]
BLOCKS = {8: 256, 4: 128}  # values per scale, by bits, as in torchao
SMALLEST = 4096  # smaller tensors are not quantised, as in bitsandbytes (arXiv 2110.02861)
TINY = 1e-30  # added to squared gradients by Adafactor, to avoid dividing by 0 (arXiv 1804.04235)


class Buffer(NamedTuple):
    """One tensor of a parameter's optimizer state."""

    shape: tuple[int, ...]  # over all ranks
    sharded: bool = True  # by rows like the parameter, else replicated
    bits: Bits = "float32"

    @property
    def width(self) -> int:
        """Bits per code, if quantised."""
        return int(self.bits[-1])

    @property
    def quantised(self) -> bool:
        """Whether the tensor is quantised: large enough, and its rows consist of full blocks."""
        row = math.prod(self.shape[1:])
        return self.bits != "float32" and self.shape[0] * row >= SMALLEST and row % BLOCKS[self.width] == 0

    def nbytes(self, ranks: int) -> int:
        """Return the bytes on the first of `ranks` ranks, which has the largest shard."""
        rows = math.ceil(self.shape[0] / ranks) if self.sharded else self.shape[0]
        values = rows * math.prod(self.shape[1:])
        if not self.quantised:
            return 4 * values
        return values * self.width // 8 + 4 * values // BLOCKS[self.width] + 4 * 2**self.width  # and a table of levels


def allocate(parameter: nn.Parameter, buffer: Buffer) -> Tensor:
    """Allocate a zero state tensor of a sharded parameter."""
    shard = local(parameter)
    shape: tuple[int, ...] = (int(shard.shape[0]), *buffer.shape[1:]) if buffer.sharded else buffer.shape
    if buffer.quantised and 0 not in shape:
        signed, block = buffer.bits.startswith("signed"), BLOCKS[buffer.width]
        if buffer.width == 8:
            from torchao.optim.subclass_8bit import OptimState8bit as Quantised
        else:
            from torchao.optim.subclass_4bit import OptimState4bit as Quantised
        part = Quantised.zeros(shape, signed, block, shard.device, dtype=torch.float32)
    else:
        part = torch.zeros(shape, device=shard.device)
    return shard_like(parameter, part, buffer.shape, replicated=not buffer.sharded)


def list_saved(state: Mapping[str, Any], buffers: Mapping[str, Buffer]) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state for a checkpoint, without the step count; they share its storage.

    Args:
        state: optimizer state of the parameter.
        buffers: layout of its tensors.
    """
    tensors: dict[str, Tensor] = {}
    for key, buffer in buffers.items():
        tensor = state[key]
        if not buffer.quantised:
            tensors[key] = tensor
            continue
        part: Any = local(tensor)
        row = math.prod(buffer.shape[1:])
        if part.numel():
            codes, scale = part.codes, part.scale
        else:  # a rank without rows has an empty tensor, without blocks
            codes, scale = part.to(torch.uint8), part
        rows, width = len(part), buffer.width
        for name, values, columns in (("codes", codes, row * width // 8), ("scale", scale, row // BLOCKS[width])):
            flat = values.view(rows, columns) if rows else values.new_empty(0, columns)
            tensors[f"{key}.{name}"] = shard_like(tensor, flat, (buffer.shape[0], columns))
    return tensors


class OptimizerKind(NamedTuple):
    """Construction of an optimizer, and layout of its state."""

    build: Callable[[Iterable[nn.Parameter], OptimizerConfig], Optimizer]
    buffers: Callable[[Shape, OptimizerConfig], dict[str, Buffer]]  # state of a parameter, given its shape
    step: Literal["device", "host", "none"]  # location of the step count per parameter
    elementwise: bool = False  # whether a value's step depends only on its own gradient and state

    def start(self, parameter: nn.Parameter, config: OptimizerConfig) -> dict[str, Any]:
        """Return a parameter's state before the first step."""
        device = local(parameter).device if self.step == "device" else "cpu"
        count = {} if self.step == "none" else {"step": torch.zeros((), device=device)}
        return {**count, **{key: allocate(parameter, b) for key, b in self.buffers(tuple(parameter.shape), config).items()}}

    def apply(self, optimizer: Optimizer, norm: Tensor, *, max_norm: float, update: int) -> None:
        """Clip the gradients, whose norm over all ranks is `norm`, to `max_norm`, and take a step.

        An elementwise optimizer steps this rank's plain tensors. Parameters in bfloat16 are rounded stochastically, with
        keys from the indices of the update and the parameter.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        rounds = any(p.dtype != torch.float32 for p in parameters)
        places = [(number, first_row(p)) for number, p in enumerate(parameters)] if rounds else []
        with plain(optimizer) if self.elementwise else nullcontext():
            clip_grads_with_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm, norm)
            if rounds:
                step_rounded(optimizer, places, rounding_key(update))
            else:
                optimizer.step()

    def nbytes(self, shape: Shape, config: OptimizerConfig, *, ranks: int) -> int:
        """Return the bytes of a parameter's state on the first of `ranks` ranks."""
        count = 0 if self.step == "none" else 4
        return count + sum(buffer.nbytes(ranks) for buffer in self.buffers(shape, config).values())


class Adafactor(Optimizer):
    """Adafactor without a first moment (arXiv 1804.04235), for row-sharded parameters.

    With G the gradient, b = 1 - t^-0.8 and r, c the averages over columns and rows:

        R <- b R + (1 - b) r(G^2 + 1e-30)    C <- b C + (1 - b) c(G^2 + 1e-30)    V = R C / mean(R)
        U = G / sqrt(V)    W <- W (1 - lr weight_decay) - lr U / max(1, RMS(U))

    R and C are over the last two dimensions; a vector stores all of V. This is the rule of transformers' Adafactor with
    relative_step and scale_parameter off. The implementations of torch and transformers cannot step sharded parameters. A
    step takes two all-reduces and no read on the host.
    """

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        super().__init__(params, {"lr": config.lr, "weight_decay": config.weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            squares = [local(p.grad).square() + TINY for p in with_grad]
            # The rows of a matrix are sharded, so sums over them are over all ranks; those of other tensors are local.
            matrices = [i for i, p in enumerate(with_grad) if p.ndim == 2]
            columns = dict(zip(matrices, sum_over_shards([squares[i].sum(0) for i in matrices], with_grad), strict=True))
            for i, p in enumerate(with_grad):
                state = self.state[p]
                state["step"] += 1
                decay = 1 - float(state["step"]) ** -0.8
                if p.ndim == 1:
                    local(state["variance"]).lerp_(squares[i], 1 - decay)
                    continue
                local(state["row"]).lerp_(squares[i].mean(-1), 1 - decay)
                mean = columns[i] / p.shape[0] if i in columns else squares[i].mean(-2)
                local(state["column"]).lerp_(mean, 1 - decay)
            del squares
            # The mean of R over the rows of all ranks, and the RMS of each parameter's step.
            rows = [local(self.state[with_grad[i]]["row"]).sum()[None] for i in matrices]
            means = dict(zip(matrices, sum_over_shards(rows, with_grad), strict=True))
            scales = [means[i] / p.shape[0] if i in means else None for i, p in enumerate(with_grad)]
            norms = [self._direction(p, scale).square().sum()[None] for p, scale in zip(with_grad, scales, strict=True)]
            for p, scale, norm in zip(with_grad, scales, sum_over_shards(norms, with_grad), strict=True):
                clip = (norm / p.numel()).sqrt().clamp(min=1)
                # Recomputed, because storing it for all parameters takes memory.
                local(p).mul_(1 - group["lr"] * group["weight_decay"]).sub_(self._direction(p, scale) * (group["lr"] / clip))

    def _direction(self, parameter: Tensor, row_mean: Tensor | None) -> Tensor:
        """Return G / sqrt(V) of this rank's rows."""
        state, gradient = self.state[parameter], local(parameter.grad)
        if parameter.ndim == 1:
            return gradient * local(state["variance"]).rsqrt()
        row, column = local(state["row"]), local(state["column"])
        mean = row.mean(-1, keepdim=True) if row_mean is None else row_mean
        return gradient * (row / mean).rsqrt()[..., None] * column.rsqrt()[..., None, :]


def _build_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    return AdamW(parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True)


def _build_quantised_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    try:
        from torchao.optim import AdamW4bit, AdamW8bit
    except ImportError as error:
        raise UsageError(
            f"`optimizer.name` is {config.name}, which needs the package torchao ({error}): pip install 'fluvial[lowbit]'"
        ) from error
    optimizer_class = AdamW8bit if config.name == "adamw8bit" else AdamW4bit
    return optimizer_class(parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


def _build_sgd(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    return SGD(parameters, lr=config.lr, momentum=config.betas[0], weight_decay=config.weight_decay)


def _adam_buffers(shape: Shape, config: OptimizerConfig) -> dict[str, Buffer]:
    return {"exp_avg": Buffer(shape), "exp_avg_sq": Buffer(shape)}


def _muon_buffers(shape: Shape, config: OptimizerConfig) -> dict[str, Buffer]:
    return {"momentum_buffer": Buffer(shape)} if len(shape) == 2 else _adam_buffers(shape, config)


def _prodigy_buffers(shape: Shape, config: OptimizerConfig) -> dict[str, Buffer]:
    extra = {"sum": Buffer(shape), "first": Buffer(shape), "estimate": Buffer((2,), sharded=False)}
    return {**_adam_buffers(shape, config), **extra}


def _quantised_adam_buffers(width: Literal[8, 4]) -> Callable[[Shape, OptimizerConfig], dict[str, Buffer]]:
    bits: tuple[Bits, Bits] = ("signed8", "unsigned8") if width == 8 else ("signed4", "unsigned4")
    return lambda shape, _: {"exp_avg": Buffer(shape, bits=bits[0]), "exp_avg_sq": Buffer(shape, bits=bits[1])}


def _adafactor_buffers(shape: Shape, config: OptimizerConfig) -> dict[str, Buffer]:
    if len(shape) == 1:
        return {"variance": Buffer(shape)}
    return {"row": Buffer(shape[:-1]), "column": Buffer((*shape[:-2], shape[-1]), sharded=len(shape) > 2)}


OPTIMIZERS: dict[OptimizerName, OptimizerKind] = {
    "adamw": OptimizerKind(_build_adamw, _adam_buffers, "device", True),
    "adamw8bit": OptimizerKind(_build_quantised_adamw, _quantised_adam_buffers(8), "host"),
    "adamw4bit": OptimizerKind(_build_quantised_adamw, _quantised_adam_buffers(4), "host"),
    "adafactor": OptimizerKind(Adafactor, _adafactor_buffers, "host"),
    "muon": OptimizerKind(MuonAdamW, _muon_buffers, "device"),
    "prodigy": OptimizerKind(Prodigy, _prodigy_buffers, "host"),
    "sgd": OptimizerKind(
        _build_sgd, lambda shape, config: {"momentum_buffer": Buffer(shape)} if config.betas[0] else {}, "none", True
    ),
}


def frozen_by_eps(
    config: OptimizerConfig, grad_norm: float, parameters: Collection[nn.Parameter], updates: int
) -> str | None:
    """Return a warning if Adam's eps is above the RMS of the gradient, which freezes training without an error.

    `grad_norm` is the norm before clipping, and `updates` the number of previous updates.
    """
    eps, norm = config.adam_eps, min(grad_norm, config.max_grad_norm)
    rms = norm / math.sqrt(sum(p.numel() for p in parameters))
    if eps is None or not 0 < rms < eps:
        return None
    return (
        f"the gradient has an RMS of {rms:.1e} at update {updates + 1}, below optimizer.eps ({eps:g}), which "
        f"shrinks every step: set optimizer.eps to {rms / 100:.0e} or less"
    )


def rounding_key(update: int) -> Key:
    """Return the rounding key of an update, counted from 0; indices of parameters and rows are folded into it."""
    return fold_in(fold_in(random.key(SEED), Stream.ROUNDING), update)


def round_stochastically(x: Tensor, words: Tensor) -> Tensor:
    """Round float32 values x to bfloat16, with mean x over all words; infinities and NaN stay.

    The lower 16 bits of a word are added to the bits that bfloat16 lacks, and the sum is truncated.

    Args:
        x: values, float32.
        words: uniform integers of at least 16 bits, of the same shape.
    """
    pattern = x.view(torch.int32)
    rounded = ((pattern + (words & 0xFFFF).to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


@torch.no_grad()
def write_rounded(weight: Tensor, value: Tensor, key: Key, *, row: int) -> None:
    """Round float32 values into a bfloat16 weight, in place; draws depend only on the row's index over all ranks.

    Args:
        weight: this rank's rows.
        value: values to round.
        key: key of the parameter in this update.
        row: index, over all ranks, of this rank's first row.
    """
    if not weight.numel():  # a rank without rows
        return
    weight, value = (tensor.view(len(tensor), -1) if tensor.ndim else tensor.view(1, 1) for tensor in (weight, value))
    rows_per_call = max(1, DRAWN_AT_ONCE // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows_per_call):
        part = value[start : start + rows_per_call]
        rows = torch.arange(row + start, row + start + len(part), device=weight.device)
        weight[start : start + len(part)] = round_stochastically(part, bits(fold_in(key, rows), tuple(part.shape)))


def step_rounded(optimizer: Optimizer, places: list[tuple[int, int]], key: Key) -> None:
    """Take a step of an elementwise optimizer, parameter by parameter; those in bfloat16 step in float32.

    Args:
        optimizer: optimizer of plain parameters, with their gradients.
        places: indices of each parameter and of this rank's first row of it, in the order of the groups.
        key: key of the update.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    remaining = iter(places)
    try:
        for group, _ in groups:
            group["params"] = []
        for group, parameters in groups:
            for parameter in parameters:
                number, row = next(remaining)
                group["params"] = [parameter]
                if parameter.dtype == torch.float32 or parameter.grad is None:
                    optimizer.step()
                    continue
                with _in_float32(optimizer, parameter) as master:
                    group["params"] = [master]
                    optimizer.step()
                write_rounded(parameter, master.detach(), fold_in(key, number), row=row)
            group["params"] = []
    finally:
        for group, parameters in groups:
            group["params"] = parameters


@contextmanager
def _in_float32(optimizer: Optimizer, parameter: nn.Parameter) -> Iterator[nn.Parameter]:
    """Yield a float32 copy of a parameter with its gradient; it has the parameter's optimizer state within the block."""
    master = nn.Parameter(parameter.detach().float())
    master.grad = None if parameter.grad is None else parameter.grad.float()
    optimizer.state[master] = optimizer.state.pop(parameter)
    try:
        yield master
    finally:
        optimizer.state[parameter] = optimizer.state.pop(master)
