"""HTTP requests of a rollout, one per prompt."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Literal, NamedTuple

from fluvial.core.random import Key, bits, fold_in
from fluvial.core.table import Record, Rows, plan
from fluvial.engines.data.records import list_negatives
from fluvial.engines.data.sizes import Size
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.wire.request import NO_EXTRA, SDE_TYPES, ExtraParams, FluvialOptions, RolloutRequest
from fluvial.engines.extensions.wire.response import Kind
from fluvial.engines.sampling.config import ReadingConfig
from fluvial.engines.sampling.generate import Requests, Sampling, StochasticSteps
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.engines.sampling.tail import Tail
from fluvial.models import Prediction
from fluvial.models.replay.kinds import File
from fluvial.models.replay.media import MediaSource

OUTPUTS: Literal["rollout_model_outputs"] = "rollout_model_outputs"  # debug tensor of the predictions


class RequestOrder(NamedTuple):
    """Samples of one prompt that are requested together."""

    prompt: str
    negative: str | None  # None without guidance
    ids: tuple[int, ...]
    initial_ids: tuple[int, ...] | None
    windows: tuple[tuple[int, ...], ...]  # stochastic steps of each sample
    recorded: tuple[tuple[int, ...], ...]  # recorded steps of each sample
    media: Mapping[str, MediaSource] = MappingProxyType({})  # images by argument of the pipeline's call

    @property
    def files(self) -> list[tuple[str, File]]:
        """Pairs of argument and image; images of a list share an argument."""
        return [
            (name, file)
            for name, source in self.media.items()
            for file in (source if isinstance(source, tuple) else (source,))
        ]

    def list_boundaries(self, last: set[int]) -> tuple[int, ...]:
        """Return the boundaries before and after the recorded steps of all samples, and those of `last`."""
        steps = {step for recorded in self.recorded for step in recorded}
        return tuple(sorted(steps | {step + 1 for step in steps} | last))


@dataclass(frozen=True)
class RequestBuilder:
    """Builder of requests, with the settings that all rollouts of a run share.

    Args:
        kind: kind of the servers.
        eta: scale of the sampler's noise.
        sizes: size in pixels, and number of frames, by the shape of a sample; empty if the server has only one shape.
    """

    kind: Kind
    sampler: str
    eta: float
    prediction: Prediction
    sizes: Mapping[tuple[int, ...], tuple[Size, int]]

    def build_orders(self, requests: Requests, sampling: Sampling, *, micro_batch: int, guided: bool) -> list[RequestOrder]:
        """Group the samples of a rollout into orders: consecutive samples of one prompt and chunk, without repeats.

        Args:
            guided: whether requests have a negative prompt.
        """
        orders, known = list[RequestOrder](), set[int]()
        for start in range(0, len(requests.ids), micro_batch):
            chunk = slice(start, start + micro_batch)
            prompts, ids = requests.prompts[chunk], requests.ids[chunk]
            opposed: Sequence[str | None] = (
                list_negatives(prompts, sampling.guidance.negative) if guided else [None] * len(ids)
            )
            # sglang 0.5.23 makes one sample of a prompt with images (configs/pipeline_configs/qwen_image.py asserts it).
            singles = [index if self.kind == "sglang" and prompt.media else 0 for index, prompt in enumerate(prompts)]
            inputs = [(prompt.model_input, *rest) for prompt, *rest in zip(prompts, opposed, singles, strict=True)]
            windows, recorded = self.plan_steps(sampling, ids)
            new = [index for index, sample_id in enumerate(ids) if sample_id not in known and sample_id not in ids[:index]]
            known.update(ids)
            for (_, negative, _), same in groupby(new, key=lambda index, inputs=inputs: inputs[index]):  # type: ignore[misc]
                indices = list(same)
                prompt, initial = prompts[indices[0]], requests.initial_ids
                orders.append(
                    RequestOrder(
                        prompt.text,
                        negative,
                        ids=tuple(ids[index] for index in indices),
                        initial_ids=None if initial is None else tuple(initial[start + index] for index in indices),
                        windows=tuple(windows[index] for index in indices),
                        recorded=tuple(recorded[index] for index in indices),
                        media=prompt.media,
                    )
                )
        return orders

    def plan_steps(self, sampling: Sampling, ids: Sequence[int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """List the stochastic and the recorded steps of each sample of a chunk."""
        stochastic, levels = sampling.stochastic, sampling.schedule.levels
        if stochastic is None:
            return [()] * len(ids), [()] * len(ids)
        window, deterministic = stochastic.choose_steps(ids), deterministic_step(self.prediction)
        record = Record(steps=None if len(window) and stochastic.record else (), form=stochastic.form)
        table = plan(
            levels, stochastic.transition, batch=len(ids), window=window, deterministic=deterministic, record=record
        )

        def list_steps(rows: Rows) -> list[tuple[int, ...]]:
            return [*rows] if len(rows) == len(ids) else [*rows] * len(ids)

        return list_steps(table.stochastic), list_steps(table.recorded)

    def build_request(self, order: RequestOrder, key: Key, sampling: Sampling, *, version: int) -> RolloutRequest:
        """Build the request of an order.

        Args:
            version: version of the weights that must generate the samples.
        """
        stochastic, guidance, steps = sampling.stochastic, sampling.guidance, len(sampling.schedule.timesteps)
        size, frames = self.sizes.get(sampling.shape, (None, None))
        keeps_velocity = stochastic is not None and stochastic.record and stochastic.keep_velocity
        form = stochastic.form if stochastic is not None and stochastic.record else "unscaled"
        extra = NO_EXTRA
        windows = order.windows[0] if len(set(order.windows)) == 1 else None
        if self.kind == "fluvial":
            options = FluvialOptions(
                key=(int(key.low), int(key.high)),
                ids=order.ids,
                initial_ids=order.initial_ids,
                sampler=None if stochastic is None else self.sampler,
                solver=sampling.solver,
                windows=order.windows if windows is None else None,
                recorded_only=True,
                final=sampling.final,
                form=form,
                reduction="mean" if stochastic is None else stochastic.reduction,
                forwards=guidance.forwards,
                text_tokens=sampling.text_tokens,
                autocast=sampling.autocast,
                reuse=sampling.reuse,
                after=sampling.after,
                prefix=None if sampling.prefix is None else (sampling.prefix.steps, sampling.prefix.group),
                debug=(OUTPUTS,) if keeps_velocity else (),
                version=version,
                media=tuple(name for name, _ in order.files) or None,
            )
            extra = ExtraParams(options)
        return RolloutRequest(
            prompt=order.prompt,
            negative_prompt=order.negative,
            seed=None if self.kind == "fluvial" else derive_seed(key, order),
            width=None if size is None else size.width,
            height=None if size is None else size.height,
            num_inference_steps=steps,
            num_outputs_per_prompt=len(order.ids),
            guidance_scale=guidance.scale,
            true_cfg_scale=None if self.kind == "fluvial" else guidance.scale,
            image_path=tuple(_encode_data_url(file) for _, file in order.files) or None,
            num_frames=frames if frames is not None and frames > 1 else None,
            # no effect on fluvial's server, which gets the sampler by its own name
            rollout_sde_type=SDE_TYPES.get("ode" if stochastic is None else self.sampler, "sde"),
            rollout_noise_level=sampling.eta if stochastic is None else self.eta,
            rollout_log_prob_no_const=form == "unscaled",
            rollout_debug_mode=keeps_velocity,
            rollout_return_dit_trajectory=True,
            rollout_sde_step_indices=windows if stochastic is not None and windows else None,
            rollout_return_step_indices=None
            if self.kind == "fluvial"
            else order.list_boundaries(find_final_boundary(sampling)),
            suppress_logs=True,
            extra_sampling_params=extra,
        )


def _encode_data_url(file: File) -> str:
    """Encode a file as a data URL; servers look at its bytes, not at the type."""
    content = file if isinstance(file, bytes) else file.read_bytes()
    return f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"


def find_final_boundary(sampling: Sampling) -> set[int]:
    """Return the boundary of the final latents if they are needed."""
    return {len(sampling.schedule.timesteps)} if sampling.final else set()


def derive_seed(key: Key, order: RequestOrder) -> int:
    """Derive the seed of an order, for servers that draw the noise of sample i from seed + i."""
    low, high = bits(fold_in(key, order.ids[0]), (2,)).tolist()
    return int(low | (high & 0x7FFF) << 32)  # 47 bits, which any generator accepts


def check_sglang(sampling: ReadingConfig, prediction: Prediction, *, autocast: bool) -> None:
    """Raise UsageError for sampling settings that only fluvial's server supports."""
    window = sampling.window
    required = {
        "sampling.shared_noise": (sampling.shared_noise, False),
        "sampling.window.share_prefix": (window.share_prefix, False),
        "sampling.window.tail": (window.tail, Tail()),
        "sampling.window.draw": (window.draw, "rollout"),
        "rollout.autocast": (autocast, False),
    }
    problem = next((f"{name} is {value}" for name, (value, default) in required.items() if value != default), None)
    if window.is_tree:
        problem = f"sampling.window is {window.kind}"
    if sampling.groups.kind == "scouted":
        problem = "sampling.groups is scouted"
    if sampling.sampler.kind not in SDE_TYPES:
        problem = f"sampling.sampler is {sampling.sampler.kind}, expected one of {', '.join(SDE_TYPES)}"
    if sampling.guidance.scale < 1:  # it guides above 1 alone
        problem = f"sampling.guidance.scale is {sampling.guidance.scale:g}, expected at least 1"
    if prediction != "velocity":
        problem = f"the model predicts {prediction}"
    _raise_problem(problem)


def check_sglang_steps(steps: StochasticSteps | None) -> None:
    """Raise UsageError for log-probabilities that only fluvial's server computes."""
    if steps is None or not steps.record:
        return
    problem = None if steps.reduction == "mean" else f"reduction is {steps.reduction}"
    if steps.form == "no_const":
        problem = "form is no_const, the density without constants, unlike rollout_log_prob_no_const"
    _raise_problem(problem)


def _raise_problem(problem: str | None) -> None:
    if problem is not None:
        raise UsageError(f"{problem}; sglang does not support this: change it, or sample with fluvial serve")
