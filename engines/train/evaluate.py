"""Evaluation: held-out prompts, deterministic sampling, fixed noise, every evaluator of the job."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.random import fold_in, key, uniform
from fluvial.engines.fsdp.world import World
from fluvial.engines.rewards.runner import RewardRunner
from fluvial.engines.rollout.generate import NO_GUIDANCE, Guidance, generate, slots
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.train.job import Job
from fluvial.models import Schedule

SEED = 20_26  # of the evaluation's prompts and noise: the same in every run, so that runs compare


class Evaluation(NamedTuple):
    """Scores of an evaluation, and its first images."""

    score: dict[str, float]  # mean of each evaluator
    exact: dict[str, float]  # fraction of samples that each evaluator gives 1
    samples: int
    prompts: Sequence[str]  # of the images
    images: Tensor  # [n, C, H, W] in [0, 1], this rank's first
    images_score: Tensor  # [n] by the last evaluator of the job, the held-out one


def evaluate(
    job: Job,
    module: nn.Module,
    *,
    schedule: Schedule,
    samples: int,
    micro_batch: int,
    world: World,
    guidance: Guidance = NO_GUIDANCE,
    show: int = 16,
) -> Evaluation:
    """Sample held-out prompts with the ODE and let every evaluator score them; every rank must take part.

    Args:
        job: model, prompts and evaluators.
        module: the network.
        schedule: the schedule.
        samples: in all; they are the same samples, to the noise, whatever the number of ranks.
        micro_batch: samples a chunk.
        world: of the world.
        guidance: of every step.
        show: images to return.

    Raises:
        RunError: a evaluator raised or returned nonsense.
    """
    root = key(SEED)
    ids, _ = slots(samples, micro_batch=micro_batch, world=world)
    places = (uniform(fold_in(root, Stream.EVALUATION_PROMPTS), (samples,)) * len(job.heldout_prompts)).long().tolist()
    prompts = [job.heldout_prompts[places[i]] for i in ids]
    chunks = generate(
        job.model, module, prompts, ids, shape=job.shape, schedule=schedule,
        key=fold_in(root, Stream.EVALUATION_SAMPLES), micro_batch=micro_batch, guidance=guidance,
    )  # fmt: skip
    images = torch.cat([chunk.images.cpu() for chunk in chunks])
    scores = []
    for evaluator in job.evaluators.values():
        runner = RewardRunner(evaluator)
        runner.submit(images, prompts)
        try:
            with world.agreed():
                scores.append(runner.collect())
        finally:
            runner.close()
    show = min(show, samples)
    local = torch.stack(scores, dim=1)
    table = world.gather_data(local.to(world.device))[:samples].cpu()
    return Evaluation(
        score=dict(zip(job.evaluators, table.mean(0).tolist(), strict=True)),
        exact=dict(zip(job.evaluators, (table == 1).float().mean(0).tolist(), strict=True)),
        samples=samples,
        prompts=prompts[:show],
        images=images[:show],
        images_score=local[:show, -1],
    )
