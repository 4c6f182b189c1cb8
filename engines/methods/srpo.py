"""SRPO: a reward relative to the same image's under an opposite description, recovered from any noise level."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from fluvial.core.checks import per_sample
from fluvial.core.flow_matching import recover
from fluvial.core.random import Key, fold_in, uniform
from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.refl import RewardInfo
from fluvial.engines.run.method import EpochsConfig, Method, Needs, NoisedRows
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.noising import ContinuousLevels, NoisingConfig
from fluvial.engines.sampling.samplers import Ode
from fluvial.engines.streams import Stream
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch

BRANCHES = NoisingConfig(each=2, levels=ContinuousLevels())  # their levels are replaced: one towards the image, one away


@dataclass(frozen=True)
class Srpo(Method, name="srpo"):
    """SRPO's loss: how much a relative reward of a recovered image falls short of a margin (arXiv 2509.06942).

        x_s = (1 - s) x0 + s e,  x0' = (x_s + (s' - s) v - s' e) / (1 - s')
        loss = relu(margin - R(x0')),  R = (1 + k) r(x0', wanted prompt) - r(x0', unwanted prompt)

    with k the weight of the level, once with s' < s (towards the image) and once with s' > s (away from it), where the two
    prompts change places; the two share the noise e, which is known, so that x0' is sharp at every level (published code has
    one e for all samples). Rewards must be differentiable, and linear in the prompt's features, as CLIP's are.

    Args:
        sampling: How clean samples are made.
        highest: Highest noise level, that of index 5 of 50 steps with shift 3.
        lowest: Lowest one, that of index 25.
        length: Longest step, as a fraction of the range.
        wanted: Words before the prompt, one per update in turn, that images are to be like.
        unwanted: Words that they are to be unlike.
        towards: Weights k of the steps towards the image, at the lowest and the highest noise.
        away: Weights k of the steps away from it.
        form: Formula of R: code (above, as published code has it) or paper, k r(wanted) + (1 - k) r(unwanted).
        margin: Relative reward at which the gradient ends.
    """

    needs: ClassVar[Needs] = Needs(prediction="velocity", rewards="gradients", off_schedule=True)
    bounds: ClassVar = {"margin": (-math.inf, math.inf), "length": (1e-6, 1), **dict.fromkeys(("highest", "lowest"), (0, 1))}
    sampling: SamplingConfig = SamplingConfig(prompts=32, group=1, steps=25, sampler=Ode())
    passes: EpochsConfig = EpochsConfig()
    highest: float = 0.9643
    lowest: float = 0.75
    length: float = 0.1
    wanted: tuple[str, ...] = ("realistic",)
    unwanted: tuple[str, ...] = ("painting",)
    towards: tuple[float, float] = (0.1, 0.25)
    away: tuple[float, float] = (0.3, 0.01)
    form: Literal["code", "paper"] = "code"
    margin: float = 0.7

    def problems(self) -> Iterator[UsageError]:
        """Yield what has no meaning among the hyper-parameters."""
        yield from super().problems()
        if not self.lowest < self.highest < 1:
            yield UsageError("highest", self.highest, f"more than `lowest` {self.lowest}, and less than 1")
        if not self.wanted or not self.unwanted:
            yield UsageError("unwanted" if self.wanted else "wanted", (), "words; '' leaves the prompt as it is")

    @property
    def rows(self) -> NoisedRows:
        """Train on clean samples with noise, at two levels each."""
        return NoisedRows(BRANCHES)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Put known noise on the samples, at a level that all share, and follow the gradient of what one step recovers."""
        items = run.noise_samples(batch, BRANCHES, key, keep=run.grade(batch).keep)
        steps, count = to_device(self.steps(key), items.rows.x.device), len(items.rows.level) // 2
        level, *context = steps.repeat_interleave(count, dim=1)
        noise = (items.rows.x0 + items.rows.target)[:count].repeat(2, *[1] * (items.rows.x0.ndim - 1))
        x = torch.lerp(items.rows.x0, noise, per_sample(level, noise))
        edits = [prefix(words[run.clock % len(words)]) for words in (self.wanted, self.unwanted)]
        items = items.with_rows(x=x, level=level, target=noise - items.rows.x0, context=torch.stack(context, dim=1))
        for part in run.minibatches(items, key, self.passes):
            yield run.update(part, partial(self.loss, reward=partial(run.rewards_of, part, edits=edits)))

    def steps(self, key: Key) -> Tensor:
        """Return the level s, the level s' after the step and the weight k, towards the image and away from it, `[3, 2]`."""
        place = 0.005 + 0.99 * float(uniform(fold_in(key, Stream.BACKPROP), ()))  # 0 is the lowest level, 1 the highest
        length = min(self.length, 1 - place, place)
        low = max(place - length, 0.001)
        places = torch.tensor([[place + length, low], [place, low + length]])
        weights = [start + (end - start) * at for (start, end), at in ((self.towards, place), (self.away, low))]
        return torch.cat([self.lowest + (self.highest - self.lowest) * places, torch.tensor([weights])])

    def loss(self, v: Tensor, rows: NoisedSamples, reward: Any = None) -> tuple[Tensor, RewardInfo]:
        """Return how much the relative reward falls short of the margin."""
        assert rows.context is not None
        level_next, k = rows.context.unbind(1)
        x0 = recover(rows.x, v, rows.x0 + rows.target, rows.level, level_next)
        scores = torch.stack(reward(rows, x0))
        wanted, unwanted = torch.where(level_next > rows.level, scores.flip(0), scores)
        relative = (1 + k) * wanted - unwanted if self.form == "code" else k * wanted + (1 - k) * unwanted
        return (self.margin - relative).relu(), RewardInfo(relative.detach())


def prefix(word: str) -> Callable[[Prompt], Prompt]:
    """Return a function that puts a word before a prompt's text."""
    return lambda prompt: replace(prompt, text=f"{word} {prompt.text}".strip())
