"""Evaluation of a network: samples of prompts from fixed noise, by a deterministic solver, scored by several evaluators."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.random import fold_in, key, uniform
from fluvial.engines.data.records import Prompt, Split, model_inputs, split_scores
from fluvial.engines.engine.world import World, collective
from fluvial.engines.run.jobs.base import Job
from fluvial.engines.sampling.generate import NO_GUIDANCE, Guidance, Requests, Sampling, assign_slots, generate
from fluvial.engines.sampling.solvers import Solver
from fluvial.engines.sampling.text import TextLengths
from fluvial.engines.scoring.gather import check_scores
from fluvial.engines.scoring.runner import RewardRunner
from fluvial.engines.scoring.scores import concatenate
from fluvial.engines.streams import Stream
from fluvial.models import Schedule
from fluvial.models.images import pick_frames
from fluvial.models.protocol import Sounds, find_sound_rate

SEED = 20_26  # of prompts and noise, the same in every run, so that runs can be compared
APART = 2**32  # distance of the ids of a prompt's samples, above any number of prompts


class EvaluationPlan(NamedTuple):
    """Samples of an evaluation, N in all."""

    prompts: list[int]  # index of each sample's prompt
    ids: list[int]  # id of each sample's noise
    names: list[str]  # name of each sample, e.g. for its file


class Scores(NamedTuple):
    """Score of each sample by each evaluator: N samples, K evaluators."""

    evaluators: tuple[str, ...]
    names: Sequence[str]  # [N]
    prompts: Sequence[Prompt]  # [N]
    values: Tensor  # [N, K], float32 on the host


class Evaluation(NamedTuple):
    """Scores of an evaluation, and its first images."""

    score: dict[str, float]  # mean score by evaluator
    exact: dict[str, float]  # fraction of samples with the score 1 by evaluator
    samples: int
    prompts: Sequence[Prompt]  # of the images
    images: Tensor  # [n, C, H, W] in [0, 1], the first of all ranks
    images_score: Tensor | None  # [n] by the last evaluator of the job, the held-out one; None without evaluators
    scores: Scores
    velocity_drift: float | None = None  # drift from the model at the start, if a probe of it was taken
    split: Split = {}  # noqa: RUF012  # scores by source and by tag of the prompts, see `split_scores`
    sounds: Sounds | None = None  # sounds of the images, if the model makes sounds
    invalid: int = 0  # samples that an evaluator returned no finite number for; they are left out of all else


def draw_plan(prompts: int, samples: int) -> EvaluationPlan:
    """Draw the prompts of `samples` samples at random with replacement, and return the plan."""
    draws = uniform(fold_in(key(SEED), Stream.EVALUATION_PROMPTS), (samples,))
    return EvaluationPlan((draws * prompts).long().tolist(), list(range(samples)), [f"{i:05d}" for i in range(samples)])


def plan_every_prompt(prompts: int, seeds: int, most: int | None = None) -> EvaluationPlan:
    """Return the plan of `seeds` samples per prompt.

    The noise of a sample depends only on the index of its prompt and on its seed. So further seeds, and prompts added at the
    end, do not change the other samples.

    Args:
        seeds: number of samples per prompt.
        most: largest number of samples; evenly spaced prompts are left out to stay within it, down to one prompt.
    """
    count = prompts if most is None else min(prompts, max(most // seeds, 1))
    chosen = [number * prompts // count for number in range(count)]
    pairs = [(prompt, seed) for seed in range(seeds) for prompt in chosen]
    return EvaluationPlan(
        [prompt for prompt, _ in pairs],
        [seed * APART + prompt for prompt, seed in pairs],
        [f"{prompt:05d}-{seed}" for prompt, seed in pairs],
    )


def find_chunk_size(samples: int, micro_batch: int) -> int:
    """Return the smallest chunk size that still needs ceil(samples / micro_batch) chunks."""
    return -(-samples // -(-samples // micro_batch))


@collective
def evaluate(
    job: Job,
    module: nn.Module,
    *,
    schedule: Schedule,
    samples: int | None,
    micro_batch: int,
    world: World,
    seeds: int | None = None,
    guidance: Guidance = NO_GUIDANCE,
    solver: Solver = "euler",
    show: int = 16,
    keep: Callable[[Sequence[str], Tensor], None] | None = None,
    max_invalid: float = 0.25,
) -> Evaluation:
    """Sample prompts with the ODE and score them with every evaluator.

    Samples and scores do not depend on the number of ranks, because evaluators are always called with the same chunks, see
    `find_chunk_size`. A sample is left out if any evaluator returns no finite number for it.

    Args:
        job: model, prompts and evaluators.
        schedule: schedule with its timesteps on the device.
        samples: number of samples over all ranks; with `seeds` the largest number, and None for all.
        micro_batch: largest number of samples per chunk.
        seeds: number of samples per prompt, see `plan_every_prompt`; None draws `samples` prompts at random.
        guidance: guidance of every step.
        solver: solver of the ODE.
        show: number of images to return.
        keep: called with the names and images of each chunk of this rank, e.g. to write them to files.
        max_invalid: largest share of samples that may be left out.

    Raises:
        RunError: more samples were left out, or an evaluator took too long.
    """
    if seeds is None:
        assert samples is not None, "without seeds, prompts are drawn"
        plan = draw_plan(len(job.heldout), samples)
    else:
        plan = plan_every_prompt(len(job.heldout), seeds, samples)
    total, prompts = len(plan.ids), [job.heldout[index] for index in plan.prompts]
    micro_batch = find_chunk_size(total, micro_batch)
    mine, real = assign_slots(total, micro_batch=micro_batch, world=world)
    requests = Requests(
        [prompts[slot] for slot in mine], [plan.ids[slot] for slot in mine], fold_in(key(SEED), Stream.EVALUATION_SAMPLES)
    )
    shown, waves, rate = list[Tensor](), list[Tensor](), find_sound_rate(job.model)
    runners = [RewardRunner(evaluator, label=f"evaluator {name!r}") for name, evaluator in job.evaluators.items()]
    show = min(show, total)
    try:
        tokens = TextLengths(job.model, world).of(guidance.list_texts(job.model, requests.prompts))
        sampling = Sampling(job.shape, schedule, guidance, solver, text_tokens=tokens)
        chunks = generate(job.model, module, requests, sampling, micro_batch=micro_batch)
        for number, chunk in enumerate(chunks):
            first = number * micro_batch
            count = sum(real[first : first + micro_batch])  # slots past the end hold repeats and come last
            for runner in runners:
                runner.submit(chunk.images, chunk.prompts, chunk.trajectory.final)
            if count and mine[first] < show:
                shown.append(chunk.images[: show - mine[first]].cpu())
                if rate is not None:
                    final, inputs = chunk.trajectory.final[: show - mine[first]].clone(), model_inputs(chunk.prompts)
                    waves.append(job.model.decode_sounds(final, inputs[: len(final)]).waves.cpu())  # type: ignore[attr-defined]
            if keep is not None:
                with world.agreed():
                    keep([plan.names[slot] for slot in mine[first : first + count]], chunk.images[:count].clone())
        with world.agreed():
            scored = [concatenate(runner.results()) for runner in runners]
    finally:
        for runner in runners:
            runner.close()
    local = torch.stack([each.scores for each in scored], dim=1) if scored else torch.zeros(len(mine), 0)
    table = world.gather_data(local)[:total]
    problems = [line for each in scored for line in each.problems]
    valid = check_scores(table, problems, most=max_invalid, world=world)
    images, names = _gather_images(shown, world), tuple(job.evaluators)
    valid_images, kept = valid[: len(images)], torch.nonzero(valid).flatten().tolist()
    images, table = images[valid_images], table[valid]
    prompts, sample_names = [prompts[index] for index in kept], [plan.names[index] for index in kept]
    return Evaluation(
        score=dict(zip(names, table.mean(0).tolist(), strict=True)),
        exact=dict(zip(names, (table == 1).float().mean(0).tolist(), strict=True)),
        samples=len(kept),
        prompts=prompts[: len(images)],
        images=images,
        images_score=table[: len(images), -1] if scored else None,
        scores=Scores(names, sample_names, prompts, table),
        split=split_scores(table, prompts, names),
        sounds=None if rate is None else Sounds(_gather_sounds(waves, world)[valid_images], rate),
        invalid=total - len(kept),
    )


@collective
def _gather_sounds(waves: Sequence[Tensor], world: World) -> Tensor:
    """Return the sounds of all ranks in the order of their samples."""
    return torch.cat([wave for part in world.gather_items([*waves])[:: world.sequence] for wave in part])


@collective
def _gather_images(images: Sequence[Tensor], world: World) -> Tensor:
    """Return the images of all ranks in the order of their samples."""
    if world.size == 1:
        return torch.cat([*images])
    # In the precision of a contact sheet: 8 bits, and only some frames of a video.
    shown = [batch[:, :, pick_frames(batch.shape[2])] if batch.ndim == 5 else batch for batch in images]
    as_bytes = [(batch.clamp(0, 1) * 255).round().byte() for batch in shown]
    by_rank = world.gather_items(as_bytes)[:: world.sequence]
    return torch.cat([batch for part in by_rank for batch in part]).float() / 255
