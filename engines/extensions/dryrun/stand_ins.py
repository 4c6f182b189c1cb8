"""Stand-ins for what a dry run has no values of: rewards that differ from sample to sample, prompts, and a shorter run."""

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
CHUNKS = 2  # of samples per rank, at least; the memory of further ones is added


class SpreadReward:
    """A reward whose scores differ within every group, so that there is something to learn; the real one is called first.

    Args:
        reward: the real reward; its memory, host reads and errors are those of the run.
        phase: context of the call.
        refused: called with a complaint about what the prompts say, where they are `PROMPTS`; None raises it.
    """

    def __init__(
        self, reward: Callable[..., Any], phase: Callable[[], Any], refused: Callable[[Exception], None] | None
    ) -> None:
        self.reward, self.phase, self.refused, self._next = reward, phase, refused, count()
        self.__signature__ = inspect.signature(reward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        samples, score = args[0], None
        try:
            with self.phase():
                score = self.reward(*args, **kwargs)
        except (ValueError, LookupError) as error:
            if self.refused is None:
                raise
            self.refused(error)
        if score is not None and isinstance(samples, Tensor) and samples.requires_grad:  # an objective follows the gradient
            return score
        return [float(next(self._next) % 7) for _ in range(len(samples))]


def with_rewards(
    job: Job, config: TrainConfig, phase: Callable[[], Any], notes: list[str], *, prompts: bool
) -> tuple[Job, TrainConfig]:
    """Return a job whose rewards can be called without values, and its run; what is left out is added to the notes.

    Args:
        job, config: the job and its run.
        phase: context of the calls of a reward.
        notes: what of the run is not simulated.
        prompts: whether the prompts are `PROMPTS`, which lack what some rewards need.
    """
    rewards = dict[str, Any]()

    def spread(name: str, reward: Callable[..., Any]) -> SpreadReward:
        def note_refusal(error: Exception) -> None:
            note = f"the reward {name}, which needs other prompts ({error}): its own memory comes on top"
            if not any(known.startswith(f"the reward {name},") for known in notes):
                notes.append(note)

        return SpreadReward(reward, phase, note_refusal if prompts else None)

    for name in (config.rewards or tuple(job.rewards)[:1]) if config.method.is_scored else ():
        try:
            selected = select(job.rewards, (name,))
        except FluvialError as error:
            notes.append(f"the reward {name}, which cannot be made here ({error}): its own memory comes on top")
            selected = {name.partition(":")[0].partition("=")[0]: (lambda images, prompts: images.flatten(1).mean(1), 1.0)}
        rewards.update({key: spread(key, reward) for key, (reward, _) in selected.items()})
    evaluators = {name: spread(name, reward) for name, reward in (job.evaluators or {}).items()}
    return replace(job, rewards=rewards, evaluators=evaluators), replace(config, rewards=tuple(rewards))


def keep_on_host(model: Any, device: torch.device) -> None:
    """Keep a pipeline that is recorded as it runs on the host, with values, while its network computes on a device.

    Its own inputs of the network are moved to the device, where they are in a run, and its images are blank.

    Args:
        model: `models.replay.any_pipeline.AnyPipeline` on the host, or one of its kind.
        device: device without values.
    """
    made = model.decode(torch.zeros(1, *model.known.shape))
    model.predict = model.known.model.to(device).predict
    model.decode = lambda latents, prompts=None: latents.new_zeros((len(latents), *made.shape[1:]), dtype=made.dtype)


def shorten(config: TrainConfig, folder: Path, *, ranks: int) -> tuple[TrainConfig, float]:
    """Return a run of one rollout with few chunks per rank, and how many times more samples the real one has.

    Args:
        config: the run.
        folder: where it may write.
        ranks: number of ranks.
    """
    size = 1 if config.engine.micro_batch == "auto" else config.samples_per_pass
    pairs = "rollout" if config.engine.update_micro_batch == "auto" else config.engine.update_micro_batch
    config = with_values(config, {"engine.micro_batch": size, "engine.update_micro_batch": pairs})
    sampling, data = config.method.sampling, ranks // config.engine.context_parallel
    # Every update has two micro-batches at least, as far as the run's own do.
    samples = max(CHUNKS * size, 2 * config.choose_pass_sizes(sampling.batch)[0] * config.method.passes.minibatches)
    prompts = min(sampling.prompts, max(1, math.ceil(samples * data / sampling.group)))
    prompts = next(count for count in range(prompts, sampling.prompts + 1) if _is_accepted(config, count))
    updates = config.updates_per_rollout * (2 if config.rollout.ahead else 1)
    # What is encoded here has no values, so it must not come into the run's own caches.
    cache = None if config.pipeline.text_cache is None else folder / "texts"
    here = {"out": folder, "data.cache": None, "pipeline.text_cache": cache, "checkpoint.background": False}
    alone = {"tracker": "none", "resume": False, "checkpoint.resume_from": None, "engine.compile": False}
    fewer = {"updates": updates, "sampling.prompts": prompts, "evaluation.samples": size * data}
    changed = with_values(config, {**here, **alone, **fewer, "rollout.max_invalid": 0.999})
    return changed, _slots(sampling.batch, size, data) / _slots(changed.method.sampling.batch, size, data)


def _is_accepted(config: TrainConfig, prompts: int) -> bool:
    """Return whether a run's method takes a number of prompts per rollout."""
    try:
        return bool(with_values(config, {"sampling.prompts": prompts}))
    except UsageError:
        return False


def _slots(batch: int, size: int, ranks: int) -> int:
    """Return the number of samples of a rank: whole chunks."""
    return math.ceil(math.ceil(batch / ranks) / size) * size
