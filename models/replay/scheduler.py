"""A scheduler for any flow pipeline of diffusers, which steps with fluvial's transitions and records what it walks.

    pipe.scheduler = RecordingScheduler.from_config(pipe.scheduler.config, sampler="flow_sde", eta=0.7)
    with pipe.scheduler.recording(key=keys) as recorder:
        images = pipe(prompts).images
    trajectory = recorder.trajectory()

Put the pipeline's own scheduler back before saving the pipeline: diffusers cannot load a class that it does not have.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from fluvial.core import gaussian, transitions
from fluvial.core.checks import check_choice, check_number, compute_dtype
from fluvial.core.gaussian import FORMS, REDUCTIONS, Form, Reduction
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Debug, Trajectory, check_density, sampler_name
from fluvial.core.sigmas import check_sigmas
from fluvial.core.transitions import Sampler, Transition

SamplerName = Literal["ode", "flow_sde", "dance_sde", "cps"]
SAMPLERS: tuple[SamplerName, ...] = ("ode", "flow_sde", "dance_sde", "cps")
Generators = torch.Generator | Sequence[torch.Generator]

# Told of each step: its index, the sample before it, the model's output, and whether it is recorded.
Observer = Callable[[int, Tensor, Tensor, bool], None]


def bind(name: SamplerName, eta: float, sigmas: Tensor) -> Sampler:
    """Return the sampler of a name, its hyper-parameters bound for a schedule `[T+1]`; eta does not concern the ODE.

    Raises:
        ValueError: there is no such sampler, or eta is out of its range.
    """
    _check_sampler(name, eta)
    if name == "flow_sde":
        return partial(transitions.flow_sde, eta=eta, sigma_max=sigmas[1])
    if name == "dance_sde":
        return partial(transitions.dance_sde, eta=eta)
    return partial(transitions.cps, eta=eta) if name == "cps" else transitions.ode


class _Plan(NamedTuple):
    """How a schedule is walked."""

    of: Tensor  # the scheduler's own sigmas; new ones make a new plan
    sigmas: Tensor  # [T+1] float32 on the host
    transition: Sampler
    samplers: Sequence[Sampler]  # of each step
    record: frozenset[int]


class _Recorded(NamedTuple):
    """A recorded step, each `[B, ...]`."""

    x: Tensor
    x_next: Tensor
    log_prob: Tensor
    velocity: Tensor | None
    debug: Debug | None


class Recorder:
    """Hold what one call of a pipeline walks; `RecordingScheduler.recording` makes it, and its arguments are there."""

    def __init__(
        self,
        *,
        key: Key | None,
        generator: Generators | None,
        window: Collection[int] | None,
        record: Collection[int] | None,
        form: Form,
        reduction: Reduction,
        keep_velocity: bool,
        debug: bool,
        on_step: Observer | None,
    ) -> None:
        self.key, self.generator = key, generator
        self.window, self.record = window, record
        self.form, self.reduction = form, reduction
        self.keep_velocity, self.debug = keep_velocity, debug
        self.on_step = on_step
        self._plan: _Plan | None = None
        self._steps: dict[int, _Recorded] = {}
        self._final: Tensor | None = None

    @property
    def sigmas(self) -> Tensor:
        """The schedule that is walked, `[T+1]` float32 on the host; ValueError before the first step."""
        return self._walked().sigmas

    @property
    def transition(self) -> Sampler:
        """The sampler of the steps in the window, its hyper-parameters bound; ValueError before the first step."""
        return self._walked().transition

    def trajectory(self) -> Trajectory:
        """Return the recorded steps, as `core.rollout.rollout` does; x and x_next have the dtype of the pipeline's samples.

        Raises:
            ValueError: no step has been taken.
        """
        self._walked()
        final = self._final
        assert final is not None
        compute, event = compute_dtype("trajectory", final=final), final.shape[1:]
        rows = [self._steps[step] for step in sorted(self._steps)]

        def stack(tensors: Sequence[Tensor], *event: int, dtype: torch.dtype = compute) -> Tensor:
            if not tensors:
                return final.new_empty((len(final), 0, *event), dtype=dtype)
            # A pipeline may begin in another dtype than its model's.
            common = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), dtype)
            return torch.stack([tensor.to(common) for tensor in tensors], dim=1)

        velocities = [row.velocity for row in rows if row.velocity is not None]
        details = [row.debug for row in rows if row.debug is not None]
        debug = Debug(
            noise=stack([detail.noise for detail in details], *event),
            mean=stack([detail.mean for detail in details], *event),
            std=stack([detail.std for detail in details]),
            velocity=stack([detail.velocity for detail in details], *event),
        )
        return Trajectory(
            x=stack([row.x for row in rows], *event, dtype=final.dtype),
            x_next=stack([row.x_next for row in rows], *event, dtype=final.dtype),
            steps=torch.tensor(sorted(self._steps), dtype=torch.int64, device=final.device),
            log_prob=stack([row.log_prob for row in rows]),
            velocity=stack(velocities, *event) if self.keep_velocity else None,
            final=final.to(compute),
            debug=debug if self.debug else None,
        )

    def _walked(self) -> _Plan:
        if self._plan is None or self._final is None:
            raise ValueError("recording: no step was taken: call the pipeline inside `with scheduler.recording(...)`")
        return self._plan

    def _take(self, step: int, transition: Transition, x: Tensor, v: Tensor, x_next: Tensor, noise: Tensor | None) -> None:
        """Keep a step if it is to be recorded, and tell the observer."""
        assert self._plan is not None
        self._final = x_next
        if recorded := step in self._plan.record:
            if step in self._steps:
                raise ValueError(f"recording: step {step} is taken twice, expected one call of a pipeline a recording")
            # Sums over a sample that is laid out otherwise round otherwise, and what is replayed is laid out in order.
            x, v, x_next = x.contiguous(), v.contiguous(), x_next.contiguous()
            details = None
            if self.debug:
                drawn = torch.zeros_like(transition.std.new_empty(x.shape)) if noise is None else noise
                details = Debug(drawn, gaussian.mean(transition, x, v), transition.std, v.clone())
            log_prob = gaussian.log_prob(transition, x, v, x_next, form=self.form, reduction=self.reduction)
            kept = v.clone() if self.keep_velocity else None
            # Copies, because the pipeline may go on to write to its samples.
            self._steps[step] = _Recorded(x.clone(), x_next.clone(), log_prob, kept, details)
        if self.on_step is not None:
            self.on_step(step, x, v, recorded)


class RecordingScheduler(FlowMatchEulerDiscreteScheduler):
    """Step like diffusers' Euler scheduler of flows, or stochastically, and record the steps on request.

    The ODE's steps are diffusers' to the bit, and while nothing is recorded they are diffusers' own call. The other samplers
    are those of `core.transitions`; their noise comes from the recording's key or generators, else from the generator that
    the pipeline passes, else from torch's global one.
    """

    # No arguments of __init__, whose signature is how diffusers knows what a config may hold.
    sampler: SamplerName = "ode"
    eta: float = 0.0
    _recorder: Recorder | None = None
    _plan: _Plan | None = None

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the scheduler for another one's config, `pipe.scheduler.config`.

        Args:
            config: of a FlowMatchEulerDiscreteScheduler.
            return_unused_kwargs: as in diffusers.
            kwargs: `sampler` ("ode", "flow_sde", "dance_sde" or "cps"; "ode" by default), its `eta`, and what overrides
                the config.

        Raises:
            ValueError: the config is another scheduler's or asks for stochastic_sampling, or there is no such sampler.
        """
        sampler, eta = kwargs.pop("sampler", "ode"), kwargs.pop("eta", 0.0)
        _check_sampler(sampler, eta)
        _check_config({**config, **kwargs})
        made = super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)
        scheduler = made[0] if return_unused_kwargs else made
        scheduler.sampler, scheduler.eta = sampler, eta
        return made

    @contextmanager
    def recording(
        self,
        *,
        key: Key | None = None,
        generator: Generators | None = None,
        window: Collection[int] | None = None,
        record: Collection[int] | None = None,
        form: Form = "density",
        reduction: Reduction = "mean",
        keep_velocity: bool = False,
        debug: bool = False,
        on_step: Observer | None = None,
    ) -> Iterator[Recorder]:
        """Record the steps of one call of a pipeline; arguments that are not named here are as in `core.rollout.rollout`.

        Args:
            key: one key, or a key a sample `[B]`. Step i draws from fold_in(key, i), as in a rollout.
            generator: where there is no key, one generator or one a sample.
            window: the steps taken with the scheduler's sampler, all by default; the others are the ODE's.
            record: the steps to record, by default those of the window that are stochastic.
            on_step: see `Observer`.

        Raises:
            ValueError: a recording is under way, or both a key and generators are given. The first step raises it where
                `core.rollout.rollout` would, and a step that is taken twice does.
        """
        check_choice("recording", "form", form, FORMS)
        check_choice("recording", "reduction", reduction, REDUCTIONS)
        if self._recorder is not None:
            raise ValueError("recording: the scheduler records already")
        if key is not None and generator is not None:
            raise ValueError("recording: key and generator are both given, expected one of them")
        recorder = Recorder(
            key=key, generator=generator, window=window, record=record, form=form, reduction=reduction,
            keep_velocity=keep_velocity, debug=debug, on_step=on_step,
        )  # fmt: skip
        self._recorder, self._plan = recorder, None
        try:
            yield recorder
        finally:
            self._recorder = self._plan = None

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
            timestep: of the schedule.
            sample: `[B, *event]`.
            s_churn, s_tmin, s_tmax, s_noise: are of no effect, as in diffusers.
            generator: of the noise, where the recording has neither key nor generators.
            per_token_timesteps: is refused.
            return_dict: as in diffusers.

        Raises:
            ValueError: tokens have timesteps of their own, or what `recording` says.
        """
        if per_token_timesteps is not None:
            raise ValueError("RecordingScheduler: per_token_timesteps is given, expected one noise level a sample and step")
        # It also checks the timestep and counts the steps.
        x_next = super().step(model_output, timestep, sample, return_dict=False)[0]
        if self._recorder is not None or self.sampler != "ode":
            x_next = self._walk(self.step_index - 1, model_output, sample, x_next, generator)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=x_next) if return_dict else (x_next,)

    def _walk(self, step: int, v: Tensor, x: Tensor, euler: Tensor, generator: Generators | None) -> Tensor:
        """Return the next sample of a step that may be stochastic or recorded, given what Euler's would be."""
        recorder, sigmas, dtype = self._recorder, self.sigmas, compute_dtype("step", model_output=v, sample=x)
        if self._plan is None or self._plan.of is not sigmas:
            self._plan = _plan(self, recorder)
        sampler, batch = self._plan.samplers[step], len(x)
        # One number a sample, as in a rollout: a vector's arithmetic may round another way than a single number's.
        levels = (level.to(device=x.device, dtype=dtype).expand(batch).contiguous() for level in sigmas[step : step + 2])
        transition = sampler(*levels)
        noise, x_next = None, euler
        if sampler is not transitions.ode:
            key = None if recorder is None else recorder.key
            if recorder is not None and recorder.generator is not None:
                generator = recorder.generator
            noise = _noise(key, generator, step, x, dtype)
            x_next = gaussian.sample(transition, x, v, noise).to(v.dtype)
        if recorder is not None:
            recorder._plan = self._plan
            recorder._take(step, transition, x, v, x_next, noise)
        return x_next


def _plan(scheduler: RecordingScheduler, recorder: Recorder | None) -> _Plan:
    """Look at a schedule once, on the host, and say how it is walked; what cannot be is refused."""
    sigmas = scheduler.sigmas.to(device="cpu", dtype=torch.float32)
    try:
        check_sigmas(sigmas)
    except ValueError as error:
        raise ValueError(
            f"RecordingScheduler: {error}; only the ODE, unrecorded, steps through any other schedule"
        ) from error
    T = len(sigmas) - 1
    transition = bind(scheduler.sampler, scheduler.eta, sigmas)
    if recorder is None:
        return _Plan(scheduler.sigmas, sigmas, transition, [transition] * T, frozenset())
    window = range(T) if recorder.window is None else recorder.window
    for name, steps in (("window", window), ("record", recorder.record or ())):
        if out := [step for step in steps if not 0 <= step < T]:
            raise ValueError(f"recording: {name} holds steps {out}, expected 0 to {T - 1}")
    samplers = [transition if step in window else transitions.ode for step in range(T)]
    record = recorder.record
    if record is None:
        noisy = [step for step in window if bool(samplers[step](sigmas[step], sigmas[step + 1]).std > 0)]
        record = window if recorder.form == "unscaled" else noisy
        if not noisy and recorder.form != "unscaled":
            raise ValueError(
                f"recording: {sampler_name(transition)} takes no stochastic step in {list(window)}, so "
                f"form={recorder.form!r} has no answer: use a stochastic sampler with eta > 0, or form='unscaled'"
            )
    check_density(samplers, sigmas, record=record, form=recorder.form)
    return _Plan(scheduler.sigmas, sigmas, transition, samplers, frozenset(record))


def _noise(key: Key | None, generator: Generators | None, step: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the noise of a step, of the shape of x."""
    batch = len(x)
    if key is None:
        if isinstance(generator, Sequence) and len(generator) != batch:
            raise ValueError(f"recording: there are {len(generator)} generators for {batch} samples, expected one a sample")
        drawn = list(generator) if isinstance(generator, Sequence) else generator
        return randn_tensor(tuple(x.shape), generator=drawn, device=x.device, dtype=dtype)
    if not isinstance(key.low, Tensor):
        keys = fold_in(key, torch.arange(batch, device=x.device))
    else:
        keys = Key(key.low.to(x.device), torch.as_tensor(key.high, device=x.device))
        if len(key.low) != batch:
            raise ValueError(f"recording: there are {len(key.low)} keys for {batch} samples, expected one a sample")
    return normal(fold_in(keys, step), tuple(x.shape), dtype=dtype)


def _check_sampler(name: str, eta: float) -> None:
    check_choice("RecordingScheduler", "sampler", name, SAMPLERS)
    check_number("RecordingScheduler", "eta", eta, low=0, high=1 if name == "cps" else float("inf"))


def _check_config(config: dict[str, Any]) -> None:
    """Raise ValueError unless a config is one that Euler's steps through a flow are taken with."""
    own = FlowMatchEulerDiscreteScheduler.__name__
    foreign = [name for name in config if not name.startswith("_") and name not in FlowMatchEulerDiscreteScheduler().config]
    # Only a config from a file says whose it is, and a file may say more than the class asks for.
    name = config.get("_class_name", f"a scheduler with {', '.join(foreign)}" if foreign else own)
    if name not in (own, RecordingScheduler.__name__):
        flow = config.get("use_flow_sigmas") and "flow_shift" in config
        way_out = f"; {own}(shift={config['flow_shift']}) steps through the same flow" if flow else ""
        raise ValueError(f"RecordingScheduler: the config is of {name}, expected {own}'s{way_out}")
    if config.get("stochastic_sampling"):
        raise ValueError(
            "RecordingScheduler: stochastic_sampling is on, whose steps have no density to record; pass "
            "stochastic_sampling=False and a sampler"
        )
