"""The hot path's dispatch: every provider gives the reference's results and refuses the same arguments in the same words."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.kernel_operations import OPERATIONS, SDE_STEP, Operation, inputs, numbers
from helpers.marks import long
from helpers.refusals import refuses
from torch import Tensor

from fluvial import kernels
from fluvial.core import flow_matching, gaussian, guidance, nft, policy
from fluvial.core.random import Key, fold_in, key, normal
from fluvial.core.transitions import Transition
from fluvial.kernels import dispatch
from fluvial.kernels.dispatch import IMPLEMENTATIONS

V, X, X_NEXT, V_REF = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(0))
STEP = Transition(torch.tensor([0.9, 1.0, 1.1]), torch.tensor([-0.1, -0.2, -0.3]), torch.tensor([0.3, 0.2, 0.4]))
OLD, ADVANTAGE, DT = torch.tensor([-0.1, 0.2, 0.3]), torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-0.1, -0.2, -0.1])
STORED: dict[str, Any] = {"log_prob_old": OLD, "advantage": ADVANTAGE}
UPDATE, KEY, STILL = partial(kernels.policy_loss, STEP, X, V, X_NEXT), key(0), STEP._replace(std=torch.tensor([0.1, 0, 1]))
CLIP: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.2}
unchecked = pytest.mark.skipif(os.environ.get("FLUVIAL_NO_TYPECHECK") != "1", reason="the hook answers a wrong type first")


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("form", gaussian.FORMS)
@pytest.mark.parametrize("reduction", gaussian.REDUCTIONS)
def test_a_log_prob_is_core_gaussians(implementation: Any, form: Any, reduction: Any) -> None:
    options: dict[str, Any] = {"form": form, "reduction": reduction}
    log_prob, kl = kernels.step_log_prob(STEP, X, V, X_NEXT, v_ref=V_REF, implementation=implementation, **options)
    assert torch.equal(log_prob, gaussian.log_prob(STEP, X, V, X_NEXT, **options))
    assert kl is not None
    assert torch.equal(kl, gaussian.kl(STEP, V, V_REF, reduction=reduction))
    assert kernels.step_log_prob(STEP, X, V, X_NEXT)[1] is None
    guided, _ = kernels.step_log_prob(STEP, X, V, X_NEXT, v_uncond=V_REF, guidance=3.0, **options)
    assert torch.equal(guided, gaussian.log_prob(STEP, X, guidance.classifier_free(V, V_REF, 3.0), X_NEXT, **options))
    torch.testing.assert_close(guidance.classifier_free(V, V_REF, 3.0), V_REF + 3 * (V - V_REF))


@pytest.mark.parametrize(("kl_weight", "factor"), [("rate", DT.abs()), ("exact", torch.ones(3)), ("mse", 2 * STEP.std**2)])
def test_a_policy_loss_is_its_parts(kl_weight: Any, factor: Tensor) -> None:
    loss, info = kernels.policy_loss(
        STEP, X, V, X_NEXT, **STORED, **CLIP, v_ref=V_REF, kl_coef=0.5, kl_weight=kl_weight, dt=DT
    )
    kl = gaussian.kl(STEP, V, V_REF)
    surrogate, diagnostics = policy.clipped_surrogate(gaussian.log_prob(STEP, X, V, X_NEXT), OLD, ADVANTAGE, **CLIP)
    torch.testing.assert_close(loss, surrogate + 0.5 * factor * kl)
    assert all(torch.equal(a, b) for a, b in zip(info[:4], diagnostics[:4], strict=True))
    assert torch.equal(info.kl_ref, kl)
    alone, info = kernels.policy_loss(STEP, X, V, X_NEXT, **STORED, **CLIP)
    assert torch.equal(alone, surrogate)
    assert torch.equal(info.kl_ref, torch.zeros(3))


def test_a_step_is_its_parts() -> None:
    """One key is folded with each sample's index; one key per sample is used as it is."""
    keys = fold_in(key(5), torch.arange(3))
    x_next, log_prob = kernels.sde_step(STEP, X, V, key=keys)
    assert torch.equal(x_next, gaussian.sample(STEP, X, V, normal(keys, (3, 2, 5))))
    assert torch.equal(log_prob, gaussian.log_prob(STEP, X, V, x_next))
    assert all(torch.equal(a, b) for a, b in zip((x_next, log_prob), kernels.sde_step(STEP, X, V, key=key(5)), strict=True))


def test_the_others_are_cores() -> None:
    assert torch.equal(kernels.velocity_error(V, X), flow_matching.velocity_error(V, X))
    options: dict[str, Any] = {"beta": 0.3, "adv_clip": 5.0}
    mine = kernels.nft_loss(V, V_REF, X, X_NEXT, 0.4, torch.tensor([0.1, 0.5, 0.9]), **options)
    assert torch.equal(mine, nft.nft_loss(V, V_REF, X, X_NEXT, 0.4, torch.tensor([0.1, 0.5, 0.9]), **options))


@pytest.mark.skipif(os.environ.get("FLUVIAL_NO_TYPECHECK") != "1", reason="a graph holds no run-time type checks")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "operation", [OPERATIONS[0], *map(long, (*OPERATIONS[1:], *SDE_STEP))], ids=lambda operation: operation.name
)
def test_compiled_is_the_reference(operation: Operation) -> None:
    samples, scalars = inputs(operation, 2, (41,), torch.float32), numbers(2)

    def of(implementation: str) -> tuple[Tensor, ...]:
        leaves = {name: t.detach().requires_grad_(name not in operation.data) for name, t in samples.items()}
        results = operation.call(implementation, leaves, scalars)
        grads = torch.autograd.grad(
            results, [t for t in leaves.values() if t.requires_grad], [torch.ones_like(r) for r in results]
        )
        return (*results, *grads)

    for mine, theirs in zip(of("compiled"), of("reference"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


BAD: dict[str, tuple[Callable[..., object], str]] = {
    "shape": (
        partial(kernels.step_log_prob, STEP, X[:, :1], V, X_NEXT),
        r"v has shape \[3, 2, 5\], expected \[3, 1, 5\] as x",
    ),
    "batch": (
        partial(kernels.velocity_error, V, X[:1]),
        r"velocity_error: target has shape \[1, 2, 5\], expected \[3, 2, 5\]",
    ),
    "dtype": (partial(kernels.step_log_prob, STEP, X, V.int(), X_NEXT), "step_log_prob: v is torch.int32, expected float16"),
    "fp8": (partial(kernels.sde_step, STEP, X, V.to(torch.float8_e4m3fn), key=KEY), "sde_step: v is torch.float8_e4m3fn"),
    "device": (partial(kernels.step_log_prob, STEP, X.to("meta"), V, X_NEXT), "v is on cpu, expected meta as x"),
    "layout": (
        partial(kernels.velocity_error, V, X.to_sparse()),
        "target has layout torch.sparse_coo, expected torch.strided",
    ),
    "coefficient": (partial(kernels.step_log_prob, STEP._replace(b=STEP.b[:2]), X, V, X_NEXT), r"b has shape \[2\]"),
    "deterministic": (partial(kernels.step_log_prob, STILL, X, V, X_NEXT), r"std is not positive for samples \[1\]"),
    "form": (partial(kernels.sde_step, STEP, X, V, key=KEY, form="sharp"), "sde_step: form is 'sharp', expected one of"),  # type: ignore[arg-type]
    "half of a guidance": (
        partial(kernels.step_log_prob, STEP, X, V, X_NEXT, guidance=3.0),
        "v_uncond is None, expected v_uncond",
    ),
    "keys": (partial(kernels.sde_step, STEP, X, V, key=fold_in(KEY, torch.arange(2))), r"key.low has shape \[2\]"),
    "words of a key": (
        partial(kernels.sde_step, STEP, X, V, key=Key(torch.ones(3), torch.ones(3))),
        "key.low is torch.float32",
    ),
    "no elements": (partial(kernels.velocity_error, V[:, :0], X[:, :0]), "expected at least one element per sample"),
    "advantage": (partial(UPDATE, **STORED | {"advantage": OLD[:1]}, **CLIP), r"advantage has shape \[1\], expected \[3\]"),
    "clip": (
        partial(UPDATE, **STORED, clip_low=-1.0, clip_high=0.1),
        r"clip_low is -1.0, expected a finite number in \[0, 1\]",
    ),
    "KL without a reference": (
        partial(UPDATE, **STORED, **CLIP, kl_coef=0.1),
        "policy_loss: kl_coef is 0.1 and v_ref is None",
    ),
    "rate without dt": (partial(UPDATE, **STORED, **CLIP, kl_coef=0.1, v_ref=V_REF), "kl_weight is 'rate' and dt is None"),
    "beta": (partial(kernels.nft_loss, V, V, X, X, 0.5, OLD, beta=0.0, adv_clip=1.0), "nft_loss: beta is 0.0"),
}


@unchecked
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_alike(implementation: str, case: str) -> None:
    """Whatever would run, in one line with what was got and what was expected, before anything runs."""
    call, message = BAD[case]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        call(implementation=implementation)
    assert "\n" not in str(caught.value)


@unchecked
def test_what_cannot_be_met_is_an_error() -> None:
    """Nothing is replaced silently: Triton on a CPU, a compiled function inside a transform, and names of nothing."""
    refuses("implementation is 'triton', but the tensors are on cpu", kernels.velocity_error, V, X, implementation="triton")
    with pytest.raises(ValueError, match=r"'compiled', which torch.func cannot transform"):
        torch.func.grad(lambda v: kernels.velocity_error(v, X, implementation="compiled").sum())(V)
    refuses("step_log_prob: implementation is 'cuda'", kernels.step_log_prob, STEP, X, V, X_NEXT, implementation="cuda")


@unchecked
def test_auto_looks_at_the_device_and_at_what_the_kernels_serve() -> None:
    """Meta tensors stand for a GPU's here: only the device's name is read."""

    class Somewhere:
        def __init__(self, device: str, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> None:
            self.device, self.dtype, self.requires_grad = torch.device(device), dtype, requires_grad

    def resolved(sample: Any, *numbers: Any) -> str:
        return dispatch.resolve("test", "auto", [sample], numbers)

    for device in ("cuda", "xpu"):
        assert resolved(Somewhere(device)) == "triton"
        assert resolved(Somewhere(device, torch.float64)) == "reference"
        assert resolved(Somewhere(device), Somewhere(device, requires_grad=True)) == "reference"
    assert resolved(Somewhere("cpu")) == "reference"
    with torch.autograd.forward_ad.dual_level():
        assert resolved(Somewhere("cuda")) == "reference"
