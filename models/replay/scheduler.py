"""Scheduler for any flow pipeline of diffusers that steps with fluvial's samplers and records the steps.

    pipe.scheduler = RecordingScheduler.from_config(pipe.scheduler.config, sampler="flow_sde", eta=0.7)
    with pipe.scheduler.recording(key=keys) as recorder:
        images = pipe(prompts).images
    trajectory = recorder.trajectory()

Restore the pipeline's own scheduler before saving the pipeline: diffusers cannot load classes of other packages.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from fluvial.core import gaussian, transitions
from fluvial.core.checks import compute_dtype
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Step, Trajectory, stack
from fluvial.core.sigmas import check_sigmas
from fluvial.core.table import Record, StepPlan, plan
from fluvial.core.transitions import Sampler, bind, check_eta
from fluvial.models.replay.start import Mixture

Generators = torch.Generator | Sequence[torch.Generator]

# Called after each step with its index, the sample before it, the output, the next sample, and whether it is recorded.
Observer = Callable[[int, Tensor, Tensor, Tensor, bool], None]


class Piece(NamedTuple):
    """One step of a piece of the samples, e.g. of the sound of a video; each tensor is `[B, ...]`."""

    v: Tensor
    x: Tensor
    x_next: Tensor


class StepSchedule(NamedTuple):
    """Noise levels and samplers of the steps of a schedule."""

    source: Tensor  # the scheduler's sigmas that the plan was made for
    sigmas: Tensor  # [T+1] float32 on the host
    transition: Sampler  # sampler of the steps in the window, with its hyper-parameters bound
    plan: StepPlan


@dataclass(eq=False, kw_only=True)
class Recorder:
    """Steps of one call of a pipeline; built by `RecordingScheduler.recording`, which documents the arguments."""

    key: Key | None
    generator: Generators | None
    window: Collection[int] | None
    record: Record
    on_step: Observer | None
    mixtures: list[Mixture] = field(default_factory=list)  # results of `scale_noise`
    pieces: list["RecordingScheduler"] = field(default_factory=list)  # copies, which step through further pieces
    shapes: tuple[torch.Size, ...] = ()  # shapes of the pieces of one sample, if there are several
    _waiting: list[Piece] = field(default_factory=list)  # pieces of the step under way
    _scheduled: StepSchedule | None = None
    _steps: list[Step] = field(default_factory=list)
    _final: Tensor | None = None

    @property
    def scheduled(self) -> StepSchedule:
        """Schedule of the steps; ValueError before the first step."""
        if self._scheduled is None or self._final is None:
            raise ValueError("recording: no step was taken: call the pipeline inside `with scheduler.recording(...)`")
        return self._scheduled

    def trajectory(self) -> Trajectory:
        """Return the recorded steps, as `core.rollout.rollout` does; x and x_next have the dtype of the pipeline's samples.

        Raises:
            ValueError: no step has been taken.
        """
        plan, final = self.scheduled.plan, self._final
        assert final is not None
        return stack(plan, self._steps, final)._replace(final=final.to(compute_dtype("recording", final=final)))

    def _keep_step(self, scheduled: StepSchedule, step: Step) -> None:
        """Keep a step if the plan records it, and call the observer."""
        self._scheduled, self._final, record = scheduled, step.x_next, self.record
        if recorded := any(step.t in row for row in scheduled.plan.recorded):
            if any(step.t == known.t for known in self._steps):
                raise ValueError(f"recording: step {step.t} is taken twice, expected one call of a pipeline per recording")
            # The sum over a sample rounds differently in another memory layout, and a replayed sample is contiguous.
            x, v, x_next = step.x.contiguous(), step.v.contiguous(), step.x_next.contiguous()
            transition = scheduled.plan.transition(step.t)
            log_prob = gaussian.log_prob(transition, x, v, x_next, form=record.form, reduction=record.reduction)
            # Copies, because the pipeline may write to its samples later.
            v = v.clone() if record.velocity or record.debug else v
            self._steps.append(step._replace(x=x.clone(), v=v, x_next=x_next.clone(), log_prob=log_prob))
        if self.on_step is not None:
            self.on_step(step.t, step.x, step.v, step.x_next, recorded)

    def join(self, piece: Piece) -> Piece | None:
        """Add a piece; return the step of whole, flat samples `[B, n]` if it is the last piece, else None."""
        self._waiting.append(piece)
        if len(self._waiting) <= len(self.pieces):
            return None
        pieces, self._waiting = self._waiting, []
        self.shapes = tuple(each.x.shape[1:] for each in pieces)
        return Piece(*(torch.cat([tensor.flatten(1) for tensor in tensors], dim=1) for tensors in zip(*pieces, strict=True)))


class RecordingScheduler(FlowMatchEulerDiscreteScheduler):
    """Scheduler that steps like diffusers' Euler scheduler of flows, or stochastically, and records steps on request.

    The ODE's steps equal diffusers' to the bit; outside a recording they are diffusers' own call. The other samplers are
    those of `core.transitions`. Their noise comes from the recording's key or generators, else from the generator that the
    pipeline passes, else from torch's global generator.
    """

    # Not arguments of __init__, because diffusers reads the config's fields from its signature.
    sampler: str | Sampler = "ode"
    eta: float = 0.0
    _recorder: Recorder | None = None
    _scheduled: StepSchedule | None = None
    _leader: "RecordingScheduler | None" = None  # the scheduler that this one is a copy of

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecordingScheduler":
        """Return a copy. During a recording it steps through a further piece of the samples, which become flat, `[B, n]`.

        A pipeline of videos with sound steps through both with the same noise levels, by the ODE.
        """
        if self._recorder is None:
            other = copy.copy(self)
            other.__dict__ = copy.deepcopy(self.__dict__, memo)
            return other
        follower: RecordingScheduler = type(self).from_config(self.config, sampler=self.sampler, eta=self.eta)
        follower.set_shift(self.shift)
        follower._leader = self
        self._recorder.pieces.append(follower)
        return follower

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return a recording scheduler for the config of another scheduler, `pipe.scheduler.config`.

        Args:
            config: config of a FlowMatchEulerDiscreteScheduler.
            return_unused_kwargs: as in diffusers.
            kwargs: `sampler` (a name of `core.transitions.SAMPLERS` except "ddim", or a custom `Sampler`; "ode" by
                default), its `eta`, and overrides of the config.

        Raises:
            ValueError: the config is of another scheduler or asks for stochastic_sampling, the sampler does not exist or
                is not a flow's, or eta is out of its range.
        """
        sampler, eta = kwargs.pop("sampler", "ode"), kwargs.pop("eta", 0.0)
        if isinstance(sampler, str):
            check_eta("RecordingScheduler", sampler, eta)
        if sampler == "ddim":
            raise ValueError("RecordingScheduler: sampler is 'ddim', which is not a flow's: use one that steps over sigmas")
        _check_config({**config, **kwargs})
        result = super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)
        scheduler = result[0] if return_unused_kwargs else result
        scheduler.sampler, scheduler.eta = sampler, eta
        return result

    @contextmanager
    def recording(
        self,
        *,
        key: Key | None = None,
        generator: Generators | None = None,
        window: Collection[int] | None = None,
        record: Record | Collection[int] | None = None,
        on_step: Observer | None = None,
    ) -> Iterator[Recorder]:
        """Record the steps of one call of a pipeline.

        Args:
            key: one key, or one key per sample, `[B]`. Step i draws from fold_in(key, i), as in a rollout.
            generator: one generator, or one per sample; in place of a key.
            window: steps taken with the scheduler's sampler, all by default; the others use the ODE.
            record: steps and fields to record, as in `core.rollout.rollout`. Samples are stored in the pipeline's dtype.
            on_step: see `Observer`.

        Raises:
            ValueError: a recording is under way, both a key and generators are given, or `record.dtype` is set. The first
                step raises the errors of `core.rollout.rollout`; a step that is taken twice raises a ValueError.
        """
        record = record if isinstance(record, Record) else Record(steps=record)
        if record.dtype is not None:
            raise ValueError(
                f"recording: record.dtype is {record.dtype}, expected None: samples are stored in the pipeline's dtype"
            )
        if self._recorder is not None:
            raise ValueError("recording: the scheduler records already: end that recording first")
        if key is not None and generator is not None:
            raise ValueError("recording: key and generator are both given, expected one of them")
        recorder = Recorder(key=key, generator=generator, window=window, record=record, on_step=on_step)
        self._recorder, self._scheduled = recorder, None
        try:
            yield recorder
        finally:
            self._recorder = self._scheduled = None

    def scale_noise(self, sample: Tensor, timestep: float | Tensor, noise: Tensor | None = None) -> Tensor:
        """Return sigma noise + (1 - sigma) sample, as diffusers' scheduler does; a recording keeps all three."""
        mixed: Tensor = super().scale_noise(sample, timestep, noise)
        if self._recorder is not None and noise is not None:
            self._recorder.mixtures.append(Mixture(sample.clone(), noise.clone(), mixed.clone()))
        return mixed

    def scale_model_input(self, sample: Tensor, timestep: float | Tensor | None = None) -> Tensor:
        """Return the sample unchanged; diffusers' Euler scheduler of flows lacks this method, which some pipelines call."""
        return sample

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = float("inf"),
        s_noise: float = 1.0,
        generator: Generators | None = None,
        per_token_timesteps: Tensor | None = None,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[Tensor]:
        """Return the next sample, in the dtype of model_output.

        Args:
            model_output: the velocity, `[B, *event]`.
            timestep: timestep of the schedule.
            sample: sample before the step, `[B, *event]`.
            s_churn, s_tmin, s_tmax, s_noise, return_dict: as in diffusers; the first four have no effect.
            generator: source of the noise if the recording has neither a key nor generators.

        Raises:
            ValueError: per_token_timesteps is given, or an error of `recording`.
        """
        if per_token_timesteps is not None:
            raise ValueError("RecordingScheduler: per_token_timesteps is given, expected None: one noise level per sample")
        # The base class also checks the timestep and counts the steps.
        x_next = super().step(model_output, timestep, sample, return_dict=False)[0]
        leader = self if self._leader is None else self._leader
        if leader._recorder is not None and leader._recorder.pieces:
            leader._take_piece(self, self.step_index - 1, Piece(model_output, sample, x_next))
        elif self._recorder is not None or self.sampler != "ode":
            # Rising sigmas belong to a flow from noise at 0, with noise levels 1 - sigma and velocity -v.
            v = -model_output if self.config.get("invert_sigmas") else model_output
            x_next = self._take_step(self.step_index - 1, v, sample, x_next, generator)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=x_next) if return_dict else (x_next,)

    def _take_piece(self, scheduler: "RecordingScheduler", step: int, piece: Piece) -> None:
        """Record a step when all pieces of the samples have taken it."""
        assert self._recorder is not None
        number = len(self._recorder._waiting)
        if scheduler is not (self, *self._recorder.pieces)[number] or not torch.equal(scheduler.sigmas, self.sigmas):
            raise ValueError("RecordingScheduler: pieces of the samples take different steps or noise levels")
        if self.sampler != "ode" or self.config.get("invert_sigmas"):
            raise ValueError("RecordingScheduler: several pieces are recorded with falling sigmas and the ODE only")
        whole = self._recorder.join(piece)
        if whole is not None:
            self._take_step(step, *whole, None)

    def _take_step(self, step: int, v: Tensor, x: Tensor, euler: Tensor, generator: Generators | None) -> Tensor:
        """Return the next sample of a step that may be stochastic or recorded, given Euler's next sample."""
        recorder, dtype = self._recorder, compute_dtype("step", model_output=v, sample=x)
        if self._scheduled is None or self._scheduled.source is not self.sigmas:
            self._scheduled = _schedule_steps(self, recorder, x, dtype)
        scheduled = self._scheduled
        noise, x_next = None, euler
        if any(step in row for row in scheduled.plan.stochastic) and scheduled.transition is not transitions.ode:
            key = None if recorder is None else recorder.key
            if recorder is not None and recorder.generator is not None:
                generator = recorder.generator
            noise = _draw_noise(key, generator, step, x, dtype)
            x_next = gaussian.sample(scheduled.plan.transition(step), x, v, noise).to(v.dtype)
        if recorder is not None:
            recorder._keep_step(scheduled, Step(step, x, v, x_next, None, noise))
        return x_next


def _schedule_steps(scheduler: RecordingScheduler, recorder: Recorder | None, x: Tensor, dtype: torch.dtype) -> StepSchedule:
    """Return the schedule of a scheduler's steps; the noise levels are checked on the host."""
    sigmas = scheduler.sigmas.to(device="cpu", dtype=torch.float32)
    sigmas = 1 - sigmas if scheduler.config.get("invert_sigmas") else sigmas
    try:
        check_sigmas(sigmas)
    except ValueError as error:
        raise ValueError(
            f"RecordingScheduler: {error}; only the ODE, unrecorded, steps through any other schedule"
        ) from error
    transition = bind(scheduler.sampler, scheduler.eta, sigmas)
    window, record = (None, Record(steps=())) if recorder is None else (recorder.window, recorder.record)
    steps = plan(
        sigmas.to(dtype), transition, window=window, record=record, batch=len(x), device=x.device, function="recording"
    )
    return StepSchedule(scheduler.sigmas, sigmas, transition, steps)


def _draw_noise(key: Key | None, generator: Generators | None, step: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw the noise of a step, of the shape of x."""
    batch = len(x)
    if key is None:
        if isinstance(generator, Sequence) and len(generator) != batch:
            raise ValueError(
                f"recording: there are {len(generator)} generators for {batch} samples, expected one per sample"
            )
        generators = list(generator) if isinstance(generator, Sequence) else generator
        return randn_tensor(tuple(x.shape), generator=generators, device=x.device, dtype=dtype)
    if not isinstance(key.low, Tensor):
        keys = fold_in(key, torch.arange(batch, device=x.device))
    else:
        keys = Key(key.low.to(x.device), torch.as_tensor(key.high, device=x.device))
        if len(key.low) != batch:
            raise ValueError(f"recording: {len(key.low)} keys for {batch} samples, expected one per sample")
    return normal(fold_in(keys, step), tuple(x.shape), dtype=dtype)


def _check_config(config: dict[str, Any]) -> None:
    """Raise ValueError unless a config is that of an Euler scheduler of flows, without stochastic sampling."""
    expected = FlowMatchEulerDiscreteScheduler.__name__
    foreign = [name for name in config if not name.startswith("_") and name not in FlowMatchEulerDiscreteScheduler().config]
    # Only a config from a file names its class, and a file may hold more fields than the class has.
    name = config.get("_class_name", f"a scheduler with {', '.join(foreign)}" if foreign else expected)
    if name not in (expected, RecordingScheduler.__name__):
        flow = config.get("use_flow_sigmas") and "flow_shift" in config
        way_out = f"; {expected}(shift={config['flow_shift']}) steps through the same flow" if flow else ""
        raise ValueError(f"RecordingScheduler: the config is of {name}, expected {expected}'s{way_out}")
    if config.get("stochastic_sampling"):
        raise ValueError(
            "RecordingScheduler: stochastic_sampling is on, whose steps have no density to record; pass "
            "stochastic_sampling=False and a sampler"
        )
