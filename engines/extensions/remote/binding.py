"""Detection of adapter modules that a server ignores or scales wrongly, from the predictions in its answer.

A probe is an adapter with random factors in each of n modules. With the trainer's prediction v and the effect
d_m = v - v(without module m), a server that multiplies the output of module m by c_m answers

    v_server - v = sum_m (c_m - 1) d_m + e

to first order, and exactly if one c_m is 0 and the others are 1. Effects of random factors are nearly orthogonal, so least
squares over one answer gives every c_m: 1 for a bound module, 0 for an ignored one, 1/2 for half the scale. A module with
another module's factors gets about 0, and leaves a residual that no module explains.

The numerical difference e of the engines is measured before, with an adapter of zeros. Factors are scaled so that all
effects are equal and exceed e. Modules that would need ||s B A|| > ||W|| for that remain unseen.

The probe has twice the run's alpha and half of B, which reveals a server that keeps the scale of an earlier adapter.
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
NEAR = 0.25  # largest |c - 1| of a bound module, without rounding
DEVIATIONS = 6.0  # tolerated error of c due to rounding, in standard deviations
CLEAR = 3.0  # an effect is seen if it is this many times the difference of the engines
FAINT = 1e-3  # and at least this fraction of the largest effect
STRAY = 0.5  # largest unexplained residual, as a fraction of the median effect of a module
START = 0.03  # initial ||s B A|| / ||W||; the final value is at most 1
LEAST, MOST = 0.1, 1.0  # total effect of all modules, if orthogonal, as a fraction of the prediction
NUMBERS = 64  # compared numbers of a prediction, per module


class Binding(NamedTuple):
    """Measured effects of an adapter's modules in a server's answer.

    Args:
        factors: factor c_m of each module that can be judged.
        wrong: names of the modules that are not bound.
        modules: number of modules of the adapter.
        stray: unexplained residual, in median effects of one module; 0 if it may be rounding.
    """

    factors: Mapping[str, float]
    wrong: tuple[str, ...]
    modules: int
    stray: float

    @property
    def problem(self) -> str:
        """Problem in one line, or an empty string."""
        if not self.wrong:
            residual = f"{self}, and its answer has an unexplained residual of {self.stray:.2g} times the effect of a module"
            return residual if self.stray else ""
        more = f", and {len(self.wrong) - 1} more are wrong" if len(self.wrong) > 1 else ""
        return f"{self}: {self.wrong[0]} acts with {self.factors[self.wrong[0]]:.2f} times its expected strength{more}"

    def __str__(self) -> str:
        hidden = self.modules - len(self.factors)
        unseen = f", {hidden} have no visible effect" if hidden else ""
        return f"{len(self.factors) - len(self.wrong)} of {self.modules} modules of the adapter are bound{unseen}"


def has_probe(module: nn.Module) -> bool:
    """Return whether the module's adapters can be probed: they must have only low-rank factors."""
    return bool(find_lora_layers(module)) and isinstance(read_form(module), LowRank)


class AdapterProbe:
    """Random factors that replace those of an adapter. Its methods are collective, since parameters may be sharded.

    Args:
        holder: owner of the module with the adapter.
        adapter: name of the adapter.
    """

    def __init__(self, holder: Holder, adapter: str) -> None:
        self.holder, self.adapter, self.layers = holder, adapter, find_lora_layers(holder.module)
        parameters = find_adapter_parameters(holder.module, adapter)
        self._shards = {name: (local(each).detach(), first_row(each)) for name, each in parameters.items()}
        self._original = {name: shard.clone() for name, (shard, _) in self._shards.items()}
        self.values = Values()  # unsharded, on the host
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
        """Set parameters, by their short names, to unsharded tensors; each rank writes its own rows."""
        self.holder.sharded.reshard()
        for name, value in values.items():
            shard, first = self._shards[name]
            shard.copy_(value[first : first + len(shard)])

    def restore(self) -> None:
        """Restore the adapter's parameters, to the bit."""
        self.holder.sharded.reshard()
        for name, value in self._original.items():
            self._shards[name][0].copy_(value)

    @contextmanager
    def double_alpha(self) -> Iterator[None]:
        """Double alpha and halve B in the context, for a push. The product is unchanged."""
        module: Any = self.holder.module

        def scale_alpha(factor: float) -> None:
            module.peft_config[self.adapter].lora_alpha *= factor
            for layer in self.layers.values():
                layer.lora_alpha[self.adapter] *= factor
                layer.scaling[self.adapter] *= factor

        scale_alpha(2)
        self.write({name: value / 2 for name, value in self.values.items() if ".lora_B." in name})
        try:
            yield
        finally:
            scale_alpha(0.5)
            self.write(self.values)

    def find_effects(self, predict: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Measure d_m of each module, `[D]`.

        Args:
            predict: function that returns the compared numbers of the holder's prediction, `[D]` float64.
        """
        effects, with_all = dict[str, Tensor](), predict()
        for name in self.layers:
            factor = f"{name}.lora_B.weight"
            self.write({factor: torch.zeros_like(self.values[factor])})
            effects[name] = with_all - predict()
            self.write({factor: self.values[factor]})
        return effects

    def equalize(self, effects: Mapping[str, Tensor], *, noise: float, norm: float) -> None:
        """Scale the factors so that all modules have equal effects.

        Args:
            effects: current effects.
            noise: difference of the engines' predictions, relative to `norm`.
            norm: norm of the prediction.
        """
        size = min(max(LEAST / math.sqrt(len(effects)), 2 * CLEAR * noise), MOST / math.sqrt(len(effects)))
        for name, effect in effects.items():
            self.values[f"{name}.lora_B.weight"] *= min(size * norm / max(float(effect.norm()), 1e-30), 1 / START)
        self.write(self.values)


@contextmanager
def open_probe(holder: Holder, adapter: str) -> Iterator[AdapterProbe]:
    """Yield a probe of an adapter; its parameters are restored at the end of the context."""
    probe = AdapterProbe(holder, adapter)
    try:
        yield probe
    finally:
        probe.restore()


def measure_binding(effects: Mapping[str, Tensor], answer: Tensor, noise: float) -> Binding:
    """Solve for the factor c_m of each module by least squares.

    Args:
        effects: d_m of each module, `[D]`.
        answer: v_server - v with the probe, minus the same with an adapter of zeros, `[D]`.
        noise: norm of the difference of the engines.
    """
    norms = {name: float(effect.norm()) for name, effect in effects.items()}
    floor = max(FAINT * max(norms.values()), CLEAR * noise)
    seen = [name for name, norm in norms.items() if norm > floor]
    if not seen:
        return Binding({}, (), len(effects), 0.0)
    table = torch.stack([effects[name] / norms[name] for name in seen])
    inverse = torch.linalg.lstsq(table @ table.T, torch.eye(len(seen), dtype=table.dtype), driver="gelsd").solution
    solved = inverse @ (table @ answer)
    residual = float((answer - solved @ table).norm())
    median = sorted(norms[name] for name in seen)[len(seen) // 2]
    rounding = min(residual, STRAY * median)
    spread = rounding / math.sqrt(max(len(answer) - len(seen), 1)) * inverse.diagonal().clamp(min=0).sqrt()
    factors, wrong = dict[str, float](), []
    for name, part, error in zip(seen, solved.tolist(), spread.tolist(), strict=True):
        # Rounding of v is on both sides of the equation, so its square biases c.
        norm = norms[name]
        near = NEAR + (DEVIATIONS * error + rounding**2 / norm) / norm
        if abs(part / norm) > near:
            wrong.append(name)
        if near < 2 * NEAR or name in wrong[-1:]:
            factors[name] = 1 + part / norm
    stray = residual / median if residual > max(STRAY * median, CLEAR * noise) else 0.0
    return Binding(factors, tuple(wrong), len(effects), stray)
