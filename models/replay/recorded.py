"""Training of flow pipelines of diffusers without an adapter: their transformer's inputs are recorded and replayed.

In each step, a pipeline calls its transformer once or more and computes the velocity from the outputs, e.g. with guidance
or a changed sign. `record` runs the pipeline with a `RecordingScheduler` and keeps the transformer's inputs; the sample
among them is found by its values. Then it searches for the `Combination` of the outputs that gives the velocity to the bit.
A pipeline without one is refused.

    add_lora(pipe.transformer, LoraConfig(), ["to_q", "to_k", "to_v"])
    recording = record(pipe, prompts, key=key(0), steps=10, sampler="flow_sde", eta=0.7, guidance_scale=4.0)
    check_replay(pipe.transformer, recording, micro_batch=8)  # before the first update
    v = replay(pipe.transformer, recording, sample, step)     # pairs of any samples and recorded steps

Add the adapter before the recording: torch multiplies a batch in another way if a weight requires a gradient, so after a
recording with the whole transformer trainable the first ratio would equal 1 only up to rounding.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fluvial.core.checks import can_look, per_sample
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.random import Key, fold_in
from fluvial.core.rollout import Trajectory
from fluvial.core.table import Record
from fluvial.core.transitions import Sampler
from fluvial.core.types import Ids, PerSample, Samples
from fluvial.models import host_values
from fluvial.models.host_values import to_device
from fluvial.models.protocol import Cond, Prediction, Schedule
from fluvial.models.replay.capture import Capture
from fluvial.models.replay.checks import build_error, wrap_errors
from fluvial.models.replay.experts import join_experts
from fluvial.models.replay.gather_maps import GatherMap
from fluvial.models.replay.recipe import StepRecipe
from fluvial.models.replay.scheduler import RecordingScheduler
from fluvial.models.replay.start import add_offset

# The initial noise and the noise of the steps are drawn from separate keys.
INITIAL, STEPS = 0, 1

# Relative RMS error of a velocity that is computed in another batch than it was recorded in.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class RecordedModel:
    """Velocity of a recorded pipeline as a function of module, sample and level, as `DiffusionModel.predict`.

    The inputs are known at the recorded noise levels only, so samples can be noised only to those levels.
    """

    pipeline: str  # class of the pipeline, for messages
    sigmas: Tensor  # [S] float32 on the host: noise levels of the recorded steps
    recipes: tuple[StepRecipe, ...]
    prediction: Prediction = "velocity"
    ragged: bool = False  # whether samples have inputs of unlike sizes, see `predict`
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)  # networks beside the trained one, by part of the pipeline
    scale: float = 1.0  # scale of the initial noise; below 1, cond ends with the offset, see `replay.start`

    def to(self, device: torch.device) -> "RecordedModel":
        """Return the velocity with its recorded inputs on another device than the pipeline's, as in a dry run."""

        def move(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        recipes = [
            dataclasses.replace(
                recipe, calls=tuple(call._replace(leaves=optree.tree_map(move, call.leaves)) for call in recipe.calls)
            )
            for recipe in self.recipes
        ]
        return dataclasses.replace(self, sigmas=self.sigmas.to(device), recipes=tuple(recipes))

    def predict(
        self, module: nn.Module, x: Samples, sigma: PerSample, cond: Cond, *, timestep: PerSample | None = None
    ) -> Samples:
        """Return the velocity `[P, *event]` that the pipeline would step with, differentiable.

        If all recorded steps have the same recipe, all pairs share their forward passes. Otherwise each recipe has its own
        pass of the batch's size, and the host waits for the device.

        If samples have inputs of unlike sizes, these are padded, and the last tensor of cond holds the sizes `[P, n]`: the
        shape, without the batch, of each row of each recipe. Each pair then has its own forward pass, which keeps its bits.

        Args:
            module: the pipeline's transformer, possibly sharded and with adapters.
            x: samples, `[P, *event]`.
            sigma: noise levels of recorded steps, `[P]`.
            cond: rows of `Recording.cond`, `[P, ...]`.
            timestep: not used, because cond includes the transformer's timesteps.

        Raises:
            ValueError: no recorded step has a sigma. On a GPU this is not checked; the velocity is NaN there.
        """
        if self.scale != 1:
            whole = dataclasses.replace(self, scale=1.0)
            return whole.predict(module, add_offset(x, self.scale, cond[-1]), sigma, cond[:-1])
        if self.ragged:
            sizes = host_values.read(cond[-1]).tolist()
            single = dataclasses.replace(self, ragged=False)
            pairs = [slice(pair, pair + 1) for pair in range(len(x))]
            conds = (optree.tree_map(itemgetter(pair), cond[:-1]) for pair in pairs)
            stripped = map(strip_padding, conds, sizes)
            rows = zip(pairs, stripped, strict=True)
            return torch.cat([single.predict(module, x[pair], sigma[pair], one) for pair, one in rows])
        known = sigma.to(torch.float32)[:, None] == self.sigmas.to(sigma.device)
        is_matched, position = known.any(dim=1), known.int().argmax(dim=1)
        if can_look(is_matched) and not is_matched.all():
            unknown = sigma[~is_matched][0]
            raise ValueError(
                f"the recording of {self.pipeline} has no step at sigma {unknown:g}, expected one of "
                f"{', '.join(f'{level:g}' for level in self.sigmas)}"
            )
        if len(self.recipes) == 1:
            v = self.recipes[0].predict(module, x, cond[0], position, sigma, self.frozen)
        else:
            order, parts = [], []
            for recipe, rows in zip(self.recipes, cond, strict=True):
                positions = to_device(torch.tensor(recipe.positions), x.device)
                pairs_of_recipe = torch.nonzero(torch.isin(position, positions)).flatten()
                count = len(pairs_of_recipe)
                if count > 0:
                    # Batches of another size round differently, and the rollout's are full: repeat the last pair.
                    full = torch.cat([pairs_of_recipe, pairs_of_recipe[-1:].expand(len(x) - count)])
                    step = torch.searchsorted(positions, position[full])
                    v = recipe.predict(module, x[full], [row[full] for row in rows], step, sigma[full], self.frozen)
                    parts.append(v[:count])
                    order.append(pairs_of_recipe)
            v = torch.cat(parts)[torch.cat(order).argsort()]
        return torch.where(per_sample(is_matched, v), v, torch.nan)


@dataclass(frozen=True)
class Recording:
    """Record of one call of a pipeline: B samples, S recorded steps, and the inputs to compute their velocities again."""

    trajectory: Trajectory  # with the velocities
    schedule: Schedule
    transition: Sampler  # sampler of the steps in the window
    outputs: tuple[Any, ...]  # returned by the pipeline
    model: RecordedModel
    cond: Cond  # pytree of tensors [B, ...]; an input that is the same at every step is stored once
    initial: Tensor  # [B, *event] samples before the first step
    taken: tuple[int, ...]  # steps of the schedule in the order they were taken, recorded or not

    @property
    def images(self) -> Any:
        """The pipeline's first output, by default images `[B, C, H, W]` in [0, 1]."""
        return self.outputs[0]


def record(
    pipe: Any,
    prompts: Sequence[str],
    *,
    key: Key,
    steps: int,
    sampler: str | Sampler,
    eta: float = 0.0,
    window: Collection[int] | None = None,
    record: Collection[int] | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    debug: bool = False,
    component: str = "transformer",
    tolerance: float | None = None,
    gather_maps: Sequence[GatherMap] = (),
    **options: Any,
) -> Recording:
    """Run a flow pipeline of diffusers and record its steps and the inputs of its transformer.

    The pipeline's scheduler is replaced during the run. Afterwards the recording is replayed on one shuffled pair per
    sample, and compared.

    Args:
        pipe: the pipeline; any class with a scheduler and a transformer.
        prompts: one prompt per sample, or per `num_images_per_prompt` samples if the options include it.
        key: one key, or one per sample `[B]`. It also draws the initial noise, unless the options include `generator` or
            `latents`.
        steps: number of steps of the schedule.
        sampler, eta: see `RecordingScheduler`.
        window, record, form, reduction, debug: see `RecordingScheduler.recording`.
        component: name of the trained part of the pipeline.
        tolerance: see `check_replay`.
        gather_maps: see `Capture`.
        options: arguments of the pipeline's call, e.g. height, width and guidance_scale.

    Raises:
        ValueError: the pipeline has no such part or another kind of scheduler, it changes its samples between steps, its
            velocity is not understood, or its own code raises an exception; the message names the pipeline.
    """
    name, module = type(pipe).__name__, pipe.components.get(component)
    if not isinstance(module, nn.Module):
        modules = [name for name, part in pipe.components.items() if isinstance(part, nn.Module)]
        raise ValueError(f"{name} has no {component} to train, expected one of {', '.join(modules)}")
    module = join_experts(pipe, component)
    batch = len(prompts) * options.get("num_images_per_prompt", 1)
    keys = key if isinstance(key.low, Tensor) else fold_in(key, torch.arange(batch))
    arguments: dict[str, Any] = {
        "prompt": list(prompts),
        "num_inference_steps": steps,
        "output_type": "pt",
        "return_dict": False,
        **options,
    }
    if arguments.get("generator") is None and arguments.get("latents") is None:
        arguments["generator"] = make_generators(fold_in(keys, INITIAL))

    pipe_scheduler = pipe.scheduler
    # Only a config loaded from a file names its class.
    config = {**pipe_scheduler.config, "_class_name": type(pipe_scheduler).__name__}
    scheduler = RecordingScheduler.from_config(config, sampler=sampler, eta=eta)
    scheduler.set_shift(pipe_scheduler.shift)  # it may have been changed after the scheduler was configured
    capture = Capture(pipe, component, arguments, gather_maps=gather_maps)
    with (
        capture.watch(pipe, scheduler),
        scheduler.recording(
            key=fold_in(keys, STEPS),
            window=window,
            on_step=capture.take_step,
            record=Record(record, form=form, reduction=reduction, velocity=True, debug=debug),
        ) as recorder,
    ):
        with wrap_errors(name, "be run"):
            outputs = pipe(**arguments)
        if capture.initial is None:
            raise build_error(name, "its scheduler takes no step")
    trajectory = recorder.trajectory()
    schedule = Schedule(recorder.scheduled.sigmas, scheduler.timesteps)
    recipes, cond = capture.build_recipes()
    model = RecordedModel(name, recorder.scheduled.sigmas[trajectory.steps[0].cpu()], recipes, frozen=capture.frozen)
    recording = Recording(
        trajectory, schedule, recorder.scheduled.transition, outputs, model, cond, capture.initial, tuple(capture.taken)
    )
    if recipes:
        check_replay(module, recording, micro_batch=len(trajectory.final), chunks=1, tolerance=tolerance)
    return recording


def strip_padding(cond: Cond, sizes: Sequence[int]) -> Cond:
    """Return the inputs of a recorded pipeline without their padding, given the shape of each without the batch.

    They are contiguous, as the pipeline's, because the bits of a product in bfloat16 depend on the layout.
    """
    rest = iter(sizes)

    def strip(row: Tensor) -> Tensor:
        return row[(slice(None), *(slice(next(rest)) for _ in row.shape[1:]))].contiguous()

    return tuple(tuple(strip(row) for row in rows) for rows in cond)


def fits_within(shapes: Sequence[Sequence[torch.Size]], most: Sequence[Sequence[torch.Size]]) -> bool:
    """Return whether inputs have as many dimensions as others, and no dimension is larger."""
    return len(shapes) == len(most) and all(
        len(rows) == len(others)
        and all(
            len(a) == len(b) and all(m <= n for m, n in zip(a, b, strict=True)) for a, b in zip(rows, others, strict=True)
        )
        for rows, others in zip(shapes, most, strict=True)
    )


def pad_to(row: Tensor, shape: torch.Size) -> Tensor:
    """Pad an input `[1, ...]` with zeros to a shape without the batch."""
    padded = row.new_zeros((len(row), *shape))
    padded[(slice(None), *map(slice, row.shape[1:]))] = row
    return padded


def replay(module: nn.Module, recording: Recording, sample: Ids, step: Ids, *, x: Samples | None = None) -> Samples:
    """Return the velocity of P pairs of a sample and a recorded step, `[P, *event]`, differentiable.

    Args:
        module, recording: the pipeline's transformer, and its recording.
        sample: index of each pair's sample, `[P]`.
        step: step of the schedule of each pair, among the recorded ones, `[P]`.
        x: samples to compute the velocity at, `[P, *event]`; by default the recorded ones.

    Raises:
        ValueError: a step was not recorded. On a GPU this is not checked; the velocity is NaN there.
    """
    trajectory = recording.trajectory
    sigma = recording.schedule.levels.to(step.device)[step]
    if x is None:
        position = (step[:, None] == trajectory.steps[sample]).int().argmax(dim=1)
        x = trajectory.x[sample, position]
    cond = optree.tree_map(lambda tensor: tensor[sample], recording.cond)
    return recording.model.predict(module, x, sigma, cond)


def find_tolerance(model: RecordedModel) -> float:
    """Return the largest relative error that counts as rounding, by the dtype that the transformer computes in."""
    return max((TOLERANCES[call.dtype] for recipe in model.recipes for call in recipe.calls), default=0.0)


def check_replay(
    module: nn.Module, recording: Recording, *, micro_batch: int, chunks: int | None = None, tolerance: float | None = None
) -> float:
    """Return the largest relative RMS error of replayed velocities against recorded ones.

    Call it before the first update, with the weights of the recording and in the training mode of the run. Pairs are
    computed in other batches than they were recorded in, which reveals inputs that are not per sample.

    Args:
        module, recording: see `replay`.
        micro_batch: number of pairs per forward pass.
        chunks: number of micro-batches to compare; all by default.
        tolerance: largest error that counts as rounding; by default that of the dtype that the transformer computes in.

    Raises:
        ValueError: the error is larger; the message names the pipeline.
    """
    trajectory, model = recording.trajectory, recording.model
    assert trajectory.velocity is not None
    batch, count = trajectory.log_prob.shape
    pair = torch.arange(batch * count, device=trajectory.final.device).flip(0)
    sample = pair % batch
    position = (pair // batch + sample) % count  # neighbours belong to different samples and steps
    errors = []
    with torch.no_grad():
        for rows in list(torch.arange(len(pair), device=pair.device).split(micro_batch))[:chunks]:
            pairs = sample[rows], position[rows]
            v, recorded = replay(module, recording, pairs[0], trajectory.steps[pairs]), trajectory.velocity[pairs]
            errors.append((v.to(recorded.dtype) - recorded).norm() / recorded.norm())
    error = float(torch.stack(errors).max()) if errors else 0.0  # NaN if one of them is
    if tolerance is None:
        tolerance = find_tolerance(model)
    if not error <= tolerance:
        raise build_error(
            model.pipeline,
            f"its transformer, replayed, misses the recorded velocity by {error:.2g} of its norm, expected at most "
            f"{tolerance:g}; it may be in training mode, have other weights by now, or mix the samples of a batch",
        )
    return error


def make_generators(keys: Key) -> list[torch.Generator]:
    """Return one generator per key, on the host, so that a sample's noise depends only on its key."""
    words = zip(torch.as_tensor(keys.low).tolist(), torch.as_tensor(keys.high).tolist(), strict=True)
    return [torch.Generator().manual_seed(high << 32 | low) for low, high in words]
