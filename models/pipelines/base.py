"""What the adapters over diffusers share: a pipeline's folder, its frozen parts, its texts and its schedule.

A pipeline is a folder of parts. The network is trained, so the engine builds, shards and loads it; the text encoders and
the VAE stay frozen, and are loaded here when they are first used.
"""

import copy
import hashlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluvial.core.guidance import classifier_free
from fluvial.core.sigmas import from_scheduler
from fluvial.models.pipelines.folder import entries, local_folder, parts_of, quietly, read_index, read_settings
from fluvial.models.protocol import Cond, Prediction, Schedule, Weights

EDGE = 2**20  # bytes of a large file's beginning and end that its fingerprint takes in


def open_model(name_or_path: str | Path, *, trust_remote_code: bool = False, **options: Any) -> "Pipeline":
    """Return the adapter of a pipeline, chosen by the class that its model_index.json names.

    Args:
        name_or_path: a folder as diffusers saves a pipeline, or an id on the Hugging Face Hub, which is downloaded.
        trust_remote_code: run code that the folder brings along.
        options: as the adapter takes them.

    Raises:
        ValueError: there is no such model, fluvial has no adapter for it, or something is missing in its folder.
    """
    folder = local_folder(name_or_path, trust_remote_code=trust_remote_code)
    kind, known = read_index(folder).get("_class_name"), _adapters()
    if kind not in known:
        raise ValueError(f"{folder} holds a {kind}, which there is no adapter for, expected one of {', '.join(known)}")
    return known[kind](folder, trust_remote_code=trust_remote_code, **options)


def has_adapter(folder: Path) -> bool:
    """Return whether `open_model` opens the pipeline of a folder; ValueError if it holds none."""
    return read_index(folder).get("_class_name") in _adapters()


class Pipeline(ABC):
    """The velocity-model protocol over a folder of diffusers; an architecture adds what is its own.

    Args:
        folder: as diffusers saves a pipeline, or an id on the Hub.
        dtype: of the text encoders and the VAE. The network is built in float32; the engine chooses what it computes in.
        device: of the text encoders and the VAE; by default the GPU, if there is one.
        text_tokens: that a prompt is padded to; by default as many as diffusers' pipeline does.
        decode_chunk: images that the VAE decodes at a time.
        cache: folder for encoded prompts, which then are encoded once for all runs and ranks.
        trust_remote_code: run code that the folder brings along.

    Raises:
        ValueError: the folder holds another pipeline or lacks a part, or a number is out of range.
    """

    pipeline: str  # the class of diffusers that model_index.json names
    network: str  # the class of diffusers that is trained
    part: ClassVar[str] = "transformer"  # its folder
    block_lists: ClassVar[tuple[str, ...]]  # names of the lists of its repeated blocks, in the order they run
    text_lengths: tuple[int, int]  # tokens that a prompt is padded to by default, and at most
    lora_targets: ClassVar[tuple[str, ...]]
    prediction: Prediction = "velocity"

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        text_tokens: int | None = None,
        decode_chunk: int = 4,
        cache: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.folder = local_folder(folder, trust_remote_code=trust_remote_code)
        self.dtype, self.cache, self.trust_remote_code = dtype, cache, trust_remote_code
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        default, most = self.text_lengths
        self.text_tokens = default if text_tokens is None else text_tokens
        if not 1 <= self.text_tokens <= most:
            raise ValueError(f"text_tokens is {text_tokens}, expected 1 to {most}")
        if decode_chunk < 1:
            raise ValueError(f"decode_chunk is {decode_chunk}, expected at least 1")
        self.decode_chunk = decode_chunk
        self.parts = parts_of(self.folder, self.pipeline, self.part)
        self.weights: Weights = self.folder / self.part
        self.config, self.vae_config = (read_settings(self.folder / part / "config.json") for part in (self.part, "vae"))
        if self.config.get("_class_name") != self.network:
            held = self.config.get("_class_name")
            raise ValueError(f"{self.folder / self.part} holds a {held}, expected a {self.network}")
        self._tokenizers: Any = None
        self._text: Any = None
        self._vae: Any = None
        self._fingerprint = ""

    @abstractmethod
    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample, see the protocol."""

    @abstractmethod
    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the schedule of the pipeline, see the protocol."""

    @abstractmethod
    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Any, *, timestep: Tensor | None = None) -> Tensor:
        """Return the prediction, see the protocol."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Return images, see the protocol."""

    @abstractmethod
    def text(self, encoders: Any, prompt: str) -> dict[str, Tensor]:
        """Return what a prompt is encoded to, each `[1, ...]`, by diffusers' pipeline without its network and VAE."""

    @abstractmethod
    def cond(self, texts: Mapping[str, Tensor]) -> Cond:
        """Return the conditioning of a batch of encoded prompts, each `[B, ...]`."""

    @abstractmethod
    def longest(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the tokenizer that reads most of a prompt, of diffusers' pipeline, and how many tokens it may give."""

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the network with its weights, in float32, or `empty`, with parameters on the meta device.

        Raises:
            ValueError: a tensor is missing in its files.
            OSError: they cannot be read.
        """
        return self.build_part(self.part, empty=empty)

    def with_weights(self, folder: Path) -> "Pipeline":
        """Return the model with the network of another folder, as a run's export writes it."""
        other = copy.copy(self)
        other.weights = folder if isinstance(self.weights, Path) else {part: folder / part for part in self.weights}
        return other

    def build_part(self, part: str, *, empty: bool) -> nn.Module:
        """Return the network of one of the folder's parts, as `build` does."""
        import diffusers

        kind = getattr(diffusers, self.network)
        if empty:
            from accelerate import init_empty_weights

            with init_empty_weights(include_buffers=False):
                return kind.from_config(read_settings(self.folder / part / "config.json"))
        folder = self.weights if isinstance(self.weights, Path) else self.weights[part]
        with quietly():
            module = kind.from_pretrained(folder, use_safetensors=True, local_files_only=True)
        if missing := [name for name, tensor in module.state_dict().items() if tensor.is_meta]:
            first, more = missing[0], len(missing) - 1
            raise ValueError(f"{folder} is incomplete: {first} and {more} more tensors are missing")
        return module

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks, in the order they run."""
        return [block for name in self.block_lists for block in module.get_submodule(name).children()]

    def guide(self, v: Tensor, v_uncond: Tensor, scale: Tensor) -> Tensor:
        """Return the guided velocity, v_uncond + g (v - v_uncond)."""
        return classifier_free(v, v_uncond, scale)

    def check_prompt(self, prompt: str) -> None:
        """Raise ValueError, in one line, if a prompt has more tokens than the encoder takes that takes most.

        Encoders that take fewer read its beginning, as in diffusers' pipeline.
        """
        if self._tokenizers is None:
            self._tokenizers = self._load("tokenizer")
        with quietly():
            tokenizer, most = self.longest(self._tokenizers)
            count = len(tokenizer(prompt).input_ids)
        if count > most:
            raise ValueError(f"the prompt {prompt[:40]!r}... has {count} tokens, expected at most {most}")

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        """Return the conditioning of a batch of prompts, on the CPU.

        Each prompt is encoded alone, so that its bits depend neither on its batch nor on whether it was cached.

        Raises:
            ValueError: a prompt is too long, or a cached one cannot be read.
        """
        texts = {prompt: self._cached(prompt) for prompt in dict.fromkeys(prompts)}
        names = next(iter(texts.values()))
        return self.cond({name: torch.cat([texts[prompt][name] for prompt in prompts]) for name in names})

    def release(self) -> None:
        """Drop the text encoders; a prompt that is not cached loads them again."""
        self._text = None

    @property
    def vae_scale(self) -> int:
        """Pixels that a value of the latents stands for, along each side; of an AutoencoderKL."""
        return 2 ** (len(self.vae_config["block_out_channels"]) - 1)

    @property
    def vae(self) -> Any:
        """The VAE, frozen."""
        if self._vae is None:
            import diffusers

            with quietly():
                kind = getattr(diffusers, self.parts["vae"])
                vae = kind.from_pretrained(self.folder / "vae", torch_dtype=self.dtype, local_files_only=True)
            self._vae = vae.requires_grad_(False).eval().to(self.device)
        return self._vae

    def scheduler(self) -> Any:
        """Return diffusers' flow-matching scheduler as the folder configures it.

        Raises:
            ValueError: the folder names another.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler

        if self.parts["scheduler"] != "FlowMatchEulerDiscreteScheduler":
            kind = self.parts["scheduler"]
            raise ValueError(f"{self.folder} is scheduled by {kind}, expected FlowMatchEulerDiscreteScheduler")
        return FlowMatchEulerDiscreteScheduler.from_pretrained(self.folder / "scheduler", local_files_only=True)

    def decode_with_vae(self, latents: Tensor) -> Tensor:
        """Return what the VAE makes of unscaled latents, in [0, 1], float32, on the latents' device; in chunks."""
        chunks = latents.to(self.device, self.dtype).split(self.decode_chunk)
        images = torch.cat([self.vae.decode(chunk, return_dict=False)[0] for chunk in chunks])
        return (images.float() * 0.5 + 0.5).clamp(0, 1).to(latents.device)

    def _cached(self, prompt: str) -> dict[str, Tensor]:
        """Return an encoded prompt from the cache's folder, if there is one and it holds it, else encode it."""
        if self.cache is None:
            return self._encoded(prompt)
        self._fingerprint = self._fingerprint or self._encoders()
        name = hashlib.sha256(f"{self._fingerprint}\n{prompt}".encode()).hexdigest()
        file = self.cache / f"{name}.safetensors"
        if file.is_file():
            try:
                return load_file(file)
            except SafetensorError as error:
                raise ValueError(f"the encoded prompt {file} cannot be read: {error}; delete it") from error
        texts = self._encoded(prompt)
        self.cache.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{secrets.token_hex(4)}")  # other ranks may write the same
        save_file(texts, partial)
        os.replace(partial, file)
        return texts

    def _encoded(self, prompt: str) -> dict[str, Tensor]:
        self.check_prompt(prompt)
        if self._text is None:
            self._text = self._load("tokenizer", "text_encoder")
            for name in self.parts:
                if name.startswith("text_encoder"):
                    getattr(self._text, name).requires_grad_(False).eval().to(self.device)
        with quietly():
            texts = self.text(self._text, prompt)
        return {name: tensor.cpu().contiguous() for name, tensor in texts.items()}

    def _load(self, *wanted: str) -> Any:
        """Return diffusers' pipeline with the parts whose names begin so, and with the network, without values."""
        from diffusers import DiffusionPipeline

        left_out = {name: None for name, kind in entries(self.folder).items() if kind is None or not name.startswith(wanted)}
        with quietly():
            return DiffusionPipeline.from_pretrained(
                self.folder,
                **{**left_out, self.part: self.build_part(self.part, empty=True)},  # some pipelines look its settings up
                torch_dtype=self.dtype,
                local_files_only=True,
                trust_remote_code=self.trust_remote_code,
            )

    def _encoders(self) -> str:
        """Return a fingerprint of all that an encoded prompt depends on besides the prompt."""
        digest = hashlib.sha256(f"{self.pipeline} {self.dtype} {self.text_tokens}".encode())
        for part in sorted(name for name in self.parts if name.startswith(("tokenizer", "text_encoder"))):
            for file in sorted(path for path in (self.folder / part).rglob("*") if path.is_file()):
                size = file.stat().st_size
                digest.update(f"\n{part}/{file.name} {size}\n".encode())
                with file.open("rb") as stream:
                    digest.update(stream.read(EDGE))
                    stream.seek(max(0, size - EDGE))
                    digest.update(stream.read(EDGE))
        return digest.hexdigest()


def check_still(frames: int) -> None:
    """Raise ValueError unless one frame is asked for."""
    if frames != 1:
        raise ValueError(f"{frames} frames are asked for, expected 1: the model makes images")


def check_size(height: int, width: int, *, multiple: int, most: int | None = None) -> None:
    """Raise ValueError unless height and width are multiples of a number of pixels, and at most a number of them."""

    def nearest(size: int) -> int:
        close = max(1, (size + multiple // 2) // multiple) * multiple
        return close if most is None else min(close, most)

    near = (nearest(height), nearest(width))
    if near != (height, width):
        limit = "" if most is None else f", at most {most}"
        raise ValueError(
            f"a size of {height}x{width} is asked for, expected multiples of {multiple}{limit}: the nearest is "
            f"{near[0]}x{near[1]}"
        )


def flow_schedule(scheduler: Any, steps: int, *, tokens: int, sigmas: Sequence[float] | None = None) -> Schedule:
    """Return what a flow-matching scheduler steps through, exactly.

    Args:
        scheduler: diffusers' FlowMatchEulerDiscreteScheduler.
        steps: how many.
        tokens: of the network's input for one sample, which move the levels if the scheduler's settings say so.
        sigmas: unshifted levels, where the pipeline has its own.
    """
    settings = scheduler.config
    options: dict[str, Any] = {"num_inference_steps": steps} if sigmas is None else {"sigmas": list(sigmas)}
    if settings.use_dynamic_shifting:
        slope = (settings.max_shift - settings.base_shift) / (settings.max_image_seq_len - settings.base_image_seq_len)
        # Evaluated as diffusers' pipelines do, for the same bits.
        options["mu"] = tokens * slope + (settings.base_shift - slope * settings.base_image_seq_len)
    scheduler.set_timesteps(**options)
    return Schedule(from_scheduler(scheduler), scheduler.timesteps)


def _adapters() -> dict[str, type[Pipeline]]:
    """Return the adapters by the pipelines of diffusers that they serve."""
    from fluvial.models.pipelines.flux import Flux
    from fluvial.models.pipelines.qwen_image import QwenImage
    from fluvial.models.pipelines.sd3 import SD3
    from fluvial.models.pipelines.sdxl import StableDiffusionXL
    from fluvial.models.pipelines.unet import StableDiffusion
    from fluvial.models.pipelines.wan import Wan
    from fluvial.models.pipelines.z_image import ZImage

    adapters: tuple[type[Pipeline], ...] = (SD3, Flux, StableDiffusion, StableDiffusionXL, Wan, QwenImage, ZImage)
    return {adapter.pipeline: adapter for adapter in adapters}
