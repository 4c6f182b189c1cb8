"""Requests to `POST /rollout/generate`: sglang-diffusion's fields, and fluvial's own under `extra_sampling_params`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct, to_builtins

from fluvial.core.gaussian import Form, Reduction
from fluvial.core.transitions import MAX_ETA, SAMPLERS
from fluvial.engines.extensions.wire.decode import SEEDS, WireError, convert
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.solvers import Solver
from fluvial.engines.sampling.tail import Tail

Debug = Literal["rollout_variance_noises", "rollout_prev_sample_means", "rollout_noise_std_devs", "rollout_model_outputs"]
DEBUG: tuple[Debug, ...] = get_args(Debug)
MOST_STEPS = 4096
MOST_IMAGE = 256_000_000  # characters of an image in a request; servers also limit its bytes
SdeType = Literal["sde", "cps", "ode"]
SDE_TYPES: dict[str, SdeType] = {"flow_sde": "sde", "cps": "cps", "ode": "ode"}  # fluvial's samplers on the wire
SAMPLER_NAMES = {sde_type: name for name, sde_type in SDE_TYPES.items()}
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Scale = Annotated[float, Meta(ge=0, le=1e6)]
Id = Annotated[int, Meta(ge=0, le=SEEDS)]
Word = Annotated[int, Meta(ge=0, lt=2**32)]
Ids = Annotated[tuple[Id, ...], Meta(max_length=4096)]
Steps = Annotated[tuple[Annotated[int, Meta(ge=0, lt=MOST_STEPS)], ...], Meta(max_length=MOST_STEPS)]
Boundaries = Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST_STEPS)], ...], Meta(max_length=MOST_STEPS)]


@dataclass(frozen=True)
class RequestLimits:
    """Largest request that a server accepts.

    Args:
        pixels: width times height times frames of one sample.
        outputs: samples per request.
        characters: characters per prompt.
    """

    pixels: int = 64_000_000
    steps: int = 1000
    outputs: int = 256
    characters: int = 65536


class FluvialOptions(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields of a request that only fluvial's server accepts.

    Args:
        key: the two words of the `core.random.Key` of the noise; None takes the seeds.
        ids: id of each sample, which is folded into the key.
        initial_ids: id of each sample's initial noise; samples with the same id start from the same noise.
        sampler: one of fluvial's built-in samplers, instead of `rollout_sde_type`.
        solver: solver of the deterministic steps.
        windows: the stochastic steps of each sample, equally many, instead of `rollout_sde_step_indices`.
        recorded_only: return the latents before and after the stochastic steps and the final ones, instead of those at
            `rollout_return_step_indices`.
        form, reduction: form and reduction of the log-probabilities, instead of `rollout_log_prob_no_const`.
        forwards: number of forward passes for the two halves of guidance.
        text_tokens: length that prompts are padded to.
        autocast: let the model compute in bfloat16 under torch's autocast.
        reuse: which layers that depend only on the prompt are computed once, see `Sampling`.
        after: steps after the window, see `Tail`.
        prefix: number of first steps that are computed once per group, and samples per group.
        debug: names of the returned debug tensors; no effect without `rollout_debug_mode`.
        version: version of the weights that must generate the samples; the request fails with 409 if the server's differs.
        final: also return the final latents with `recorded_only`.
        media: argument of the pipeline's call for each image of `image_path`; images of a list share one. None takes the
            server's order.
    """

    key: tuple[Word, Word] | None = None
    ids: Ids | None = None
    initial_ids: Ids | None = None
    sampler: str | None = None
    solver: Solver = "euler"
    windows: Annotated[tuple[Steps, ...], Meta(max_length=4096)] | None = None
    recorded_only: bool = False
    form: Form | None = None
    reduction: Reduction = "mean"
    forwards: Literal["one", "two"] = "one"
    text_tokens: Positive | None = None
    autocast: bool = False
    reuse: Literal["all", "outside_blocks", "none"] = "none"
    after: Tail = Tail()
    prefix: tuple[Positive, Positive] | None = None
    debug: tuple[Debug, ...] = DEBUG
    version: Id | None = None
    final: bool = True
    media: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=16)] | None = None


class ExtraParams(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Further settings of a request, see `read_request`.

    Args:
        fluvial: fluvial's own fields. Even if empty they select fluvial's form of the reply; without them it is sglang's.
    """

    fluvial: FluvialOptions | None = None


NO_EXTRA = ExtraParams()  # the default, which `write_request` omits
NO_OPTIONS = FluvialOptions()


class RolloutRequest(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Prompt with sampling settings. Fields and defaults are sglang's.

    Args:
        prompt, negative_prompt: texts; None takes the server's negative prompt.
        seed: seed of the first sample; sample i takes seed + i. None lets the server draw one.
        generator_device: device that sglang draws noise on; fluvial's noise is the same on every device.
        width, height, num_frames: size of a sample; None takes the server's.
        fps: frames per second. A recorded pipeline that takes a frame rate accepts only its own.
        num_inference_steps: steps of the schedule; None takes the server's.
        num_outputs_per_prompt: samples per prompt.
        guidance_scale, true_cfg_scale: scale of classifier-free guidance; which one applies depends on the model.
        image_path: images for the pipeline: files in the server's folders, or data URLs (`data:image/png;base64,...`).
        rollout: whether to return log-probabilities and the requested tensors with the samples.
        rollout_noise_level: eta.
        rollout_log_prob_no_const: return negative squared residuals instead of log-probabilities.
        rollout_debug_mode: return inputs and intermediate values of each step.
        rollout_return_denoising_env: return the conditioning of the network.
        rollout_return_dit_trajectory: return latents, timesteps and sigmas.
        rollout_sde_step_indices: stochastic steps; None is all of them.
        rollout_return_step_indices: step boundaries, 0 to T, whose latents are returned; None is all of them.
        rollout_video_dtype: "uint8" quantises videos.
        suppress_logs: leave out `peak_memory_mb`.
        extra_sampling_params: fluvial's own fields. Other fields here replace those above, as on sglang's server.
    """

    prompt: str
    negative_prompt: str | None = None
    seed: Id | None = None
    generator_device: Annotated[str, Meta(max_length=64)] = "cuda"
    width: Positive | None = None
    height: Positive | None = None
    num_inference_steps: Positive | None = None
    num_outputs_per_prompt: Positive | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    num_frames: Positive | None = None
    fps: Positive | None = None
    image_path: Annotated[tuple[Annotated[str, Meta(max_length=MOST_IMAGE)], ...], Meta(max_length=16)] | None = None
    rollout: bool = True
    rollout_sde_type: SdeType = "sde"
    rollout_noise_level: Annotated[float, Meta(ge=0, le=1e3)] = 0.7
    rollout_log_prob_no_const: bool = False
    rollout_debug_mode: bool = True
    rollout_return_denoising_env: bool = False
    rollout_return_dit_trajectory: bool = False
    rollout_sde_step_indices: Steps | None = None
    rollout_return_step_indices: Boundaries | None = None
    rollout_video_dtype: Literal["uint8"] | None = None
    suppress_logs: bool = False
    extra_sampling_params: ExtraParams = NO_EXTRA

    @property
    def fluvial(self) -> FluvialOptions:
        """Fluvial's own fields."""
        return self.extra_sampling_params.fluvial or NO_OPTIONS

    @property
    def wants_sglang_form(self) -> bool:
        """Whether the reply has sglang's layouts and names, because the request has none of fluvial's fields."""
        return self.extra_sampling_params.fluvial is None

    @property
    def outputs(self) -> int:
        """Number of samples."""
        return self.num_outputs_per_prompt or 1

    @property
    def sampler(self) -> str:
        """fluvial's name of the sampler."""
        return self.fluvial.sampler or SAMPLER_NAMES[self.rollout_sde_type]

    @property
    def form(self) -> Form:
        """fluvial's form of the log-probability.

        The wire's `rollout_log_prob_no_const` is the negative squared residual, form "unscaled". Form "no_const" is another
        formula: the density without its constants.
        """
        return self.fluvial.form or ("unscaled" if self.rollout_log_prob_no_const else "density")

    @property
    def debug(self) -> tuple[Debug, ...]:
        """Names of the requested debug tensors."""
        return self.fluvial.debug if self.rollout and self.rollout_debug_mode else ()

    @property
    def scale(self) -> float | None:
        """Guidance scale; None takes the server's."""
        return self.guidance_scale if self.true_cfg_scale is None else self.true_cfg_scale


def read_request(value: Any, limits: RequestLimits | None = None) -> RolloutRequest:
    """Convert a JSON value to a request; null stands for the default of any field.

    Raises:
        WireError: the value breaks the schema or has unknown fields, its fields contradict each other, or it is too large.
    """
    request, limits = convert(_merge_extra(value), RolloutRequest, lenient=True), limits or RequestLimits()
    pixels = (request.width or 1) * (request.height or 1) * (request.num_frames or 1)
    for name, size, most in (
        ("prompt", len(request.prompt), limits.characters),
        ("negative_prompt", len(request.negative_prompt or ""), limits.characters),
        ("num_inference_steps", request.num_inference_steps or 1, min(limits.steps, MOST_STEPS)),
        ("num_outputs_per_prompt", request.outputs, limits.outputs),
        ("width times height times num_frames", pixels, limits.pixels),
    ):
        if size > most:
            raise WireError(f"{name}: got {size}, expected at most {most}")
    _check(request)
    return request


def _merge_extra(value: Any) -> Any:
    """Merge the fields of `extra_sampling_params`, except `fluvial`, into those of the request.

    Raises:
        WireError: a field there is not a field of a request.
    """
    extra = value.get("extra_sampling_params") if isinstance(value, dict) else None
    if not isinstance(extra, dict):
        return value
    options = {name: item for name, item in extra.items() if name == "fluvial"}
    after = options["fluvial"].get("after") if isinstance(options.get("fluvial"), dict) else None
    if isinstance(after, dict) and (unknown := sorted({*after} - {each.name for each in fields(Tail)})):
        raise WireError(
            f"extra_sampling_params.fluvial.after: {unknown[0][:60]} is unknown, expected fields of the steps after"
        )
    others = {name: item for name, item in extra.items() if name not in options and item is not None}
    for name in others:
        if name not in RolloutRequest.__struct_fields__ or name == "extra_sampling_params":
            raise WireError(f"extra_sampling_params: {name[:60]} is set, which this server does not support: remove it")
    if others.get("rollout", value.get("rollout", True)) != value.get("rollout", True):
        raise WireError("extra_sampling_params: rollout differs from that of the request, which sglang takes: leave it out")
    return {**value, **others, "extra_sampling_params": options}


def write_request(request: RolloutRequest) -> dict[str, Any]:
    """Convert a request to JSON, without the fields at their defaults, which are sglang's defaults too."""
    return to_builtins(request)


def check_steps(request: RolloutRequest, steps: int) -> None:
    """Raise WireError unless the step indices of a request are below `steps`, the length of its schedule."""
    for name, indices, most in (
        ("rollout_sde_step_indices", request.rollout_sde_step_indices, steps - 1),
        ("rollout_return_step_indices", request.rollout_return_step_indices, steps),
        ("windows", [step for window in request.fluvial.windows or () for step in window], steps - 1),
    ):
        if wrong := [index for index in indices or () if index > most]:
            raise WireError(f"{name} holds {wrong[0]}, expected 0 to {most} for {steps} steps")
    if request.fluvial.prefix is not None and request.fluvial.prefix[0] > steps:
        raise WireError(f"prefix has {request.fluvial.prefix[0]} steps, expected at most {steps}")


def _check(request: RolloutRequest) -> None:
    """Raise WireError for fields that contradict each other."""
    options, eta = request.fluvial, request.rollout_noise_level
    if options.sampler is not None and options.sampler not in SAMPLERS:
        raise WireError(f"sampler is {options.sampler[:60]!r}, expected one of {', '.join(SAMPLERS)}")
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
        *((f"windows[{number}]", window) for number, window in enumerate(options.windows or ())),
    ):
        _check_rising(name, indices)
    for name, ids in (("ids", options.ids), ("initial_ids", options.initial_ids), ("windows", options.windows)):
        if ids is not None and len(ids) != request.outputs:
            raise WireError(f"{name} has {len(ids)} items, expected {request.outputs}, one per sample")
    if (options.key is None) != (options.ids is None) or (options.initial_ids is not None and options.ids is None):
        raise WireError("key, ids and initial_ids define the noise together, and one is missing: set key and ids, or a seed")
    if options.media is not None and len(options.media) != len(request.image_path or ()):
        raise WireError(f"media is {', '.join(options.media)}, expected one argument for each image of image_path")
    if options.windows is not None and len({len(window) for window in options.windows}) > 1:
        raise WireError("windows have different numbers of steps, expected as many for each sample")
    if options.windows is not None and request.rollout_sde_step_indices is not None:
        raise WireError("windows and rollout_sde_step_indices are both set, expected one of them")
    if request.rollout and options.solver != "euler":
        raise WireError(f"solver is {options.solver}, which takes no stochastic steps: expected euler, or rollout false")
    if options.prefix is not None and options.initial_ids is None:
        raise WireError("prefix is set without initial_ids, which say which samples share it: set initial_ids")


def _check_rising(name: str, indices: Sequence[int] | None) -> None:
    if indices is not None and any(after <= before for before, after in pairwise(indices)):
        raise WireError(f"{name} does not rise, expected rising indices without repeats")


def resolve_guidance(request: RolloutRequest, default: Guidance) -> Guidance:
    """Return the guidance of a request, with the server's `default` for the fields that it leaves out."""
    scale, negative = request.scale, request.negative_prompt
    return Guidance(
        default.scale if scale is None else scale,
        default.negative if negative is None else negative,
        forwards=request.fluvial.forwards,
    )
