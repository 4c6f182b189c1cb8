"""Losses of published methods in float64, written from the formulas of the papers with plain tensor operations.

Nothing of fluvial is called here. A loss is a function of a `Scene`: what one optimizer update was made of, in float64.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# velocity(x, level, sample) of a policy: the network at each item, guided where the run is
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Scene:
    """What one update was made of: P items out of B samples, all in float64.

    Args:
        settings: settings of the published run.
        reward: `[B, K]`.
        group: index of each sample's group, `[B]`.
        sample: sample of each item, `[P]`.
        x, level: where the network is evaluated, `[P, *event]` and `[P]`.
        x_next, level_next: the recorded step, where there is one.
        x0, target: clean sample and noise - clean sample, where noise was put on samples.
        first, second: level 0 and level 1 of the schedule.
        policy, old, reference, average: velocities of the trained policy, of the one that made the rollout, of the base
            model, and of a moving average of the policy.
        levels, noise: schedule, and the noise of the steps that a reward's gradient flows through.
    """

    settings: Mapping[str, Any]
    reward: Tensor
    group: Tensor
    sample: Tensor
    x: Tensor
    level: Tensor
    x_next: Tensor | None
    level_next: Tensor | None
    x0: Tensor | None
    target: Tensor | None
    second: float
    policy: Velocity
    old: Velocity
    reference: Velocity
    average: Velocity  # moving average of the policy
    levels: Tensor  # of the whole schedule
    noise: Tensor | None  # [P, K, *event], of the last K steps, which a reward's gradient flows through

    def at(self, velocity: Velocity) -> Tensor:
        return velocity(self.x, self.level, self.sample)

    def extra(self, *names: str, default: Any = None) -> Any:
        extra = self.settings.get("loss_extra", {})
        return next((extra[name] for name in names if name in extra), default)


def mean(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1) / values[0].numel()


def spread(values: Tensor, like: Tensor) -> Tensor:
    """Return a number per item, ready to multiply samples."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def advantages(scene: Scene, *, default_ddof: int = 1, default_eps: float = 1e-4) -> Tensor:
    """Return the advantage of each sample by the run's own settings, with a loop over groups."""
    s, reward = scene.settings, scene.reward.sum(1)
    ddof, eps = s.get("advantage_std_ddof", default_ddof), s.get("advantage_eps", default_eps)

    def std(values: Tensor) -> float:
        centred = values - values.mean()
        return math.sqrt(float((centred**2).sum()) / max(len(values) - ddof, 1))

    out = torch.zeros_like(reward)
    for group in scene.group.unique():
        mine = scene.group == group
        within = s.get("advantage_scale", "group") == "group"
        if "stat_buffer_size" in s.get("loss_extra", {}):  # of all prompts, until a prompt has 16 rewards
            out[mine] = (reward[mine] - reward.mean()) / (std(reward) + eps)
            continue
        scale = std(reward[mine] if within else reward)
        # Flow-Factory takes the larger of the two.
        out[mine] = (reward[mine] - reward[mine].mean()) / (max(scale, eps) if eps == 1e-6 else scale + eps)
    clip, most = s.get("advantage_clip"), scene.extra("advantage_rescale_max")
    out = out if clip is None else out.clamp(-clip, clip)
    if most is None:
        return out
    assert clip is not None
    return out / clip * most


def gaussian(scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """Return (a, b, std) of each recorded step, x_next ~ N(a x + b v, std^2), from the run's sampler and noise."""
    s, now, then = scene.settings, scene.level, scene.level_next
    assert then is not None
    eta, dt, sampler = s.get("noise_level", 0.7), then - now, s["sampler"].partition(", then")[0]
    if sampler in ("flow_sde", "dance_sde", "wan_sde"):
        rate = torch.full_like(now, eta)
        if sampler == "wan_sde":  # sigma_min + (sigma_max - sigma_min) sigma, from the second level to the last, 0
            rate = scene.second * now
        if sampler == "flow_sde":  # a sqrt(sigma / (1 - sigma)), with the second level in place of sigma = 1
            rate = eta * (now / (1 - torch.where(now > 1 - 1e-6, scene.second, now))).sqrt()
        # dx = (v + rate^2 / (2 sigma) (x + (1 - sigma) v)) dt + rate dw
        return 1 + rate**2 / (2 * now) * dt, dt + rate**2 / (2 * now) * (1 - now) * dt, rate * (-dt).sqrt()
    if (
        s["sampler"] == "cps"
    ):  # x' = (1 - s') x0_hat + sqrt(s'^2 - std^2) x1_hat + std noise, x0_hat = x - s v, x1_hat = x0_hat + v
        std = then * math.sin(eta * math.pi / 2)
        rest = (then**2 - std**2).sqrt()
        return 1 - then + rest, -now * (1 - then) + (1 - now) * rest, std
    assert s["sampler"] == "ddim_eta"  # DDIM, eq. 12 and 16, with levels alpha_bar
    std = eta * ((1 - then) / (1 - now)).sqrt() * (1 - now / then).sqrt()
    return (then / now).sqrt(), (1 - then - std**2).sqrt() - (then * (1 - now) / now).sqrt(), std


def log_prob(scene: Scene, v: Tensor) -> Tensor:
    """Return the mean log-density of each recorded step; of Flow-CPS the negative squared error, as it publishes."""
    a, b, std = gaussian(scene)
    assert scene.x_next is not None
    error = mean((scene.x_next - spread(a, v) * scene.x - spread(b, v) * v) ** 2)
    if scene.settings["sampler"] == "cps":
        return -error
    return -error / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2


def clip(scene: Scene) -> tuple[float, float]:
    low, high = (scene.settings.get(f"ratio_clip_{side}", 1e-3) for side in ("low", "high"))
    return 1 - low, 1 + high


def grpo(scene: Scene) -> Tensor:
    """Flow-GRPO, DanceGRPO, DDPO: -min(rho A, clip(rho) A), with the KL of the Gaussian steps where the run has one."""
    s, v, advantage = scene.settings, scene.at(scene.policy), advantages(scene)[scene.sample]
    ratio = (log_prob(scene, v) - log_prob(scene, scene.at(scene.old))).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(*clip(scene)) * advantage)
    if s.get("kl_kind") == "mean_mse":  # Flow-CPS's code for SD3 does not divide by the variance
        _, b, _ = gaussian(scene)
        loss = loss + s["kl_coef"] * mean((spread(b, v) * (v - scene.at(scene.reference))) ** 2)
    if s.get("kl_kind") == "mean_gaussian" and s.get("kl_coef"):
        _, b, std = gaussian(scene)
        assert scene.level_next is not None
        # Flow-GRPO's code divides by the rate alone, which is the exact KL times |dt|.
        rate = std / (scene.level - scene.level_next).sqrt() if s["sampler"] == "flow_sde" else std
        loss = loss + s["kl_coef"] * mean((spread(b, v) * (v - scene.at(scene.reference))) ** 2) / (2 * rate**2)
    return kept(scene, loss, advantage)


def tempflow(scene: Scene) -> Tensor:
    """TempFlow-GRPO: Flow-GRPO's surrogate times 1.73 std (2.25 for SD3), with the exact KL of the steps."""
    v, advantage = scene.at(scene.policy), advantages(scene)[scene.sample]
    _, b, std = gaussian(scene)
    ratio = (log_prob(scene, v) - log_prob(scene, scene.at(scene.old))).exp()
    weighted = (2.25 if "2.25" in scene.settings["loss_weighting"] else 1.73) * std * advantage
    loss = -torch.minimum(ratio * weighted, ratio.clamp(*clip(scene)) * weighted)
    kl = mean((spread(b, v) * (v - scene.at(scene.reference))) ** 2) / (2 * std**2)
    return kept(scene, loss + scene.settings["kl_coef"] * kl, advantage)


def d3po(scene: Scene) -> Tensor:
    """D3PO: -log sigmoid(beta (log clip(rho_best) - log clip(rho_worst))), rho to the base model; one term per step."""
    eps, beta = scene.extra("eps"), scene.extra("d3po_beta")
    v, reference = scene.at(scene.policy), scene.at(scene.reference)
    ratio = (log_prob(scene, v) - log_prob(scene, reference)).exp()
    implicit = beta * ratio.clamp(1 - eps, 1 + eps).log()
    losses, reward = [], scene.reward.sum(1)
    for number in scene.group.unique():
        members = torch.nonzero(scene.group == number).flatten()
        best, worst = members[reward[members].argmax()], members[reward[members].argmin()]
        for level in scene.level.unique():
            at = scene.level == level
            margin = implicit[at & (scene.sample == best)] - implicit[at & (scene.sample == worst)]
            losses.append(-torch.nn.functional.logsigmoid(margin))
    return torch.cat(losses).mean()


def alignprop(scene: Scene) -> Tensor:
    """AlignProp: 0.01 |R(x_0) - 10|, x_0 by the last steps with gradient; R is 100 times the std of the image."""
    assert scene.noise is not None
    x, steps, count = scene.x, len(scene.levels) - 1, scene.noise.shape[1]
    for i, step in enumerate(range(steps - count, steps)):
        now, then = (scene.levels[at].expand(len(x)) for at in (step, step + 1))
        a, b, std = gaussian(replace(scene, level=now, level_next=then))
        v = scene.policy(x, now, scene.sample)
        x = spread(a, x) * x + spread(b, x) * v + spread(std, x) * scene.noise[:, i]
    reward = 100 * (x / 2 + 0.5).clamp(0, 1).flatten(1).std(1)
    return scene.extra("loss_coeff") * (reward - scene.extra("aesthetic_target")).abs().mean()


def guard(scene: Scene) -> Tensor:
    """GRPO-Guard: the log-ratio is centred, multiplied by the step's std, and the loss divided by |dt|."""
    v, old, advantage = scene.at(scene.policy), scene.at(scene.old), advantages(scene)[scene.sample]
    _, b, std = gaussian(scene)
    assert scene.level_next is not None
    centre = mean((spread(b, v) * (v - old)) ** 2) / (2 * std**2)
    ratio = ((log_prob(scene, v) - log_prob(scene, old) + centre) * std).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(*clip(scene)) * advantage) / (scene.level - scene.level_next)
    return kept(scene, loss, advantage)


def dppo(scene: Scene) -> Tensor:
    """Flow-DPPO: -rho A, without the pairs whose KL is above the threshold and whose ratio has moved A's way."""
    v, old, advantage = scene.at(scene.policy), scene.at(scene.old), advantages(scene)[scene.sample]
    _, b, std = gaussian(scene)
    kl = mean((spread(b, v) * (v - old)) ** 2) / (2 * std**2)
    ratio = (log_prob(scene, v) - log_prob(scene, old)).exp()
    away = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
    mask = (~(away & (kl >= scene.extra("kl_mask_threshold")))).to(v.dtype)
    return kept(scene, -mask.detach() * ratio * advantage, advantage)


def nft(scene: Scene) -> Tensor:
    """DiffusionNFT: r |v+ - target|^2 + (1 - r) |v- - target|^2 in terms of x0, each over its mean absolute error."""
    s, v, old = scene.settings, scene.at(scene.policy), scene.at(scene.old).detach()
    bound, beta = s["advantage_clip"], scene.extra("nft_beta", default=1.0)
    r = (advantages(scene)[scene.sample].clamp(-bound, bound) / bound / 2 + 0.5).clamp(0, 1)
    t, floor = spread(scene.level, v), scene.extra("adaptive_weight_floor", default=1e-5)
    assert scene.x0 is not None
    terms = []
    for sign in (1, -1):
        error = scene.x - t * (old + sign * beta * (v - old)) - scene.x0
        terms.append(mean(error**2) / mean(error.detach().abs()).clamp(min=floor))
    loss = bound * (r * terms[0] + (1 - r) * terms[1]) / beta
    return (loss + velocity_kl(scene, v)).mean()


def awm(scene: Scene) -> Tensor:
    """AWM: -min(rho A, clip(rho) A), rho of the generalised Huber loss of the matching error times t."""
    v, old, advantage = scene.at(scene.policy), scene.at(scene.old), advantages(scene)[scene.sample]
    target = scene.target
    assert target is not None
    power = scene.extra("ghuber_power", default=0.25)

    def matching(of: Tensor) -> Tensor:
        return -scene.level * ((mean((of - target) ** 2) + 1e-10) ** power - 1e-10**power) / power

    ratio = (matching(v) - matching(old)).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(*clip(scene)) * advantage)
    if coef := scene.extra("ema_kl_coef", "ema_kl_beta"):
        loss = loss + coef * mean((v - scene.at(scene.average)) ** 2)
    return (loss + velocity_kl(scene, v)).mean()


def dpo(scene: Scene) -> Tensor:
    """Diffusion-DPO: -log sigmoid(-beta / 2 ((e_w - e_w_ref) - (e_l - e_l_ref))); items are winner, loser, winner, ..."""
    v, reference = scene.at(scene.policy), scene.at(scene.reference)
    assert scene.target is not None
    gain = mean((v - scene.target) ** 2) - mean((reference - scene.target) ** 2)
    return -torch.nn.functional.logsigmoid(-scene.extra("dpo_beta", "beta") / 2 * (gain[0::2] - gain[1::2])).mean()


def dgpo(scene: Scene) -> Tensor:
    """DGPO: sigmoid(sum over the group of A beta (e - e_ref) / G) A e; beyond the clip of exp(e_old - e) no gradient."""
    v, advantage = scene.at(scene.policy), advantages(scene)[scene.sample]
    assert scene.target is not None
    error, old, reference = (mean((of - scene.target) ** 2) for of in (v, scene.at(scene.old), scene.at(scene.reference)))
    group, weight = scene.group[scene.sample], torch.zeros_like(error)
    for level in scene.level.unique():
        for number in group.unique():
            mine = (scene.level == level) & (group == number)
            terms = advantage[mine] * scene.extra("dpo_beta") * (error[mine] - reference[mine]).detach()
            weight[mine] = torch.sigmoid(terms.sum() / int(mine.sum()))
    ratio, (low, high) = (old - error).exp().detach(), clip(scene)
    free = ~torch.where(advantage > 0, ratio > high, ratio < low)
    error = torch.where(free, error, error.detach())
    return (weight * advantage * error + velocity_kl(scene, v)).mean()


def crd(scene: Scene) -> Tensor:
    """CRD: (beta (r - mean r) - (R - mean R))^2, and a KL that weighs good samples more; items are level by level."""
    s, v, old = scene.settings, scene.at(scene.policy), scene.at(scene.old)
    assert scene.target is not None
    bound, beta, coef = s["advantage_clip"], scene.extra("crd_beta"), s["kl_coef"]
    reward = (advantages(scene).clamp(-bound, bound) / bound / 2 + 0.5)[scene.sample]
    fits = []
    for of in (v, old):
        off = of - scene.target
        fits.append(mean(off**2) / mean(off.detach().abs()).clamp(min=1e-5))
    implicit, total = fits[1] - fits[0], torch.zeros((), dtype=v.dtype)
    samples = len(scene.group)
    for start in range(0, len(implicit), samples):
        rows = slice(start, start + samples)
        own = beta * (implicit[rows] - implicit[rows].detach().mean())
        total = total + (bound / beta * (own - (reward[rows] - reward[rows].mean())) ** 2).sum()
    kl = (1e-4 / coef + (1 - 1e-4 / coef) * reward) * mean((v - scene.at(scene.reference)) ** 2)
    return total / len(implicit) + coef * kl.mean()


def velocity_kl(scene: Scene, v: Tensor) -> Tensor:
    if scene.settings.get("kl_kind") != "velocity_mse" or not scene.settings.get("kl_coef"):
        return torch.zeros_like(scene.level)
    return scene.settings["kl_coef"] * mean((v - scene.at(scene.reference)) ** 2)


def kept(scene: Scene, loss: Tensor, advantage: Tensor) -> Tensor:
    if not scene.settings.get("zero_advantage_filter"):
        return loss.mean()
    return loss[advantage != 0].mean()
