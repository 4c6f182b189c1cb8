"""Post-train a flow pipeline of diffusers that has no adapter: run it, record what its transformer is given, replay that.

A pipeline calls its transformer once or more a step and makes the step's velocity of what it returns: away from a negative
prompt, with the sign turned, and so on. `record` runs the pipeline with a `RecordingScheduler` and keeps the transformer's
inputs; the sample among them is known by its values. What the velocity was made of is looked for among a few
`Combination`s, which must give it to the bit. A pipeline of which none does is refused.

    recording = record(pipe, prompts, key=key(0), steps=10, sampler="flow_sde", eta=0.7, guidance_scale=4.0)
    add_lora(pipe.transformer, LoraConfig(), ["to_q", "to_k", "to_v"])
    check_replay(pipe.transformer, recording, micro_batch=8)  # before the first update
    v = replay(pipe.transformer, recording, sample, step)     # pairs of any samples and recorded steps
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fluvial.core.checks import can_look, per_sample
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.random import Key, fold_in
from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Sampler
from fluvial.core.types import Ids, PerSample, Samples
from fluvial.models.protocol import Cond, Prediction, Schedule
from fluvial.models.replay.capture import Capture, StepRecipe
from fluvial.models.replay.scheduler import RecordingScheduler, SamplerName

# Initial noise and the noise of the steps are drawn from keys apart.
INITIAL, STEPS = 0, 1

# Relative error, in root mean square, of a velocity that is computed in another batch than it was recorded in.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class RecordedModel:
    """The velocity of a recorded pipeline, with the arguments of `models.protocol.DiffusionModel`, at the recorded steps.

    It knows its inputs at those noise levels alone, so noise can be put on samples anew at those and no others.
    """

    pipeline: str  # its class, for messages
    sigmas: Tensor  # [S] float32 on the host, of the recorded steps
    ways: tuple[StepRecipe, ...]
    prediction: Prediction = "velocity"

    def predict(
        self, module: nn.Module, x: Samples, sigma: PerSample, cond: Cond, *, timestep: PerSample | None = None
    ) -> Samples:
        """Return the velocity `[P, *event]` that the pipeline would step with, differentiable.

        All pairs share their forward passes where all recorded steps are made alike; else the steps' own are taken one after
        the other, which makes the host wait for the device.

        Args:
            module: the pipeline's transformer, sharded or adapted as may be.
            x: samples, `[P, *event]`.
            sigma: noise levels of recorded steps, `[P]`.
            cond: rows of `Recording.cond`, `[P, ...]`.
            timestep: is not needed: what the transformer was given is in cond.

        Raises:
            ValueError: a sigma is no recorded step's (looked at only where that is free; elsewhere the answer is NaN).
        """
        known = sigma.to(torch.float32)[:, None] == self.sigmas.to(sigma.device)
        found, position = known.any(dim=1), known.int().argmax(dim=1)
        if can_look(found) and not found.all():
            got = sigma[~found][0]
            raise ValueError(
                f"the recording of {self.pipeline} has no step at sigma {got:g}, expected one of "
                f"{', '.join(f'{level:g}' for level in self.sigmas)}"
            )
        if len(self.ways) == 1:
            v = self.ways[0].predict(module, x, cond[0], position)
        else:
            order, parts = [], []
            for way, rows in zip(self.ways, cond, strict=True):
                places = torch.tensor(way.positions, device=x.device)
                mine = torch.nonzero(torch.isin(position, places)).flatten()
                if len(mine) > 0:
                    place = torch.searchsorted(places, position[mine])
                    parts.append(way.predict(module, x[mine], [row[mine] for row in rows], place))
                    order.append(mine)
            v = torch.cat(parts)[torch.cat(order).argsort()]
        return torch.where(per_sample(found, v), v, torch.nan)


@dataclass(frozen=True)
class Recording:
    """One call of a pipeline: B samples, S recorded steps, and what is needed to compute their velocities again."""

    trajectory: Trajectory  # with the velocities
    schedule: Schedule
    transition: Sampler  # of the steps in the window
    images: Any  # what the pipeline returns, images [B, C, H, W] in [0, 1] by default
    model: RecordedModel
    cond: Cond  # a pytree of tensors [B, ...]; what does not differ from step to step is there once


def record(
    pipe: Any,
    prompts: Sequence[str],
    *,
    key: Key,
    steps: int,
    sampler: SamplerName,
    eta: float = 0.0,
    window: Collection[int] | None = None,
    record: Collection[int] | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    debug: bool = False,
    component: str = "transformer",
    tolerance: float | None = None,
    **options: Any,
) -> Recording:
    """Run a flow pipeline of diffusers and record its steps and what its transformer was given at each of them.

    The pipeline's scheduler is replaced while it runs. That replaying gives what was recorded is tried on as many pairs as
    there are samples, shuffled.

    Args:
        pipe: the pipeline; nothing is asked of its class but a scheduler and a transformer.
        prompts: one a sample, or `num_images_per_prompt` samples each, if that is among the options.
        key: one key, or a key a sample `[B]`. It makes the initial noise too, unless the options hold `generator` or
            `latents`.
        steps: of the schedule.
        sampler, eta: see `RecordingScheduler`.
        window, record, form, reduction, debug: see `RecordingScheduler.recording`.
        component: the pipeline's part that is trained.
        tolerance: see `check_replay`.
        options: the pipeline's own, e.g. height, width and guidance_scale.

    Raises:
        ValueError: the pipeline has no such part or another kind of scheduler, or it is not understood what it does with the
            transformer; the message names the pipeline. Or what `RecordingScheduler` refuses.
    """
    name, module = type(pipe).__name__, pipe.components.get(component)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} has no {component} to train, expected one of {', '.join(_modules(pipe))}")
    batch = len(prompts) * options.get("num_images_per_prompt", 1)
    keys = key if isinstance(key.low, Tensor) else fold_in(key, torch.arange(batch))
    asked: dict[str, Any] = {
        "prompt": list(prompts), "num_inference_steps": steps, "output_type": "pt", "return_dict": False, **options
    }  # fmt: skip
    if asked.get("generator") is None and asked.get("latents") is None:
        asked["generator"] = generators(fold_in(keys, INITIAL))

    own = pipe.scheduler
    config = {**own.config, "_class_name": type(own).__name__}  # only a config from a file says whose it is
    scheduler = RecordingScheduler.from_config(config, sampler=sampler, eta=eta)
    scheduler.set_shift(own.shift)  # which may have been moved since it was configured
    capture = Capture(pipe, component, asked)
    with (
        capture.watching(pipe, scheduler),
        scheduler.recording(
            key=fold_in(keys, STEPS), window=window, record=record, form=form, reduction=reduction, keep_velocity=True,
            debug=debug, on_step=capture.step,
        ) as recorder,
    ):  # fmt: skip
        images = pipe(**asked)[0]
    trajectory = recorder.trajectory()
    schedule = Schedule(recorder.sigmas, scheduler.timesteps)
    ways, cond = capture.ways()
    model = RecordedModel(name, recorder.sigmas[trajectory.steps.cpu()], ways)
    recording = Recording(trajectory, schedule, recorder.transition, images, model, cond)
    if ways:
        check_replay(module, recording, micro_batch=len(trajectory.final), chunks=1, tolerance=tolerance)
    return recording


def replay(module: nn.Module, recording: Recording, sample: Ids, step: Ids, *, x: Samples | None = None) -> Samples:
    """Return the velocity of P pairs of a sample and a recorded step, `[P, *event]`, differentiable.

    Args:
        module: the pipeline's transformer.
        recording: of the pipeline.
        sample: `[P]`, which of the B samples.
        step: `[P]`, which step of the schedule, among the recorded ones.
        x: the samples to take it at, `[P, *event]`; by default the recorded ones.

    Raises:
        ValueError: a step was not recorded (looked at only where that is free; elsewhere the answer is NaN).
    """
    trajectory = recording.trajectory
    sigma = recording.schedule.levels.to(step.device)[step]
    if x is None:
        position = (step[:, None] == trajectory.steps).int().argmax(dim=1)
        x = trajectory.x[sample, position]
    cond = optree.tree_map(lambda tensor: tensor[sample], recording.cond)
    return recording.model.predict(module, x, sigma, cond)


def rounding(model: RecordedModel) -> float:
    """Return the relative error that is taken for rounding, by the dtype that the transformer works in."""
    return max((TOLERANCES[call.dtype] for way in model.ways for call in way.calls), default=0.0)


def check_replay(
    module: nn.Module,
    recording: Recording,
    *,
    micro_batch: int,
    chunks: int | None = None,
    tolerance: float | None = None,
) -> float:
    """Return how far the replayed velocities are from the recorded ones: the largest relative error, in root mean square.

    Call it before the first update, with the weights that the recording was made with and in the mode that is trained in.
    Pairs are put in other batches than they were recorded in, so that an input that belongs to no sample shows.

    Args:
        module: the pipeline's transformer.
        recording: of the pipeline.
        micro_batch: pairs a forward pass.
        chunks: micro-batches to try, all by default.
        tolerance: the largest error that is taken for rounding; by default one for the dtype that the transformer works in.

    Raises:
        ValueError: the error is larger; the message names the pipeline.
    """
    trajectory, model = recording.trajectory, recording.model
    assert trajectory.velocity is not None
    batch, count = trajectory.log_prob.shape
    pair = torch.arange(batch * count, device=trajectory.final.device).flip(0)
    sample = pair % batch
    position = (pair // batch + sample) % count  # neighbours are of different samples and steps
    errors = []
    with torch.no_grad():
        for rows in list(torch.arange(len(pair), device=pair.device).split(micro_batch))[:chunks]:
            v = replay(module, recording, sample[rows], trajectory.steps[position[rows]])
            want = trajectory.velocity[sample[rows], position[rows]]
            errors.append((v.to(want.dtype) - want).norm() / want.norm())
    error = max(float(error) for error in errors) if errors else 0.0
    if tolerance is None:
        tolerance = rounding(model)
    if not error <= tolerance:
        raise ValueError(
            f"{model.pipeline} cannot be trained without an adapter: its transformer, replayed, misses the recorded "
            f"velocity by {error:.2g} of its norm, expected at most {tolerance:g}; it may be in training mode, have other "
            "weights by now, or mix the samples of a batch"
        )
    return error


def generators(keys: Key) -> list[torch.Generator]:
    """Return a generator a key, on the host, so that a sample's noise depends on its key alone."""
    words = zip(torch.as_tensor(keys.low).tolist(), torch.as_tensor(keys.high).tolist(), strict=True)
    return [torch.Generator().manual_seed(high << 32 | low) for low, high in words]


def _modules(pipe: Any) -> list[str]:
    return [name for name, part in pipe.components.items() if isinstance(part, nn.Module)]
