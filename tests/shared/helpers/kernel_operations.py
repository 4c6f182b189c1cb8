"""One table over the operations of fluvial.kernels: a new one is one row, and inherits every test that runs over it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluvial import kernels
from fluvial.core.random import fold_in, key
from fluvial.core.transitions import Transition

# Where the table's tensors are: cpu, for Triton's interpreter, or with `make gpu-first` an accelerator.
DEVICE = os.environ.get("FLUVIAL_TEST_DEVICE", "cpu")

Samples = dict[str, Tensor]  # float tensors [B, *event]; all may need a gradient
Numbers = dict[str, Tensor]  # [B]


@dataclass(frozen=True)
class Operation:
    name: str
    samples: tuple[str, ...]
    call: Callable[
        ..., tuple[Tensor, ...]
    ]  # (implementation, samples, numbers, form=, reduction=) -> differentiable results
    wide: frozenset[str] = frozenset({"x", "x_next", "target", "x0", "xt"})  # what is stored in float32 beside a bf16 v
    data: frozenset[str] = frozenset()  # what gets no gradient
    has_form: bool = True


def numbers(batch: int, *, std: float = 0.3, seed: int = 0, dtype: torch.dtype = torch.float32) -> Numbers:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(batch, generator=generator, device="cpu")).to(dtype).to(DEVICE)

    return {
        "a": draw(0.8, 1.1),
        "b": draw(-0.3, -0.05),
        "std": draw(std, 2 * std),
        "guidance": draw(1, 7),
        "old": draw(-1, 1),
        "advantage": draw(-2, 2),
        "dt": draw(-0.2, -0.05),
        "t": draw(0.1, 0.9),
        "prob": draw(0, 1),
    }


def by_row(scalars: Numbers, rows: int) -> Numbers:
    """Return the numbers with levels and coefficients of each of some rows, `[B, R]`."""
    spread = torch.linspace(1, 1.2, rows, device=DEVICE)
    of_level = ("a", "b", "std", "dt", "t")
    return {name: scalar[:, None] * spread if name in of_level else scalar for name, scalar in scalars.items()}


def inputs(
    operation: Operation, batch: int, event: tuple[int, ...], dtype: torch.dtype, *, scale: float = 1.0, seed: int = 0
) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    drawn: Samples = {}
    for name in operation.samples:
        tensor = scale * torch.randn(batch, *event, generator=generator, device="cpu")
        if name == "x_next":
            tensor = drawn["x"].cpu() + 0.3 * tensor
        drawn[name] = tensor.to(torch.float32 if name in operation.wide else dtype).to(DEVICE)
    return drawn


def _guidance(samples: Samples, numbers: Numbers) -> dict[str, Any]:
    guided = "v_uncond" in samples
    return {"v_uncond": samples["v_uncond"], "guidance": numbers["guidance"]} if guided else {}


def _transition(numbers: Numbers) -> Transition:
    return Transition(numbers["a"], numbers["b"], numbers["std"])


def _step_log_prob(implementation: Any, samples: Samples, numbers: Numbers, **options: Any) -> tuple[Tensor, ...]:
    v, x, x_next = (samples[name] for name in ("v", "x", "x_next"))
    results = kernels.step_log_prob(
        _transition(numbers),
        x,
        v,
        x_next,
        v_ref=samples.get("v_ref"),
        implementation=implementation,
        **_guidance(samples, numbers),
        **options,
    )
    return tuple(result for result in results if result is not None)


def _policy_loss(
    implementation: Any, samples: Samples, numbers: Numbers, *, kl_weight: Any = "rate", **options: Any
) -> tuple[Tensor, ...]:
    v, x, x_next = (samples[name] for name in ("v", "x", "x_next"))
    # An old log-prob near the current one: a ratio of order 1, on both sides of the clip.
    with torch.no_grad():
        now, _ = kernels.step_log_prob(
            Transition(*(t.double() for t in _transition(numbers))),
            x.detach().double(),
            v.detach().double(),
            x_next.detach().double(),
            implementation="reference",
            **{name: value.detach().double() for name, value in _guidance(samples, numbers).items()},
            **options,
        )
    old = now + 0.1 * numbers["old"]
    loss, _ = kernels.policy_loss(
        _transition(numbers),
        x,
        v,
        x_next,
        log_prob_old=old if v.dtype == torch.float64 else old.float(),
        advantage=numbers["advantage"],
        clip_low=0.05,
        clip_high=0.08,
        v_ref=samples.get("v_ref"),
        kl_coef=0.5 if "v_ref" in samples else 0.0,
        kl_weight=kl_weight,
        dt=numbers["dt"],
        implementation=implementation,
        **_guidance(samples, numbers),
        **options,
    )
    return (loss,)


def _sde_step(implementation: Any, samples: Samples, numbers: Numbers, **options: Any) -> tuple[Tensor, ...]:
    v, x = samples["v"], samples["x"]
    keys = fold_in(key(7), torch.arange(v.shape[0], device=v.device))
    return kernels.sde_step(
        _transition(numbers), x, v, key=keys, implementation=implementation, **_guidance(samples, numbers), **options
    )


def _velocity_error(implementation: Any, samples: Samples, numbers: Numbers) -> tuple[Tensor, ...]:
    return (kernels.velocity_error(samples["v"], samples["target"], implementation=implementation),)


def _nft_loss(implementation: Any, samples: Samples, numbers: Numbers) -> tuple[Tensor, ...]:
    v, v_old, x0, xt = (samples[name] for name in ("v", "v_old", "x0", "xt"))
    return (
        kernels.nft_loss(
            v, v_old, x0, xt, numbers["t"], numbers["prob"], beta=0.3, adv_clip=5.0, implementation=implementation
        ),
    )


STEP = ("v", "x", "x_next")
OPERATIONS = (
    Operation("step_log_prob", STEP, _step_log_prob),
    Operation("step_log_prob with KL", (*STEP, "v_ref"), _step_log_prob),
    Operation("step_log_prob with KL and guidance", (*STEP, "v_ref", "v_uncond"), _step_log_prob),
    Operation("policy_loss", STEP, _policy_loss),
    Operation("policy_loss with KL", (*STEP, "v_ref"), partial(_policy_loss, kl_weight="exact")),
    Operation("policy_loss with KL and guidance", (*STEP, "v_ref", "v_uncond"), _policy_loss),
    Operation("velocity_error", ("v", "target"), _velocity_error, has_form=False),
    Operation("nft_loss", ("v", "v_old", "x0", "xt"), _nft_loss, data=frozenset({"v_old", "x0", "xt"}), has_form=False),
)
SDE_STEP = (
    Operation("sde_step", ("v", "x"), _sde_step),
    Operation("sde_step with guidance", ("v", "x", "v_uncond"), _sde_step),
)
