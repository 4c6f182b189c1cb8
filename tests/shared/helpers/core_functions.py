"""The table of all public functions of core: how each is called, for `core/test_composes.py`."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from helpers.tables import normals
from torch import Tensor

import fluvial.core
from fluvial.core import (
    adjoint,
    advantages,
    adversarial,
    awm,
    checks,
    correction,
    crd,
    dgpo,
    distill,
    dpo,
    ema,
    flow_matching,
    gardo,
    gaussian,
    guidance,
    nft,
    policy,
    random,
    rollout,
    sigmas,
    step,
    table,
    transitions,
    types,
)
from fluvial.core.random import Key
from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Transition

BATCH, EVENT, STEPS = 4, (3, 2), 3
GRID = torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
GROUP = torch.tensor([7, 2, 7, 2])
LEVELS = "sigma sigma_next"


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function with tensors.

    Args:
        name: "module.function variant".
        call: `call(**arguments)` returns a tree of tensors.
        names: names of the tensors; `_drawn` says what each stands for.
        numbers: hyper-parameters, each with a value, passed as tensors `[B]`.
        still: names of the arguments without a gradient; "all" where no result has one.
        held: what the function holds constant in its derivative, which differences do not.
        not_compiled: why it makes no sense in a graph.
    """

    name: str
    call: Callable[..., Any]
    names: str
    numbers: dict[str, float] = field(default_factory=dict)
    still: str = ""
    held: str = ""
    not_compiled: str = ""

    def arguments(self, seed: int = 0) -> dict[str, Tensor]:
        """Return the arguments, in float64, in the range that an update meets; other seeds give other values."""
        drawn = {name: _drawn(name, 100 * seed + place) for place, name in enumerate(self.names.split())}
        scale = 1 + 0.1 * torch.sigmoid(normals(100 * seed + 99, BATCH))
        return drawn | {name: value * scale for name, value in self.numbers.items()}

    def learned(self) -> list[str]:
        names = [name for name, tensor in self.arguments().items() if tensor.is_floating_point()]
        return [] if self.still == "all" else [name for name in names if name not in self.still.split()]


def _drawn(name: str, seed: int) -> Tensor:
    if name in ("one_id", "one_low", "one_high"):
        return torch.tensor(seed * 5 + 3)
    if name in ("ids", "low", "high"):
        return torch.arange(BATCH) * (seed + 3) + seed
    event = EVENT if name[0] in "vx" or name in ("noise", "target", "final", "correction", "reference") else ()
    tensor = normals(
        seed, BATCH, *{"rewards": (2,), "margin": (2,), "steps_old": (3,), "steps_other": (3,)}.get(name, event)
    )
    unit = torch.sigmoid(tensor)
    if name in ("sigma", "alpha_bar_next"):
        return 0.55 + 0.4 * unit
    if name in ("sigma_next", "alpha_bar", "a", "b", "std", "t", "reward_prob"):
        return 0.1 + 0.4 * unit
    if name.startswith("err"):
        return torch.exp(tensor / 2)
    if name == "dt":
        return -0.1 - unit
    return tensor / 5 if name.startswith(("log", "steps")) else tensor


def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
    return 0.5 * x - level[:, None, None] * (1 + step)


def floats(trajectory: Trajectory) -> tuple[Tensor, ...]:
    return trajectory.x_next, trajectory.log_prob, trajectory.final


class Scheduler(NamedTuple):
    sigmas: Tensor
    timesteps: range


def scheduler(sigma: Tensor) -> Scheduler:
    return Scheduler(torch.cat([sigma.sort(descending=True).values, sigma.new_zeros(1)]), range(BATCH))


def sampled(sigma_next: Tensor, *, name: str = "flow_sde", eta: Tensor | float = 0.7, **options: Any) -> tuple[Tensor, ...]:
    grid = GRID.flip(0) * 0.9 + 0.05 if name == "ddim" else GRID
    x = sigma_next[:, None, None] * torch.ones(BATCH, *EVENT, dtype=torch.float64)
    sampler = transitions.bind(name, eta, grid)
    still = partial(transitions.ddim, eta=0.0) if name == "ddim" else transitions.ode
    record = options.pop("record", [0, 1])
    run = partial(rollout.rollout, velocity, x, grid, transition=sampler, deterministic=still, record=record)
    return floats(run(**{"key": random.key(3), **options}))


def _added(t: Tensor) -> Tensor:
    """Return a loss with a KL, both in the dtype that a surrogate computes in."""
    wide = t if t.dtype == torch.float64 else t.float()
    return step.add_kl(wide, policy.PolicyInfo(wide, wide, wide, wide, wide), wide, wide)[0]


def planned(window: Any = None, **options: Any) -> table.StepPlan:
    sampler = transitions.bind("flow_sde", 0.7, GRID)
    return table.plan(GRID, sampler, batch=BATCH, window=window, **options)


WINDOWS = torch.tensor([[0, 1], [1, 2], [0, 2], [0, 1]])
PLAN = planned(WINDOWS)


def _rising(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a sample, noise, and the levels of a falling step, from the lower of which it is noised."""

    def call(x: Tensor, noise: Tensor, sigma: Tensor, sigma_next: Tensor) -> Any:
        return function(x, noise, sigma_next, sigma)

    return call


def _step(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    def call(a: Tensor, b: Tensor, std: Tensor, **rest: Tensor) -> Any:
        return function(Transition(a, -b, std), *(rest.pop(name) for name in names), **rest)

    return call


def weigh_steps(steps_old: Tensor, steps_other: Tensor, **options: Any) -> Any:
    return correction.rollout_weights(steps_old, steps_other, threshold=1.2, **options)


def _policy(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    return _step(lambda step, *pairs, **rest: function(*pairs[:3], step, *pairs[3:], **rest), *PAIRS.split(), *names)


def _keyed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(**arguments: Tensor) -> Any:
        low, high = (arguments.pop(next(name for name in arguments if name.endswith(word))) for word in ("low", "high"))
        return function(Key(low, high), **arguments)

    return call


def _scaled(std: Tensor, v: Tensor, kl_coef: Tensor) -> Tensor:
    scale = step.kl_scale(Transition(std, std, std), v, v_ref=v, kl_coef=kl_coef, kl_weight="mse", dt=None)
    return std * scale


PAIRS = "log_prob log_prob_old advantage"
CLIPS = {"clip_low": 0.03, "clip_high": 0.02}  # within the ratios that are drawn
ONE = "one_low one_high"  # the words of one key
TAKEN = Transition(*(torch.tensor(value, dtype=torch.float64) for value in (0.9, -0.2, 0.3)))
INFO, SCORED = "diagnostics", "the sample that is scored"
group_advantages = partial(advantages.group_advantages, group=GROUP)
weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
log_probs = product(gaussian.FORMS, gaussian.REDUCTIONS)
stochastic = [name for name in transitions.SAMPLERS if name != "ode"]
debug = table.Record([1], velocity=True, debug=True)
taken = partial(rollout.unroll, velocity, plan=PLAN, key=random.key(1))

# Functions that take no tensor: one row calls them all, so that they are known to work within each transform.
HOST: dict[str, Callable[[], Any]] = {
    "ema.warm_up_decay": lambda: ema.warm_up_decay(0.9, 3),
    "random.key": lambda: random.key(2**40 + 1),
    "random.check_key": lambda: random.check_key("f", random.key(0)),
    "random.host_uniforms": lambda: random.host_uniforms(random.key(5), 6),
    "random.permute": lambda: random.permute(random.key(5), 3, 10),
    "sigmas.sde_window": lambda: sigmas.sde_window(random.key(3), 9, 2),
    "sigmas.sde_steps": lambda: sigmas.sde_steps(random.key(3), 9, 2),
    "sigmas.moving_window": lambda: sigmas.moving_window(5, 9, 2, every=2, decay=0.1),
    "transitions.sampler_name": lambda: len(transitions.sampler_name(partial(transitions.cps, eta=0.5))),
    "checks.check_choice": lambda: checks.check_choice("f", "x", "a", ("a", "b")),
    "checks.type_of": lambda: len(checks.type_of(3)),
}
# Checks of a tensor, which one row makes all of.
CHECKS: dict[str, Callable[[Tensor], object]] = {
    "advantages.check_rewards": lambda t: advantages.check_rewards("f", t, GROUP),
    "gaussian.check_stochastic": lambda t: gaussian.check_stochastic("f", t),
    "nft.check_nft_numbers": lambda t: nft.check_nft_numbers(beta=t, adv_clip=2.0, weight_min=t, batch=BATCH),
    "sigmas.check_sigmas": lambda t: sigmas.check_sigmas(scheduler(t).sigmas),
    "step.check_guidance": lambda t: step.check_guidance("f", t, 2.0),
    "transitions.check_eta": lambda t: transitions.check_eta("f", "cps", t),
    "checks.check_same_shape": lambda t: checks.check_same_shape("f", x=t, y=t),
    "checks.check_same_device": lambda t: checks.check_same_device("f", x=t, y=t),
    "checks.check_per_sample": lambda t: checks.check_per_sample("f", BATCH, t=t),
    "checks.check_group": lambda t: checks.check_group("f", GROUP, len(t)),
    "checks.check_number": lambda t: checks.check_number("f", "t", t, low=0, high=1, batch=BATCH),
}


def call_host_functions(x: Tensor) -> Tensor:
    """Return the tensor times a number of what the functions without tensors return."""
    results = [function() for function in HOST.values()]
    numbers = [n for each in results for n in (each if isinstance(each, list | tuple | range) else [each])]
    return x.double() * (1 + sum(number for number in numbers if isinstance(number, int | float)))


def make_checks(t: Tensor) -> Tensor:
    for check in CHECKS.values():
        check(t)
    return 2 * t.double()


def check_record(x: Tensor) -> Tensor:
    checks.check_fields(table.RECORD)
    return 2 * x


ROWS = (
    FunctionCall("host functions", call_host_functions, "x"),
    FunctionCall("checks of arguments", make_checks, "t"),
    FunctionCall("adjoint.lean_adjoint", _step(adjoint.lean_adjoint, "v", "v_ref"), "a b std v v_ref", still="std"),
    FunctionCall(
        "adjoint.adjoint_loss",
        _step(adjoint.adjoint_loss, "v", "v_ref", "v_old"),
        "a b std v v_ref v_old",
        still="a b std v_ref v_old",
    ),
    FunctionCall("adversarial.generator_loss", adversarial.generator_loss, "logit"),
    FunctionCall("adversarial.discriminator_loss", adversarial.discriminator_loss, "logit logit_real"),
    FunctionCall("advantages.group_advantages", group_advantages, "reward"),
    FunctionCall("advantages.group_advantages batch", partial(group_advantages, scale="batch"), "reward"),
    FunctionCall(
        "advantages.multi_reward_advantages",
        partial(advantages.multi_reward_advantages, weights=weights, group=GROUP),
        "rewards",
    ),
    FunctionCall(
        "advantages.edge_advantages",
        partial(advantages.edge_advantages, edge=torch.tensor([[2, 2], [0, 0], [2, 1], [0, 3]]), tree=GROUP),
        "reward",
    ),
    FunctionCall("advantages.turning_point_gains", advantages.turning_point_gains, "rewards"),
    *(
        FunctionCall(
            f"awm.awm_log_prob {kind}",
            partial(awm.awm_log_prob, weighting=kind),
            "error t",
            {"delta": 0.1, "power": 0.25},
            still,
        )
        for kind, still in zip(awm.WEIGHTINGS, ("t delta power", "delta power", "delta power", "power", ""), strict=True)
    ),
    *(
        FunctionCall(
            f"correction.rollout_weights {mode} {level}",
            partial(weigh_steps, mode=mode, level=level),
            "steps_old steps_other",
            still="all",
        )
        for mode, level in product(correction.MODES, correction.LEVELS)
    ),
    FunctionCall(
        "crd.implicit_reward",
        crd.implicit_reward,
        "v v_old target",
        {"weight_min": 0.1},
        "v_old target weight_min",
        "errors' sizes",
    ),
    *(
        FunctionCall(
            f"crd.crd_loss {match}",
            partial(crd.crd_loss, match=match),
            "implicit centre reward_centred",
            {"beta": 0.5, "scale": 2.0},
            "centre reward_centred",
        )
        for match in ("mse", "bce")
    ),
    FunctionCall("dgpo.group_weight", partial(dgpo.group_weight, group=GROUP), "margin"),
    FunctionCall("dgpo.preference_margin", dgpo.preference_margin, "error error_ref advantage", {"beta": 0.5}),
    FunctionCall(
        "dgpo.dgpo_loss",
        dgpo.dgpo_loss,
        "error error_old advantage weight",
        CLIPS,
        "error_old weight clip_low clip_high",
        "the ratio",
    ),
    FunctionCall("distill.mean_kl", _step(distill.mean_kl, "v", "v_teacher"), "a b std v v_teacher", still="a v_teacher"),
    FunctionCall("distill.velocity_mse", distill.velocity_mse, "v v_teacher", still="v_teacher"),
    *(
        FunctionCall(
            f"distill.scaled_mse relative={relative}",
            partial(distill.scaled_mse, relative=relative),
            "v v_teacher",
            {"scale": 0.5},
            "v_teacher",
            "the mean distance" if relative else "",
        )
        for relative in (False, True)
    ),
    FunctionCall(
        "dpo.dpo_loss",
        dpo.dpo_loss,
        "err_win err_lose err_win_ref err_lose_ref",
        {"beta": 3.0, "lose_weight": 0.7},
        "err_win_ref err_lose_ref",
        INFO,
    ),
    *(
        FunctionCall(
            f"dpo.kto_loss {utility}",
            partial(dpo.kto_loss, utility=utility),
            "gain baseline label",
            {"beta": 0.5},
            "baseline label",
            INFO,
        )
        for utility in dpo.UTILITIES
    ),
    FunctionCall(
        "dpo.mapo_loss", dpo.mapo_loss, "err_win err_lose", {"beta": 0.5, "temperature": 2.0, "snr": 0.5}, held=INFO
    ),
    FunctionCall("dpo.clip_log_ratio", dpo.clip_log_ratio, "log_prob log_prob_ref", {"eps": 0.1}),
    FunctionCall(
        "dpo.d3po_loss",
        dpo.d3po_loss,
        "log_ratio log_ratio_other preferred",
        {"beta": 0.7},
        "log_ratio_other",
        "half of the pair's loss",
    ),
    FunctionCall("dpo.best_and_worst", partial(dpo.best_and_worst, group=GROUP), "reward", still="all"),
    FunctionCall(
        "gardo.diverse_advantages",
        lambda reward, rewards: gardo.diverse_advantages(reward, rewards, torch.zeros_like(GROUP)),
        "reward rewards",
    ),
    *(
        FunctionCall(
            f"gardo.rank_doubt {doubted}",
            lambda reward, rewards, doubted=doubted: gardo.rank_doubt(reward, rewards, doubted=doubted),
            "reward rewards",
            still="all",
        )
        for doubted in gardo.DOUBTED
    ),
    FunctionCall("gardo.doubt_gate", lambda reward: gardo.doubt_gate(reward, share=0.5), "reward", still="all"),
    FunctionCall("ema.init", lambda x: ema.init({"w": x}), "x", still="all"),
    FunctionCall("ema.update", lambda x, x_next: ema.update({"w": x}, {"w": x_next}, 0.9), "x x_next", still="x_next"),
    FunctionCall("flow_matching.interpolate", flow_matching.interpolate, "x0 noise sigma"),
    FunctionCall("flow_matching.recover", flow_matching.recover, "x v noise sigma_next sigma"),
    FunctionCall("flow_matching.velocity_error", flow_matching.velocity_error, "v target"),
    *(
        FunctionCall(
            f"distill.matching_loss {form}",
            partial(distill.matching_loss, form=form),
            "x0 correction reference",
            {"huber": 0.1},
            "correction reference" + (" huber" if form != "huber" else ""),
            "the scale",
        )
        for form in distill.MATCH_FORMS
    ),
    *(
        FunctionCall(f"distill.{name}", _rising(getattr(distill, name)), f"x noise {LEVELS}")
        for name in ("renoise", "ambient_velocity", "noise_weight")
    ),
    FunctionCall(
        "distill.ambient_weight", lambda sigma, sigma_next: distill.ambient_weight(sigma_next, sigma, largest=0.9), LEVELS
    ),
    FunctionCall("distill.consistency_loss", lambda x0, x, target: distill.consistency_loss(x0, x, target), "x0 x target"),
    FunctionCall("distill.snr_weight", partial(distill.snr_weight, largest=5.0), "sigma"),
    FunctionCall("gaussian.mean", _step(gaussian.mean, "x", "v"), "a b std x v", still="std"),
    FunctionCall("gaussian.sample", _step(gaussian.sample, "x", "v", "noise"), "a b std x v noise"),
    *(
        FunctionCall(
            f"gaussian.log_prob {form} {by}",
            _step(partial(gaussian.log_prob, form=form, reduction=by), "x", "v", "x_next"),
            "a b std x v x_next",
            still="std" if form == "unscaled" else "",
        )
        for form, by in log_probs
    ),
    FunctionCall("gaussian.draw", _step(gaussian.draw, "x", "v", "noise"), "a b std x v noise", held=SCORED),
    FunctionCall("gaussian.kl", _step(gaussian.kl, "v", "v_ref"), "a b std v v_ref", still="a"),
    FunctionCall("guidance.classifier_free", guidance.classifier_free, "v v_uncond", {"guidance": 2.0}),
    FunctionCall(
        "nft.nft_loss",
        nft.nft_loss,
        "v v_old x0 xt t reward_prob",
        {"beta": 0.3, "adv_clip": 5.0, "weight_min": 0.01},
        "v_old x0 xt weight_min",
        "errors' sizes",
    ),
    *(
        FunctionCall(
            f"nft.reward_prob {mode}",
            partial(nft.reward_prob, mode=mode),
            "advantage",
            {"adv_clip": 2.0},
            "advantage" if mode in ("one_only", "binary") else "",
        )
        for mode in nft.MODES
    ),
    FunctionCall("policy.clipped_surrogate", policy.clipped_surrogate, PAIRS, CLIPS, held=INFO),
    FunctionCall(
        "policy.noise_weighted_surrogate", policy.noise_weighted_surrogate, f"{PAIRS} std", CLIPS | {"scale": 1.7}, held=INFO
    ),
    FunctionCall(
        "policy.share_ratio",
        lambda steps_old, steps_other, used: policy.share_ratio(steps_old, steps_other, used[:, None].expand_as(steps_old)),
        "steps_old steps_other used",
    ),
    FunctionCall("policy.step_scale", _step(policy.step_scale), "a b std", still="a"),
    FunctionCall(
        "policy.guard_surrogate",
        _policy(policy.guard_surrogate, "v", "v_old", "dt"),
        f"a b std {PAIRS} v v_old dt",
        {"clip": 0.03},
        "a",
        INFO,
    ),
    FunctionCall(
        "policy.dppo_surrogate",
        _policy(policy.dppo_surrogate, "v", "v_old"),
        f"a b std {PAIRS} v v_old",
        {"kl_threshold": 0.5},
        "a b std v v_old kl_threshold",
        INFO,
    ),
    FunctionCall(
        "random.fold_in", _keyed(lambda key, ids: random.fold_in(random.fold_in(key, ids), 3)), "low high ids", still="all"
    ),
    FunctionCall("random.fold_in one", lambda ids: random.fold_in(random.key(2**40), ids), "ids", still="all"),
    FunctionCall(
        "random.fold_in 0-d",
        _keyed(lambda key, one_id: random.fold_in(random.fold_in(key, one_id), GROUP)),
        f"{ONE} one_id",
        still="all",
    ),
    FunctionCall("random.normal 0-d", _keyed(partial(random.normal, shape=(BATCH, 5))), ONE, still="all"),
    FunctionCall("step.sde_step 0-d", _keyed(lambda key, v: step.sde_step(TAKEN, v, v, key=key)), f"{ONE} v", held=SCORED),
    FunctionCall("rollout.scan 0-d", _keyed(lambda key, x: floats(rollout.scan(velocity, x, PLAN, key))), f"{ONE} x"),
    FunctionCall("random.sample_keys", _keyed(lambda key: random.sample_keys(key, BATCH)), "low high", still="all"),
    FunctionCall("random.philox", _keyed(lambda key: random.philox((key.low, 1, 0, 0), key)), "low high", still="all"),
    FunctionCall("random.bits", _keyed(partial(random.bits, shape=(BATCH, 5))), "low high", still="all"),
    FunctionCall("random.uniform", _keyed(partial(random.uniform, shape=(BATCH, 5))), "low high", still="all"),
    FunctionCall("random.normal", _keyed(partial(random.normal, shape=(BATCH, 5))), "low high", still="all"),
    FunctionCall(
        "random.step_noises",
        _keyed(lambda key: [*random.step_noises(key, [0, 2], (BATCH, *EVENT), torch.float64)]),
        "low high",
        still="all",
    ),
    FunctionCall("random.step_keys", _keyed(lambda key: [*random.step_keys(key, [0, 2], BATCH)]), "low high", still="all"),
    *(
        FunctionCall(f"rollout.rollout {name}", partial(sampled, name=name), "sigma_next", {"eta": 0.6})
        for name in stochastic
    ),
    FunctionCall(
        "rollout.rollout keys",
        _keyed(lambda key, sigma_next: sampled(sigma_next, key=key, window=[0, 1])),
        "low high sigma_next",
    ),
    FunctionCall("rollout.rollout part", partial(sampled, steps=range(1, 3), record=debug), "sigma_next"),
    FunctionCall("rollout.rollout all", partial(sampled, record=None), "sigma_next", {"eta": 0.6}),
    FunctionCall(
        "rollout.rollout windows",
        partial(sampled, window=WINDOWS, record=None),
        "sigma_next",
        not_compiled="steps are values: `plan` outside, `scan` inside",
    ),
    FunctionCall("rollout.scan", lambda x: floats(rollout.scan(velocity, x, PLAN, random.key(1))), "x"),
    FunctionCall("rollout.unroll", lambda x: [step.x_next for step in taken(x=x)], "x"),
    FunctionCall("rollout.stack", lambda x: floats(rollout.stack(PLAN, taken(x=x), x)), "x"),
    FunctionCall("rollout.wrap_samples", lambda final: rollout.wrap_samples(final).final * 2, "final"),
    FunctionCall("sigmas.linear", lambda x: x * sigmas.linear(3).sum(), "x"),
    FunctionCall("sigmas.shifted", lambda x: x * sigmas.shifted(3, 3.0).sum(), "x"),
    FunctionCall("sigmas.shifted_twice", lambda x: x * sigmas.shifted_twice(3, 3.0).sum(), "x"),
    FunctionCall("sigmas.dynamic_shift", lambda x: x * sigmas.dynamic_shift(3, 1024, shift_terminal=0.02).sum(), "x"),
    FunctionCall(
        "sigmas.from_scheduler",
        lambda sigma: sigmas.from_scheduler(scheduler(sigma)),
        "sigma",
        held="the rounding to float32",
    ),
    FunctionCall(
        "step.step_log_prob",
        _step(step.step_log_prob, "x", "v", "x_next"),
        "a b std x v x_next v_ref v_uncond",
        {"guidance": 2.0},
    ),
    FunctionCall("step.sde_step", _step(partial(step.sde_step, key=random.key(3)), "x", "v"), "a b std x v", held=SCORED),
    *(
        FunctionCall(
            f"step.policy_loss {weight}",
            _step(partial(step.policy_loss, kl_weight=weight), "x", "v", "x_next"),
            "a b std x v x_next log_prob_old advantage v_ref v_uncond dt",
            CLIPS | {"kl_coef": 0.5, "guidance": 2.0},
            "clip_high" if weight == "rate" else "clip_high dt",  # no ratio that is drawn is so large
            INFO,
        )
        for weight in step.KL_WEIGHTS
    ),
    FunctionCall("step.kl_scale", _scaled, "std v", {"kl_coef": 0.5}, "v kl_coef"),
    FunctionCall(
        "step.weigh_kl",
        lambda std, v, dt: step.weigh_kl(dt, 0.5, dt.abs(), Transition(std, std, std), v, v, "mean"),
        "std v dt",
        still="std v",
    ),
    FunctionCall("step.add_kl", _added, "t"),
    FunctionCall("step.kl_factor", lambda dt: step.kl_factor(Transition(dt, dt, dt), dt, "rate"), "dt"),
    FunctionCall("step.apply_guidance", partial(step.apply_guidance, "f"), "v v_uncond", {"guidance": 2.0}),
    FunctionCall("table.plan", lambda x: x * planned(record=[0, 1]).table.std.sum(), "x"),
    FunctionCall(
        "table.step_coefficients", lambda x: x * table.step_coefficients(transitions.ode, sigmas.linear(4)).b.sum(), "x"
    ),
    FunctionCall("table.mask", lambda x: x * table.mask(((0,), (1,)), 3, x.device).sum(), "x"),
    FunctionCall(
        "transitions.bind", lambda eta, **levels: transitions.bind("cps", eta, GRID)(*levels.values()), LEVELS, {"eta": 0.6}
    ),
    FunctionCall("transitions.ode", transitions.ode, LEVELS),
    FunctionCall("transitions.flow_sde", partial(transitions.flow_sde, sigma_max=0.97), LEVELS, {"eta": 0.6}),
    FunctionCall("transitions.wan_sde", transitions.wan_sde, LEVELS, {"eta": 0.6, "sigma_max": 0.9}),
    FunctionCall("transitions.dance_sde", transitions.dance_sde, LEVELS, {"eta": 0.6}),
    FunctionCall("transitions.cps", transitions.cps, LEVELS, {"eta": 0.6}),
    FunctionCall("transitions.ddim", transitions.ddim, "alpha_bar alpha_bar_next", {"eta": 0.6}),
    FunctionCall("types.to_device", lambda x: 2 * types.to_device(x, x.device), "x"),
    FunctionCall("checks.compute_dtype", lambda x: x.to(checks.compute_dtype("f", x=x)) * 2, "x"),
    FunctionCall("checks.match_tensors", lambda x: checks.match_tensors("f", x=x, y=2 * x), "x"),
    FunctionCall("checks.number", lambda t: 2 * checks.number("f", "t", t, t, low=0, high=1), "t"),
    FunctionCall(
        "checks.check_fields",
        check_record,
        "x",
        not_compiled="it reads the types of fields",
    ),
    FunctionCall("checks.can_look", lambda x: x * (3 if isinstance(checks.can_look(x), bool) else 0), "x"),
    FunctionCall("checks.clip", lambda t, low, high: checks.clip(t, low, high), "t", {"low": 0.2, "high": 0.4}),
    FunctionCall("checks.first_block", lambda t, x: checks.per_sample(checks.first_block(t), x) * x, "t x"),
    FunctionCall("checks.per_sample", lambda t, x: checks.per_sample(t, x) * x, "t x"),
)


def public() -> Iterator[str]:
    for module in pkgutil.iter_modules(fluvial.core.__path__):
        for name, function in vars(importlib.import_module(f"fluvial.core.{module.name}")).items():
            if inspect.isfunction(function) and function.__module__ == f"fluvial.core.{module.name}" and name[0] != "_":
                yield f"{module.name}.{name}"
