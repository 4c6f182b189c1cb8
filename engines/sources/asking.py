"""What a rollout asks of servers: one request per prompt, in the words of the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from fluvial.core.random import Key, bits, fold_in
from fluvial.core.rollout import Record, plan_steps
from fluvial.core.transitions import SAMPLERS
from fluvial.engines.data.records import negatives
from fluvial.engines.data.sizes import Size
from fluvial.engines.errors import UsageError
from fluvial.engines.rollout.after import AfterWindow
from fluvial.engines.rollout.config import RolloutConfig
from fluvial.engines.rollout.generate import Requests, Sampling, deterministic_step
from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.names import no_const_of, sde_type_of
from fluvial.engines.wire.request import FluvialOptions, RolloutRequest
from fluvial.models import Prediction

Kind = Literal["fluvial", "sglang"]  # server of `fluvial serve`, or any other with sglang's endpoints
OUTPUTS = "rollout_model_outputs"  # debug tensor of the predictions


class Order(NamedTuple):
    """Samples of one prompt, which one request asks for."""

    prompt: str
    negative: str | None  # where there is guidance
    ids: tuple[int, ...]
    initial_ids: tuple[int, ...] | None
    windows: tuple[tuple[int, ...], ...]  # stochastic steps of each sample
    recorded: tuple[tuple[int, ...], ...]  # recorded steps of each sample


@dataclass(frozen=True)
class Asking:
    """How samples are asked for, the same in all rollouts of a run.

    Args:
        kind: what the servers are.
        sampler: name of the sampler.
        eta: scale of its noise.
        prediction: what the model predicts.
        sizes: size in pixels, and number of frames, by the shape of a sample; none where the server knows one shape alone.
    """

    kind: Kind
    sampler: str
    eta: float
    prediction: Prediction
    sizes: Mapping[tuple[int, ...], tuple[Size, int]]

    def orders(self, requests: Requests, sampling: Sampling, *, micro_batch: int, guided: bool) -> list[Order]:
        """Return the orders of a rollout: consecutive samples of one prompt and one chunk; a repeated sample is left out.

        Args:
            requests: the samples.
            sampling: how they are made.
            micro_batch: samples per chunk.
            guided: whether they are given a negative prompt.
        """
        found, known = list[Order](), set[int]()
        for start in range(0, len(requests.ids), micro_batch):
            part = slice(start, start + micro_batch)
            prompts, ids = requests.prompts[part], requests.ids[part]
            opposed: Sequence[str | None] = negatives(prompts, sampling.guidance.negative) if guided else [None] * len(ids)
            first = ids if requests.initial_ids is None else requests.initial_ids[part]
            windows, recorded = self.steps(sampling, ids)
            open_order: Order | None = None
            for row, own in enumerate(ids):
                if own in known:
                    continue
                known.add(own)
                initial = None if requests.initial_ids is None else (first[row],)
                order = Order(str(prompts[row]), opposed[row], (own,), initial, (windows[row],), (recorded[row],))
                if open_order is not None and order[:2] == open_order[:2]:
                    found.pop()
                    order = _joined(open_order, order)
                found.append(order)
                open_order = order
        return found

    def steps(self, sampling: Sampling, ids: Sequence[int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the stochastic and the recorded steps of each sample of a chunk."""
        stochastic, levels = sampling.stochastic, sampling.schedule.levels
        if stochastic is None:
            return [()] * len(ids), [()] * len(ids)
        window = stochastic.steps_of(ids)
        if isinstance(window, Tensor):
            rows = [tuple(row) for row in window.tolist()]
            return rows, rows if stochastic.record else [()] * len(ids)
        shared = tuple(sorted(window))
        record = Record(steps=None if shared and stochastic.record else (), form=stochastic.form)
        plan = plan_steps(
            levels, stochastic.transition, window=shared, deterministic=deterministic_step(self.prediction), record=record
        )
        return [shared] * len(ids), [tuple(sorted(plan.record))] * len(ids)

    def request(self, order: Order, key: Key, sampling: Sampling, *, version: int) -> RolloutRequest:
        """Return the request of an order.

        Args:
            order: the samples.
            key: key of the rollout.
            sampling: how they are made.
            version: version of the weights that must make them.
        """
        stochastic, guidance, steps = sampling.stochastic, sampling.guidance, len(sampling.schedule.timesteps)
        size, frames = self.sizes.get(sampling.shape, (None, None))
        keeps = stochastic is not None and stochastic.record and stochastic.keep_velocity
        form = stochastic.form if stochastic is not None and stochastic.record else "unscaled"
        own = FluvialOptions()
        windows = order.windows[0] if len(set(order.windows)) == 1 else None
        if self.kind == "fluvial":
            own = FluvialOptions(
                key=(int(key.low), int(key.high)), ids=order.ids, initial_ids=order.initial_ids,
                sampler=None if stochastic is None else self.sampler, solver=sampling.solver,
                windows=order.windows if windows is None else None, recorded_only=True, form=form,
                reduction="mean" if stochastic is None else stochastic.reduction, forwards=guidance.forwards,
                text_tokens=sampling.text_tokens, autocast=sampling.autocast, reuse=sampling.reuse, after=sampling.after,
                prefix=None if sampling.prefix is None else (sampling.prefix.steps, sampling.prefix.group),
                debug=(OUTPUTS,) if keeps else (), version=version,
            )  # fmt: skip
        boundaries = sorted(
            {step for row in order.recorded for own_step in row for step in (own_step, own_step + 1)} | {steps}
        )
        return RolloutRequest(
            prompt=order.prompt,
            negative_prompt=order.negative,
            seed=None if self.kind == "fluvial" else seed_of(key, order),
            width=None if size is None else size.width,
            height=None if size is None else size.height,
            num_inference_steps=steps,
            num_outputs_per_prompt=len(order.ids),
            guidance_scale=guidance.scale,
            true_cfg_scale=None if self.kind == "fluvial" else guidance.scale,
            num_frames=frames if frames is not None and frames > 1 else None,
            rollout_sde_type="ode" if stochastic is None else self._sde_type,
            rollout_noise_level=sampling.eta if stochastic is None else self.eta,
            rollout_log_prob_no_const=form == "unscaled",
            rollout_debug_mode=keeps,
            rollout_return_dit_trajectory=True,
            rollout_sde_step_indices=windows if stochastic is not None and windows else None,
            rollout_return_step_indices=None if self.kind == "fluvial" else tuple(boundaries),
            suppress_logs=True,
            fluvial=own,
        )

    @property
    def _sde_type(self) -> Literal["sde", "cps", "ode"]:
        """Name of the sampler on the wire; fluvial's server takes the other name."""
        return "sde" if self.kind == "fluvial" and self.sampler not in ("cps", "ode") else sde_type_of(self.sampler)


def seed_of(key: Key, order: Order) -> int:
    """Return the seed of an order for a server that draws noise from seeds: of sample i it uses seed + i."""
    low, high = bits(fold_in(key, order.ids[0]), (2,)).tolist()
    return int(low | (high & 0x7FFF) << 32)  # 47 bits, which any generator takes


def check_served(rollout: RolloutConfig) -> None:
    """Raise UsageError for samples that no server makes."""
    if rollout.sampler_name not in SAMPLERS and rollout.sampler_name != "ode":
        raise UsageError(
            f"rollout.sampler is {rollout.sampler_name}, a function of this process, and rollout.source names servers: use "
            f"one of {', '.join(SAMPLERS)}"
        )
    if rollout.solver != "euler":
        raise UsageError(
            f"rollout.solver is {rollout.solver}, and rollout.source names servers, which return Euler's latents alone: "
            "use euler"
        )
    if rollout.step_cache:
        raise UsageError(
            f"rollout.step_cache is {rollout.step_cache:g}, with which samples depend on others of their batch, and "
            "rollout.source names servers: use 0"
        )


def check_sglang(rollout: RolloutConfig, prediction: Prediction) -> None:
    """Raise UsageError for samples that sglang does not make, and fluvial's own server does."""
    unchanged = {
        "solver": "euler", "shared_noise": False, "share_prefix": False, "branches": None, "after": AfterWindow(),
        "window_draw": "rollout", "reduction": "mean", "autocast": False,
    }  # fmt: skip
    problem = next(
        (
            f"rollout.{name} is {getattr(rollout, name)}"
            for name, value in unchanged.items()
            if getattr(rollout, name) != value
        ),
        None,
    )
    if prediction != "velocity":
        problem = f"the model predicts {prediction}"
    try:
        sde_type_of(rollout.sampler_name)
        no_const_of(rollout.form)
    except WireError as error:
        problem = f"rollout.{error}"
    if problem is not None:
        raise UsageError(f"{problem}; sglang cannot do this: leave it, or let fluvial serve make the samples")


def _joined(order: Order, other: Order) -> Order:
    """Return two orders of one prompt as one."""
    initial = None if order.initial_ids is None or other.initial_ids is None else order.initial_ids + other.initial_ids
    return order._replace(
        ids=order.ids + other.ids, initial_ids=initial, windows=order.windows + other.windows,
        recorded=order.recorded + other.recorded,
    )  # fmt: skip
