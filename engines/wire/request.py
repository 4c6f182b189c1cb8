"""A request of `POST /rollout/generate`: sglang-diffusion's fields, and fluvial's own below `extra_sampling_params`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from fluvial.core.gaussian import FORMS, REDUCTIONS, Form, Reduction
from fluvial.core.transitions import MAX_ETA, SAMPLERS
from fluvial.engines.rollout.after import AfterWindow
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.rollout.solvers import Solver
from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.fields import SEEDS, Fields
from fluvial.engines.wire.names import SDE_TYPES, SdeType, form_of, sampler_of

EXTENSION = "fluvial"  # name of fluvial's own fields in extra_sampling_params
DEBUG = ("rollout_variance_noises", "rollout_prev_sample_means", "rollout_noise_std_devs", "rollout_model_outputs")
MOST_STEPS = 4096
SOLVERS: tuple[Solver, ...] = get_args(Solver)
REUSE = ("all", "outside_blocks", "none")


@dataclass(frozen=True)
class RequestLimits:
    """Largest request that a server takes.

    Args:
        pixels: width times height times frames of one sample.
        steps: steps of the schedule.
        outputs: samples per request.
        characters: characters of a prompt.
    """

    pixels: int = 64_000_000
    steps: int = 1000
    outputs: int = 256
    characters: int = 65536


@dataclass(frozen=True)
class FluvialOptions:
    """What a request to fluvial's own server may say beyond sglang's fields.

    Args:
        key: the two words of the `core.random.Key` that the noise is drawn from; None takes the seeds.
        ids: id of each sample, which is folded into the key.
        initial_ids: id of each sample's initial noise, where samples share it.
        sampler: one of fluvial's built-in samplers, instead of `rollout_sde_type`.
        solver: solver of the deterministic steps.
        windows: the stochastic steps of each sample, equally many, instead of `rollout_sde_step_indices`.
        recorded_only: return the latents before and after the stochastic steps and the final ones, instead of those of
            `rollout_return_step_indices`.
        form, reduction: of the log-probabilities, instead of `rollout_log_prob_no_const`.
        forwards: number of forward passes for the two halves of guidance.
        text_tokens: length that prompts are padded to.
        autocast: let the model compute in bfloat16 under torch's autocast.
        reuse: layers that see the prompt alone whose results are computed once, see `Sampling`.
        after: how the deterministic steps after the window are taken.
        prefix: number of first steps that are computed once per group, and samples per group.
        debug: names of the debug tensors that are returned, where `rollout_debug_mode` is set.
        version: version of the weights that the samples must be made by; with any other the request fails with 409.
    """

    key: tuple[int, int] | None = None
    ids: tuple[int, ...] | None = None
    initial_ids: tuple[int, ...] | None = None
    sampler: str | None = None
    solver: Solver = "euler"
    windows: tuple[tuple[int, ...], ...] | None = None
    recorded_only: bool = False
    form: Form | None = None
    reduction: Reduction = "mean"
    forwards: Literal["one", "two"] = "one"
    text_tokens: int | None = None
    autocast: bool = False
    reuse: Literal["all", "outside_blocks", "none"] = "none"
    after: AfterWindow = field(default_factory=AfterWindow)
    prefix: tuple[int, int] | None = None
    debug: tuple[str, ...] = DEBUG
    version: int | None = None


@dataclass(frozen=True)
class RolloutRequest:
    """A prompt, and how its samples are made. Fields and defaults are sglang's; see the schema for their meaning.

    Args:
        prompt, negative_prompt: texts; None takes the server's negative prompt.
        seed: seed of the first sample; sample i takes seed + i. None lets the server draw one.
        generator_device: device that sglang draws noise on; fluvial's noise is the same on every device.
        width, height, num_frames, fps: size of a sample; None takes the server's.
        num_inference_steps: steps of the schedule; None takes the server's.
        num_outputs_per_prompt: samples of the prompt.
        guidance_scale, true_cfg_scale: scale of classifier-free guidance, whichever the model has.
        image_path: conditioning images on the server's disk.
        rollout: whether to return log-probabilities, and what else is asked for, beside the samples.
        rollout_sde_type: sampler.
        rollout_noise_level: eta.
        rollout_log_prob_no_const: return negative squared residuals instead of log-probabilities.
        rollout_debug_mode: return what each step was computed from.
        rollout_return_denoising_env: return the conditioning of the network.
        rollout_return_dit_trajectory: return latents, timesteps and sigmas.
        rollout_sde_step_indices: stochastic steps; None is all of them.
        rollout_return_step_indices: boundaries of steps, 0 to T, whose latents are returned; None is all of them.
        rollout_video_dtype: "uint8" quantises videos.
        suppress_logs: leave out `peak_memory_mb`.
        extra_sampling_params: further settings; fluvial's server reads `fluvial` there, and ignores the rest.
        fluvial: the settings that were read there.
    """

    prompt: str
    negative_prompt: str | None = None
    seed: int | None = None
    generator_device: str = "cuda"
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    num_outputs_per_prompt: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    num_frames: int | None = None
    fps: int | None = None
    image_path: tuple[str, ...] | None = None
    rollout: bool = True
    rollout_sde_type: SdeType = "sde"
    rollout_noise_level: float = 0.7
    rollout_log_prob_no_const: bool = False
    rollout_debug_mode: bool = True
    rollout_return_denoising_env: bool = False
    rollout_return_dit_trajectory: bool = False
    rollout_sde_step_indices: tuple[int, ...] | None = None
    rollout_return_step_indices: tuple[int, ...] | None = None
    rollout_video_dtype: str | None = None
    suppress_logs: bool = False
    extra_sampling_params: Mapping[str, Any] | None = None
    fluvial: FluvialOptions = field(default_factory=FluvialOptions)

    @property
    def outputs(self) -> int:
        """Number of samples."""
        return self.num_outputs_per_prompt or 1

    @property
    def sampler(self) -> str:
        """Fluvial's name of the sampler."""
        return self.fluvial.sampler or sampler_of(self.rollout_sde_type)

    @property
    def form(self) -> Form:
        """Fluvial's form of the log-probability."""
        return self.fluvial.form or form_of(self.rollout_log_prob_no_const)

    @property
    def scale(self) -> float | None:
        """Guidance scale; None takes the server's."""
        return self.guidance_scale if self.true_cfg_scale is None else self.true_cfg_scale


def read_request(value: Any, limits: RequestLimits | None = None) -> RolloutRequest:
    """Return the request of a JSON value; unknown fields are ignored, and null is the default.

    Raises:
        WireError: it breaks the schema, asks for what has no answer, or is too large.
    """
    limits, given = limits or RequestLimits(), Fields(value)
    prompt = given.text("prompt", most=limits.characters)
    if prompt is None:
        raise WireError("prompt is missing, expected a text")
    extra = given.inner("extra_sampling_params")
    request = RolloutRequest(
        prompt=prompt,
        negative_prompt=given.text("negative_prompt", most=limits.characters),
        seed=given.integer("seed", low=SEEDS[0], high=SEEDS[1]),
        generator_device=given.text("generator_device", "cuda", most=64) or "cuda",
        width=given.integer("width", low=1),
        height=given.integer("height", low=1),
        num_inference_steps=given.integer("num_inference_steps", low=1, high=min(limits.steps, MOST_STEPS)),
        num_outputs_per_prompt=given.integer("num_outputs_per_prompt", low=1, high=limits.outputs),
        guidance_scale=given.number("guidance_scale"),
        true_cfg_scale=given.number("true_cfg_scale"),
        num_frames=given.integer("num_frames", low=1),
        fps=given.integer("fps", low=1),
        image_path=given.texts("image_path"),
        rollout=given.flag("rollout", True),
        rollout_sde_type=given.choice("rollout_sde_type", "sde", SDE_TYPES),
        rollout_noise_level=given.number("rollout_noise_level", 0.7, high=1e3) or 0.0,
        rollout_log_prob_no_const=given.flag("rollout_log_prob_no_const", False),
        rollout_debug_mode=given.flag("rollout_debug_mode", True),
        rollout_return_denoising_env=given.flag("rollout_return_denoising_env", False),
        rollout_return_dit_trajectory=given.flag("rollout_return_dit_trajectory", False),
        rollout_sde_step_indices=given.integers("rollout_sde_step_indices", high=MOST_STEPS - 1),
        rollout_return_step_indices=given.integers("rollout_return_step_indices", high=MOST_STEPS),
        rollout_video_dtype=given.choice("rollout_video_dtype", "", ("uint8",)) or None,
        suppress_logs=given.flag("suppress_logs", False),
        extra_sampling_params=None if extra is None else extra.value,
        fluvial=_options(None if extra is None else extra.inner(EXTENSION)),
    )
    pixels = (request.width or 1) * (request.height or 1) * (request.num_frames or 1)
    if pixels > limits.pixels:
        raise WireError(f"width, height and num_frames make {pixels} pixels, expected at most {limits.pixels} per sample")
    _check(request)
    return request


def written(request: RolloutRequest) -> dict[str, Any]:
    """Return the JSON value of a request: only the fields that differ from their defaults, which sglang's are."""
    value = _changed(request, {"prompt", "fluvial", "extra_sampling_params"})
    extra, own = dict(request.extra_sampling_params or {}), _changed(request.fluvial, {"after"})
    extra.pop(EXTENSION, None)
    if request.fluvial.after != AfterWindow():
        own["after"] = _changed(request.fluvial.after, set())
    if own:
        extra[EXTENSION] = own
    return {"prompt": str(request.prompt), **value, **({"extra_sampling_params": extra} if extra else {})}


def check_steps(request: RolloutRequest, steps: int) -> None:
    """Raise WireError unless the indices of a request are steps of its schedule.

    Args:
        request: the request.
        steps: steps of the schedule, which the server may have chosen.
    """
    for name, indices, most in (
        ("rollout_sde_step_indices", request.rollout_sde_step_indices, steps - 1),
        ("rollout_return_step_indices", request.rollout_return_step_indices, steps),
        ("windows", [step for row in request.fluvial.windows or () for step in row], steps - 1),
    ):
        if out := [index for index in indices or () if index > most]:
            raise WireError(f"{name} holds {out[0]}, expected 0 to {most} for {steps} steps")
    if request.fluvial.prefix is not None and request.fluvial.prefix[0] > steps:
        raise WireError(f"prefix has {request.fluvial.prefix[0]} steps, expected at most {steps}")


def _options(given: Fields | None) -> FluvialOptions:
    if given is None:
        return FluvialOptions()
    words, prefix = given.integers("key", high=2**32 - 1), given.integers("prefix", low=1)
    for name, pair in (("key", words), ("prefix", prefix)):
        if pair is not None and len(pair) != 2:
            raise WireError(f"{given.name(name)} has {len(pair)} numbers, expected 2")
    sampler, form = given.choice("sampler", "", SAMPLERS) or None, given.choice("form", "", FORMS) or None
    debug = given.texts("debug", accepted=DEBUG)
    return FluvialOptions(
        key=None if words is None else (words[0], words[1]),
        ids=given.integers("ids", high=SEEDS[1]),
        initial_ids=given.integers("initial_ids", high=SEEDS[1]),
        sampler=sampler,
        solver=given.choice("solver", "euler", SOLVERS),
        windows=given.rows("windows", high=MOST_STEPS - 1),
        recorded_only=given.flag("recorded_only", False),
        form=form,
        reduction=given.choice("reduction", "mean", REDUCTIONS),
        forwards=given.choice("forwards", "one", ("one", "two")),
        text_tokens=given.integer("text_tokens", low=1),
        autocast=given.flag("autocast", False),
        reuse=given.choice("reuse", "none", REUSE),
        after=_after(given.inner("after")),
        prefix=None if prefix is None else (prefix[0], prefix[1]),
        debug=DEBUG if debug is None else debug,
        version=given.integer("version", high=SEEDS[1]),
    )


def _after(given: Fields | None) -> AfterWindow:
    if given is None:
        return AfterWindow()
    try:
        return AfterWindow(
            **{name: given.value[name] for name in (part.name for part in fields(AfterWindow)) if given.has(name)}
        )
    except (TypeError, ValueError) as error:
        raise WireError(f"{given.where}: {error}") from None


def _check(request: RolloutRequest) -> None:
    """Raise WireError for values that do not go together."""
    own, eta = request.fluvial, request.rollout_noise_level
    stochastic = request.sampler != "ode"
    if request.rollout and not stochastic and request.form != "unscaled":
        raise WireError(
            "rollout_sde_type is ode, whose steps have no log-probability: set rollout_log_prob_no_const, which returns "
            "negative squared residuals, or rollout false"
        )
    if request.rollout and stochastic and eta == 0 and request.form != "unscaled":
        raise WireError(
            f"rollout_noise_level is 0, so that steps of {request.sampler} have no log-probability: expected more than 0, "
            "or rollout_log_prob_no_const"
        )
    if stochastic and eta > MAX_ETA[request.sampler]:
        raise WireError(
            f"rollout_noise_level is {eta:g}, expected at most {MAX_ETA[request.sampler]:g} for {request.sampler}"
        )
    for name, indices in (
        ("rollout_sde_step_indices", request.rollout_sde_step_indices),
        ("rollout_return_step_indices", request.rollout_return_step_indices),
        *((f"windows[{number}]", row) for number, row in enumerate(own.windows or ())),
    ):
        _check_rising(name, indices)
    if request.num_inference_steps is not None:
        check_steps(request, request.num_inference_steps)
    for name, ids in (("ids", own.ids), ("initial_ids", own.initial_ids), ("windows", own.windows)):
        if ids is not None and len(ids) != request.outputs:
            raise WireError(f"{name} has {len(ids)} items, expected {request.outputs}, one per sample")
    if (own.key is None) != (own.ids is None) or (own.initial_ids is not None and own.ids is None):
        raise WireError("key, ids and initial_ids name the noise together, and one is missing: set key and ids, or a seed")
    if own.windows is not None and len({len(row) for row in own.windows}) > 1:
        raise WireError("windows have different numbers of steps, expected as many for each sample")
    if own.windows is not None and request.rollout_sde_step_indices is not None:
        raise WireError("windows and rollout_sde_step_indices are both set, expected one of them")
    if request.rollout and own.solver != "euler":
        raise WireError(f"solver is {own.solver}, which takes no stochastic steps: expected euler, or rollout false")
    if own.prefix is not None and own.initial_ids is None:
        raise WireError("prefix is set, and initial_ids say which samples share it: set them")


def _check_rising(name: str, indices: Sequence[int] | None) -> None:
    if indices is not None and any(after <= before for before, after in pairwise(indices)):
        raise WireError(f"{name} does not rise, expected rising indices without repeats")


def _changed(value: Any, left_out: set[str]) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as JSON values."""
    plain = type(value)(prompt="") if isinstance(value, RolloutRequest) else type(value)()
    names = [part.name for part in fields(value) if part.name not in left_out]
    return {name: _json(getattr(value, name)) for name in names if getattr(value, name) != getattr(plain, name)}


def _json(value: Any) -> Any:
    return [_json(item) for item in value] if isinstance(value, tuple) else value


def guidance_of(request: RolloutRequest, default: Guidance) -> Guidance:
    """Return the guidance of a request.

    Args:
        request: the request.
        default: guidance of the server, for what the request leaves open.
    """
    scale, negative = request.scale, request.negative_prompt
    return Guidance(
        default.scale if scale is None else scale,
        default.negative if negative is None else negative,
        forwards=request.fluvial.forwards,
    )
