"""Tiny random pipelines of diffusers with an adapter: one row per architecture, and functions to sample from them."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from einops import rearrange
from helpers import stored
from helpers.marks import long
from safetensors.torch import load_file
from torch import Tensor, nn

from fluvial.core import transitions
from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import Trajectory, rollout
from fluvial.core.transitions import Sampler
from fluvial.models import Schedule
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.dit import DiT
from fluvial.models.pipelines.flux import Flux
from fluvial.models.pipelines.folder import silence
from fluvial.models.pipelines.open import open_model
from fluvial.models.pipelines.qwen_image import QwenImage
from fluvial.models.pipelines.sd3 import SD3
from fluvial.models.pipelines.unet import StableDiffusion, StableDiffusionXL
from fluvial.models.pipelines.wan import Wan
from fluvial.models.pipelines.z_image import ZImage
from fluvial.models.tiny.encoders import build_clip_encoder, build_clip_tokenizer, build_t5_encoder
from fluvial.models.tiny.pipelines import build, build_network, build_random, save_pipeline

STEPS = 3
TEXT = 40  # tokens per prompt, padding included


class TinyArchitecture(NamedTuple):
    """One architecture: how to build, call and compare its pipeline."""

    adapter: Callable[..., Pipeline]  # class of the adapter
    make: Callable[[], Any]  # builds the tiny pipeline of diffusers
    call: Callable[[float], dict[str, Any]]  # arguments of diffusers' pipeline for a scale of guidance
    prompts: tuple[str, ...] = ("a red fox", "two cats", "9 owls in 1 barn, at night")
    sizes: tuple[tuple[int, ...], ...] = (
        (16, 16),
        (16, 24),
        (32, 8),
    )  # height and width in pixels, and the number of frames of a video
    masks: bool = False  # whether the network masks padding tokens
    # Prefixes of the names of parameters without a gradient, because their output is not used.
    idle: tuple[str, ...] = ()
    variant: bool = False  # variant of another row's architecture; these rows are marked slow
    options: dict[str, Any] = {}  # noqa: RUF012  # further options of the adapter
    latents: Callable[[Tensor], Tensor] = torch.clone  # initial noise in the layout of diffusers' pipeline
    asked: Callable[[Tensor], dict[str, Any]] = lambda x: {"max_sequence_length": TEXT}  # further arguments, given the noise
    images: Callable[[Any], Tensor] = attrgetter("images")  # images in the pipeline's output
    scheduler: Callable[[Any], Any] | None = None  # replaces the pipeline's scheduler, given its settings
    load_lora: Callable[[Any, Path], None] = lambda pipeline, folder: pipeline.load_lora_weights(folder)
    exact: bool = True  # whether the pipeline computes its steps with the same operations
    sample: Callable[..., Any] = lambda pipeline, **given: pipeline(**given)  # calls the pipeline
    apart: int = 0  # blocks that are no units of their own


def flow(**levels: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**levels)


# A schedule that is shifted by the size of the image.
MOVING: dict[str, Any] = {"use_dynamic_shifting": True, "base_image_seq_len": 8, "max_image_seq_len": 99}


def sd3() -> Any:
    """Build a tiny SD3.5 medium: with normed queries and keys, and a second attention in one block."""
    sizes = {"joint_attention_dim": 16, "pooled_projection_dim": 16, "pos_embed_max_size": 16, "sample_size": 16}
    network = build_network("SD3Transformer2DModel", **sizes, qk_norm="rms_norm", dual_attention_layers=(0,))
    encoders = {"text_encoder": build_clip_encoder, "text_encoder_2": build_clip_encoder, "text_encoder_3": build_t5_encoder}
    return build("StableDiffusion3Pipeline", transformer=network, **encoders)


def sd3_without_t5() -> Any:
    """Build a tiny SD3 without T5, with a schedule that is shifted by the size of the image."""
    pipeline = sd3()
    pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
    pipeline.scheduler = flow(**MOVING)
    return pipeline


def flux(*, distilled: bool = True) -> Any:
    """Build a tiny FLUX.1: the guidance-distilled model (dev), or the one without a guidance input (schnell)."""
    sizes = {"num_single_layers": 2, "pooled_projection_dim": 8}
    network = build_network("FluxTransformer2DModel", **sizes, guidance_embeds=distilled)
    encoder = partial(build_clip_encoder, projected=False)
    return build("FluxPipeline", transformer=network, text_encoder=encoder, scheduler=flow(**MOVING if distilled else {}))


def stable_diffusion(*, large: bool = False, predicts: str = "epsilon") -> Any:
    """Build a tiny Stable Diffusion: 1.5 with convolutions around attention, or XL with two encoders and size inputs."""
    from diffusers import (
        AutoencoderKL,
        EulerDiscreteScheduler,
        PNDMScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )

    xl = {
        "use_linear_projection": True,
        "transformer_layers_per_block": (1, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 * 4 + 8,
    }
    unet = UNet2DConditionModel(
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16 if large else 8,
        attention_head_dim=2,
        **(xl if large else {}),
    )
    images = AutoencoderKL(
        block_out_channels=(4, 4, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4,
        norm_num_groups=2,
        layers_per_block=1,
        scaling_factor=0.5,
    )
    betas = {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "steps_offset": 1,
        "timestep_spacing": "leading",
        "prediction_type": predicts,
    }
    tokenizer, encoder = build_clip_tokenizer(TEXT), build_clip_encoder(projected=False)
    if large:
        return StableDiffusionXLPipeline(
            unet=unet,
            scheduler=EulerDiscreteScheduler(**betas),
            vae=images,
            text_encoder=encoder,
            tokenizer=tokenizer,
            text_encoder_2=build_clip_encoder(),
            tokenizer_2=build_clip_tokenizer(TEXT),
            add_watermarker=False,
        )
    return StableDiffusionPipeline(
        unet=unet,
        scheduler=PNDMScheduler(**betas, skip_prk_steps=True),
        vae=images,
        text_encoder=encoder,
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def wan(*, experts: bool = False, timestep_per_token: bool = False) -> Any:
    """Build a tiny Wan 2.1, or 2.2 with two experts or one timestep per token; the VAE halves sides and later frames."""
    from diffusers import UniPCMultistepScheduler

    names = ("transformer", "transformer_2") if experts else ("transformer",)
    networks = {name: build_network("WanTransformer3DModel", num_layers=2, ffn_dim=24) for name in names}
    own = {"expand_timesteps": timestep_per_token, "boundary_ratio": 0.8 if experts else None}
    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return build("WanPipeline", **networks, **own, vae=build_network("AutoencoderKLWan"), scheduler=solver)


def qwen_image() -> Any:
    network = build_network("QwenImageTransformer2DModel", num_layers=2)
    return build("QwenImagePipeline", transformer=network, scheduler=flow(**MOVING, shift_terminal=0.02))


def z_image() -> Any:
    network = build_network("ZImageTransformer2DModel", n_layers=2, n_kv_heads=2, axes_lens=[96, 32, 24])
    return build("ZImagePipeline", transformer=network)


def classifier_free(scale: float) -> dict[str, Any]:
    return {"guidance_scale": scale, "negative_prompt": ""}


def true_guidance(scale: float) -> dict[str, Any]:
    return {"guidance_scale": 2.5, "true_cfg_scale": scale, "negative_prompt": ""}


def norm_keeping(scale: float) -> dict[str, Any]:
    return {"true_cfg_scale": scale}


def with_negatives(x: Tensor) -> dict[str, Any]:
    return {"max_sequence_length": TEXT, "negative_prompt": [""] * len(x)}


def counted_from_none(scale: float) -> dict[str, Any]:
    return {"guidance_scale": scale - 1}


def packed(x: Tensor) -> Tensor:
    """Return latents as FLUX's pipeline takes them: one token per 2 x 2 latents."""
    return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def without_negative(scale: float) -> dict[str, Any]:
    """Return the arguments of guidance for Stable Diffusion; XL treats no negative prompt and an empty one differently."""
    return {"guidance_scale": scale}


def ddim(settings: Any) -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler.from_config(settings, clip_sample=False)


def flow_euler(settings: Any) -> Any:
    return flow(shift=settings["flow_shift"])


def video(x: Tensor) -> dict[str, Any]:
    return {"num_frames": 2 * x.shape[2] - 1, "max_sequence_length": TEXT}


def load_both(pipeline: Any, folder: Path) -> None:
    pipeline.load_lora_weights(folder / "transformer")
    pipeline.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)


def dit() -> Any:
    """Build a tiny DiT, whose pipeline takes no shift of the VAE's latents."""
    pipeline = build("DiTPipeline")
    pipeline.vae.register_to_config(shift_factor=None)
    return pipeline


def sample_classes(pipeline: Any, *, prompt: list[str], latents: Tensor, height: int, width: int, **given: Any) -> Any:
    """Call a DiTPipeline, which draws its noise itself, with noise and prompts that are numbers or names."""
    classes = [int(each) if each.isdigit() else pipeline.labels[each] for each in prompt]
    with patch("diffusers.pipelines.dit.pipeline_dit.randn_tensor", return_value=latents):
        return pipeline(classes, **given)


def merge_lora(pipeline: Any, folder: Path) -> None:
    """Add an exported adapter of alpha / rank 3 / 2 to the weights of a pipeline that loads none."""
    tensors = load_file(folder / "pytorch_lora_weights.safetensors")
    for name, down in tensors.items():
        if name.endswith(end := ".lora_A.weight"):
            layer = attrgetter(name.removesuffix(end))(pipeline)
            layer.weight.data += 3 / 2 * tensors[name.replace("lora_A", "lora_B")] @ down


# The last block of SD3 drops the text tokens after attention.
SD3_IDLE = ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.norm_added_q")

UNET = TinyArchitecture(StableDiffusion, stable_diffusion, without_negative, asked=lambda x: {}, scheduler=ddim, exact=False)

# The last block of Qwen-Image drops the text tokens.
QWEN_IDLE = tuple(
    f"transformer_blocks.1.{name}" for name in ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
)
# Z-Image pads to multiples of 32 tokens: the last prompt is longer than 32, and one size needs no padding.
Z_IMAGE: dict[str, Any] = {
    "prompts": ("a red fox", "two cats", "9 owls, 12345 mice, 67890 h"),
    "sizes": ((16, 16), (16, 24), (16, 32)),
}

VIDEOS = TinyArchitecture(
    Wan,
    wan,
    classifier_free,
    sizes=((16, 16, 5), (16, 32), (32, 16, 3)),
    asked=video,
    scheduler=flow_euler,
    images=lambda made: made.frames.transpose(1, 2),
)

ROWS: dict[str, TinyArchitecture] = {
    "sd3": TinyArchitecture(SD3, sd3, classifier_free, idle=SD3_IDLE),
    "sd3-without-t5": TinyArchitecture(SD3, sd3_without_t5, classifier_free, idle=SD3_IDLE, variant=True),
    "flux": TinyArchitecture(Flux, flux, true_guidance, options={"embedded_guidance": 2.5}, latents=packed),
    "flux-schnell": TinyArchitecture(Flux, lambda: flux(distilled=False), true_guidance, latents=packed, variant=True),
    "qwen-image": TinyArchitecture(
        QwenImage, qwen_image, norm_keeping, masks=True, idle=QWEN_IDLE, latents=packed, asked=with_negatives, exact=False
    ),
    "z-image": TinyArchitecture(ZImage, z_image, counted_from_none, masks=True, **Z_IMAGE),
    "sd1": UNET,
    "sd2-v": UNET._replace(make=lambda: stable_diffusion(predicts="v_prediction"), variant=True),
    "sdxl": UNET._replace(adapter=StableDiffusionXL, make=lambda: stable_diffusion(large=True)),
    "dit": UNET._replace(
        adapter=DiT,
        make=dit,
        prompts=("207", "two cats", "9 owls in 1 barn"),
        sizes=((16, 16),) * 2,
        sample=sample_classes,
        load_lora=merge_lora,
        options={"text_tokens": None},
        variant=True,
        apart=1,
    ),
    "wan": VIDEOS,
    "wan-experts": VIDEOS._replace(make=lambda: wan(experts=True), load_lora=load_both, variant=True),
}


def save(row: TinyArchitecture, folder: Path) -> Path:
    names = [name for name, known in ROWS.items() if known is row]
    if names:
        return stored.copy_of(f"adapted-{names[0]}", folder, partial(_make, row))
    _make(row, folder)
    return folder


def _make(row: TinyArchitecture, folder: Path) -> None:
    with silence():
        save_pipeline(build_random(row.make, 0.1), folder)


_rows = {name: long(name) if row.variant else name for name, row in ROWS.items()}
each_row = pytest.mark.parametrize("name", [*_rows.values()])
# Of those whose prompts are text, whatever its size: DiT's are classes, and it has one size.
each_text_row = pytest.mark.parametrize("name", [row for name, row in _rows.items() if name != "dit"])


def opened(name: str, folder: Path, **options: Any) -> Pipeline:
    return open_model(folder, **{"text_tokens": TEXT, "device": "cpu", **ROWS[name].options, **options})


def theirs(row: TinyArchitecture, folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent)
    if row.scheduler is not None:
        pipeline.scheduler = row.scheduler(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def images_of(
    row: TinyArchitecture, pipeline: Any, model: Pipeline, x: Tensor, prompts: Sequence[str], scale: float
) -> Tensor:
    size = [model.vae_scale * side for side in x.shape[-2:]]
    given = {"prompt": list(prompts), "height": size[0], "width": size[1], "latents": row.latents(x)}
    options = {"num_inference_steps": STEPS, "output_type": "pt"}
    return row.images(row.sample(pipeline, **given, **options, **row.asked(x), **row.call(scale)))


def conditions(model: Pipeline, prompts: Sequence[str], scale: float) -> Any:
    cond = model.encode(prompts)
    if scale == 1:
        return cond
    return Guided(cond, model.encode([""] * len(prompts)), torch.full((len(prompts),), scale))


def sampled(
    model: Pipeline, module: nn.Module, x: Tensor, cond: Any, schedule: Schedule, *, eta: float | None = None, **options: Any
) -> Trajectory:
    def velocity(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        timestep = schedule.timesteps[step].expand(len(x))
        return guided_velocity(model, module, x, sigma, cond, timestep=timestep, **options)

    deterministic = transitions.ode if model.prediction == "velocity" else partial(transitions.ddim, eta=0.0)
    sampler = deterministic if eta is None else noisy(model, schedule, eta)
    steps = () if eta is None else range(STEPS - 1)
    sampling: dict[str, Any] = {"transition": sampler, "deterministic": deterministic, "window": steps, "record": steps}
    with torch.no_grad():
        return rollout(velocity, x, schedule.levels, key=key(1), **sampling)


def noisy(model: Pipeline, schedule: Schedule, eta: float) -> Sampler:
    if model.prediction == "epsilon":
        return partial(transitions.ddim, eta=eta)
    return partial(transitions.flow_sde, eta=eta, sigma_max=float(schedule.levels[1]))


def start(model: Pipeline, count: int, size: tuple[int, ...]) -> Tensor:
    return normal(fold_in(key(0), torch.arange(count)), (count, *model.latent_shape(*size)))
