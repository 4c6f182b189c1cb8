"""Networks for `fluvial plan`: built on the meta device without weights, with inputs of a given resolution.

They are separate from `models.catalogue`, which must import without torch.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.models.original.whole import find_pipeline_folder
from fluvial.models.pipelines import unfilled
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.folder import CONFIGURATIONS, find_config, is_modular, read_entries, read_index, read_settings
from fluvial.models.pipelines.open import list_adapters
from fluvial.models.pipelines.sd3 import SD3
from fluvial.models.quantised import Base
from fluvial.models.replay.arguments import parse_argument

# Inputs that are stored per sample; the others are shared by all samples or computed in the forward pass.
CONDITIONING = ("encoder_hidden_states", "encoder_hidden_states_image", "pooled_projections")
FRAMES = 81  # default number of frames of a video
EXAMPLE = 'a photo of an apple on a table, and a sign that reads "1 APPLE"'


class PassShape(NamedTuple):
    """Side of an image, and options of a modular pipeline; other networks need the side alone."""

    side: int  # in pixels
    frames: int | None = None
    steps: int = 3
    call: tuple[str, ...] = ()  # name=value
    guided: bool = False
    compute: torch.dtype = torch.float32


class ModelShape(NamedTuple):
    """Network of a published model, its inputs, and defaults for planning."""

    build: Callable[[], nn.Module]
    block_lists: tuple[str, ...]  # names of the module lists of repeated blocks
    lora_targets: tuple[str, ...]
    inputs: Callable[[int, int], dict[str, Any]]  # (samples, resolution in pixels) -> keyword arguments of forward
    resolution: int | None = 1024  # default in pixels; None if the model has a single image size
    micro_batch: int = 1  # default
    # (samples, resolution, frames, dtype) -> VAE and a function that decodes; None without a VAE
    decoder: Callable[[int, int, int | None, torch.dtype], tuple[nn.Module, Callable[[], Tensor]]] | None = None

    @property
    def makes_videos(self) -> bool:
        """Whether the samples have frames."""
        return bool(self.inputs(1, self.resolution or 0)["hidden_states"].ndim == 5)

    def build_inputs(self, samples: int, shape: PassShape) -> dict[str, Any]:
        """Return the keyword arguments of a pass of samples; videos have the frames of the shape."""
        inputs = self.inputs(samples, shape.side)
        if shape.frames is not None and self.makes_videos:
            inputs["hidden_states"] = inputs["hidden_states"][:, :, :1].repeat(1, 1, count_latent_frames(shape.frames), 1, 1)
        return inputs

    def predict(self, module: nn.Module, samples: int, shape: PassShape) -> Tensor:
        """Return the output of a pass of samples on the meta device."""
        return module(**self.build_inputs(samples, shape), return_dict=False)[0]

    def count_stored_bytes(self, shape: PassShape) -> tuple[int, int]:
        """Return the bytes of a sample and of its conditioning."""
        inputs = self.build_inputs(1, shape)
        return inputs["hidden_states"].nbytes, sum(inputs[key].nbytes for key in CONDITIONING if key in inputs)


class ModularShape:
    """Counterpart of `ModelShape` for a modular pipeline, whose other parts are read and run on the host to find a pass.

    Args:
        folder: folder of the pipeline.
    """

    resolution, micro_batch, decoder = 1024, 1, None

    def __init__(self, folder: Path) -> None:
        self.folder, self._opened = folder, dict[PassShape, Any]()
        model = self._open(PassShape(self.resolution))
        self.lora_targets: tuple[str, ...] = model.lora_targets
        self.build, self.list_blocks = partial(model.build, empty=True), model.blocks

    def predict(self, module: nn.Module, samples: int, shape: PassShape) -> Tensor:
        """Return the velocity of samples on the meta device.

        Raises:
            ValueError: the network reads values of its inputs, which meta tensors lack.
        """
        model, meta = self._open(shape), torch.device("meta")
        levels, cond = model.known.levels[:1], model.encode([EXAMPLE])
        *rows, sizes, level = (row.expand(samples, *row.shape[1:]) for row in (*cond, levels))  # the host reads the last two
        x = _make_empty(samples, *model.known.shape)
        try:
            v: Tensor = model.known.model.to(meta).predict(module, x, level, (*(row.to(meta) for row in rows), sizes))
        except RuntimeError as error:
            says = f"its network reads values, so only `fluvial train --dry-run` can count it: {error}"
            raise ValueError(" ".join(says.split())) from error
        return v

    def count_stored_bytes(self, shape: PassShape) -> tuple[int, int]:
        """Return the bytes of a sample and of its conditioning."""
        model = self._open(shape)
        return _make_empty(*model.known.shape).nbytes, sum(row.nbytes for row in model.encode([EXAMPLE]))

    def _open(self, shape: PassShape) -> Any:
        """Return the pipeline's model for a shape."""
        from fluvial.models.modular.any_modular import AnyModular

        if shape not in self._opened:
            side, frames, steps, call, guided, compute = shape
            size: dict[str, Any] = {"height": side, "width": side, "frames": frames or 1, "steps": steps, "compute": compute}
            options: dict[str, Any] = {"call": dict(map(parse_argument, call)), "scale": 4.0 if guided else 1.0}
            self._opened[shape] = AnyModular(self.folder, **size, **options, example=EXAMPLE, device="cpu")
        return self._opened[shape]


def _build_handwriting() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    from fluvial.models.handwriting.model import CONFIG

    return SD3Transformer2DModel(**CONFIG)


def _find_published(name: str, inputs: Callable[[int, int], dict[str, Any]], *, resolution: int = 1024) -> ModelShape:
    """Return a published model by its Hub name without the owner: fluvial ships its settings, the adapter knows the rest."""
    return _read_folder(CONFIGURATIONS / name, inputs, resolution)


def _read_folder(folder: Path, inputs: Callable[[int, int], dict[str, Any]], resolution: int) -> ModelShape:
    """Return the model of a pipeline's folder."""
    adapter: type[Pipeline] = list_adapters()[read_settings(folder / "model_index.json")["_class_name"]]

    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, adapter.network).from_config(read_settings(folder / adapter.part / "config.json"))

    def decoder(
        samples: int, resolution: int, frames: int | None, dtype: torch.dtype
    ) -> tuple[nn.Module, Callable[[], Tensor]]:
        frames = (frames or FRAMES) if inputs(samples, resolution)["hidden_states"].ndim == 5 else 1
        size: dict[str, Any] = {"height": resolution, "width": resolution, "frames": frames}
        sized = {name: size[name] for name in getattr(adapter, "sized", ())}
        model = adapter(folder, dtype=dtype, device="meta", **sized)
        latents = _make_empty(samples, *model.latent_shape(resolution, resolution, frames))
        return model.vae, lambda: model.decode(latents)

    targets = adapter(folder, device="meta").lora_targets  # may depend on the network's settings
    return ModelShape(build, adapter.block_lists, targets, inputs, resolution, decoder=decoder)


def _build_sd3_inputs(samples: int, resolution: int) -> dict[str, Any]:
    # 77 CLIP tokens and 256 T5 tokens, diffusers' default.
    return _build_inputs(samples, (16, resolution // 8, resolution // 8), text=(333, 4096), pooled=2048)


def _build_flux_inputs(samples: int, resolution: int) -> dict[str, Any]:
    tokens, text = (resolution // 16) ** 2, 512  # 2x2 packed latents; T5 tokens, diffusers' default
    return {
        **_build_inputs(samples, (tokens, 64), text=(text, 4096), pooled=768),
        "guidance": _make_empty(samples),
        "img_ids": _make_empty(tokens, 3),
        "txt_ids": _make_empty(text, 3),
    }


def _build_qwen_inputs(samples: int, resolution: int) -> dict[str, Any]:
    side = resolution // 16
    # Up to 512 text tokens, diffusers' default.
    return {
        **_build_inputs(samples, (side * side, 64), text=(512, 3584), pooled=None),
        "img_shapes": [[(1, side, side)]] * samples,
    }


def _build_edit_inputs(samples: int, resolution: int, *, text: int = 1536) -> dict[str, Any]:
    side, image = resolution // 16, 64  # the image is scaled to about a megapixel, of 64 x 64 tokens
    return {
        **_build_inputs(samples, (side**2 + image**2, 64), text=(text, 3584), pooled=None),
        "img_shapes": [[(1, side, side), (1, image, image)]] * samples,
    }


def count_latent_frames(frames: int) -> int:
    """Return the number of frames of the latents of a video."""
    return (frames - 1) // 4 + 1


def _build_wan_inputs(samples: int, resolution: int) -> dict[str, Any]:
    # 512 text tokens, diffusers' default; the VAE makes one latent of four frames.
    side = resolution // 8
    return _build_inputs(samples, (16, count_latent_frames(FRAMES), side, side), text=(512, 4096), pooled=None)


def _build_inputs(samples: int, latent: tuple[int, ...], *, text: tuple[int, int], pooled: int | None) -> dict[str, Any]:
    """Return the inputs of most networks: latents, prompt embeddings, timesteps, and a pooled embedding of that width."""
    return {
        "hidden_states": _make_empty(samples, *latent),
        "encoder_hidden_states": _make_empty(samples, *text),
        **({} if pooled is None else {"pooled_projections": _make_empty(samples, pooled)}),
        "timestep": _make_empty(samples),
    }


def _make_empty(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


MODELS: dict[str, ModelShape] = {
    "handwriting": ModelShape(
        _build_handwriting,
        ("transformer_blocks",),
        (*SD3.lora_targets, "net.0.proj", "net.2", "linear"),
        lambda samples, resolution: _build_inputs(samples, (1, 8, 32), text=(4, 14), pooled=40),
        resolution=None,
        micro_batch=64,
    ),
    "sd3.5-medium": _find_published("stable-diffusion-3.5-medium", _build_sd3_inputs),
    "flux.1-dev": _find_published("FLUX.1-dev", _build_flux_inputs),
    "qwen-image": _find_published("Qwen-Image", _build_qwen_inputs),
    "wan2.1-14b": _find_published("Wan2.1-T2V-14B-Diffusers", _build_wan_inputs, resolution=640),
}


# Inputs by the class of the network or the pipeline; those of a folder may have other widths.
NETWORKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "SD3Transformer2DModel": _build_sd3_inputs,
    "FluxTransformer2DModel": _build_flux_inputs,
    "QwenImageTransformer2DModel": _build_qwen_inputs,
    "WanTransformer3DModel": _build_wan_inputs,
    "QwenImageEditPipeline": _build_edit_inputs,  # about 1400 tokens of text are the image's
    "QwenImageEditPlusPipeline": partial(_build_edit_inputs, text=512),
}


@cache
def find_model_shape(name: str) -> ModelShape | ModularShape | None:
    """Return a model by its name in the catalogue, or by the folder or id of a pipeline; None if neither exists.

    Raises:
        ValueError: the folder contains no pipeline, or the inputs of its network are unknown.
    """
    if name in MODELS:
        return MODELS[name]
    if "/" not in name and not Path(name).exists():
        return None
    folder = find_config(name) or find_pipeline_folder(name)
    pipeline = str(read_index(folder).get("_class_name"))
    adapter = list_adapters().get(pipeline)
    if adapter is None and is_modular(folder):
        return ModularShape(folder)
    if adapter is None:
        raise ValueError(
            f"{pipeline} has no adapter, so that the inputs of its network are known only when it runs: fluvial train "
            "--dry-run runs it on simulated GPUs"
        )
    if adapter.network not in NETWORKS:
        raise ValueError(f"the inputs of {adapter.network} are not known, expected one of {', '.join(NETWORKS)}")
    settings = read_settings(folder / adapter.part / "config.json")
    known = NETWORKS.get(adapter.pipeline, NETWORKS[adapter.network])
    widths = {
        "hidden_states": settings["in_channels"],
        "encoder_hidden_states": settings.get("joint_attention_dim", settings.get("text_dim")),
        "pooled_projections": settings.get("pooled_projection_dim"),
    }

    def inputs(samples: int, resolution: int) -> dict[str, Any]:
        """Return the inputs with the widths of the folder's network; latents have channels first, tokens last."""
        tensors = known(samples, resolution)
        for key, width in widths.items():
            if key in tensors:
                shape = list(tensors[key].shape)
                shape[1 if key == "hidden_states" and len(shape) > 3 else -1] = width
                tensors[key] = _make_empty(*shape)
        if settings.get("image_dim") is not None:  # Wan 2.1 from images; CLIP makes 257 tokens
            tensors["encoder_hidden_states_image"] = _make_empty(samples, 257, settings["image_dim"])
        return tensors

    halvings = len(read_settings(folder / "vae" / "config.json").get("block_out_channels", range(4))) - 1
    return _read_folder(folder, inputs, min(1024, (settings.get("sample_size") or 128) << halvings))


@cache
def count_text_encoder_bytes(name: str, base: Base | None, dtype: torch.dtype) -> int:
    """Return the bytes of a pipeline's text encoders, with linear layers quantised to the format `base`.

    Args:
        name: folder or id of a pipeline.
        base: format; None leaves them in `dtype`.
        dtype: dtype of the other weights.
    """
    import transformers

    folder, meta = find_config(name) or find_pipeline_folder(name), torch.device("meta")
    entries = read_entries(folder).items()
    kinds = {part: kind for part, kind in entries if part.startswith("text_encoder") and kind is not None}
    return sum(
        tensor.nbytes
        for part, kind in kinds.items()
        for module in [unfilled.build_network(transformers, kind, folder / part, dtype=dtype, device=meta, base=base)]
        for tensor in (*module.parameters(), *module.buffers())
    )


def list_blocks(model: ModelShape | ModularShape, module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a network in execution order."""
    if isinstance(model, ModularShape):
        return [*model.list_blocks(module)]
    return [block for name in model.block_lists for block in module.get_submodule(name).children()]
