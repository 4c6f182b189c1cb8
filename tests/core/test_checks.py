"""Every argument check: its exception, one line, naming the function and what was got and expected.

It runs without run-time type checks (see tests/sessions.py), which would answer a wrong type first.
"""

import os
from collections.abc import Callable
from functools import partial

import pytest

if os.environ.get("FLUVIAL_NO_TYPECHECK") != "1":
    pytest.skip("runs in the session without type checks (tests/sessions.py)", allow_module_level=True)

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fluvial.core import (
    advantages,
    awm,
    checks,
    correction,
    dgpo,
    distill,
    dpo,
    ema,
    flow_matching,
    gaussian,
    policy,
    random,
    rollout,
    sigmas,
    table,
    transitions,
)
from fluvial.core.random import fold_in, key
from fluvial.core.transitions import Transition

X, OTHER, FIRST = torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(1, 4)
INTS = torch.zeros(3, 4, dtype=torch.int64)
S = torch.full((3,), 0.5)
STEP = Transition(S, S, S)
GROUP = torch.zeros(3, dtype=torch.int64)
surrogate = partial(policy.clipped_surrogate, clip_low=0.1, clip_high=0.1)
walk = partial(rollout.rollout, lambda x, sigma, step: x, X, sigmas=sigmas.linear(4), key=key(0))

Case = tuple[Callable[[], object], type[Exception], str]


def guard(*, transition: Transition = STEP, v_old: Tensor = X, dt: Tensor | None = None, clip: float = 0.1) -> object:
    p = torch.zeros(3)
    return policy.guard_surrogate(p, p, p, transition, X, v_old, torch.ones(3) if dt is None else dt, clip=clip)


def dppo(
    *, log_prob: Tensor = S, v: Tensor = X, v_old: Tensor = X, transition: Transition = STEP, kl_threshold: float = 0.1
) -> object:
    return policy.dppo_surrogate(log_prob, log_prob, log_prob, transition, v, v_old, kl_threshold=kl_threshold)


preference = partial(dpo.dpo_loss, beta=1.0)
matching = partial(awm.awm_log_prob, weighting="ghuber")
weigh = partial(correction.rollout_weights, mode="mask", threshold=2.0)


SDES = (
    ("flow_sde", partial(transitions.flow_sde, eta=0.5, sigma_max=0.9)),
    ("dance_sde", partial(transitions.dance_sde, eta=0.5)),
    ("wan_sde", partial(transitions.wan_sde, eta=0.5, sigma_max=0.9)),
    ("cps", partial(transitions.cps, eta=0.5)),
)
CASES: dict[str, Case] = {
    # A shape that would broadcast silently is the reason these checks exist: [1, 4] against [3, 4].
    "mean broadcasts v": (
        lambda: gaussian.mean(STEP, X, FIRST),
        ValueError,
        r"mean: v has shape \[1, 4\], expected \[3, 4\] as x",
    ),
    "mean of another event": (
        lambda: gaussian.mean(STEP, X, OTHER),
        ValueError,
        r"mean: v has shape \[3, 5\], expected \[3, 4\]",
    ),
    "sample's noise": (lambda: gaussian.sample(STEP, X, X, FIRST), ValueError, r"sample: noise has shape \[1, 4\]"),
    "log_prob's x_next": (lambda: gaussian.log_prob(STEP, X, X, FIRST), ValueError, r"log_prob: x_next has shape \[1, 4\]"),
    "guard's dt": (
        lambda: guard(dt=torch.ones(1)),
        ValueError,
        r"guard_surrogate: dt has shape \[1\], expected \[\] or \[3\]",
    ),
    "guard's v_old": (lambda: guard(v_old=FIRST), ValueError, r"v_ref has shape \[1, 4\], expected \[3, 4\]"),
    "guard's clip": (lambda: guard(clip=-1.0), ValueError, r"guard_surrogate: clip is -1"),
    "guard without noise": (
        lambda: guard(transition=STEP._replace(std=torch.zeros(3))),
        ValueError,
        r"std is not positive for samples \[0, 1, 2\]",
    ),
    "guard's velocities of another batch": (
        lambda: policy.guard_surrogate(S, S, S, Transition(*[S[0]] * 3), FIRST, FIRST, torch.ones(()), clip=0.1),
        ValueError,
        r"guard_surrogate: log_prob has shape \[3\], expected \[\] or \[1\]",
    ),
    "dppo's v_old": (
        lambda: dppo(v_old=FIRST),
        ValueError,
        r"dppo_surrogate: v_old has shape \[1, 4\], expected \[3, 4\] as v",
    ),
    "dppo's velocities of another batch": (
        lambda: dppo(v=FIRST, v_old=FIRST, transition=Transition(*[S[0]] * 3)),
        ValueError,
        r"dppo_surrogate: log_prob has shape \[3\], expected \[\] or \[1\]",
    ),
    "dppo's log-probs of steps": (
        lambda: dppo(log_prob=X),
        ValueError,
        r"dppo_surrogate: log_prob has shape \[3, 4\], expected \[\] or \[3\]",
    ),
    "dppo's coefficients": (lambda: dppo(transition=STEP._replace(b=S[:2])), ValueError, r"kl: b has shape \[2\]"),
    "dppo's threshold": (lambda: dppo(kl_threshold=-1.0), ValueError, "dppo_surrogate: kl_threshold is -1.0"),
    "dppo's integer velocity": (lambda: dppo(v=INTS), TypeError, "dppo_surrogate: v is torch.int64"),
    "dppo without noise": (
        lambda: dppo(transition=STEP._replace(std=torch.zeros(3))),
        ValueError,
        r"std is not positive for samples \[0, 1, 2\]",
    ),
    "a reference of other pairs": (
        lambda: preference(S, S, S[:1], S),
        ValueError,
        r"dpo_loss: err_win_ref has shape \[1\], expected \[3\] as err_win",
    ),
    "one pair of errors": (lambda: preference(S[0], S[0], S[0], S[0]), ValueError, r"dpo_loss: err_win has shape \[\]"),
    "integer errors": (lambda: preference(S, GROUP, S, S), TypeError, "dpo_loss: err_lose is torch.int64"),
    "beta of nothing": (lambda: preference(S, S, S, S, beta=0.0), ValueError, "dpo_loss: beta is 0.0"),
    "another sample of other pairs": (lambda: preference(S, S[:1], S, S), ValueError, r"dpo_loss: err_lose has shape \[1\]"),
    "pairs of two axes": (lambda: dpo.best_and_worst(X, GROUP), ValueError, r"best_and_worst: reward has shape \[3, 4\]"),
    "pairs of another batch": (
        lambda: dpo.best_and_worst(S, GROUP[:2]),
        ValueError,
        r"best_and_worst: group has shape \[2\], expected \[3\]",
    ),
    "pairs of float groups": (lambda: dpo.best_and_worst(S, S), TypeError, "best_and_worst: group is torch.float32"),
    "pairs of nothing finite": (
        lambda: dpo.best_and_worst(S / 0, GROUP),
        ValueError,
        r"best_and_worst: rewards are not finite at indices \[0, 1, 2\]",
    ),
    "weighting": (
        lambda: matching(S, 0.5, weighting="t**2"),  # type: ignore[arg-type]
        ValueError,
        r"awm_log_prob: weighting is 't\*\*2', expected one of 'uniform', 't', 't2', 'huber', 'ghuber'",
    ),
    "times of another batch": (
        lambda: matching(S, S[:1]),
        ValueError,
        r"awm_log_prob: t has shape \[1\], expected \[\] or \[3\]",
    ),
    "an error": (lambda: matching(S[0], 0.5), ValueError, r"awm_log_prob: error has shape \[\]"),
    "integer error": (lambda: matching(GROUP, 0.5), TypeError, "awm_log_prob: error is torch.int64"),
    "delta": (lambda: matching(S, 0.5, delta=0.0), ValueError, "awm_log_prob: delta is 0.0"),
    "power": (lambda: matching(S, 0.5, power=2.0), ValueError, "awm_log_prob: power is 2.0"),
    "teacher's step": (
        lambda: distill.mean_kl(STEP, X, FIRST),
        ValueError,
        r"mean_kl: v_teacher has shape \[1, 4\], expected \[3, 4\] as v",
    ),
    "teacher's velocity": (
        lambda: distill.velocity_mse(X, OTHER),
        ValueError,
        r"velocity_mse: v_teacher has shape \[3, 5\], expected \[3, 4\] as v",
    ),
    "a teacher's list": (
        lambda: distill.velocity_mse(X, X.tolist()),  # type: ignore[arg-type]
        TypeError,
        "velocity_mse: v_teacher is a list",
    ),
    "a rollout of other steps": (
        lambda: weigh(X, OTHER),
        ValueError,
        r"rollout_weights: log_prob_rollout has shape \[3, 5\], expected \[3, 4\] as log_prob_old",
    ),
    "a rollout without steps": (lambda: weigh(S, S), ValueError, r"log_prob_old has shape \[3\], expected \[B, S\]"),
    "integer log-probs": (lambda: weigh(X, INTS), TypeError, "rollout_weights: log_prob_rollout is torch.int64"),
    "correction's mode": (
        lambda: weigh(X, X, mode="clip"),  # type: ignore[arg-type]
        ValueError,
        "rollout_weights: mode is 'clip', expected one of 'truncate', 'reject', 'mask'",
    ),
    "correction's level": (
        lambda: weigh(X, X, level="token"),  # type: ignore[arg-type]
        ValueError,
        "rollout_weights: level is 'token', expected one of 'step', 'trajectory'",
    ),
    "correction's threshold": (
        lambda: weigh(X, X, threshold=0.5),
        ValueError,
        r"rollout_weights: threshold is 0.5, expected a finite number in \[1, 1e\+30\]",
    ),
    "kl's v_ref": (lambda: gaussian.kl(STEP, X, FIRST), ValueError, r"kl: v_ref has shape \[1, 4\]"),
    "no batch": (lambda: gaussian.mean(STEP, S[0], S[0]), ValueError, r"mean: x has shape \[\], expected \[B, \*event\]"),
    "coefficients of another batch": (
        lambda: gaussian.mean(STEP._replace(b=S[:2]), X, X),
        ValueError,
        r"mean: b has shape \[2\], expected \[\] or \[3\]",
    ),
    "coefficients [1]": (
        lambda: gaussian.mean(STEP._replace(a=S[:1]), X, X),
        ValueError,
        r"a has shape \[1\], expected \[\] or \[3\]",
    ),
    "coefficients [B, 1]": (lambda: gaussian.kl(STEP._replace(std=S[:, None]), X, X), ValueError, r"std has shape \[3, 1\]"),
    "integer sample": (lambda: gaussian.mean(STEP, INTS, X), TypeError, "mean: x is torch.int64, expected float16"),
    "integer coefficient": (
        lambda: gaussian.kl(STEP._replace(b=GROUP), X, X),
        TypeError,
        "kl: b is torch.int64, expected float16",
    ),
    "float coefficient": (
        lambda: gaussian.mean(Transition(1.0, S, S), X, X),  # type: ignore[arg-type]
        TypeError,
        "mean: a is a float, expected a tensor",
    ),
    "a list": (lambda: gaussian.mean(STEP, X.tolist(), X), TypeError, "mean: x is a list, expected a tensor"),  # type: ignore[arg-type]
    "form": (
        lambda: gaussian.log_prob(STEP, X, X, X, form="exact"),  # type: ignore[arg-type]
        ValueError,
        "log_prob: form is 'exact', expected one of 'density', 'no_const', 'unscaled'",
    ),
    "reduction": (
        lambda: gaussian.log_prob(STEP, X, X, X, reduction="none"),  # type: ignore[arg-type]
        ValueError,
        "log_prob: reduction is 'none', expected one of 'mean', 'sum'",
    ),
    "kl's reduction": (lambda: gaussian.kl(STEP, X, X, reduction="max"), ValueError, "kl: reduction is 'max'"),  # type: ignore[arg-type]
    "levels of two batches": (
        lambda: transitions.ode(S, S[:2]),
        ValueError,
        r"ode: sigma_next has shape \[2\], expected \[\] or \[3\]",
    ),
    "levels [B, 1]": (lambda: transitions.cps(S[:, None], S, eta=0.5), ValueError, r"cps: sigma has shape \[3, 1\]"),
    "integer levels": (lambda: transitions.ode(GROUP, S), TypeError, "ode: sigma is torch.int64"),
    "sigma_max of another batch": (
        lambda: transitions.flow_sde(S, S, eta=0.5, sigma_max=S[:2]),
        ValueError,
        r"flow_sde: sigma_max has shape \[2\]",
    ),
    **{
        f"{name}'s eta {eta!r}": (
            partial(sampler, S, S, eta=eta),  # type: ignore[arg-type]
            error,
            f"{name}: eta is {message}",
        )
        for name, sampler in (
            ("flow_sde", partial(transitions.flow_sde, sigma_max=0.9)),
            ("dance_sde", transitions.dance_sde),
            ("cps", transitions.cps),
            ("ddim", transitions.ddim),
        )
        for eta, error, message in (
            (-0.1, ValueError, "-0.1, expected a finite number"),
            (float("nan"), ValueError, "nan, expected a finite number"),
            (float("inf"), ValueError, "inf, expected a finite number"),
            ("1", TypeError, "a str, expected a number"),
            (True, TypeError, "a bool, expected a number"),
            (S - 1, ValueError, "-0.5, expected a finite number"),
        )
    },
    **{
        f"{name}: levels {level} to {level_next}": (
            partial(sampler, torch.tensor([0.5, level]), torch.tensor([0.4 if level_next < level else 0.5, level_next])),
            ValueError,
            f"{name}: {message}",
        )
        for name, sampler in SDES
        for level, level_next, message in (
            (1000.0, 980.0, r"sigma is 1000 at index 1, expected a noise level in \[0, 1\]: .* divide it by 1000"),
            (0.5, -0.1, r"sigma_next is -0.1 at index 1, expected a noise level in \[0, 1\]"),
            (float("nan"), 0.1, r"sigma is nan at index 1, expected a noise level in \[0, 1\]"),
            (0.5, 0.8, r"the noise level goes from 0.5 to 0.8 at index 1, expected falling levels, .*: flip the schedule"),
            (0.0, 0.0, "the noise level goes from 0 to 0 at index 1, expected falling levels"),
        )
    },
    **{
        f"ddim: levels {level} to {level_next}": (
            partial(transitions.ddim, torch.tensor(level), level_next, eta=0.5),
            ValueError,
            f"ddim: alpha_bar goes from {level:g} to {level_next:g}, expected rising signal powers",
        )
        for level, level_next in ((0.8, 0.5), (980.0, 1000.0), (1.0, 1.0), (0.0, 0.5))
    },
    "sigma_max of timesteps": (
        lambda: transitions.wan_sde(S, S, eta=0.5, sigma_max=950.0),
        ValueError,
        "wan_sde: sigma_max is 950",
    ),
    "a schedule that rises": (
        lambda: walk(sigmas=sigmas.linear(4).flip(0), transition=partial(transitions.cps, eta=0.5)),
        ValueError,
        r"cps: the noise level goes from 0 to 0.25 at index 0, expected falling levels",
    ),
    "learned eta of another batch": (
        lambda: transitions.cps(S, S, eta=S[:2]),
        ValueError,
        r"cps: .* has shape \[[23]\], expected \[\] or \[[23]\]",
    ),
    "an eta of ode": (lambda: transitions.bind("ode", S[0], S), ValueError, "bind: eta is .*ode draws no noise"),
    "clips of another batch": (
        lambda: surrogate(S, S, S, clip_low=S[:2]),
        ValueError,
        r"clipped_surrogate: clip_low has shape \[2\], expected \[\] or \[3\]",
    ),
    "a clip below": (
        lambda: surrogate(S, S, S, clip_low=torch.tensor([0.1, -0.1, 0.1])),
        ValueError,
        r"clip_low is -0.1.*, expected a finite number in \[0, 1\]",
    ),
    "an integer clip": (lambda: surrogate(S, S, S, clip_high=GROUP), TypeError, "clip_high is torch.int64"),
    "an int as a key to fold": (
        lambda: fold_in(0, GROUP),  # type: ignore[arg-type]
        TypeError,
        r"fold_in: key is an int, expected a Key: .*key\(seed\)",
    ),
    "an int as a key to draw": (lambda: random.normal(0, (3,)), TypeError, "key is an int"),  # type: ignore[arg-type]
    "an int as a rollout's key": (
        lambda: walk(transition=partial(transitions.cps, eta=0.5), key=0),  # type: ignore[arg-type]
        TypeError,
        "key is an int, expected a Key",
    ),
    "an int as a window's key": (lambda: sigmas.sde_window(0, 4, 1), TypeError, "key is an int, expected a Key"),  # type: ignore[arg-type]
    **{
        f"a list as the groups of {name}": (
            partial(function, group=[0, 0, 1]),
            TypeError,
            rf"{name}: group is a list, expected a tensor of integers: use torch.tensor\(group\)",
        )
        for name, function in (
            ("group_advantages", partial(advantages.group_advantages, S)),
            ("multi_reward_advantages", partial(advantages.multi_reward_advantages, X, torch.ones(4))),
            ("best_and_worst", partial(dpo.best_and_worst, S)),
            ("group_weight", partial(dgpo.group_weight, X)),
        )
    },
    "cps's eta beyond all": (
        lambda: transitions.cps(S, S, eta=1.5),
        ValueError,
        r"cps: eta is 1.5, expected .* in \[0, 1\]",
    ),
    "x0 and noise": (lambda: flow_matching.interpolate(X, FIRST, 0.5), ValueError, r"interpolate: noise has shape \[1, 4\]"),
    "sigma of another batch": (
        lambda: flow_matching.interpolate(X, X, S[:2]),
        ValueError,
        r"interpolate: sigma has shape \[2\], expected \[\] or \[3\]",
    ),
    "sigma of two axes": (
        lambda: flow_matching.interpolate(X, X, S[:, None]),
        ValueError,
        r"interpolate: sigma has shape \[3, 1\]",
    ),
    "target": (lambda: flow_matching.velocity_error(X, FIRST), ValueError, r"velocity_error: target has shape \[1, 4\]"),
    "integer velocity": (lambda: flow_matching.velocity_error(INTS, X), TypeError, "velocity_error: v is torch.int64"),
    "old log-probs": (lambda: surrogate(S, S[:1], S), ValueError, r"clipped_surrogate: log_prob_old has shape \[1\]"),
    "advantage": (lambda: surrogate(S, S, X), ValueError, r"clipped_surrogate: advantage has shape \[3, 4\]"),
    "0-d log-probs": (lambda: surrogate(S[0], S[0], S[0]), ValueError, r"clipped_surrogate: log_prob has shape \[\]"),
    "integer advantage": (lambda: surrogate(S, S, GROUP), TypeError, "clipped_surrogate: advantage is torch.int64"),
    "clip_low": (lambda: surrogate(S, S, S, clip_low=1.1), ValueError, r"clip_low is 1.1, expected .* in \[0, 1\]"),
    "clip_high": (
        lambda: surrogate(S, S, S, clip_high=-1.0),
        ValueError,
        "clip_high is -1.0, expected a finite number >= 0",
    ),
    "clip type": (
        lambda: surrogate(S, S, S, clip_low="1"),  # type: ignore[arg-type]
        TypeError,
        "clip_low is a str, expected a number",
    ),
    "reward of two axes": (
        lambda: advantages.group_advantages(X, GROUP),
        ValueError,
        r"group_advantages: reward has shape \[3, 4\]",
    ),
    "group of another batch": (
        lambda: advantages.group_advantages(S, GROUP[:2]),
        ValueError,
        r"group has shape \[2\], expected \[3\]",
    ),
    "group of one": (
        lambda: advantages.group_advantages(S, GROUP[:1]),
        ValueError,
        r"group has shape \[1\], expected \[3\]",
    ),
    "float group": (
        lambda: advantages.group_advantages(S, S),
        TypeError,
        "group is torch.float32, expected an integer dtype",
    ),
    "bool group": (lambda: advantages.group_advantages(S, S > 0), TypeError, "group is torch.bool"),
    "integer reward": (lambda: advantages.group_advantages(GROUP, GROUP), TypeError, "reward is torch.int64"),
    "scale": (
        lambda: advantages.group_advantages(S, GROUP, scale="std"),  # type: ignore[arg-type]
        ValueError,
        "group_advantages: scale is 'std', expected one of 'group', 'batch', 'none'",
    ),
    "not finite": (lambda: advantages.group_advantages(S / 0, GROUP), ValueError, r"not finite at indices \[0, 1, 2\]"),
    "weights": (
        lambda: advantages.multi_reward_advantages(X, S, GROUP),
        ValueError,
        r"multi_reward_advantages: rewards \[3, 4\] and weights \[3\], expected \[B, K\] and \[K\]",
    ),
    "one reward": (lambda: advantages.multi_reward_advantages(S, S, GROUP), ValueError, r"rewards \[3\] and weights \[3\]"),
    "seed type": (lambda: key(0.5), TypeError, "key: seed is a float, expected an int"),  # type: ignore[arg-type]
    "bool seed": (lambda: key(True), TypeError, "key: seed is a bool"),
    "seed below": (lambda: key(-1), ValueError, r"key: seed is -1, expected 0 <= seed < 2\^64"),
    "seed above": (lambda: key(2**64), ValueError, "key: seed is 18446744073709551616"),
    "float ids": (lambda: fold_in(key(0), S), TypeError, "fold_in: data is torch.float32, expected an integer dtype"),
    "bool ids": (lambda: fold_in(key(0), S > 0), TypeError, "fold_in: data is torch.bool"),
    "float data": (lambda: fold_in(key(0), 1.5), TypeError, "fold_in: data is a float"),  # type: ignore[arg-type]
    "bool data": (lambda: fold_in(key(0), True), TypeError, "fold_in: data is a bool"),
    "data below": (lambda: fold_in(key(0), -1), ValueError, r"fold_in: data is -1, expected 0 <= data < 2\^63"),
    "data above": (lambda: fold_in(key(0), 2**63), ValueError, "fold_in: data is 9223372036854775808"),
    "ids of two axes": (lambda: fold_in(key(0), GROUP[:, None]), ValueError, r"fold_in: data has shape \[3, 1\]"),
    "ids of another batch": (
        lambda: fold_in(fold_in(key(0), GROUP), GROUP[:1]),
        ValueError,
        r"fold_in: data has shape \[1\]",
    ),
    "draw of another batch": (lambda: random.normal(fold_in(key(0), GROUP), (2, 5)), ValueError, r"shape is \[2, 5\]"),
    "no steps": (lambda: sigmas.linear(0), ValueError, "0 steps"),
    "half a step": (lambda: sigmas.linear(1.5), ValueError, "1.5 steps"),  # type: ignore[arg-type]
    "shift": (lambda: sigmas.shifted(4, -1.0), ValueError, "shifted: shift is -1.0"),
    "shift of nothing": (lambda: sigmas.shifted(4, 0.0), ValueError, "shift"),
    "shift type": (lambda: sigmas.shifted(4, "3"), TypeError, "shifted: shift is a str"),  # type: ignore[arg-type]
    "kind": (lambda: sigmas.dynamic_shift(4, 256, kind="cosine"), ValueError, "dynamic_shift: kind is 'cosine'"),  # type: ignore[arg-type]
    "decay": (lambda: ema.update({"w": X}, {"w": X}, 2.0), ValueError, r"ema.update: decay is 2.0, expected .* in \[0, 1\]"),
    "storage dtype": (
        lambda: walk(transition=partial(transitions.dance_sde, eta=0.5), record=table.Record(dtype=torch.int32)),
        TypeError,
        "record.dtype is torch.int32, expected a floating-point dtype",
    ),
    "recorded form": (
        lambda: table.Record(form="densty"),  # type: ignore[arg-type]
        checks.FieldError,
        r"record.form is 'densty', expected one of 'density', .* \(did you mean 'density'\?\)",
    ),
    "recorded reduction": (
        lambda: table.Record(reduction="max"),  # type: ignore[arg-type]
        checks.FieldError,
        "record.reduction is 'max', expected one of 'mean', 'sum'",
    ),
    "keys of another batch": (
        lambda: walk(transition=partial(transitions.dance_sde, eta=0.5), key=fold_in(key(0), GROUP[:2])),
        ValueError,
        "shape",
    ),
    "steps of ode among ddim's": (
        # Euler's step over alpha_bar is no step of a variance-preserving path.
        lambda: rollout.rollout(
            lambda x, sigma, step: x,
            X,
            torch.tensor([0.1, 0.5, 0.9]),
            transition=partial(transitions.ddim, eta=0.5),
            key=key(0),
            window=[0],
        ),
        ValueError,
        "window",
    ),
    "a number without an upper bound": (
        lambda: checks.check_number("f", "x", -1.0, low=0),
        ValueError,
        "f: x is -1.0, expected a finite number >= 0",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), CASES.values(), ids=CASES.keys())
def test_a_check(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error  # not a subclass: torch's own errors are RuntimeErrors
    assert "\n" not in str(caught.value)


def test_numbers_in_range_pass() -> None:
    for value in (0, 1, 0.5):
        checks.check_number("f", "x", value, low=0, high=1)
    checks.check_number("f", "x", -1e300)


def test_per_sample_views() -> None:
    assert checks.per_sample(S, torch.zeros(3, 4, 5)).shape == (3, 1, 1)
    assert checks.per_sample(S, S).shape == (3,)
    assert checks.per_sample(S[0], X).shape == ()


def test_values_are_looked_at_where_they_are_known() -> None:
    """On the CPU, under grad and jvp too; not mapped over, traced, or under a dispatch mode, which could count the read."""
    seen = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.append((checks.can_look(x), checks.can_look(S), checks.can_look(torch.ones(3))))
        return x.sum()

    def counted(x: torch.Tensor) -> None:
        with FlopCounterMode(display=False):
            spy(x)

    for run, known in (
        (spy, (True, True, True)),
        (torch.func.grad(spy), (True, True, True)),
        (lambda x: torch.func.jvp(spy, (x,), (x,)), (True, True, True)),
        (torch.func.vmap(spy), (False, True, True)),
        (torch.func.vmap(torch.func.grad(spy)), (False, True, True)),
        (make_fx(spy), (False, False, False)),
        (counted, (False, False, False)),
    ):
        run(X)
        assert seen.pop() == known
    assert not checks.can_look(torch.empty(3, device="meta"))
    with FakeTensorMode() as mode:
        assert not checks.can_look(torch.ones(3))
    assert not checks.can_look(mode.from_tensor(S))
