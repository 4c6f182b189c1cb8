"""The fused kernels against the reference in float64.

tests/sessions.py runs this in Triton's interpreter, `make gpu-first` on an accelerator.
"""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from helpers.refusals import refuses

if os.environ.get("TRITON_INTERPRET") != "1" and os.environ.get("FLUVIAL_TEST_DEVICE", "cpu") == "cpu":
    pytest.skip("runs in the session of the interpreter (tests/sessions.py)", allow_module_level=True)

import torch
import triton
import triton.language as tl
from helpers.kernel_operations import DEVICE, OPERATIONS, SDE_STEP, Numbers, Operation, Samples, by_row, inputs, numbers
from helpers.marks import Patch, long
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime import interpreter

from fluvial import kernels
from fluvial.core.gaussian import FORMS, REDUCTIONS
from fluvial.core.guidance import classifier_free
from fluvial.core.random import bits, fold_in, key, normal
from fluvial.core.transitions import Transition
from fluvial.kernels.fused import device, gaussian_step, nft_loss, policy_loss, rows, sde_step, step_log_prob, velocity_error

torch.set_default_device(DEVICE)
ALL = (*OPERATIONS, *SDE_STEP)
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning"),  # the interpreter's numpy
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]
EPS = torch.finfo(torch.float32).eps
CLIP = {"clip_low": 0.1, "clip_high": 0.1}
IMPLEMENTATIONS: Sequence[Any] = ("triton", "reference")
EVENTS: tuple[tuple[int, ...], ...] = ((), (1,), (41,), (3, 5), (1271,), (2, 1024), (4099,))
# One form of each kernel, with all of its operands; in the interpreter the others are long.
FULLEST = [o for o in ALL if "guidance" in o.name or o.name in ("velocity_error", "nft_loss")]


def in_full(operations: Sequence[Operation]) -> pytest.MarkDecorator:
    """Return operations as the cases of a test, of which the fullest forms are in every run."""
    cases = [operation if operation in FULLEST or DEVICE != "cpu" else long(operation) for operation in operations]
    return pytest.mark.parametrize("operation", cases, ids=lambda operation: operation.name)


every = in_full(ALL)
# Those whose call in the table is a single one; a policy loss looks up an old log-prob first, and has tests of its own.
DIRECT = [operation for operation in ALL if "policy" not in operation.name]
every_loss = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def run(
    operation: Operation, implementation: str, samples: Samples, scalars: Numbers, weights: Sequence[Tensor], **options: Any
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    leaves = {name: t.detach().requires_grad_(name not in operation.data) for name, t in samples.items()}
    results = operation.call(implementation, leaves, scalars, **options)
    needed = [leaf for leaf in leaves.values() if leaf.requires_grad]
    total = [(result, weight.to(result.dtype)) for result, weight in zip(results, weights, strict=True)]
    grads = torch.autograd.grad(
        [r for r, _ in total], needed, [w for _, w in total], create_graph=implementation == "reference"
    )
    return results, dict(zip([name for name in leaves if leaves[name].requires_grad], grads, strict=True))


def condition(result: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    grads = torch.autograd.grad(result.sum(), leaves, retain_graph=True, allow_unused=True)
    parts = [
        (leaf * grad).abs().reshape(len(leaf), -1).sum(1)
        for leaf, grad in zip(leaves, grads, strict=True)
        if grad is not None
    ]
    return torch.stack(parts).sum(0).detach()


def check(operation: Operation, samples: Samples, scalars: Numbers, **options: Any) -> None:
    """Compare results and gradients with those of the reference in float64, to what float32 can be expected to keep.

    An output's error is eps, times the roundings on its way, times its condition: the sum over its inputs u of |u df/du|,
    which bounds what an error of relative size eps in each term of a difference does to f.
    """
    batch, length = next(iter(samples.values())).shape[0], math.prod(next(iter(samples.values())).shape[1:])
    roundings = 24 + math.ceil(math.log2(max(length, 1)))
    generator = torch.Generator().manual_seed(1)
    shapes = [result.shape for result in operation.call("reference", samples, scalars, **options)]
    weights = [torch.randn(shape, generator=generator, device="cpu").double().to(DEVICE) for shape in shapes]
    got, got_grads = run(operation, "triton", samples, scalars, weights, **options)
    wide = {name: tensor.double().requires_grad_() for name, tensor in samples.items()}
    exact = {name: tensor.double() for name, tensor in scalars.items()}
    want = operation.call("reference", wide, exact, **options)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        bound = (
            condition(theirs, list(wide.values()))
            + theirs.abs().detach()
            + 1
            + exact["std"].log().abs().reshape(batch, -1).amax(1) * (length if options.get("reduction") == "sum" else 1)
        )
        assert ((mine - theirs).abs() <= roundings * EPS * bound).all(), (operation.name, mine, theirs)
    total = torch.stack([(result * weight).sum() for result, weight in zip(want, weights, strict=True)]).sum()
    needed = [name for name in wide if name not in operation.data]
    grads = torch.autograd.grad(total, [wide[name] for name in needed], create_graph=True)
    # A policy's ratio turns the log-prob's error into a relative one, of what passes through it: all but the KL.
    through_ratio = {name: tensor for name, tensor in wide.items() if "policy" in operation.name and name != "v_ref"}
    parts = dict.fromkeys(needed, torch.zeros(()).double())
    if through_ratio:
        (loss,) = operation.call("reference", through_ratio, exact, **options)
        shift = condition(loss, list(through_ratio.values())) / loss.detach().abs()
        found = torch.autograd.grad((loss * weights[0] * shift).sum(), list(through_ratio.values()))
        parts |= {name: part.abs() for name, part in zip(through_ratio, found, strict=True)}
    for name, theirs in zip(needed, grads, strict=True):
        mine = got_grads[name]
        assert mine.dtype == samples[name].dtype
        curved = torch.autograd.grad(theirs.sum(), list(wide.values()), retain_graph=True, allow_unused=True)
        bound = theirs.abs() + parts[name]
        for leaf, second in zip(wide.values(), curved, strict=True):
            if second is not None:
                bound = bound + (leaf * second).abs()
        kind = torch.finfo(mine.dtype)
        if operation.name == "nft_loss":  # v_old's rounding counts twice, in beta (v - v_old) too, and so do the weights'
            bound = 8 * bound
        bound = roundings * EPS * bound + kind.eps * theirs.abs() + kind.smallest_normal * kind.eps
        error = (mine.double() - theirs).abs()
        overflows = theirs.abs() > kind.max
        assert ((error <= bound) | (overflows & mine.isinf())).all(), (operation.name, name, (error / bound).max())


@every_loss
@given(
    batch=st.integers(1, 3),
    event=st.sampled_from(EVENTS[:5]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
    std=st.sampled_from([1e-3, 0.05, 0.7]),
    form=st.sampled_from(FORMS),
    reduction=st.sampled_from(REDUCTIONS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=11)
def test_it_is_the_reference(
    operation: Operation,
    batch: int,
    event: tuple[int, ...],
    dtype: torch.dtype,
    scale: float,
    std: float,
    form: Any,
    reduction: Any,
    seed: int,
) -> None:
    """Results and gradients, weighed at random, for every dtype, size, scale and way of adding up."""
    if "policy" in operation.name:  # its ratio is meant for log-probs of order 1
        scale, std, reduction = min(scale, 1.0), max(std, 0.05), "mean"
    options = {"form": form, "reduction": reduction} if operation.has_form else {}
    samples = inputs(operation, batch, event, dtype, scale=scale, seed=seed)
    if dtype == torch.float16 and scale > 1:
        samples = {name: tensor.clamp(-6e4, 6e4) for name, tensor in samples.items()}
    check(operation, samples, numbers(batch, std=std, seed=seed), **options)


@every_loss
@pytest.mark.parametrize("event", [*map(long, EVENTS[:-1]), EVENTS[-1]], ids=str)
def test_every_size(operation: Operation, event: tuple[int, ...]) -> None:
    """No vector of a register is filled by 41 or 1271 elements, and 4099, in every run, are more than a program's share."""
    check(operation, inputs(operation, 2, event, torch.bfloat16), numbers(2))


@every_loss
def test_rows_with_levels_of_their_own(operation: Operation) -> None:
    """A launch over rows in place of samples; their mean or sum is that of the sample."""
    for reduction in REDUCTIONS if operation.has_form and "policy" not in operation.name else REDUCTIONS[:1]:
        options = {"reduction": reduction} if operation.has_form else {}
        check(operation, inputs(operation, 2, (3, 5), torch.bfloat16), by_row(numbers(2), 3), **options)


@pytest.mark.parametrize("operation", SDE_STEP, ids=lambda operation: operation.name)
def test_a_step_of_rows_has_the_log_prob_that_its_update_finds(operation: Operation) -> None:
    """It draws as the reference does, and scores as the kernel: the first ratio of a rollout on a GPU is exactly 1."""
    samples, scalars = inputs(operation, 2, (3, 5), torch.float32), by_row(numbers(2), 3)
    x_next, log_prob = operation.call("triton", samples, scalars)
    assert torch.equal(x_next, operation.call("reference", samples, scalars)[0])
    scored = next(each for each in OPERATIONS if each.name == "step_log_prob")
    found = scored.call("triton", {**samples, "x_next": x_next}, scalars)
    assert torch.equal(found[0], log_prob)


@pytest.mark.long
@every_loss
def test_a_row_of_many_chunks(operation: Operation, monkeypatch: Patch) -> None:
    """A million and one elements, 257 chunks; in the interpreter 17, and 65 small ones, whose sums fill several blocks."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    check(operation, inputs(operation, 1, ((2**16 if interpreted else 2**20) + 1,), torch.bfloat16), numbers(1))
    if interpreted and operation.name in ("policy_loss with KL", "nft_loss"):  # one per way of adding up
        monkeypatch.setattr(rows, "BLOCK", 16)
        assert rows.partition(2**12 + 1)._replace(warps=0, chunk_warps=0) == (65, 4, 4, 0, 4, 0)
        check(operation, inputs(operation, 1, (2**12 + 1,), torch.bfloat16), numbers(1))


@every
def test_one_launch_has_the_bits_of_two(operation: Operation, monkeypatch: Patch) -> None:
    """Whichever program of a row comes last, and it leaves the counters at zero for the next call."""
    samples, scalars = inputs(operation, 2, (9001,), torch.bfloat16), numbers(2)
    apart = operation.call("triton", samples, scalars)
    monkeypatch.setattr(rows, "LAUNCHES", 1)
    together = operation.call("triton", samples, scalars)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert rows._counters
    assert not any(counter.any() for counter in rows._counters.values())
    if os.environ.get("TRITON_INTERPRET") != "1":  # programs of a GPU come in an order of their own
        return
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z))
    backwards = operation.call("triton", samples, scalars)
    assert all(torch.equal(a, b) for a, b in zip(backwards, apart, strict=True))
    assert not any(counter.any() for counter in rows._counters.values())


@pytest.mark.parametrize("operation", [o for o in ALL if "guidance" in o.name], ids=lambda operation: operation.name)
def test_guidance_in_the_kernel_has_the_bits_of_guidance_before_it(operation: Operation) -> None:
    """So a rollout that combines the halves, and an update that leaves it to the kernel, have a first ratio of exactly 1."""
    samples, scalars = inputs(operation, 2, (41,), torch.bfloat16), numbers(2)
    combined = {name: tensor for name, tensor in samples.items() if name != "v_uncond"}
    combined["v"] = classifier_free(samples["v"], samples["v_uncond"], scalars["guidance"])
    for inside, before in zip(
        operation.call("triton", samples, scalars | {"old": torch.zeros(2)}),
        operation.call("triton", combined, scalars | {"old": torch.zeros(2)}),
        strict=True,
    ):
        assert torch.equal(inside, before)


@every
def test_an_empty_batch(operation: Operation) -> None:
    samples = inputs(operation, 0, (5,), torch.float32)
    weights = [torch.zeros_like(result) for result in operation.call("reference", samples, numbers(0))]
    results, grads = run(operation, "triton", samples, numbers(0), weights)
    assert all(result.shape[0] == 0 for result in results)
    assert all(grad.shape == (0, 5) for grad in grads.values())


@every
def test_a_sample_does_not_see_the_others(operation: Operation) -> None:
    samples, scalars = inputs(operation, 4, (4099,), torch.bfloat16), numbers(4)
    weights = [torch.ones(4, 4099), torch.ones(4)] if operation in SDE_STEP else [torch.ones(4)] * 2
    weights = weights[: len(operation.call("reference", samples, scalars))]

    def of(rows: Tensor, samples: Samples = samples) -> list[Tensor]:
        if operation in SDE_STEP:  # whose noise is the place's own: one place at a time
            rows = rows[:1]
        taken = [weight[: len(rows)] for weight in weights]
        results, grads = run(
            operation, "triton", {n: t[rows] for n, t in samples.items()}, {n: t[rows] for n, t in scalars.items()}, taken
        )
        return [tensor.detach() for tensor in (*results, *grads.values())]

    whole = of(torch.tensor([2, 1, 0, 3]))
    alone = of(torch.tensor([2]))
    assert all(torch.equal(a[:1], b[:1]) for a, b in zip(whole, alone, strict=True))
    spoilt = {name: tensor.clone() for name, tensor in samples.items()}
    spoilt["v"][0, 5], spoilt["v"][1, 4098], spoilt["v"][3] = math.nan, math.inf, -math.inf
    beside = of(torch.tensor([2, 1, 0, 3]), spoilt)
    assert all(torch.equal(a[:1], b[:1]) for a, b in zip(whole, beside, strict=True))


@every_loss
def test_nan_and_infinity_go_where_they_go_in_the_reference(operation: Operation) -> None:
    samples, scalars = inputs(operation, 3, (41,), torch.float32), numbers(3)
    samples["v"][0, 5], samples["v"][1, 40] = math.nan, math.inf
    weights = [torch.ones_like(result) for result in operation.call("reference", samples, scalars)]
    mine, theirs = (run(operation, which, samples, scalars, weights) for which in ("triton", "reference"))
    for a, b in zip((*mine[0], *mine[1].values()), (*theirs[0], *theirs[1].values()), strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.isinf(), b.isinf())


def test_what_no_gradient_comes_through_is_not_read() -> None:
    """An infinity, or a std of 0, in a result that is not differentiated leaves the others' gradients finite."""
    scalars, (v, x, x_next, v_ref) = numbers(2), torch.randn(4, 2, 41, generator=torch.Generator(DEVICE).manual_seed(0))
    transition, still = Transition(scalars["a"], scalars["b"], scalars["std"]), torch.zeros(2)
    v = v.clone().requires_grad_()

    def gradient(which: Any, result: int, **changes: Any) -> Tensor:
        given: dict[str, Any] = {"x_next": x_next, "v_ref": v_ref, "transition": transition, "form": "density", **changes}
        results = kernels.step_log_prob(
            given["transition"], x, v, given["x_next"], v_ref=given["v_ref"], form=given["form"], implementation=which
        )
        return torch.autograd.grad(results[result], v, torch.ones(2))[0]  # type: ignore[arg-type]

    far = x_next.clone()
    far[:, 3] = math.inf
    cases: list[tuple[int, dict[str, Any]]] = [(1, {"x_next": far}), (0, {"v_ref": far})]
    for result, changes in cases:
        mine, theirs = gradient("triton", result, **changes), gradient("reference", result, **changes)
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    with FlopCounterMode(display=False):  # as on a GPU, no value is read
        unscaled = gradient("triton", 0, transition=transition._replace(std=still), form="unscaled")
    assert unscaled.isfinite().all()
    drawn, _ = kernels.sde_step(transition._replace(std=still), x, v, key=key(0), implementation="triton")
    (path,) = torch.autograd.grad(drawn.sum(), v)
    torch.testing.assert_close(path, scalars["b"][:, None].expand(2, 41))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice of a trajectory": lambda t: torch.stack([t + 1, t, t - 1], dim=1)[:, 1],
    "one half of a guided batch": lambda t: torch.cat([t, t + 1]).chunk(2)[0],
    "an odd offset": lambda t: torch.cat([t.new_zeros(3), t.flatten()])[3:].view(t.shape),
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "every other": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
    "batch last": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
}


TOGETHER = ("an odd offset", "channels last", "every other")  # of all operands
SHORT = ("a slice of a trajectory", "an odd offset", "every other")


@every
@pytest.mark.parametrize(
    "layout", [*SHORT, *map(long, ["shared by all samples", *(name for name in LAYOUTS if name not in SHORT)])]
)
def test_each_operand_is_read_with_strides_of_its_own(operation: Operation, layout: str) -> None:
    samples, scalars = inputs(operation, 3, (3, 5, 8), torch.float32), numbers(3)
    weights = [torch.ones_like(r) for r in operation.call("reference", samples, scalars)]
    want, want_grads = run(operation, "triton", samples, scalars, weights)
    for names in [[*samples]] if layout in TOGETHER else [[name] for name in samples]:
        plain = {other: tensor.clone() for other, tensor in samples.items()}
        if layout == "shared by all samples":
            plain |= {name: plain[name][:1].repeat(3, 1, 1, 1) for name in names}
            moved = plain | {name: plain[name][:1].expand(3, 3, 5, 8) for name in names}
            want, want_grads = run(operation, "triton", plain, scalars, weights)
        else:
            moved = plain | {name: LAYOUTS[layout](plain[name]) for name in names}
        assert layout in ("an odd offset", "one half of a guided batch") or all(
            moved[name].stride() != plain[name].stride() for name in names
        )
        got, got_grads = run(operation, "triton", moved, scalars, weights)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), names
        assert all(torch.equal(got_grads[other], want_grads[other]) for other in want_grads), names


@every
def test_numbers_that_all_samples_share(operation: Operation) -> None:
    samples, scalars = inputs(operation, 3, (41,), torch.float32), numbers(1)
    shared = {name: t[0] if name in ("a", "b", "std", "guidance", "dt", "t") else t.expand(3) for name, t in scalars.items()}
    spread = {name: t.expand(3).clone() for name, t in scalars.items()}
    for a, b in zip(operation.call("triton", samples, shared), operation.call("triton", samples, spread), strict=True):
        assert torch.equal(a, b)


def test_rows_further_apart_than_32_bits_count() -> None:
    """Offsets are of 64 bits: the second row begins past element 2^31. The pages between are never touched."""
    v = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((2, 41), (2**31 + 8, 1))
    near = torch.randn(2, 41).bfloat16()
    v.copy_(near)
    target = torch.randn(2, 41)
    assert torch.equal(
        kernels.velocity_error(v, target, implementation="triton"),
        kernels.velocity_error(near, target, implementation="triton"),
    )


@triton.jit
def _store_words(out_ptr, low_ptr, high_ptr, first_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    low, high = tl.load(low_ptr).to(tl.uint32), tl.load(high_ptr).to(tl.uint32)
    w0, w1, w2, w3 = device.words(low, high, tl.load(first_ptr), COUNT)
    place = 4 * tl.arange(0, COUNT // 4)
    tl.store(out_ptr + place, w0.to(tl.int64))
    tl.store(out_ptr + place + 1, w1.to(tl.int64))
    tl.store(out_ptr + place + 2, w2.to(tl.int64))
    tl.store(out_ptr + place + 3, w3.to(tl.int64))


def stored_words(low: int, high: int, first: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64)
    _store_words[(1,)](out, torch.tensor([low]), torch.tensor([high]), torch.tensor([first]), count)
    return out


@given(seed=st.integers(0, 2**64 - 1))
@settings(max_examples=10)
def test_the_words_are_those_of_core_random(seed: int) -> None:
    assert torch.equal(stored_words(*key(seed), 0, 64), bits(key(seed), (64,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", SDE_STEP, ids=lambda operation: operation.name)
@pytest.mark.parametrize("event", [(1,), (41,), (4099,)], ids=str)
def test_a_step_is_the_references(operation: Operation, event: tuple[int, ...]) -> None:
    """The draw to a few units in the last place, its log-prob and gradients to what float32 keeps."""
    samples, scalars = inputs(operation, 2, event, torch.bfloat16), numbers(2)
    exact = {name: tensor.double() for name, tensor in scalars.items()}
    weights = [torch.randn(2, *event), torch.randn(2)]
    (x_next, log_prob), grads = run(operation, "triton", samples, scalars, weights)
    wide = {name: tensor.double() for name, tensor in samples.items()}
    (theirs, their_log_prob), their_grads = run(operation, "reference", wide, exact, weights)
    torch.testing.assert_close(x_next.double(), theirs, rtol=8 * EPS, atol=32 * EPS)
    torch.testing.assert_close(log_prob.double(), their_log_prob, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.double(), their_grads[name], rtol=2 * torch.finfo(grad.dtype).eps, atol=2e-5)


def test_normals_are_good_to_a_few_units() -> None:
    keys = fold_in(key(3), torch.arange(16))
    zeros, ones = torch.zeros(16, 4096), torch.ones(16)
    drawn, _ = kernels.sde_step(
        Transition(ones * 0, ones * 0, ones), zeros, zeros, key=keys, form="no_const", implementation="triton"
    )
    want = normal(keys, (16, 4096))
    units = (drawn.double() - want.double()).abs() / (EPS * want.double().abs().clamp(min=2.0**-20))
    assert units.max() <= 6
    assert (units == 0).float().mean() > 0.4


def test_an_on_policy_ratio_is_one() -> None:
    """The log-prob of the draw, of the update and inside the loss are the same number, for every kind of row.

    Each form in one chunk and in several: it does not change how a row is cut.
    """
    for event, form in (*zip(EVENTS, itertools.cycle(FORMS)), *itertools.product(EVENTS[-1:], FORMS[1:])):
        samples, scalars = inputs(SDE_STEP[0], 2, event, torch.bfloat16), numbers(2)
        transition = Transition(scalars["a"], scalars["b"], scalars["std"])
        v, x = samples["v"], samples["x"]
        x_next, log_prob = kernels.sde_step(transition, x, v, key=key(1), form=form, implementation="triton")
        again, _ = kernels.step_log_prob(transition, x, v, x_next, form=form, implementation="triton")
        assert torch.equal(log_prob, again)
        stored: dict[str, Any] = {"log_prob_old": log_prob, "advantage": scalars["advantage"], "form": form, **CLIP}
        loss, info = kernels.policy_loss(transition, x, v, x_next, **stored, implementation="triton")
        assert info.log_ratio.abs().max() == 0
        assert torch.equal(info.ratio, torch.ones(2))
        assert torch.equal(loss, -scalars["advantage"])


def test_diagnostics_are_the_references() -> None:
    operation = OPERATIONS[5]
    samples, scalars = inputs(operation, 3, (1271,), torch.float32), numbers(3)
    transition = Transition(scalars["a"], scalars["b"], scalars["std"])
    v, x, x_next = (samples[name] for name in ("v", "x", "x_next"))
    old = kernels.step_log_prob(transition, x, v, x_next)[0] + torch.tensor([0.001, 0.3, -0.3])
    stored: dict[str, Any] = {"log_prob_old": old, "advantage": torch.tensor([1.0, -1.0, 1.0]), **CLIP}
    penalty: dict[str, Any] = {"v_ref": samples["v_ref"], "kl_coef": 0.1, "kl_weight": "exact"}
    infos = [
        kernels.policy_loss(transition, x, v, x_next, **stored, **penalty, implementation=which)[1]
        for which in IMPLEMENTATIONS
    ]
    assert infos[1].clipped.tolist() == [0, 1, 1]
    for name, mine, theirs in zip(infos[0]._fields, *infos, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6), name


def test_the_kl_to_the_old_policy_is_accurate_at_every_log_ratio() -> None:
    """rho - 1 - log rho, by a series near 0 and by the exponential elsewhere, never where either is off."""
    ratios = torch.tensor([0.0, 1e-6, 1e-3, 0.05, 0.2, 0.249, 0.251, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0], device="cpu")
    ratios = torch.cat([ratios, -ratios]).to(DEVICE)
    B = len(ratios)
    zeros, ones = torch.zeros(B, 1), torch.ones(B)
    transition = Transition(ones, ones, ones)
    log_prob, _ = kernels.step_log_prob(transition, zeros, zeros, zeros + 1, implementation="triton")
    stored = {"log_prob_old": log_prob - ratios, "advantage": ones, "clip_low": 0.1, "clip_high": 0.1}
    _, info = kernels.policy_loss(transition, zeros, zeros, zeros + 1, **stored, implementation="triton")  # type: ignore[arg-type]
    x = info.log_ratio.double()
    assert_close(x, ratios.double(), rtol=1e-5, atol=1e-6)
    # By the series alone, far past where a difference in float64 would cancel.
    exact = torch.stack([x ** (n + 2) / float(math.factorial(n + 2)) for n in range(60)]).sum(0)
    assert_close(info.kl_old.double(), exact, rtol=1e-5, atol=1e-14)


@every
def test_only_inputs_are_kept_for_the_backward_pass(operation: Operation) -> None:
    """Nothing with an element a pixel is saved but the inputs themselves (and a step's result)."""
    samples, scalars = inputs(operation, 2, (1271,), torch.bfloat16), numbers(2)
    leaves = {name: t.requires_grad_(name not in operation.data) for name, t in samples.items()}
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = operation.call("triton", leaves, scalars)
    owned = {t.data_ptr() for t in leaves.values()} | {t.data_ptr() for t in results}
    large = [t for t in saved if t.numel() >= 1271]
    assert large
    assert all(t.data_ptr() in owned for t in large)


@pytest.mark.long
def test_torch_checks_every_operation() -> None:
    """Schema, fake tensors, autograd and compilation, with and without what is optional.

    In several chunks, the schema and the fake tensors alone: autograd and compilation do not see how a row is cut.
    """
    third = [torch.rand(3) + 0.1 for _ in range(7)]
    keys = fold_in(key(0), torch.arange(3))
    cases: tuple[tuple[int, dict[str, Any]], ...] = ((41, {}), (4099, {"test_utils": ("test_schema", "test_faketensor")}))
    for length, which in cases:
        checked: Callable[..., object] = partial(opcheck, **which)
        v, ref, uncond, x, x_next = (torch.randn(3, length, requires_grad=True) for _ in range(5))
        tail = ("density", "mean")
        checked(step_log_prob.operation, (*third[:3], x, v, x_next, None, None, None, *tail))
        checked(step_log_prob.operation, (*third[:3], x, v, x_next, ref, uncond, third[3], "unscaled", "sum"))
        checked(policy_loss.operation, (*third[:3], x, v, x_next, ref, None, None, *third[4:], 0.1, 0.1, 0.5, *tail))
        checked(velocity_error.operation, (v, x_next))
        checked(sde_step.operation, (*third[:3], x, v, uncond, third[3], *keys, *tail))
        checked(nft_loss.operation, (v, ref.detach(), x.detach(), x_next.detach(), third[0], third[1], 0.1, 5.0, 1e-5))
        checked(
            nft_loss.gradient_operation,
            (third[0], *(t.detach() for t in (v, ref, x, x_next)), *third[1:3], torch.rand(3, 2) + 1, 0.1, 5.0),
        )
        step = (*third[:3], *(t.detach() for t in (x, v, x_next)), None, None, None)
        needs = (False, True, True, False, False)
        checked(gaussian_step.step_gradients_operation, (third[0], *[None] * 4, *step, 0.0, *tail, *needs))


@in_full(DIRECT)
def test_it_compiles_whole(operation: Operation) -> None:
    samples, scalars = inputs(operation, 2, (41,), torch.bfloat16), numbers(2)
    weights = [torch.ones_like(r) for r in operation.call("reference", samples, scalars)]
    eager = run(operation, "triton", samples, scalars, weights)
    torch._dynamo.reset()
    compiled = torch.compile(lambda s: operation.call("triton", s, scalars), fullgraph=True, backend="aot_eager")
    leaves = {name: t.detach().requires_grad_(name not in operation.data) for name, t in samples.items()}
    results = compiled(leaves)
    grads = torch.autograd.grad(results, [t for t in leaves.values() if t.requires_grad], weights)
    assert all(torch.equal(a, b) for a, b in zip(results, eager[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, eager[1].values(), strict=True))


TWO = numbers(2)
STORED = torch.randn(2, 2, 41, generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE)


def policy_update(v: Tensor, implementation: Any = "triton") -> Tensor:
    (x, x_next), scalars = STORED, TWO
    transition = Transition(scalars["a"], scalars["b"], scalars["std"])
    stored: dict[str, Any] = {"log_prob_old": scalars["old"] * 0 - 5, "advantage": scalars["advantage"], **CLIP}
    loss, _ = kernels.policy_loss(transition, x, v, x_next, **stored, implementation=implementation)
    return loss.sum()


def test_a_policy_update_compiles_and_is_checkpointed() -> None:
    """Whole, and recomputed in the backward pass, to the same bits."""
    v = torch.randn(2, 41, requires_grad=True)
    torch._dynamo.reset()
    (eager,) = torch.autograd.grad(policy_update(v), v)
    (compiled,) = torch.autograd.grad(torch.compile(policy_update, fullgraph=True, backend="aot_eager")(v), v)
    assert torch.equal(eager, compiled)
    weight = torch.randn(41, 41, requires_grad=True)
    data = torch.randn(2, 41)
    (plain,) = torch.autograd.grad(policy_update(data @ weight), weight)
    (again,) = torch.autograd.grad(checkpoint(lambda w: policy_update(data @ w), weight, use_reentrant=False), weight)
    assert torch.equal(plain, again)


def test_under_fsdp(tmp_path: Any) -> None:
    """A sharded module trained through the fused loss has the gradients of the plain one."""
    torch.distributed.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        plain, sharded = nn.Linear(41, 41), nn.Linear(41, 41)
        sharded.load_state_dict(plain.state_dict())
        torch.distributed.fsdp.fully_shard(sharded, mesh=torch.distributed.init_device_mesh(DEVICE, (1,)))
        data = torch.randn(2, 41)
        for module in (plain, sharded):
            policy_update(module(data)).backward()
        mine, theirs = sharded.weight.grad, plain.weight.grad
        assert isinstance(mine, DTensor)
        assert theirs is not None
        assert torch.equal(mine.full_tensor(), theirs)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad", "grad of vmap", "jacrev"])
def test_function_transforms(transform: str) -> None:
    from torch.func import grad, jacrev, vmap

    def of(implementation: str) -> Tensor:
        def loss(v: Tensor) -> Tensor:
            return policy_update(v, implementation)

        stacked = torch.randn(3, 2, 41, generator=torch.Generator().manual_seed(0), device="cpu").to(DEVICE)
        transforms: dict[str, Callable[[], Tensor]] = {
            "grad": lambda: grad(loss)(stacked[0]),
            "vmap": lambda: vmap(loss)(stacked),
            "vmap of grad": lambda: vmap(grad(loss))(stacked),
            "grad of vmap": lambda: grad(lambda s: vmap(loss)(s).sum())(stacked),
            "jacrev": lambda: jacrev(lambda v: torch.stack([loss(v), loss(2 * v)]))(stacked[0]),
        }
        return transforms[transform]()

    torch.testing.assert_close(of("triton"), of("reference"), rtol=1e-4, atol=1e-6)


@in_full([operation for operation in DIRECT if operation in OPERATIONS])
def test_vmap_over_every_operation(operation: Operation) -> None:
    samples = [inputs(operation, 2, (41,), torch.float32, seed=seed) for seed in range(3)]
    scalars = numbers(2)
    stacked = {name: torch.stack([s[name] for s in samples], dim=1) for name in samples[0]}
    shared = next(name for name in stacked if name != "v")
    stacked[shared] = samples[0][shared]
    dims = ({name: None if name == shared else 1 for name in stacked},)
    mapped = torch.func.vmap(lambda s: operation.call("triton", s, scalars), in_dims=dims)(stacked)
    for i, alone in enumerate(samples):
        want = operation.call("triton", alone | {shared: samples[0][shared]}, scalars)
        for a, b in zip(mapped, want, strict=True):
            assert torch.equal(a[i], b)


def of_b(b: Tensor) -> Tensor:
    v, transition = STORED[0], Transition(TWO["a"], TWO["b"] * b, TWO["std"])
    return kernels.step_log_prob(transition, v, v, v, implementation="triton")[0].sum()


def test_what_the_kernels_cannot_do_is_refused_in_words() -> None:
    v = torch.randn(2, 41)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch.compile wraps a torch.func"):
        torch.compile(torch.func.grad(policy_update), fullgraph=True, backend="aot_eager")(v)
    refuses("forward-mode differentiation is active", torch.func.jvp, policy_update, (v,), (v,))
    with pytest.raises(NotImplementedError, match="for second derivatives use implementation='reference'"):
        torch.func.grad(lambda v: torch.func.grad(policy_update)(v).sum())(v)
    leaf = v.clone().requires_grad_()
    (first,) = torch.autograd.grad(policy_update(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"step_gradients.* no autograd formula"):
        first.sum().backward()
    refuses("a tensor is float64", kernels.velocity_error, v.double(), v, implementation="triton")
    steps = torch.full((2,), 0.5, requires_grad=True)
    for call in (
        lambda: torch.func.grad(lambda b: torch.func.vmap(of_b)(b).sum())(torch.ones(3)),
        lambda: kernels.step_log_prob(Transition(steps, steps, steps), v, v, v, implementation="triton"),
    ):
        refuses("a per-sample number .* requires a gradient", call)
