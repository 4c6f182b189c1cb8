"""Evaluation: held-out prompts, deterministic sampling, fixed noise, every judge of the job."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.random import fold_in, key, uniform
from fluvial.engines.distributed import World
from fluvial.engines.generate import NO_GUIDANCE, Guidance, generate, slots
from fluvial.engines.jobs import Job
from fluvial.engines.rewards import RewardRunner
from fluvial.models import Schedule

SEED = 20_26  # of the evaluation's prompts and noise: the same in every run, so that runs compare


class Evaluation(NamedTuple):
    """Scores of an evaluation, and its first pictures."""

    score: dict[str, float]  # mean of each judge
    exact: dict[str, float]  # fraction of samples that each judge gives 1
    samples: int
    prompts: Sequence[str]  # of the pictures
    pictures: Tensor  # [n, C, H, W] in [0, 1], this rank's first
    pictures_score: Tensor  # [n] by the last judge of the job, the held-out one


def evaluate(
    job: Job,
    module: nn.Module,
    *,
    grid: Schedule,
    samples: int,
    micro_batch: int,
    world: World,
    guidance: Guidance = NO_GUIDANCE,
    show: int = 16,
) -> Evaluation:
    """Sample held-out prompts with the ODE and let every judge score them; every rank must take part.

    Args:
        job: model, prompts and judges.
        module: the network.
        grid: the schedule.
        samples: in all; they are the same samples, to the noise, whatever the number of ranks.
        micro_batch: samples a chunk.
        world: of the processes.
        guidance: of every step.
        show: pictures to return.

    Raises:
        RunError: a judge raised or returned nonsense.
    """
    root = key(SEED)
    ids, _ = slots(samples, micro_batch=micro_batch, world=world)
    places = (uniform(fold_in(root, 0), (samples,)) * len(job.heldout_prompts)).long().tolist()
    prompts = [job.heldout_prompts[places[i]] for i in ids]
    chunks = generate(
        job.model, module, prompts, ids, shape=job.shape, grid=grid, key=fold_in(root, 1), micro_batch=micro_batch,
        guidance=guidance,
    )  # fmt: skip
    pictures = torch.cat([chunk.pictures.cpu() for chunk in chunks])
    scores = []
    for judge in job.judges.values():
        runner = RewardRunner(judge)
        runner.submit(pictures, prompts)
        try:
            with world.agreed():
                scores.append(runner.collect())
        finally:
            runner.close()
    show = min(show, samples)
    local = torch.stack(scores, dim=1)
    table = world.gather_data(local.to(world.device))[:samples].cpu()
    return Evaluation(
        score=dict(zip(job.judges, table.mean(0).tolist(), strict=True)),
        exact=dict(zip(job.judges, (table == 1).float().mean(0).tolist(), strict=True)),
        samples=samples,
        prompts=prompts[:show],
        pictures=pictures[:show],
        pictures_score=local[:show, -1],
    )
