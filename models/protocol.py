"""Interface of a model to rollouts, objectives and the engine."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from torch import Tensor, nn

from fluvial.core.types import PerSample, Samples

Cond = Any  # conditioning of a model: a pytree of tensors whose first dimension is the batch


# Folder of weights as diffusers saves a network, or the folder of each part by name for a network made of several.
Weights = Path | Mapping[str, Path]

Prediction = Literal["velocity", "epsilon"]
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)


class Schedule(NamedTuple):
    """A model's schedule of T steps."""

    # [T+1] float32 on the host. For a flow: noise levels sigma, exactly 0 at the end. For an epsilon-prediction model:
    # cumulative signal powers alpha_bar, rising.
    levels: Tensor
    timesteps: Tensor  # [T] timestep input of the network at the first T levels


class DiffusionModel(Protocol):
    """A diffusion or flow model: a network, its noise levels, and the encoding of prompts and decoding of samples.

    Two kinds of prediction are supported:

    - velocity: a flow x = (1 - sigma) x0 + sigma eps, whose network predicts v = eps - x0. Its level is sigma.
    - epsilon: a variance-preserving path x = sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) eps, whose network predicts eps.
      Its level is alpha_bar.

    All methods are pure functions of the module and the inputs, because the engine shards the module, adds LoRA to it or
    averages it, and passes it back in. `check_model` tests an object against this protocol.
    """

    @property
    def prediction(self) -> Prediction:
        """Quantity that `predict` returns, see the class."""
        ...

    @property
    def lora_targets(self) -> Sequence[str]:
        """Suffixes of the names of the linear layers that LoRA adapts, in PEFT's form, e.g. `to_q`."""
        ...

    @property
    def weights(self) -> Weights | None:
        """Folder of the base weights; None if only `build` provides weights."""
        ...

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the trained network with its base weights in float32; with `empty`, with parameters on the meta device."""
        ...

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks of the network in execution order; each is one unit of sharding."""
        ...

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample, without the batch dimension.

        Args:
            height, width: size of the image or video, in pixels.
            frames: number of frames of a video; 1 for an image.

        Raises:
            ValueError: the model does not support that size; the message names the nearest one.
        """
        ...

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the schedule of the model's scheduler; some schedulers shift the levels by the sample's shape."""
        ...

    def check_prompt(self, prompt: str) -> None:
        """Raise a ValueError of one line if the model cannot encode `prompt`."""
        ...

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Return the conditioning of a batch of prompts; the empty prompt is the unconditional input of guidance."""
        ...

    def predict(
        self, module: nn.Module, x: Samples, level: PerSample, cond: Cond, /, *, timestep: PerSample | None = None
    ) -> Samples:
        """Return the prediction `[B, *event]`: the velocity v = eps - x0 of a flow, or eps of a variance-preserving model.

        For a network in half precision, samples and conditioning `[B, ...]` are cast, but numbers per sample `[B]` are not:
        a network that joins a level to its features casts it.

        Args:
            module: the network, as `build` returned it, possibly sharded and with adapters.
            x: noisy samples, `[B, *event]`.
            level: noise level of each sample, `[B]`: sigma of a flow, alpha_bar of a variance-preserving model.
            cond: conditioning of each sample, as `encode` returns it.
            timestep: timestep of each sample on the scheduler, `[B]`; None, for levels between those of a schedule, as in
                supervised training, derives it from the level.
        """
        ...

    def decode(self, latents: Samples) -> Tensor:
        """Return images `[B, C, H, W]` or videos `[B, C, F, H, W]`, float in [0, 1]."""
        ...

    def guide(self, v: Samples, v_uncond: Samples, scale: PerSample, /) -> Samples:
        """Return the guided prediction `[B, *event]`: v_uncond + g (v - v_uncond) for most models.

        Models with this formula set `guide = staticmethod(fluvial.core.guidance.classifier_free)`, so that the fused
        kernels of an update can combine the halves.

        Args:
            v, v_uncond: conditional and unconditional prediction.
            scale: guidance scale g of each sample, `[B]`. A model may vary it with the level by an optional method
                `scale_at(scale, level, timestep)`, see `models.guidance.scale_at`.
        """
        ...


class Sounds(NamedTuple):
    """Sounds of B samples, which some models generate alone or with a video."""

    waves: Tensor  # [B, channels, n] float in [-1, 1]
    rate: int  # sampling rate per channel, in Hz


class PipelineModel(DiffusionModel, Protocol):
    """A model over a folder of weights, whose text encoders are loaded on first use."""

    def with_weights(self, folder: Path) -> "PipelineModel":
        """Return the model with the network of another folder, e.g. the export of a run."""
        ...

    def release(self) -> None:
        """Free the text encoders; encoding another prompt loads them again."""
        ...


def check_model(model: Any, name: str, *, pipeline: bool = False) -> None:
    """Check that an object has the members of `DiffusionModel`, and that its methods take the protocol's arguments.

    Args:
        model: object to test.
        name: start of the message, e.g. "mine:adapter".
        pipeline: also expect the members of `PipelineModel`.

    Raises:
        ValueError: a member is missing or has another signature; the message lists all missing members.
    """
    declared = {**vars(DiffusionModel), **(vars(PipelineModel) if pipeline else {})}
    public = {name: member for name, member in declared.items() if not name.startswith("_")}
    calls = {name: inspect.signature(member) for name, member in public.items() if inspect.isfunction(member)}
    protocol = (PipelineModel if pipeline else DiffusionModel).__name__
    # A class may lack attributes that its constructor sets.
    members = calls if isinstance(model, type) else public
    description = f"the class {model.__name__}" if isinstance(model, type) else f"an object of type {type(model).__name__}"
    if missing := [member for member in members if not hasattr(model, member)]:
        raise ValueError(f"{name} is {description}, which is not a {protocol}: it has no {', '.join(missing)}")
    if isinstance(model, type):
        raise ValueError(f"{name} is {description}, expected an object of it")
    if model.prediction not in PREDICTIONS:
        raise ValueError(f"{name}.prediction is {model.prediction!r}, expected {' or '.join(PREDICTIONS)}")
    if isinstance(model.lora_targets, str):
        raise ValueError(f"{name}.lora_targets is the string {model.lora_targets!r}, expected a sequence of strings")
    for method, call in calls.items():
        model_method, parameters = getattr(model, method), list(call.parameters.values())[1:]
        named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
        expected = ", ".join([*positional, *(f"{key}=..." for key in named)])
        if not callable(model_method):
            raise ValueError(f"{name}.{method} is of type {type(model_method).__name__}, expected a method of ({expected})")
        signature = inspect.signature(model_method)
        try:
            signature.bind(*positional, **dict.fromkeys(named))
        except TypeError as error:
            raise ValueError(f"{name}.{method} has the signature {signature}, expected ({expected}): {error}") from error


def is_recorded(model: DiffusionModel) -> bool:
    """Return whether a model is a pipeline without an adapter, whose calls are replayed (`models.replay.any_pipeline`).

    The conditioning of such a model includes its guidance. It is defined only at the levels of its schedule, unless
    `knows_any_level`.
    """
    return bool(getattr(model, "recorded", False))


def knows_any_level(model: DiffusionModel) -> bool:
    """Return whether a pipeline without an adapter is also defined at levels between those of its schedule."""
    return bool(getattr(model, "any_level", False))


def find_sound_rate(model: DiffusionModel) -> int | None:
    """Return the sampling rate of `model.decode_sounds(latents, prompts)`; None if the model makes no sounds."""
    return getattr(model, "sound_rate", None)


def decode_samples(model: DiffusionModel, latents: Samples, prompts: Sequence[Any]) -> Tensor:
    """Return the images or videos of samples, see `DiffusionModel.decode`.

    The prompts are passed to a recorded pipeline, and to a model whose `decodes_prompts` is set.

    Args:
        model: the model.
        latents: samples `[B, *event]`.
        prompts: prompt of each sample, as the model encodes it, with its images if it has some.
    """
    latents = latents.clone()  # a model may scale them in place, but the run trains on them
    if is_recorded(model) or getattr(model, "decodes_prompts", False):
        return model.decode(latents, prompts)  # type: ignore[call-arg]
    return model.decode(latents)
