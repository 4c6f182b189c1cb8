"""Evaluation: held-out prompts, deterministic sampling, fixed noise, every evaluator of the job."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.random import fold_in, key, uniform
from fluvial.engines.data.labels import Split, split
from fluvial.engines.fsdp.world import World
from fluvial.engines.rewards.runner import RewardRunner
from fluvial.engines.rollout.generate import NO_GUIDANCE, Guidance, Requests, Sampling, generate, slots
from fluvial.engines.rollout.solvers import Solver
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.rollout.text import TextLengths
from fluvial.engines.train.job import Job
from fluvial.models import Schedule

SEED = 20_26  # of prompts and noise: the same in every run, so that runs compare


class Evaluation(NamedTuple):
    """Scores of an evaluation, and its first images."""

    score: dict[str, float]  # mean score by evaluator
    exact: dict[str, float]  # fraction of samples with the score 1 by evaluator
    samples: int
    prompts: Sequence[str]  # of the images
    images: Tensor  # [n, C, H, W] in [0, 1], the first of this rank
    images_score: Tensor | None  # [n] by the last evaluator of the job, the held-out one; None without evaluators
    velocity_drift: float | None = None  # from the model at the start, where a probe of it was taken
    split: Split = {}  # noqa: RUF012  # scores by source and by tag of the prompts, see `labels.split`


def evaluate(
    job: Job,
    module: nn.Module,
    *,
    schedule: Schedule,
    samples: int,
    micro_batch: int,
    world: World,
    guidance: Guidance = NO_GUIDANCE,
    solver: Solver = "euler",
    show: int = 16,
) -> Evaluation:
    """Sample held-out prompts with the ODE and score them with every evaluator; every rank must take part.

    Args:
        job: model, prompts and evaluators.
        module: network.
        schedule: schedule with its timesteps on the device.
        samples: number of samples over all ranks; they do not depend on the number of ranks.
        micro_batch: samples per chunk.
        world: process group.
        guidance: guidance of every step.
        solver: solver of the ODE.
        show: number of images to return.

    Raises:
        RunError: an evaluator raised, or did not return one finite number per image.
    """
    root = key(SEED)
    ids, _ = slots(samples, micro_batch=micro_batch, world=world)
    places = (uniform(fold_in(root, Stream.EVALUATION_PROMPTS), (samples,)) * len(job.heldout)).long().tolist()
    prompts = [job.heldout[places[i]] for i in ids]
    requests = Requests(prompts, ids, fold_in(root, Stream.EVALUATION_SAMPLES))
    tokens = TextLengths(job.model, world).of(guidance.texts(job.model, prompts))
    sampling = Sampling(job.shape, schedule, guidance, solver, text_tokens=tokens)
    chunks = generate(job.model, module, requests, sampling, micro_batch=micro_batch)
    images = torch.cat([chunk.images.cpu() for chunk in chunks])
    scores = []
    for name, evaluator in job.evaluators.items():
        runner = RewardRunner(evaluator, label=f"evaluator {name!r}")
        runner.submit(images, prompts)
        try:
            with world.agreed():
                scores.append(runner.collect())
        finally:
            runner.close()
    show = min(show, samples)
    local = torch.stack(scores, dim=1) if scores else torch.zeros(len(ids), 0)
    table = world.gather_data(local.to(world.device))[:samples].cpu()
    return Evaluation(
        score=dict(zip(job.evaluators, table.mean(0).tolist(), strict=True)),
        exact=dict(zip(job.evaluators, (table == 1).float().mean(0).tolist(), strict=True)),
        samples=samples,
        prompts=prompts[:show],
        images=images[:show],
        images_score=local[:show, -1] if scores else None,
        split=split(table, [job.heldout[place] for place in places], list(job.evaluators)),
    )
