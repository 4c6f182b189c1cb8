"""SRPO: rewards of an image relative to an opposite prompt, with the image recovered from any noise level."""

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
from fluvial.engines.sampling.config import CleanSamplingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.noising import ContinuousLevels, NoisingConfig
from fluvial.engines.streams import Stream
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch

BRANCHES = NoisingConfig(each=2, levels=ContinuousLevels())  # placeholders: `learn` replaces the levels


@dataclass(frozen=True)
class Srpo(Method, name="srpo"):
    """SRPO's loss: the shortfall of a recovered image's relative reward from a margin (arXiv 2509.06942).

        x_s = (1 - s) x0 + s e,  x0' = (x_s + (s' - s) v - s' e) / (1 - s')
        loss = relu(margin - R(x0')),  R = (1 + k) r(x0', wanted prompt) - r(x0', unwanted prompt)

    with k the weight of the level. Each sample is used twice: with s' < s (towards the image), and with s' > s (away from
    it) and the two prompts swapped. Both share the known noise e, so that x0' is sharp at every level (the published code
    has one e for all samples). Rewards must be differentiable, and linear in the prompt's features, like CLIP's.

    Args:
        sampling: How clean samples are generated.
        highest: Highest noise level; the default is the level at index 5 of 50 steps with shift 3.
        lowest: Lowest noise level; the default is the level at index 25.
        length: Longest step, as a fraction of the range.
        wanted: Prefixes of the prompt for wanted images, used in turn, one per update.
        unwanted: Prefixes of the prompt for unwanted images.
        towards: Weights k of the steps towards the image, at the lowest and the highest noise.
        away: Weights k of the steps away from it.
        form: Formula of R: code (above, as in the published code) or paper, k r(wanted) + (1 - k) r(unwanted).
        margin: Relative reward above which there is no gradient.
    """

    needs: ClassVar[Needs] = Needs(prediction="velocity", rewards="gradients", off_schedule=True)
    bounds: ClassVar = {"margin": (-math.inf, math.inf), "length": (1e-6, 1), **dict.fromkeys(("highest", "lowest"), (0, 1))}
    sampling: CleanSamplingConfig = CleanSamplingConfig(prompts=32, group=1, steps=25)
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
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if not self.lowest < self.highest < 1:
            yield UsageError("highest", self.highest, f"more than `lowest` {self.lowest}, and less than 1")
        if not self.wanted or not self.unwanted:
            yield UsageError("unwanted" if self.wanted else "wanted", (), "words; '' leaves the prompt unchanged")

    @property
    def rows(self) -> NoisedRows:
        """Train on clean samples, noised to two levels each."""
        return NoisedRows(BRANCHES)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Noise all samples to the same level, recover them by one step, and follow the gradient of their rewards."""
        items = run.noise_samples(batch, BRANCHES, key, keep=run.grade(batch).keep)
        steps, count = to_device(self.steps(key), items.rows.x.device), len(items.rows.level) // 2
        level, *context = steps.repeat_interleave(count, dim=1)
        noise = (items.rows.x0 + items.rows.target)[:count].repeat(2, *[1] * (items.rows.x0.ndim - 1))
        x = torch.lerp(items.rows.x0, noise, per_sample(level, noise))
        edits = [prefix(words[run.clock % len(words)]) for words in (self.wanted, self.unwanted)]
        items = items.with_rows(x=x, level=level, target=noise - items.rows.x0, context=torch.stack(context, dim=1))
        for part in run.minibatches(items, key, self.passes):
            yield run.update(part, partial(self.loss, reward=partial(run.compute_rewards, part, edits=edits)))

    def steps(self, key: Key) -> Tensor:
        """Return level s, level s' after the step and weight k, for the steps towards and away from the image, `[3, 2]`."""
        place = 0.005 + 0.99 * float(uniform(fold_in(key, Stream.BACKPROP), ()))  # 0 is the lowest level, 1 the highest
        length = min(self.length, 1 - place, place)
        low = max(place - length, 0.001)
        places = torch.tensor([[place + length, low], [place, low + length]])
        weights = [start + (end - start) * at for (start, end), at in ((self.towards, place), (self.away, low))]
        return torch.cat([self.lowest + (self.highest - self.lowest) * places, torch.tensor([weights])])

    def loss(self, v: Tensor, rows: NoisedSamples, reward: Any = None) -> tuple[Tensor, RewardInfo]:
        """Return the relative reward's shortfall from the margin."""
        assert rows.context is not None
        level_next, k = rows.context.unbind(1)
        x0 = recover(rows.x, v, rows.x0 + rows.target, rows.level, level_next)
        scores = torch.stack(reward(rows, x0))
        wanted, unwanted = torch.where(level_next > rows.level, scores.flip(0), scores)
        relative = (1 + k) * wanted - unwanted if self.form == "code" else k * wanted + (1 - k) * unwanted
        return (self.margin - relative).relu(), RewardInfo(relative.detach())


def prefix(word: str) -> Callable[[Prompt], Prompt]:
    """Return a function that prefixes a prompt's text with a word."""
    return lambda prompt: replace(prompt, text=f"{word} {prompt.text}".strip())
