"""Operations of the kernel benchmarks, with inputs at real sizes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluvial import kernels
from fluvial.core.random import Key, fold_in, key
from fluvial.core.transitions import Transition

# One sample's latents.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "handwriting": (1, 8, 32),
    "SD3.5 512^2": (16, 64, 64),
    "SD3.5 1024^2": (16, 128, 128),
    "Qwen-Image 1024^2": (4096, 64),
    "Wan 480p 81 frames": (16, 21, 60, 104),
}


@dataclass(frozen=True)
class Operation:
    """An operation: names of its samples, of those with a gradient, and the call."""

    name: str
    samples: tuple[str, ...]
    gradients: tuple[str, ...]
    writes: tuple[str, ...]  # samples that the forward pass returns, in float32
    call: Callable[[str, dict[str, Tensor], dict[str, Tensor]], Tensor]  # -> one result per sample


def make_inputs(
    operation: Operation, batch: int, event: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make (samples, numbers per sample): velocities in `dtype`, samples in float32."""
    samples = {
        name: torch.randn(batch, *event, device=device).to(dtype if name.startswith("v") else torch.float32)
        for name in operation.samples
    }
    numbers = {name: torch.full((batch,), value, device=device) for name, value in NUMBERS.items()}
    numbers["key.low"], numbers["key.high"] = fold_in(key(0), torch.arange(batch, device=device))  # type: ignore[assignment]
    return samples, numbers


def count_bytes(operation: Operation, batch: int, event: tuple[int, ...], *, dtype: torch.dtype) -> dict[str, int]:
    """Count the bytes that each pass must move: every input is read once, every result of that size written once."""
    elements = batch * math.prod(event)
    size = {name: (dtype if name.startswith("v") else torch.float32).itemsize for name in operation.samples}
    read = sum(size.values()) * elements
    forward = read + 4 * elements * len(operation.writes)
    backward = read + sum(size[name] for name in operation.gradients) * elements
    return {"forward": forward, "backward": backward, "both": forward + backward}


NUMBERS = {"a": 0.95, "b": -0.1, "std": 0.3, "old": 0.0, "advantage": 0.7, "t": 0.5, "prob": 0.6}


def _make_transition(numbers: dict[str, Tensor]) -> Transition:
    return Transition(numbers["a"], numbers["b"], numbers["std"])


def _step_log_prob(which: Any, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> Tensor:
    log_prob, kl = kernels.step_log_prob(
        _make_transition(numbers),
        samples["x"],
        samples["v"],
        samples["x_next"],
        v_ref=samples.get("v_ref"),
        implementation=which,
    )
    return log_prob if kl is None else log_prob + kl


def _policy_loss(which: Any, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> Tensor:
    loss, _ = kernels.policy_loss(
        _make_transition(numbers),
        samples["x"],
        samples["v"],
        samples["x_next"],
        log_prob_old=numbers["old"],
        advantage=numbers["advantage"],
        clip_low=0.5,
        clip_high=0.5,
        v_ref=samples["v_ref"],
        kl_coef=0.1,
        kl_weight="exact",
        implementation=which,
    )
    return loss


def _sde_step(which: Any, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> Tensor:
    keys = Key(numbers["key.low"], numbers["key.high"])
    return kernels.sde_step(_make_transition(numbers), samples["x"], samples["v"], key=keys, implementation=which)[1]


def _velocity_error(which: Any, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> Tensor:
    return kernels.velocity_error(samples["v"], samples["target"], implementation=which)


def _nft_loss(which: Any, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> Tensor:
    return kernels.nft_loss(
        samples["v"],
        samples["v_old"],
        samples["x0"],
        samples["xt"],
        numbers["t"],
        numbers["prob"],
        beta=0.3,
        adv_clip=5.0,
        implementation=which,
    )


OPERATIONS = (
    Operation("step_log_prob", ("v", "x", "x_next"), ("v",), (), _step_log_prob),
    Operation("step_log_prob with KL", ("v", "x", "x_next", "v_ref"), ("v",), (), _step_log_prob),
    Operation("policy_loss with KL", ("v", "x", "x_next", "v_ref"), ("v",), (), _policy_loss),
    Operation("velocity_error", ("v", "target"), ("v",), (), _velocity_error),
    Operation("nft_loss", ("v", "v_old", "x0", "xt"), ("v",), (), _nft_loss),
    Operation("sde_step", ("v", "x"), (), ("x_next",), _sde_step),
)
