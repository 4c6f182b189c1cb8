"""GARDO: GRPO that favours diverse good samples, with a KL on samples whose reward is doubtful."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fluvial.core.gardo import diverse_advantages
from fluvial.core.policy import PolicyInfo
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.methods.gates import Doubt, Everywhere, Gate
from fluvial.engines.methods.losses import StepKLConfig
from fluvial.engines.run.declared import Follower, Networks
from fluvial.engines.run.method import Method, Needs, PassesConfig
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.window import AllRecorded, Trained
from fluvial.kernels import policy_loss

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Gardo(Method, name="gardo"):
    """GARDO's loss: a clipped surrogate of diversity-aware advantages, and a KL on gated samples (arXiv 2512.24138).

    The policy is trained on the first reward; the others show where it is doubtful. The reference is a copy of the policy.

    Args:
        kl: KL to the reference, averaged over the gated samples.
        gate: Selects the samples with a KL: `Everywhere` or `Doubt`.
        reset_kl: Weighted KL (`kl.weight`), per dimension, above which the reference is reset to the policy.
        reset_after: Number of batches since the last reset after which the next batch resets the reference.
        features: Features whose distance in a group measures diversity: thumbnails, or a function of (images, prompts) as
            module:name; GARDO uses DINOv3.
        adv_clip: Bound of the advantages, which are clipped to [-adv_clip, adv_clip].
        clip_low: Lower half-width of the clip of the ratio.
        clip_high: Upper half-width of the clip.
    """

    learns_from_sums = False
    bounds: ClassVar = {
        **{"clip_low": (0, 1), "clip_high": (0, math.inf), "adv_clip": (1e-12, math.inf)},
        **{"reset_kl": (0, math.inf), "reset_after": (1, 2**31)},
    }
    sampling: SamplingConfig = SamplingConfig()
    trained: Trained = AllRecorded()
    passes: PassesConfig = PassesConfig()
    kl: StepKLConfig = StepKLConfig(coef=0.04)
    gate: Gate = Everywhere()
    reset_kl: float = 3e-4
    reset_after: int = 15
    features: str = "thumbnails"
    adv_clip: float = 5.0
    clip_low: float = 1e-4
    clip_high: float = 1e-4

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The gate `Doubt` compares the first reward with others."""
        return Needs(ratio=True, least_rewards=2 if isinstance(self.gate, Doubt) else 1)

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if not self.kl.coef:
            yield UsageError("kl.coef", 0, "above 0", "gardo compares with a reference")
        if self.kl.guidance is not None:
            yield no_effect("kl.guidance", "with gardo, whose reference is a copy of the policy")

    def networks(self) -> Networks:
        """Declare the reference: a copy of the policy, which `learn` resets."""
        return {**self.kl.networks(), "ref": Follower(lambda rollouts, updates: 1.0)}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Optimize the surrogate of every recorded step, with a KL on the gated samples."""
        assert batch.rewards is not None
        scores = batch.rewards.scores[batch.kept_ids] * run.runners.weights.sign()  # only the sign of a weight matters
        advantage = diverse_advantages(scores[:, 0], run.extract_features(batch, self.features), batch.group)
        advantage, chosen = advantage.clamp(-self.adv_clip, self.adv_clip), self.gate.choose(run.state, scores)
        run.log(advantage=advantage.clone(), gate={"share": float(chosen.mean())})
        steps = run.record_steps(batch, key, advantage, trained=self.trained, keep=torch.ones_like(advantage))
        share = batch.spread(chosen / chosen.mean().clamp(min=1e-12))  # makes the mean KL that of the chosen samples
        steps = steps.with_rows(context=steps.look_up(share[:, None].expand(steps.used.shape)))
        is_far, age = False, run.state.get("age", [0.0])[0] + 1
        for part in run.minibatches(steps, key, self.passes):
            yield (info := run.update(run.predict(part), self.loss))
            is_far |= info.mean["kl_ref"] > self.reset_kl
        if resets := is_far or age > self.reset_after:
            run.copy_policy("ref")
        run.state["age"] = [0.0 if resets else age]

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, PolicyInfo]:
        """Return `kernels.policy_loss` of the recorded steps, with the KL of the chosen samples."""
        share, rule = rows.context, self.sampling.sampler.rule
        assert share is not None
        kl: dict[str, Any] = {"v_ref": rows.predictions["ref"], "kl_coef": self.kl.coef * share, "dt": rows.dt}
        clips: dict[str, Any] = {
            "clip_low": self.clip_low,
            "clip_high": self.clip_high,
            "kl_weight": self.kl.weight_of(rule),
        }
        pairs: dict[str, Any] = {"log_prob_old": rows.log_prob_old, "advantage": rows.signal}
        loss, info = policy_loss(rows.transition, rows.x, v, rows.x_next, **pairs, **clips, **kl)
        weighed = self.kl.weigh(info.kl_ref, share, v.detach(), rows.predictions["ref"], rows, rule, "mean")
        return self.kl.add_ema_of_steps(loss, v, rows, rule, "mean"), info._replace(kl_ref=weighed)
