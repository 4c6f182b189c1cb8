"""Stand-ins of a dry run, which has no values: rewards that differ between samples, prompts, and a shorter run."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluvial.engines.errors import FluvialError, UsageError
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.job import Job
from fluvial.engines.scoring.registry import select

PROMPTS = [f'a photo of {number} apples on a table, and a sign that reads "{number} APPLES"' for number in range(1, 65)]
CHUNKS = 2  # smallest number of chunks of samples per rank; the memory of further ones is added


class SpreadReward:
    """Reward whose scores differ within every group, so that no group is skipped; the real reward is called first.

    Args:
        reward: real reward; its memory, host reads and errors are those of the run.
        phase: context of the call.
        on_refusal: called with the error if the reward cannot use the prompts `PROMPTS`; None raises the error.
    """

    def __init__(
        self, reward: Callable[..., Any], phase: Callable[[], Any], on_refusal: Callable[[Exception], None] | None
    ) -> None:
        self.reward, self.phase, self.on_refusal, self._next = reward, phase, on_refusal, count()
        self.__signature__ = inspect.signature(reward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        samples, score = args[0], None
        try:
            with self.phase():
                score = self.reward(*args, **kwargs)
        except (ValueError, LookupError) as error:
            if self.on_refusal is None:
                raise
            self.on_refusal(error)
        if score is not None and isinstance(samples, Tensor) and samples.requires_grad:  # the loss needs its gradient
            return score
        return [float(next(self._next) % 7) for _ in range(len(samples))]


def replace_rewards(
    job: Job, config: TrainConfig, phase: Callable[[], Any], notes: list[str], *, prompts: bool
) -> tuple[Job, TrainConfig]:
    """Return a job whose rewards can be called without values, and its configuration; omissions are added to `notes`.

    Args:
        job, config: job and its configuration.
        phase: context of the calls of a reward.
        notes: parts of the run that are not simulated.
        prompts: whether the prompts are `PROMPTS`, which lack what some rewards need.
    """
    rewards = dict[str, Any]()

    def wrap_reward(name: str, reward: Callable[..., Any]) -> SpreadReward:
        def note_refusal(error: Exception) -> None:
            note = f"the reward {name}, which needs other prompts ({error}): its memory comes on top"
            if not any(known.startswith(f"the reward {name},") for known in notes):
                notes.append(note)

        return SpreadReward(reward, phase, note_refusal if prompts else None)

    for name in (config.rewards or tuple(job.rewards)[:1]) if config.method.is_scored else ():
        try:
            selected = select(job.rewards, (name,))
        except FluvialError as error:
            notes.append(f"the reward {name}, which cannot be built here ({error}): its memory comes on top")
            selected = {name.partition(":")[0].partition("=")[0]: (lambda images, prompts: images.flatten(1).mean(1), 1.0)}
        rewards.update({key: wrap_reward(key, reward) for key, (reward, _) in selected.items()})
    evaluators = {name: wrap_reward(name, reward) for name, reward in (job.evaluators or {}).items()}
    return replace(job, rewards=rewards, evaluators=evaluators), replace(config, rewards=tuple(rewards))


def keep_on_host(model: Any, device: torch.device) -> None:
    """Keep a recorded pipeline on the host, where it has values, and run its network on a device.

    The recorded inputs of the network are moved to the device. Decoded images are blank.

    Args:
        model: `models.replay.any_pipeline.AnyPipeline` on the host, or a similar model.
        device: device without values.
    """
    image = model.decode(torch.zeros(1, *model.known.shape))
    model.predict = model.known.model.to(device).predict
    model.decode = lambda latents, prompts=None: latents.new_zeros((len(latents), *image.shape[1:]), dtype=image.dtype)


def shorten(config: TrainConfig, folder: Path, *, ranks: int) -> tuple[TrainConfig, float]:
    """Return a run of one rollout with few chunks per rank, and the number of samples of the real run per sample here.

    Args:
        config: configuration of the run.
        folder: temporary folder of the run.
        ranks: number of ranks.
    """
    size = 1 if config.engine.micro_batch == "auto" else config.samples_per_pass
    pairs = "rollout" if config.engine.update_micro_batch == "auto" else config.engine.update_micro_batch
    config = with_values(config, {"engine.micro_batch": size, "engine.update_micro_batch": pairs})
    sampling, data = config.method.sampling, ranks // config.engine.context_parallel
    # Every update has at least two micro-batches, if those of the run have.
    samples = max(CHUNKS * size, 2 * config.choose_pass_sizes(sampling.batch)[0] * config.method.passes.minibatches)
    prompts = min(sampling.prompts, max(1, math.ceil(samples * data / sampling.group)))
    prompts = next(count for count in range(prompts, sampling.prompts + 1) if _is_accepted(config, count))
    updates = config.updates_per_rollout * (2 if config.rollout.ahead else 1)
    # Encoded tensors have no values here, so they must not enter the caches of the run.
    cache = None if config.pipeline.text_cache is None else folder / "texts"
    here = {"out": folder, "data.cache": None, "pipeline.text_cache": cache, "checkpoint.background": False}
    alone = {"tracker": "none", "resume": False, "checkpoint.resume_from": None, "engine.compile": False}
    fewer = {"updates": updates, "sampling.prompts": prompts, "evaluation.samples": size * data}
    changed = with_values(config, {**here, **alone, **fewer, "rollout.max_invalid": 0.999})
    return changed, _count_slots(sampling.batch, size, data) / _count_slots(changed.method.sampling.batch, size, data)


def _is_accepted(config: TrainConfig, prompts: int) -> bool:
    """Return whether the method accepts a number of prompts per rollout."""
    try:
        return bool(with_values(config, {"sampling.prompts": prompts}))
    except UsageError:
        return False


def _count_slots(batch: int, size: int, ranks: int) -> int:
    """Return the number of samples per rank, rounded up to whole chunks."""
    return math.ceil(math.ceil(batch / ranks) / size) * size
