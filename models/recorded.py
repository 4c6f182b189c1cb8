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

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

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
from fluvial.models.schedulers import RecordingScheduler, SamplerName

# Initial noise and the noise of the steps are drawn from keys apart.
INITIAL, STEPS = 0, 1

SCALES = ("guidance_scale", "true_cfg_scale")  # what diffusers' pipelines call the scale of classifier-free guidance

# Relative error, in root mean square, of a velocity that is computed in another batch than it was recorded in.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Latent(NamedTuple):
    """An input that is the sample: cast, and repeated along the batch for guidance."""

    dtype: torch.dtype
    repeats: int


class Row(NamedTuple):
    """An input with a row a sample, repeated along the batch for guidance."""

    repeats: int
    each_step: bool  # whether it differs from step to step


class Fixed(NamedTuple):
    """An input that all samples and steps share, tensor or not."""

    value: Any


Leaf = Latent | Row | Fixed


class Call(NamedTuple):
    """One call of the transformer: where its inputs come from, as leaves of the pytree (args, kwargs)."""

    tree: Any  # an optree.PyTreeSpec
    leaves: tuple[Leaf, ...]
    dtype: torch.dtype  # of what it returns

    @property
    def repeats(self) -> int:
        """How many times the batch is in one call."""
        return next(leaf.repeats for leaf in self.leaves if isinstance(leaf, Latent))


class Combination(NamedTuple):
    """What a step's velocity is made of: one part, or two with classifier-free guidance c + g (c - u) or u + g (c - u).

    A part is what the transformer returns for one copy of the batch; the parts of all calls are counted.
    """

    cond: int | None = None  # which of two parts is c; None: there is one part
    scale: float = 1.0  # g
    from_cond: bool = False  # it starts from c, as Z-Image's does
    keep_norm: bool = False  # it is given the norm of c over the last dimension, as Lumina 2's is
    first_half: bool = False  # of the channels: the others are a learned variance
    negative: bool = False  # the model predicts x0 - eps
    dtype: torch.dtype | None = None  # the parts are cast to it first

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`."""
        if self.dtype is not None:
            parts = [part.to(self.dtype) for part in parts]
        v = parts[0]
        if self.cond is not None:
            c, u = parts[self.cond], parts[1 - self.cond]
            v = (c if self.from_cond else u) + self.scale * (c - u)
            if self.keep_norm:
                v = v * (torch.norm(c, dim=-1, keepdim=True) / torch.norm(v, dim=-1, keepdim=True))
        if self.first_half:
            v = v.chunk(2, dim=1)[0]
        return -v if self.negative else v


@dataclass(frozen=True)
class Way:
    """How the velocity of some recorded steps comes about; steps that are made alike share one."""

    calls: tuple[Call, ...]
    combination: Combination
    positions: tuple[int, ...]  # of the steps, among the recorded ones

    def velocity(self, module: nn.Module, x: Tensor, rows: Sequence[Tensor], place: Tensor) -> Tensor:
        """Return the velocity of P pairs.

        Args:
            module: the transformer.
            x: `[P, *event]`.
            rows: the inputs with a row a sample, `[P, repeats, ...]`; those that differ by step, `[P, S, repeats, ...]`.
            place: `[P]` int64, which of the S steps.
        """
        values, pairs, parts = iter(rows), torch.arange(len(x), device=x.device), []
        for call in self.calls:
            leaves = []
            for leaf in call.leaves:
                if isinstance(leaf, Latent):
                    leaves.append(x.to(leaf.dtype).repeat(leaf.repeats, *[1] * (x.ndim - 1)))
                elif isinstance(leaf, Row):
                    value = next(values)
                    leaves.append((value[pairs, place] if leaf.each_step else value).transpose(0, 1).flatten(0, 1))
                else:
                    leaves.append(leaf.value.to(x.device) if isinstance(leaf.value, Tensor) else leaf.value)
            args, kwargs = optree.tree_unflatten(call.tree, leaves)
            parts.extend(_output(module(*args, **kwargs)).chunk(call.repeats))
        return self.combination(parts)


@dataclass(frozen=True)
class RecordedModel:
    """The velocity of a recorded pipeline, with the arguments of `models.protocol.VelocityModel`, at the recorded steps.

    It knows its inputs at those noise levels alone, so objectives that put noise on samples anew cannot use it.
    """

    pipeline: str  # its class, for messages
    sigmas: Tensor  # [S] float32 on the host, of the recorded steps
    ways: tuple[Way, ...]
    prediction: Prediction = "velocity"

    def velocity(
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
            v = self.ways[0].velocity(module, x, cond[0], position)
        else:
            order, parts = [], []
            for way, rows in zip(self.ways, cond, strict=True):
                places = torch.tensor(way.positions, device=x.device)
                mine = torch.nonzero(torch.isin(position, places)).flatten()
                if len(mine) > 0:
                    place = torch.searchsorted(places, position[mine])
                    parts.append(way.velocity(module, x[mine], [row[mine] for row in rows], place))
                    order.append(mine)
            v = torch.cat(parts)[torch.cat(order).argsort()]
        return torch.where(per_sample(found, v), v, torch.nan)


@dataclass(frozen=True)
class Recording:
    """One call of a pipeline: B samples, S recorded steps, and what is needed to compute their velocities again."""

    trajectory: Trajectory  # with the velocities
    schedule: Schedule
    transition: Sampler  # of the steps in the window
    pictures: Any  # what the pipeline returns, pictures [B, C, H, W] in [0, 1] by default
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
        asked["generator"] = _generators(fold_in(keys, INITIAL))

    own = pipe.scheduler
    config = {**own.config, "_class_name": type(own).__name__}  # only a config from a file says whose it is
    scheduler = RecordingScheduler.from_config(config, sampler=sampler, eta=eta)
    scheduler.set_shift(own.shift)  # which may have been moved since it was configured
    capture = _Capture(name, component, _scales(pipe, asked))
    handles = [
        module.register_forward_pre_hook(capture.before, with_kwargs=True),
        module.register_forward_hook(capture.after),
    ]
    pipe.scheduler = scheduler
    try:
        with scheduler.recording(
            key=fold_in(keys, STEPS), window=window, record=record, form=form, reduction=reduction, keep_velocity=True,
            debug=debug, on_step=capture.step,
        ) as recorder:  # fmt: skip
            pictures = pipe(**asked)[0]
    finally:
        pipe.scheduler = own
        for handle in handles:
            handle.remove()
    trajectory = recorder.trajectory()
    schedule = Schedule(recorder.sigmas, scheduler.timesteps)
    ways, cond = capture.ways()
    model = RecordedModel(name, recorder.sigmas[trajectory.steps.cpu()], ways)
    recording = Recording(trajectory, schedule, recorder.transition, pictures, model, cond)
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
    return recording.model.velocity(module, x, sigma, cond)


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
        tolerance = max((TOLERANCES[call.dtype] for way in model.ways for call in way.calls), default=0.0)
    if not error <= tolerance:
        raise ValueError(
            f"{model.pipeline} cannot be trained without an adapter: its transformer, replayed, misses the recorded "
            f"velocity by {error:.2g} of its norm, expected at most {tolerance:g}; it may be in training mode, have other "
            "weights by now, or mix the samples of a batch"
        )
    return error


class _Steps(NamedTuple):
    """Steps that are made alike, as they are recorded."""

    calls: list[Call]
    combinations: list[Combination]  # that gave the velocity of all of them
    positions: list[int]
    rows: list[list[Tensor]]  # of each step; the same objects where they are equal


class _Capture:
    """Hold what a transformer is given and returns within a step, until the scheduler is told the velocity."""

    def __init__(self, pipeline: str, component: str, scales: Sequence[float]) -> None:
        self.pipeline, self.component, self.scales = pipeline, component, scales
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._outputs: list[Any] = []
        self._groups: list[_Steps] = []
        self._recorded = 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the inputs; the transformer may go on to change the containers, so they are copied."""
        self._inputs.append(optree.tree_map(lambda leaf: leaf, (args, kwargs)))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the output."""
        self._outputs.append(output)

    def step(self, step: int, x: Tensor, v: Tensor, recorded: bool) -> None:
        """Understand the calls of a step, or raise ValueError."""
        inputs, outputs = self._inputs, self._outputs
        self._inputs, self._outputs = [], []
        if not recorded:
            return
        if not inputs:
            raise self._refusal(step, f"the {self.component} is not called")
        calls: list[Call] = []
        rows: list[Tensor] = []
        parts: list[Tensor] = []
        for given, output in zip(inputs, outputs, strict=True):
            leaves, tree = optree.tree_flatten(given)
            repeats = next((count for leaf in leaves if (count := _copies(leaf, x))), None)
            if repeats is None:
                raise self._refusal(step, f"the {self.component} is called without the sample, as the scheduler has it")
            kinds: list[Leaf] = []
            for leaf in leaves:
                if count := _copies(leaf, x):
                    kinds.append(Latent(leaf.dtype, count))
                elif isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) in (repeats * len(x), len(x)):
                    kinds.append(Row(len(leaf) // len(x), False))
                    rows.append(leaf.detach().unflatten(0, (-1, len(x))).transpose(0, 1))
                else:
                    kinds.append(Fixed(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf))
            returned = _output(output)
            if not isinstance(returned, Tensor) or len(returned) != repeats * len(x):
                raise self._refusal(step, f"the {self.component} returns something else than a tensor of as many samples")
            calls.append(Call(tree, tuple(kinds), returned.dtype))
            parts.extend(returned.chunk(repeats))
        combinations = [combination for combination in _combinations(parts, v, self.scales) if _same(combination(parts), v)]
        if not combinations:
            scales = " or ".join(f"{scale:g}" for scale in self.scales) or "none"
            raise self._refusal(
                step,
                f"its velocity is no known combination of {len(parts)} outputs of the {self.component} (guidance {scales})",
            )
        self._add(calls, rows, combinations)

    def ways(self) -> tuple[tuple[Way, ...], Cond]:
        """Return how the velocities came about, and the inputs with a row a sample."""
        ways, cond = [], []
        for group in self._groups:
            if len(group.combinations) > 1:
                raise self._refusal(
                    None,
                    "its velocity is several combinations of the outputs at once; use prompts other than the negative one",
                )
            each_step = [any(row is not first for row in others) for first, *others in zip(*group.rows, strict=True)]
            flags = iter(each_step)
            calls = []
            for call in group.calls:
                leaves = (leaf._replace(each_step=next(flags)) if isinstance(leaf, Row) else leaf for leaf in call.leaves)
                calls.append(call._replace(leaves=tuple(leaves)))
            ways.append(Way(tuple(calls), group.combinations[0], tuple(group.positions)))
            columns = zip(zip(*group.rows, strict=True), each_step, strict=True)
            cond.append(tuple(torch.stack(column, dim=1) if differs else column[0] for column, differs in columns))
        return tuple(ways), tuple(cond)

    def _add(self, calls: list[Call], rows: list[Tensor], combinations: list[Combination]) -> None:
        """Put a step to those that are made alike, keeping tensors that are equal once."""
        position, self._recorded = self._recorded, self._recorded + 1
        for at, group in enumerate(self._groups):
            both = [known for known in group.combinations if known in combinations]
            if both and _alike(group.calls, calls) and [_kind(row) for row in group.rows[0]] == [_kind(row) for row in rows]:
                kept = [
                    first if torch.equal(first, row) else row.clone() for first, row in zip(group.rows[0], rows, strict=True)
                ]
                group.positions.append(position)
                group.rows.append(kept)
                self._groups[at] = group._replace(combinations=both)
                return
        self._groups.append(_Steps(calls, combinations, [position], [[row.clone() for row in rows]]))

    def _refusal(self, step: int | None, reason: str) -> ValueError:
        where = "" if step is None else f" at step {step}"
        return ValueError(f"{self.pipeline} cannot be trained without an adapter:{where} {reason}")


def _combinations(parts: Sequence[Tensor], v: Tensor, scales: Sequence[float]) -> Iterator[Combination]:
    """Yield the combinations that could make v of the parts, the plain ones first."""
    if len(parts) > 2 or any(part.shape != parts[0].shape for part in parts):
        return
    dtype = None if parts[0].dtype == v.dtype else v.dtype
    half = parts[0].shape[1:] == (2 * v.shape[1], *v.shape[2:])
    for negative in (False, True):
        made = partial(Combination, first_half=half, negative=negative, dtype=dtype)
        if len(parts) == 1:
            yield made()
            continue
        for scale, cond, from_cond, keep_norm in product(scales, (1, 0), (False, True), (False, True)):
            yield made(cond=cond, scale=scale, from_cond=from_cond, keep_norm=keep_norm)


def _copies(leaf: Any, x: Tensor) -> int:
    """Return how many times the leaf is the sample, one after the other along the batch; 0 if it is something else."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.shape[1:] != x.shape[1:] or leaf.ndim != x.ndim:
        return 0
    count, rest = divmod(len(leaf), len(x))
    if rest or not count:
        return 0
    return count if torch.equal(leaf, x.to(leaf.dtype).repeat(count, *[1] * (x.ndim - 1))) else 0


def _output(output: Any) -> Any:
    """Return the first of what a transformer returns, as a tuple or as diffusers' output."""
    return output if isinstance(output, Tensor) else output[0]


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _alike(left: Sequence[Call], right: Sequence[Call]) -> bool:
    """Whether two steps call the transformer alike, but for what is the sample or has a row a sample."""
    return len(left) == len(right) and all(
        one.tree == other.tree and one.dtype == other.dtype and all(map(_equal, one.leaves, other.leaves))
        for one, other in zip(left, right, strict=True)
    )


def _equal(left: Leaf, right: Leaf) -> bool:
    if not isinstance(left, Fixed) or not isinstance(right, Fixed):
        return left == right
    one, other = left.value, right.value
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and _same(one, other)
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _generators(keys: Key) -> list[torch.Generator]:
    """Return a generator a key, on the host, so that a sample's noise depends on its key alone."""
    words = zip(torch.as_tensor(keys.low).tolist(), torch.as_tensor(keys.high).tolist(), strict=True)
    return [torch.Generator().manual_seed(high << 32 | low) for low, high in words]


def _scales(pipe: Any, asked: dict[str, Any]) -> list[float]:
    """Return the scales of guidance that a pipeline is called with, its defaults included."""
    try:
        bound = inspect.signature(pipe.__call__).bind(**asked)
    except TypeError as error:
        raise ValueError(f"{type(pipe).__name__} cannot be called so: {error}") from error
    bound.apply_defaults()
    given = (bound.arguments.get(name) for name in SCALES)
    return list(dict.fromkeys(float(scale) for scale in given if isinstance(scale, int | float)))


def _modules(pipe: Any) -> list[str]:
    return [name for name, part in pipe.components.items() if isinstance(part, nn.Module)]
