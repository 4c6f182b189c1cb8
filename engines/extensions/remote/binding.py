"""Finds modules of an adapter that a server does not compute with, in the server's own answer.

A probe is an adapter with random factors in each of n modules. Let v be the trainer's prediction with it, and
d_m = v - v(without module m). A server that multiplies module m's part by c_m answers

    v_server - v = sum_m (c_m - 1) d_m + e

to first order, and exactly where one c_m is 0 and the others are 1. Effects of random factors are nearly orthogonal, so that
least squares over the numbers of one answer give every c_m: 1 where a module is bound, 0 where it is ignored, 1/2 with half
the scale. A module that gets another's factors has about 0, and leaves what no module explains. e, which the engines differ
by, is known from an answer with an adapter of zeros before. Factors are scaled so that all effects are equal and above it;
those that cannot be, without ||s B A|| > ||W||, are not seen.

Its alpha is twice the run's, and its B half, so that a server that keeps the scale of an earlier adapter is found as well.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.engines.engine.shards import first_row, local
from fluvial.engines.gathered import gather
from fluvial.engines.sampling.source import Holder
from fluvial.models.lora import LowRank, find_adapter_parameters, find_lora_layers, read_form

Values = dict[str, Tensor]  # parameters of an adapter by their short names
SEED = 46
NEAR = 0.25  # largest |c - 1| of a module that is bound, without rounding
DEVIATIONS = 6.0  # of the estimate of c that rounding may make
CLEAR = 3.0  # an effect is seen that is as many times what the engines differ by
FAINT = 1e-3  # and at least this part of the largest one
STRAY = 0.5  # part of a module's median effect that the answer may differ by without a module that explains it
START = 0.03  # ||s B A|| / ||W|| at first; at most 1 in the end
LEAST, MOST = 0.1, 1.0  # effects of all modules together, if they are orthogonal, as a part of the prediction
NUMBERS = 64  # of a prediction that are compared, per module


class Binding(NamedTuple):
    """How the modules of an adapter act in a server's answer.

    Args:
        acts: factor c_m of each module that can be judged.
        wrong: names of those that are not bound.
        modules: number of modules of the adapter.
        stray: what no module explains, in median effects of one module; 0 where it may be rounding.
    """

    acts: Mapping[str, float]
    wrong: tuple[str, ...]
    modules: int
    stray: float

    @property
    def problem(self) -> str:
        """The problem in one line, or an empty string."""
        if not self.wrong:
            return f"{self}, and its answer holds {self.stray:.2g} times the effect of one beside them" if self.stray else ""
        more = f", and {len(self.wrong) - 1} more do not either" if len(self.wrong) > 1 else ""
        return f"{self}: {self.wrong[0]} acts {self.acts[self.wrong[0]]:.2f} times as it should{more}"

    def __str__(self) -> str:
        hidden = self.modules - len(self.acts)
        unseen = f", {hidden} have no effect that can be seen" if hidden else ""
        return f"{len(self.acts) - len(self.wrong)} of {self.modules} modules of the adapter are bound{unseen}"


def has_probe(module: nn.Module) -> bool:
    """Return whether a module has adapters that can be probed: low-rank factors alone."""
    return bool(find_lora_layers(module)) and isinstance(read_form(module), LowRank)


class AdapterProbe:
    """Random factors that replace those of an adapter. Its methods are collective, since parameters may be sharded.

    Args:
        holder: whose adapter it is.
        adapter: its name.
    """

    def __init__(self, holder: Holder, adapter: str) -> None:
        self.holder, self.adapter, self.layers = holder, adapter, find_lora_layers(holder.module)
        held = find_adapter_parameters(holder.module, adapter)
        self._parts = {name: (local(each).detach(), first_row(each)) for name, each in held.items()}
        self._own = {name: part.clone() for name, (part, _) in self._parts.items()}
        self.values = Values()  # whole, on the host
        generator = torch.Generator().manual_seed(SEED)
        for name, layer in self.layers.items():
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            weight = layer.get_base_layer().weight.detach()
            norm = float(gather(torch.linalg.vector_norm(weight.float()))) or 1.0
            scale = START * norm / math.sqrt(len(a) * len(b)) / layer.scaling[adapter]
            self.values[f"{name}.lora_A.weight"] = torch.randn(a.shape, generator=generator) / math.sqrt(a.shape[1])
            self.values[f"{name}.lora_B.weight"] = torch.randn(b.shape, generator=generator) * scale

    @property
    def zeros(self) -> Values:
        """Factors that change nothing."""
        return {name: torch.zeros_like(value) for name, value in self.values.items() if ".lora_B." in name}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters, by their short names, to whole tensors; each rank writes its own rows."""
        self.holder.sharded.reshard()
        for name, value in values.items():
            part, first = self._parts[name]
            part.copy_(value[first : first + len(part)])

    def restore(self) -> None:
        """Set the parameters to what they were, to the bit."""
        self.holder.sharded.reshard()
        for name, value in self._own.items():
            self._parts[name][0].copy_(value)

    @contextmanager
    def doubled_alpha(self) -> Iterator[None]:
        """Have twice the alpha and half of B in the context, for a push: no network computes so."""
        module: Any = self.holder.module

        def change(factor: float) -> None:
            module.peft_config[self.adapter].lora_alpha *= factor
            for layer in self.layers.values():
                layer.lora_alpha[self.adapter] *= factor
                layer.scaling[self.adapter] *= factor

        change(2)
        self.write({name: value / 2 for name, value in self.values.items() if ".lora_B." in name})
        try:
            yield
        finally:
            change(0.5)
            self.write(self.values)

    def find_effects(self, predict: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Return d_m of each module, `[D]`.

        Args:
            predict: returns the numbers of the holder's prediction that are compared, `[D]` float64.
        """
        effects, whole = dict[str, Tensor](), predict()
        for name in self.layers:
            factor = f"{name}.lora_B.weight"
            self.write({factor: torch.zeros_like(self.values[factor])})
            effects[name] = whole - predict()
            self.write({factor: self.values[factor]})
        return effects

    def equalize(self, effects: Mapping[str, Tensor], *, noise: float, norm: float) -> None:
        """Scale the factors so that all modules have equal effects.

        Args:
            effects: their effects now.
            noise: what predictions of the engines differ by, as a part of their norm.
            norm: norm of the prediction.
        """
        size = min(max(LEAST / math.sqrt(len(effects)), 2 * CLEAR * noise), MOST / math.sqrt(len(effects)))
        for name, effect in effects.items():
            self.values[f"{name}.lora_B.weight"] *= min(size * norm / max(float(effect.norm()), 1e-30), 1 / START)
        self.write(self.values)


@contextmanager
def probing(holder: Holder, adapter: str) -> Iterator[AdapterProbe]:
    """Yield a probe, which may write to an adapter in the context."""
    probe = AdapterProbe(holder, adapter)
    try:
        yield probe
    finally:
        probe.restore()


def measure(effects: Mapping[str, Tensor], answer: Tensor, known: float) -> Binding:
    """Return how an adapter's modules act.

    Args:
        effects: d_m of each module, `[D]`.
        answer: v_server - v with the probe, less what it is with an adapter of zeros, `[D]`.
        known: norm of what the engines differ by.
    """
    norms = {name: float(effect.norm()) for name, effect in effects.items()}
    floor = max(FAINT * max(norms.values()), CLEAR * known)
    seen = [name for name, norm in norms.items() if norm > floor]
    if not seen:
        return Binding({}, (), len(effects), 0.0)
    table = torch.stack([effects[name] / norms[name] for name in seen])
    inverse = torch.linalg.lstsq(table @ table.T, torch.eye(len(seen), dtype=table.dtype), driver="gelsd").solution
    solved = inverse @ (table @ answer)
    rest = float((answer - solved @ table).norm())
    typical = sorted(norms[name] for name in seen)[len(seen) // 2]
    rounding = min(rest, STRAY * typical)
    spread = rounding / math.sqrt(max(len(answer) - len(seen), 1)) * inverse.diagonal().clamp(min=0).sqrt()
    acts, wrong = dict[str, float](), []
    for name, part, error in zip(seen, solved.tolist(), spread.tolist(), strict=True):
        # Rounding of v is in both sides of the equation, so that its square biases c.
        norm = norms[name]
        near = NEAR + (DEVIATIONS * error + rounding**2 / norm) / norm
        if abs(part / norm) > near:
            wrong.append(name)
        if near < 2 * NEAR or name in wrong[-1:]:
            acts[name] = 1 + part / norm
    stray = rest / typical if rest > max(STRAY * typical, CLEAR * known) else 0.0
    return Binding(acts, tuple(wrong), len(effects), stray)
