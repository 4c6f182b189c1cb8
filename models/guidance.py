"""Classifier-free guidance of any model: the conditioning includes the unconditional input."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.guidance import classifier_free
from fluvial.core.types import PerSample, Samples
from fluvial.models.host_values import compute_known, join
from fluvial.models.protocol import Cond, DiffusionModel


class Guided(NamedTuple):
    """Conditioning of a batch with guidance; a pytree of tensors, indexed and stored like any conditioning."""

    cond: Cond
    uncond: Cond  # conditioning of the negative prompts, of the same shapes
    scale: Tensor  # [B] guidance scale


def join_halves(cond: Guided) -> Cond:
    """Return the conditioning of both halves as one batch, `[2B, ...]`: the prompts, then the negative prompts."""
    return optree.tree_map(join, cond.cond, cond.uncond)


def guided_velocity(
    model: DiffusionModel,
    module: nn.Module,
    x: Samples,
    level: PerSample,
    cond: Cond,
    *,
    timestep: PerSample | None = None,
    forwards: Literal["one", "two"] = "one",
    gradient: Literal["both", "conditional"] = "both",
    both: Cond | None = None,
    halves: "Callable[..., tuple[Samples, Samples]] | None" = None,
) -> Samples:
    """Return the prediction `[B, *event]` of a step: guided by the model if cond is `Guided`, else unguided.

    Args:
        model, module, x, level, timestep, forwards, gradient, both: see `predict_halves`.
        cond: conditioning of the model, or `Guided`.
        halves: function that returns both predictions, by default `predict_halves`.

    Source: arXiv 2207.12598.
    """
    if not isinstance(cond, Guided):
        return model.predict(module, x, level, cond, timestep=timestep)
    options: Any = {"timestep": timestep, "forwards": forwards, "gradient": gradient, "both": both}
    v, v_uncond = (halves or predict_halves)(model, module, x, level, cond, **options)
    return model.guide(v, v_uncond, scale_at(model, cond, level, timestep))


def is_classifier_free(model: DiffusionModel) -> bool:
    """Return whether a model combines the halves with `core.guidance.classifier_free` itself, as fused kernels do."""
    return model.guide is classifier_free


def scale_at(model: DiffusionModel, cond: Guided, level: PerSample, timestep: PerSample | None) -> PerSample:
    """Return the guidance scale of each sample at its level, `[B]`, changed by `model.scale_at` if the model defines it."""
    change: Callable[[Tensor, PerSample, PerSample | None], Tensor] | None = getattr(model, "scale_at", None)
    return cond.scale if change is None else change(cond.scale, level, timestep)


def predict_halves(
    model: DiffusionModel,
    module: nn.Module,
    x: Samples,
    level: PerSample,
    cond: Guided,
    *,
    timestep: PerSample | None = None,
    forwards: Literal["one", "two"] = "one",
    gradient: Literal["both", "conditional"] = "both",
    both: Cond | None = None,
) -> tuple[Samples, Samples]:
    """Return the conditional and the unconditional prediction of a step, `[B, *event]`.

    Args:
        model, module: the model and its network.
        x, level, timestep: see `DiffusionModel.predict`.
        cond: conditioning of both halves.
        forwards: number of forward passes for both predictions: one of 2B samples, or two of B, which need less memory.
        gradient: predictions that the gradient flows through: both, or the conditional one.
        both: `join_halves(cond)`, from a caller with many steps; computed here by default.
    """
    if forwards == "one":
        both = join_halves(cond) if both is None else both
        twice = None if timestep is None else compute_known(lambda each: each.repeat(2), timestep)
        v, v_uncond = model.predict(module, x.repeat(2, *[1] * (x.ndim - 1)), level.repeat(2), both, timestep=twice).chunk(2)
        v_uncond = v_uncond.detach() if gradient == "conditional" else v_uncond
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() and gradient == "both"):
            v_uncond = model.predict(module, x, level, cond.uncond, timestep=timestep)
        v = model.predict(module, x, level, cond.cond, timestep=timestep)
    return v, v_uncond


class GuidanceDifference:
    """Cached difference of the halves of guidance, for one batch of samples on their way through a schedule.

    With v_i and u_i the conditional and unconditional prediction at step i, and k the last step that computed both:

        u_i = v_i - (v_k - u_k)

    With classifier-free guidance of scale g the error of the guided prediction is (g - 1) ((v_k - u_k) - (v_i - u_i)).

    Source: CFG cache of FasterCache (arXiv 2410.19355), here without its frequency weights.

    Args:
        every: Length of a cycle of steps; its first step computes both halves.
    """

    def __init__(self, every: int) -> None:
        self._every, self._age = every, 0  # age: steps since the difference was computed
        self._difference: Tensor | None = None

    def advance(self, *, exact: bool) -> bool:
        """Advance to the next step, and return whether it can reuse the difference of an earlier step."""
        self._age += 1
        return self._difference is not None and not exact and self._age < self._every

    def compute(self, *inputs: Any, **options: Any) -> tuple[Samples, Samples]:
        """Return the result of `predict_halves`, and keep the difference."""
        v, v_uncond = predict_halves(*inputs, **options)
        self._difference, self._age = v - v_uncond, 0
        return v, v_uncond

    def reuse(
        self, model: DiffusionModel, module: nn.Module, x: Samples, level: PerSample, cond: Guided, **options: Any
    ) -> tuple[Samples, Samples]:
        """Return both halves as `predict_halves`, with the unconditional one from the difference."""
        assert self._difference is not None
        v = model.predict(module, x, level, cond.cond, timestep=options["timestep"])
        return v, v - self._difference
