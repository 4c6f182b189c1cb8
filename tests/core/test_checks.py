"""Every argument check: its exception, one line, naming the function and what was got and expected.

It runs without run-time type checks (see tests/sessions.py), which would answer a wrong type first.
"""

# mypy: disable-error-code="arg-type"

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest

if os.environ.get("FLUVIAL_NO_TYPECHECK") != "1":
    pytest.skip("runs in the session without type checks (tests/sessions.py)", allow_module_level=True)

import torch
from helpers.refusals import refuses
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fluvial.core import (
    advantages,
    awm,
    checks,
    correction,
    crd,
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
CASES: list[Case] = [
    # A shape that would broadcast silently is the reason these checks exist: [1, 4] against [3, 4].
    (lambda: gaussian.mean(STEP, X, FIRST), ValueError, r"mean: v has shape \[1, 4\], expected \[3, 4\] as x"),
    (lambda: gaussian.mean(STEP, X, OTHER), ValueError, r"mean: v has shape \[3, 5\], expected \[3, 4\]"),
    (lambda: gaussian.sample(STEP, X, X, FIRST), ValueError, r"sample: noise has shape \[1, 4\]"),
    (lambda: gaussian.log_prob(STEP, X, X, FIRST), ValueError, r"log_prob: x_next has shape \[1, 4\]"),
    (lambda: gaussian.draw(STEP, X, X, X, reduction="median"), ValueError, "draw: reduction is 'median'"),
    (lambda: guard(dt=torch.ones(1)), ValueError, r"guard_surrogate: dt has shape \[1\], expected \[\] or \[3\]"),
    (lambda: guard(v_old=FIRST), ValueError, r"v_ref has shape \[1, 4\], expected \[3, 4\]"),
    (lambda: guard(clip=-1.0), ValueError, r"guard_surrogate: clip is -1"),
    (lambda: guard(transition=STEP._replace(std=torch.zeros(3))), ValueError, r"std is not positive for samples \[0, 1"),
    (
        lambda: policy.guard_surrogate(S, S, S, Transition(*[S[0]] * 3), FIRST, FIRST, torch.ones(()), clip=0.1),
        ValueError,
        r"guard_surrogate: log_prob has shape \[3\], expected \[\] or \[1\]",
    ),
    (lambda: dppo(v_old=FIRST), ValueError, r"dppo_surrogate: v_old has shape \[1, 4\], expected \[3, 4\] as v"),
    (lambda: dppo(v=FIRST, v_old=FIRST, transition=Transition(*[S[0]] * 3)), ValueError, r"log_prob has shape \[3\]"),
    (lambda: dppo(log_prob=X), ValueError, r"dppo_surrogate: log_prob has shape \[3, 4\], expected \[\] or \[3\]"),
    (lambda: dppo(transition=STEP._replace(b=S[:2])), ValueError, r"kl: b has shape \[2\]"),
    (lambda: dppo(kl_threshold=-1.0), ValueError, "dppo_surrogate: kl_threshold is -1.0"),
    (lambda: dppo(v=INTS), TypeError, "dppo_surrogate: v is torch.int64"),
    (lambda: dppo(transition=STEP._replace(std=torch.zeros(3))), ValueError, r"std is not positive for samples \[0, 1, 2\]"),
    (lambda: preference(S, S, S[:1], S), ValueError, r"dpo_loss: err_win_ref has shape \[1\], expected \[3\] as err_win"),
    (lambda: preference(S[0], S[0], S[0], S[0]), ValueError, r"dpo_loss: err_win has shape \[\]"),
    (lambda: preference(S, GROUP, S, S), TypeError, "dpo_loss: err_lose is torch.int64"),
    (lambda: preference(S, S, S, S, beta=0.0), ValueError, "dpo_loss: beta is 0.0"),
    (lambda: preference(S, S[:1], S, S), ValueError, r"dpo_loss: err_lose has shape \[1\]"),
    (lambda: dpo.kto_loss(S, S, S, beta=1.0, utility="relu"), ValueError, "kto_loss: utility is 'relu'"),
    (lambda: dpo.best_and_worst(X, GROUP), ValueError, r"best_and_worst: reward has shape \[3, 4\]"),
    (lambda: dpo.best_and_worst(S, GROUP[:2]), ValueError, r"best_and_worst: group has shape \[2\], expected \[3\]"),
    (lambda: dpo.best_and_worst(S, S), TypeError, "best_and_worst: group is torch.float32"),
    (lambda: dpo.best_and_worst(S / 0, GROUP), ValueError, r"best_and_worst: rewards are not finite at indices \[0, 1, 2\]"),
    (lambda: matching(S, 0.5, weighting="t**2"), ValueError, r"awm_log_prob: weighting is 't\*\*2'"),
    (lambda: matching(S, S[:1]), ValueError, r"awm_log_prob: t has shape \[1\], expected \[\] or \[3\]"),
    (lambda: matching(S[0], 0.5), ValueError, r"awm_log_prob: error has shape \[\]"),
    (lambda: matching(GROUP, 0.5), TypeError, "awm_log_prob: error is torch.int64"),
    (lambda: matching(S, 0.5, delta=0.0), ValueError, "awm_log_prob: delta is 0.0"),
    (lambda: matching(S, 0.5, power=2.0), ValueError, "awm_log_prob: power is 2.0"),
    (lambda: distill.mean_kl(STEP, X, FIRST), ValueError, r"mean_kl: v_teacher has shape \[1, 4\], expected \[3, 4\] as v"),
    (lambda: distill.velocity_mse(X, OTHER), ValueError, r"velocity_mse: v_teacher has shape \[3, 5\]"),
    (lambda: distill.velocity_mse(X, X.tolist()), TypeError, "velocity_mse: v_teacher is a list"),
    (lambda: weigh(X, OTHER), ValueError, r"rollout_weights: log_prob_rollout has shape \[3, 5\]"),
    (lambda: weigh(S, S), ValueError, r"log_prob_old has shape \[3\], expected \[B, S\]"),
    (lambda: weigh(X, INTS), TypeError, "rollout_weights: log_prob_rollout is torch.int64"),
    (lambda: weigh(X, X, mode="clip"), ValueError, "rollout_weights: mode is 'clip'"),
    (lambda: weigh(X, X, level="token"), ValueError, "rollout_weights: level is 'token'"),
    (lambda: weigh(X, X, threshold=0.5), ValueError, "rollout_weights: threshold is 0.5"),
    (lambda: gaussian.kl(STEP, X, FIRST), ValueError, r"kl: v_ref has shape \[1, 4\]"),
    (lambda: gaussian.mean(STEP, S[0], S[0]), ValueError, r"mean: x has shape \[\], expected \[B, \*event\]"),
    (lambda: gaussian.mean(STEP._replace(b=S[:2]), X, X), ValueError, r"mean: b has shape \[2\], expected \[\] or \[3\]"),
    (lambda: gaussian.mean(STEP._replace(a=S[:1]), X, X), ValueError, r"a has shape \[1\], expected \[\] or \[3\]"),
    (lambda: gaussian.kl(STEP._replace(std=S[:, None]), X, X), ValueError, r"std has shape \[3, 1\]"),
    (lambda: gaussian.mean(STEP, INTS, X), TypeError, "mean: x is torch.int64, expected float16"),
    (lambda: gaussian.kl(STEP._replace(b=GROUP), X, X), TypeError, "kl: b is torch.int64, expected float16"),
    (lambda: gaussian.mean(Transition(1.0, S, S), X, X), TypeError, "mean: a is a float, expected a tensor"),
    (lambda: gaussian.mean(STEP, X.tolist(), X), TypeError, "mean: x is a list, expected a tensor"),
    (lambda: gaussian.log_prob(STEP, X, X, X, form="exact"), ValueError, "log_prob: form is 'exact'"),
    (lambda: gaussian.log_prob(STEP, X, X, X, reduction="none"), ValueError, "log_prob: reduction is 'none'"),
    (lambda: gaussian.kl(STEP, X, X, reduction="max"), ValueError, "kl: reduction is 'max'"),
    (lambda: transitions.ode(S, S[:2]), ValueError, r"ode: sigma_next has shape \[2\], expected \[\] or \[3\]"),
    (lambda: transitions.cps(S[:, None], S, eta=0.5), ValueError, r"cps: sigma_next has shape \[3\]"),
    (lambda: transitions.ode(GROUP, S), TypeError, "ode: sigma is torch.int64"),
    (lambda: transitions.flow_sde(S, S, eta=0.5, sigma_max=S[:2]), ValueError, r"flow_sde: sigma_max has shape \[2\]"),
    *(
        (partial(sampler, S, S, eta=eta), error, f"{name}: eta is {message}")
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
    ),
    *(
        (
            partial(sampler, torch.tensor([0.5, level]), torch.tensor([0.4 if level_next < level else 0.5, level_next])),
            ValueError,
            f"{name}: {message}",
        )
        for name, sampler in SDES
        for level, level_next, message in (
            (
                1000.0,
                980.0,
                r"sigma is 1000 at index 1, expected a noise level in \[0, 1\]: divide timesteps of 0 to 1000 by 1000",
            ),
            (0.5, -0.1, "sigma_next is -0.1 at index 1"),
            (float("nan"), 0.1, "sigma is nan at index 1"),
            (0.5, 0.8, "the noise level goes from 0.5 to 0.8 at index 1, expected falling levels, .*: flip the schedule"),
            (0.0, 0.0, "the noise level goes from 0 to 0 at index 1"),
        )
    ),
    *(
        (partial(transitions.ddim, torch.tensor(level), after, eta=0.5), ValueError, f"goes from {level:g} to {after:g}")
        for level, after in ((0.8, 0.5), (980.0, 1000.0), (1.0, 1.0), (0.0, 0.5))
    ),
    (lambda: transitions.wan_sde(S, S, eta=0.5, sigma_max=950.0), ValueError, "wan_sde: sigma_max is 950"),
    (
        lambda: walk(sigmas=sigmas.linear(4).flip(0), transition=partial(transitions.cps, eta=0.5)),
        ValueError,
        r"cps: the noise level goes from 0 to 0.25 at index 0, expected falling levels",
    ),
    (lambda: transitions.cps(S, S, eta=S[:2]), ValueError, r"cps: .* has shape \[[23]\], expected \[\] or \[[23]\]"),
    (lambda: transitions.bind("ode", S[0], S), ValueError, "bind: eta is .*ode draws no noise"),
    (lambda: surrogate(S, S, S, clip_low=S[:2]), ValueError, r"clipped_surrogate: clip_low has shape \[2\]"),
    (lambda: surrogate(S, S, S, clip_low=torch.tensor([0.1, -0.1, 0.1])), ValueError, "clip_low is -0.1"),
    (lambda: surrogate(S, S, S, clip_high=GROUP), TypeError, "clip_high is torch.int64"),
    (lambda: fold_in(0, GROUP), TypeError, r"fold_in: key is an int, expected a Key: .*key\(seed\)"),
    (lambda: random.normal(0, (3,)), TypeError, "key is an int"),
    (lambda: walk(transition=partial(transitions.cps, eta=0.5), key=0), TypeError, "key is an int, expected a Key"),
    (lambda: sigmas.sde_window(0, 4, 1), TypeError, "key is an int, expected a Key"),
    *(
        (partial(function, group=[0, 0, 1]), TypeError, rf"{name}: group is a list, .*: use torch.tensor\(group\)")
        for name, function in (
            ("group_advantages", partial(advantages.group_advantages, S)),
            ("multi_reward_advantages", partial(advantages.multi_reward_advantages, X, torch.ones(4))),
            ("best_and_worst", partial(dpo.best_and_worst, S)),
            ("group_weight", partial(dgpo.group_weight, X)),
        )
    ),
    (lambda: transitions.cps(S, S, eta=1.5), ValueError, r"cps: eta is 1.5, expected .* in \[0, 1\]"),
    (lambda: flow_matching.interpolate(X, FIRST, 0.5), ValueError, r"interpolate: noise has shape \[1, 4\]"),
    (lambda: flow_matching.interpolate(X, X, S[:2]), ValueError, r"interpolate: sigma has shape \[2\]"),
    (lambda: flow_matching.interpolate(X, X, S[:, None]), ValueError, r"interpolate: sigma has shape \[3, 1\]"),
    (lambda: flow_matching.velocity_error(X, FIRST), ValueError, r"velocity_error: target has shape \[1, 4\]"),
    (lambda: flow_matching.velocity_error(INTS, X), TypeError, "velocity_error: v is torch.int64"),
    (lambda: surrogate(S, S[:1], S), ValueError, r"clipped_surrogate: log_prob_old has shape \[1\]"),
    (lambda: surrogate(S, S, X), ValueError, r"clipped_surrogate: advantage has shape \[3, 4\]"),
    (lambda: surrogate(S[0], S[0], S[0]), ValueError, r"clipped_surrogate: log_prob has shape \[\]"),
    (lambda: surrogate(S, S, GROUP), TypeError, "clipped_surrogate: advantage is torch.int64"),
    (lambda: surrogate(S, S, S, clip_low=1.1), ValueError, r"clip_low is 1.1, expected .* in \[0, 1\]"),
    (lambda: surrogate(S, S, S, clip_high=-1.0), ValueError, "clip_high is -1.0, expected a finite number >= 0"),
    (lambda: surrogate(S, S, S, clip_low="1"), TypeError, "clip_low is a str, expected a number"),
    (lambda: advantages.group_advantages(X, GROUP), ValueError, r"group_advantages: reward has shape \[3, 4\]"),
    (lambda: advantages.group_advantages(S, GROUP[:2]), ValueError, r"group has shape \[2\], expected \[3\]"),
    (lambda: advantages.group_advantages(S, GROUP[:1]), ValueError, r"group has shape \[1\], expected \[3\]"),
    (lambda: advantages.group_advantages(S, S), TypeError, "group is torch.float32, expected an integer dtype"),
    (lambda: advantages.group_advantages(S, S > 0), TypeError, "group is torch.bool"),
    (lambda: advantages.group_advantages(GROUP, GROUP), TypeError, "reward is torch.int64"),
    (lambda: advantages.group_advantages(S, GROUP, scale="std"), ValueError, "group_advantages: scale is 'std'"),
    (lambda: advantages.group_advantages(S / 0, GROUP), ValueError, r"not finite at indices \[0, 1, 2\]"),
    (lambda: advantages.multi_reward_advantages(X, S, GROUP), ValueError, r"multi_reward_advantages: rewards \[3, 4\]"),
    (lambda: advantages.multi_reward_advantages(S, S, GROUP), ValueError, r"rewards \[3\] and weights \[3\]"),
    (lambda: key(0.5), TypeError, "key: seed is a float, expected an int"),
    (lambda: key(True), TypeError, "key: seed is a bool"),
    (lambda: key(-1), ValueError, r"key: seed is -1, expected 0 <= seed < 2\^64"),
    (lambda: key(2**64), ValueError, "key: seed is 18446744073709551616"),
    (lambda: fold_in(key(0), S), TypeError, "fold_in: data is torch.float32, expected an integer dtype"),
    (lambda: fold_in(key(0), S > 0), TypeError, "fold_in: data is torch.bool"),
    (lambda: fold_in(key(0), 1.5), TypeError, "fold_in: data is a float"),
    (lambda: fold_in(key(0), True), TypeError, "fold_in: data is a bool"),
    (lambda: fold_in(key(0), -1), ValueError, r"fold_in: data is -1, expected 0 <= data < 2\^63"),
    (lambda: fold_in(key(0), 2**63), ValueError, "fold_in: data is 9223372036854775808"),
    (lambda: fold_in(key(0), GROUP[:, None]), ValueError, r"fold_in: data has shape \[3, 1\]"),
    (lambda: fold_in(fold_in(key(0), GROUP), GROUP[:1]), ValueError, r"fold_in: data has shape \[1\]"),
    (lambda: random.normal(fold_in(key(0), GROUP), (2, 5)), ValueError, r"shape is \[2, 5\]"),
    (lambda: sigmas.linear(0), ValueError, "0 steps"),
    (lambda: sigmas.linear(1.5), ValueError, "1.5 steps"),
    (lambda: sigmas.shifted(4, -1.0), ValueError, "shifted: shift is -1.0"),
    (lambda: sigmas.shifted(4, 0.0), ValueError, "shift"),
    (lambda: sigmas.shifted(4, "3"), TypeError, "shifted: shift is a str"),
    (lambda: sigmas.dynamic_shift(4, 256, kind="cosine"), ValueError, "dynamic_shift: kind is 'cosine'"),
    (lambda: ema.update({"w": X}, {"w": X}, 2.0), ValueError, r"ema.update: decay is 2.0, expected .* in \[0, 1\]"),
    (
        lambda: walk(transition=partial(transitions.dance_sde, eta=0.5), record=table.Record(dtype=torch.int32)),
        TypeError,
        "record.dtype is torch.int32, expected a floating-point dtype",
    ),
    (lambda: table.Record(form="densty"), checks.FieldError, "record.form is 'densty'"),
    (lambda: table.Record(reduction="max"), checks.FieldError, "record.reduction is 'max', expected one of 'mean', 'sum'"),
    (lambda: walk(transition=partial(transitions.dance_sde, eta=0.5), key=fold_in(key(0), GROUP[:2])), ValueError, "shape"),
    (
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
    *(
        (partial(ema.update, {"w": X}, {"w": X}, decay), ValueError, "ema.update: decay is")
        for decay in (-0.1, 1.1, float("nan"))
    ),
    (lambda: advantages.group_advantages(S, GROUP, ddof=2), ValueError, "ddof is 2, expected 0 or 1"),
    (lambda: sigmas.sde_window(fold_in(key(0), GROUP), 4, 2), TypeError, "expected one key on the host"),
    (lambda: crd.crd_loss(S, S, S, beta=0.0, scale=1.0), ValueError, "crd_loss: beta is 0"),
    (lambda: dgpo.dgpo_loss(S, S, S, S, clip_low=2, clip_high=0.1), ValueError, "dgpo_loss: clip_low is 2"),
    (lambda: dgpo.preference_margin(S, S, S, beta=0), ValueError, "preference_margin: beta is 0"),
    (lambda: dpo.clip_log_ratio(S, S, eps=1), ValueError, "clip_log_ratio: eps is 1"),
    (lambda: dpo.d3po_loss(S, S, S, beta=0), ValueError, "d3po_loss: beta is 0"),
    (lambda: checks.check_number("f", "x", -1.0, low=0), ValueError, "f: x is -1.0, expected a finite number >= 0"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), CASES, ids=[f"{number} {case[2]}" for number, case in enumerate(CASES)]
)
def test_a_check(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error  # not a subclass: torch's own errors are RuntimeErrors
    assert "\n" not in str(caught.value)


def test_values_and_views_that_pass() -> None:
    for value in (0, 1, 0.5):
        checks.check_number("f", "x", value, low=0, high=1)
    checks.check_number("f", "x", -1e300)
    assert checks.per_sample(S, torch.zeros(3, 4, 5)).shape == (3, 1, 1)
    assert checks.per_sample(S, S).shape == (3,)
    assert checks.per_sample(S[0], X).shape == ()


# torch's table of forward-mode decompositions, imported at the first jvp, still scripts them.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
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


Sampler = Literal["flow_sde", "dance_sde", "cps"]


@dataclass(frozen=True)
class Inner:
    """A dataclass of settings."""


@dataclass(frozen=True)
class Other:
    """Another one."""


@dataclass(frozen=True)
class RunConfig:
    sampler: Sampler = "cps"
    solver: Literal["euler", "dpmpp_2m"] | None = None
    order: Literal[1, 2] = 1
    dtype: Literal["auto"] | int = "auto"
    forms: tuple[Literal["density", "unscaled"], ...] = ()
    steps: int = 10
    eta: float = 0.5
    clip: float | None = None
    shared: bool = False
    name: str = ""
    inner: Inner = Inner()
    choice: Inner | Other | None = None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sampler": "flow-sde"}, r"^run\.sampler is 'flow-sde', expected one of .* \(did you mean 'flow_sde'\?\)$"),
        ({"sampler": "CPS"}, r"did you mean 'cps'\?"),
        ({"sampler": "zzz"}, r"expected one of 'flow_sde', 'dance_sde', 'cps'$"),
        ({"sampler": None}, "run.sampler is None, expected one of"),
        ({"solver": "heun"}, r"run\.solver is 'heun', expected one of 'euler', 'dpmpp_2m', None$"),
        ({"order": True}, r"run\.order is True, expected one of 1, 2$"),
        ({"order": "1"}, r"run\.order is '1', expected one of 1, 2$"),
        ({"dtype": "auot"}, r"run\.dtype is 'auot', expected 'auto' \(did you mean 'auto'\?\) or an integer$"),
        ({"forms": ("density", "unscald")}, r"run\.forms is 'unscald', .*did you mean 'unscaled'"),
    ],
)
def test_a_value_that_is_no_literal_of_its_field_is_named_with_the_nearest(values: dict[str, Any], message: str) -> None:
    refuses(message, checks.check_fields, RunConfig(**values))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"steps": "10"}, TypeError, r"^run\.steps is a str, expected an integer$"),
        ({"steps": 2.0}, TypeError, r"run\.steps is a float, expected an integer"),
        ({"steps": True}, TypeError, r"run\.steps is a bool, expected an integer"),
        ({"steps": 0}, ValueError, r"run\.steps is 0, expected an integer >= 1$"),
        ({"eta": "0.5"}, TypeError, r"run\.eta is a str, expected a number"),
        ({"eta": True}, TypeError, r"run\.eta is a bool, expected a number"),
        ({"eta": None}, TypeError, r"run\.eta is a NoneType, expected a number"),
        ({"eta": math.nan}, ValueError, r"run\.eta is nan, expected a finite number in \[0, 1\]"),
        ({"eta": 1.5}, ValueError, r"run\.eta is 1.5, expected a finite number in \[0, 1\]"),
        ({"dtype": True}, TypeError, r"^run\.dtype is a bool, expected an integer$"),
        ({"dtype": 0}, ValueError, r"^run\.dtype is 0, expected an integer >= 1$"),
        ({"clip": math.inf}, ValueError, r"run\.clip is inf, expected a finite number of any size"),
        ({"shared": "no"}, TypeError, r"run\.shared is a str, expected True or False"),
        ({"shared": 1}, TypeError, r"run\.shared is an int, expected True or False"),
        ({"inner": Other()}, TypeError, r"^run\.inner is an Other, expected Inner$"),
        ({"inner": None}, TypeError, r"^run\.inner is a NoneType, expected Inner$"),
        ({"choice": "none"}, TypeError, r"^run\.choice is a str, expected Inner or Other or None$"),
    ],
)
def test_a_field_of_another_type_or_out_of_bounds_is_named(
    values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checks.check_fields(RunConfig(**values), steps=(1, math.inf), eta=(0, 1), dtype=(1, math.inf))


def test_values_of_the_fields_types_pass() -> None:
    for config in (
        RunConfig(),
        RunConfig(sampler="flow_sde", solver="euler", order=2, dtype=3, forms=("density", "unscaled"), eta=1, clip=0.1),
        RunConfig(choice=Other()),
    ):
        checks.check_fields(config, steps=(1, 10), eta=(0, 1), dtype=(1, 10))


def test_the_owner_of_a_value_is_named() -> None:
    refuses(r"^rollout\.sampler is 'sde'", checks.check_fields, RunConfig(sampler="sde"), "rollout")
    refuses("^log_prob: form is 'densty'", checks.check_choice, "log_prob", "form", "densty", ("density", "unscaled"))
    with pytest.raises(TypeError, match=r"^shifted: shift is a bool, expected a number$"):
        checks.check_number("shifted", "shift", True)
    refuses(r"^shifted: shift is 0, expected a finite number >= 1$", checks.check_number, "shifted", "shift", 0, low=1)
    checks.check_number("shifted", "shift", 1, low=1)
