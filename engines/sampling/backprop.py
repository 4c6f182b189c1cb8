"""Differentiable replay of a rollout's last steps, for methods that follow the gradient of a reward."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fluvial.core import gaussian
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.transitions import Sampler
from fluvial.engines.sampling.items import LastSteps
from fluvial.engines.streams import Stream
from fluvial.models import Schedule
from fluvial.models.host_values import to_device


def number_of_steps(key: Key, steps: int, *, last: int, spread: float) -> int:
    """Return how many of the last steps the gradient flows through, the same on every rank.

    The number is steps - int(n), where n is the first draw from N(steps - last, spread^2) within the schedule.

    `steps` is the length of the schedule. With spread 0 nothing is drawn, and the result is `last`.

    Source: AlignProp, arXiv 2310.03739, and its published code.
    """
    if spread == 0:
        return last
    drawn = normal(fold_in(key, Stream.BACKPROP), (64,)) * spread + (steps - last)
    fitting = [int(n) for n in drawn.tolist() if 1 <= int(n) < steps]
    return steps - fitting[0] if fitting else last


def final_samples(
    v: Tensor, items: LastSteps, sampler: Sampler, schedule: Schedule, predict: Callable[[LastSteps], Tensor]
) -> Tensor:
    """Return the clean sample of each item, `[P, *event]`, differentiable with respect to every prediction.

    Every prediction but the first is checkpointed: the backward pass recomputes it, so only one graph is in memory.

    Args:
        v: prediction at the items.
        items: samples before the last steps.
        sampler: sampler of the steps.
        schedule: schedule of the rollout.
        predict: function from items to the prediction at them.
    """
    x, noise = items.x, items.noise
    steps, count = len(schedule.timesteps), noise.shape[1]
    levels = to_device(schedule.levels.to(x.dtype), x.device)
    for i, step in enumerate(range(steps - count, steps)):
        level, level_next = (levels[index].expand(len(x), *levels.shape[1:]) for index in (step, step + 1))
        if i:

            def predict_step(x: Tensor, level: Tensor = level, step: int = step) -> Tensor:
                timestep = schedule.timesteps[step].expand(len(x))
                return predict(items._replace(x=x, level=level, timestep=timestep))

            v = checkpoint(predict_step, x, use_reentrant=False)
        x = gaussian.sample(sampler(level, level_next), x, v, noise[:, i])
    return x
