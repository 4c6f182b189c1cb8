"""Base class of the adapters over diffusers: the pipeline's folder, its frozen parts, encoded prompts and schedule.

A pipeline is a folder of parts. The network is trained, so the engine builds, shards and loads it. The text encoders and
the VAE are frozen, and loaded here on first use.
"""

import contextlib
import copy
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluvial.core.guidance import classifier_free
from fluvial.core.random import Key, normal
from fluvial.core.sigmas import from_scheduler
from fluvial.models.device import find_default_device, has_values, is_accelerator
from fluvial.models.digests import describe_code, describe_encoding_code, digest_file, join_digests
from fluvial.models.host_values import to_device
from fluvial.models.original.convert import unpack_weights
from fluvial.models.pipelines import unfilled
from fluvial.models.pipelines.folder import find_folder, list_parts, load_network, read_entries, read_settings, silence
from fluvial.models.protocol import Cond, Prediction, Schedule, Weights
from fluvial.models.quantised import Base, quantise_linear
from fluvial.models.replay.media import TextPrompt, get_text
from fluvial.models.replay.processors import add_tokenizers, read_processors

PATCH = 2  # latents per token along each side
DECODE_CHUNK = 4  # default number of images that a VAE decodes at a time
VAE_LOCK = threading.RLock()  # held while an offloaded VAE works: an evaluation and prefetched rollouts share it


class TextCond(NamedTuple):
    """Conditioning of a network by a prompt."""

    tokens: Tensor  # [B, L, D] embedding of each token; several encoders are joined as in the pipeline
    pooled: Tensor | None = None  # [B, P] pooled embedding, for networks that take one


class VaeOptions(NamedTuple):
    """Options of a frozen VAE."""

    dtype: torch.dtype | None = None  # by default the dtype of the pipeline's frozen parts
    tile: int | None = None  # side of the tiles in pixels, one image at a time; None processes whole images
    on_host: bool = False  # whether to offload the VAE to the host while it is not in use


class Pipeline:
    """The model protocol over a pipeline's folder; the subclass of an architecture adds the rest.

    Args:
        folder: folder as diffusers saves a pipeline, or an id on the Hub.
        dtype: dtype of the text encoders and the VAE. The network is built in float32; the engine chooses its dtype.
        device: device of the text encoders and the VAE; by default the GPU if there is one.
        text_tokens: number of tokens that a prompt is padded to; by default that of diffusers' pipeline.
        shift: shift s of a flow's noise levels, sigma -> s sigma / (1 + (s - 1) sigma); by default the scheduler's.
        decode_chunk: number of images that the VAE decodes at a time.
        text_base: quantisation format of the text encoders' linear layers; None leaves them in `dtype`.
        vae: options of the VAE.
        cache: folder of encoded prompts, so that each prompt is encoded once for all runs and ranks; None disables it.
        trust_remote_code: whether to run code that the folder contains.

    Raises:
        ValueError: the folder holds another pipeline or lacks a part, or a number is out of range.
    """

    pipeline: str  # class of diffusers' pipeline, as in model_index.json
    network: str  # class of the trained network in diffusers
    former: ClassVar[tuple[str, ...]] = ()  # former names of the class in published folders
    part: str = "transformer"  # folder of the network
    block_lists: ClassVar[tuple[str, ...]]  # names of the module lists of repeated blocks, in the order they run
    packed: ClassVar[bool] = False  # whether the network takes tokens of 2 x 2 latents
    # np.linspace or torch.linspace, which round differently, for a pipeline that sets the levels before the shift.
    linspace: ClassVar[Callable[..., Any] | None] = None
    text_lengths: tuple[int, int]  # number of tokens that a prompt is padded to: default and maximum
    encoding: ClassVar[Mapping[str, Any]] = {}  # further arguments of the pipeline's encode_prompt
    encoded: ClassVar[tuple[str, ...]]  # names of encode_prompt's results in order; "" drops one
    lora_targets: tuple[str, ...]
    conditioning: ClassVar[type] = TextCond  # type of the conditioning, whose fields are the results of `encode_text`
    others: ClassVar[tuple[str, ...]] = ("vae", "scheduler")  # parts that a folder must contain beside the network
    prompt_layers: ClassVar[tuple[str, ...]] = ()  # layers that see the prompt alone, see `models.prompt_layers`
    encoders: ClassVar[tuple[str, ...]] = ("tokenizer", "text_encoder")  # name prefixes of the parts that encode a prompt
    prediction: Prediction = "velocity"
    guide = staticmethod(classifier_free)

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        text_tokens: int | None = None,
        shift: float | None = None,
        decode_chunk: int = DECODE_CHUNK,
        text_base: Base | None = None,
        vae: VaeOptions | None = None,
        cache: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.folder = find_folder(folder, trust_remote_code=trust_remote_code)
        self.dtype, self.cache, self.trust_remote_code = dtype, cache, trust_remote_code
        self.device = find_default_device() if device is None else torch.device(device)
        default, most = self.text_lengths
        self.text_tokens = default if text_tokens is None else text_tokens
        if not 1 <= self.text_tokens <= most:
            raise ValueError(f"text_tokens is {text_tokens}, expected 1 to {most}")
        if shift is not None and (self.prediction != "velocity" or not 0 < shift < 1e6):
            raise ValueError(f"shift is {shift}, expected a number above 0, for a model that predicts a velocity")
        self.shift = shift
        if decode_chunk < 1:
            raise ValueError(f"decode_chunk is {decode_chunk}, expected at least 1")
        self.vae_options = vae = vae or VaeOptions()
        self.vae_dtype = vae.dtype or dtype
        self.decode_chunk, self.text_base = decode_chunk if vae.tile is None else 1, text_base
        filled = has_values(self.device)
        self.parts = list_parts(self.folder, self.pipeline, self.part, weights=filled, others=self.others)
        self.weights: Weights = self.folder / self.part
        self.config, self.vae_config = (
            read_settings(self.folder / part / "config.json") if part in self.parts else {} for part in (self.part, "vae")
        )
        if (class_name := self.config.get("_class_name")) not in (self.network, *self.former):
            raise ValueError(f"{self.folder / self.part} holds a {class_name}, expected a {self.network}")
        self._tokenizers: Any = None
        self._text: Any = None
        self._vae: Any = None
        self._fingerprint = ""

    @property
    def patch(self) -> int:
        """Latents per token of the network along each side."""
        return PATCH

    @property
    def positions(self) -> int | None:
        """Largest number of tokens along each side; None if there is no limit."""
        return None

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return (C, height / s, width / s) for a VAE that scales by s.

        Raises:
            ValueError: frames > 1, height or width is not a multiple of s times the patch, or there are too many tokens.
        """
        check_still(frames)
        multiple = self.vae_scale * self.patch
        check_size(height, width, multiple=multiple, most=None if self.positions is None else multiple * self.positions)
        channels = self.config["in_channels"] // (PATCH**2 if self.packed else 1)
        return (channels, height // self.vae_scale, width // self.vae_scale)

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the pipeline's schedule; some schedulers shift it by the number of tokens."""
        tokens = (shape[-2] // self.patch) * (shape[-1] // self.patch)
        sigmas = None if self.linspace is None else self.linspace(1.0, 1 / steps, steps).tolist()
        return build_flow_schedule(self.build_scheduler(), steps, tokens=tokens, sigmas=sigmas)

    def predict(self, module: nn.Module, x: Tensor, level: Tensor, cond: Any, *, timestep: Tensor | None = None) -> Tensor:
        """Return v `[B, *event]`, see `DiffusionModel.predict`."""
        v = module(
            hidden_states=self.build_network_input(x, cond),
            encoder_hidden_states=cond.tokens.to(x.dtype),
            **self.build_inputs(x, level * 1000 if timestep is None else timestep, cond),
            return_dict=False,
        )[0]
        # A network returns a velocity for further input tokens, too.
        return unpack(v[:, : x.shape[-2] * x.shape[-1] // PATCH**2], x.shape[-2]) if self.packed else v

    def build_network_input(self, x: Tensor, cond: Any) -> Tensor:
        """Return the samples in the network's input layout; a subclass adds tokens or channels of the conditioning."""
        return pack(x) if self.packed else x

    def build_inputs(self, x: Tensor, timestep: Tensor, cond: Any) -> dict[str, Any]:
        """Return the network's arguments apart from the sample and the tokens of the prompt."""
        return {"timestep": timestep}

    def decode(self, latents: Tensor) -> Tensor:
        """Return images `[B, 3, height, width]`, float in [0, 1]."""
        config = self.vae.config
        unscaled = latents / config.scaling_factor
        return self.decode_with_vae(unscaled if config.shift_factor is None else unscaled + config.shift_factor)

    def encode_images(self, images: Tensor, *, key: Key | None = None) -> Tensor:
        """Return clean samples `[B, *event]`, which `decode` turns back into the images up to the error of the VAE.

        Args:
            images: images `[B, C, H, W]` of 1 or 3 channels, or videos `[B, C, F, H, W]`, in [0, 1].
            key: keys `[B]`, one per image, to draw a sample of the VAE's distribution; without a key, return its mode.
        """
        config, latents = self.vae.config, self.encode_with_vae(images, key)
        return (latents if config.shift_factor is None else latents - config.shift_factor) * config.scaling_factor

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return the encoding of a prompt as tensors `[1, ...]` by name.

        Args:
            encoders: diffusers' pipeline with its tokenizers and text encoders, without its VAE and the network's weights.
            prompt: the prompt.
        """
        options = {"device": self.device, "max_sequence_length": self.text_tokens, **self.encoding}
        returned = zip(self.encoded, encoders.encode_prompt(get_text(prompt), **options), strict=True)
        return {name: tensor for name, tensor in returned if name}

    def build_cond(self, texts: Mapping[str, Tensor]) -> Cond:
        """Return the conditioning of a batch of encoded prompts, given as tensors `[B, ...]` by `encode_text`'s names."""
        return self.conditioning(**texts)

    def find_token_limit(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the tokenizer with the largest limit among those of diffusers' pipeline, and that limit in tokens."""
        return tokenizers.tokenizer, self.text_tokens

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the network with its weights, in float32, or `empty`, with parameters on the meta device.

        Raises:
            ValueError: a tensor is missing in the files.
            OSError: the files cannot be read, or are not in the safetensors format.
        """
        return self.build_part(self.part, empty=empty)

    def with_weights(self, folder: Path) -> "Pipeline":
        """Return the model with the network of another folder, e.g. the export of a run, or of a safetensors file.

        Raises:
            ValueError: the file does not contain weights of this network, see `unpack_weights`.
        """
        if folder.is_file():
            if not isinstance(self.weights, Path):
                raise ValueError(f"{folder} is a file, expected a folder with the networks {', '.join(self.weights)}")
            folder = unpack_weights(folder.absolute(), self.pipeline, self.build(empty=True))
        other = copy.copy(self)
        other.weights = folder if isinstance(self.weights, Path) else {part: folder / part for part in self.weights}
        return other

    def build_part(self, part: str, *, empty: bool) -> nn.Module:
        """Return the network of one part of the folder; see `build`."""
        import diffusers

        kind = getattr(diffusers, self.network)
        if empty:
            from accelerate import init_empty_weights

            unread = not has_values(self.device)
            with torch.device("meta") if unread else init_empty_weights(include_buffers=False):
                return kind.from_config(read_settings(self.folder / part / "config.json"))
        folder = self.weights if isinstance(self.weights, Path) else self.weights[part]
        with silence():
            return load_network(kind, folder)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks, in the order they run."""
        return [block for name in self.block_lists for block in module.get_submodule(name).children()]

    def check_prompt(self, prompt: TextPrompt) -> None:
        """Raise a ValueError of one line if a prompt has more tokens than the largest limit of the encoders.

        Encoders with a smaller limit truncate the prompt, as in diffusers' pipeline.
        """
        if self._tokenizers is None:
            self._tokenizers = self._load_parts("tokenizer")
        with silence():
            tokenizer, most = self.find_token_limit(self._tokenizers)
            count = self.count_tokens(tokenizer, get_text(prompt))
        if count > most:
            raise ValueError(f"the prompt {get_text(prompt)[:40]!r}... has {count} tokens, expected at most {most}")

    def count_tokens(self, tokenizer: Any, prompt: str) -> int:
        """Return the number of tokens of a prompt."""
        return len(tokenizer(prompt).input_ids)

    @torch.no_grad()
    def encode(self, prompts: Sequence[TextPrompt]) -> Cond:
        """Return the conditioning of a batch of prompts, on the CPU.

        Each prompt is encoded alone, so that its bits depend neither on its batch nor on the cache.

        Raises:
            ValueError: a prompt is too long, or its file in the cache cannot be read.
            OSError: the cache cannot be written.
        """
        texts = {prompt: self._read_cache(prompt) for prompt in dict.fromkeys(prompts)}
        names = next(iter(texts.values()))
        return self.build_cond({name: torch.cat([texts[prompt][name] for prompt in prompts]) for name in names})

    def release(self) -> None:
        """Free the text encoders; a prompt that is not in the cache loads them again."""
        self._text = None

    @property
    def vae_scale(self) -> int:
        """Pixels per latent along each side, for an AutoencoderKL."""
        return 2 ** (len(self.vae_config["block_out_channels"]) - 1)

    @property
    def vae(self) -> Any:
        """Frozen VAE, loaded on first use."""
        if self._vae is None:
            import diffusers

            kind, folder = self.parts["vae"], self.folder / "vae"
            if not has_values(self.device):
                self._vae = unfilled.build_network(diffusers, kind, folder, dtype=self.vae_dtype, device=self._vae_storage)
                self._set_tiles()
                return self._vae
            options = {"torch_dtype": self.vae_dtype, "use_safetensors": True, "local_files_only": True}
            with silence():
                vae = getattr(diffusers, kind).from_pretrained(folder, **options)
            self._vae = vae.requires_grad_(False).eval().to(self._vae_storage)
            self._set_tiles()
        return self._vae

    @property
    def _vae_storage(self) -> torch.device:
        """Device of the VAE while it is not in use."""
        return torch.device("cpu") if self.vae_options.on_host else self.device

    def _set_tiles(self) -> None:
        """Set the size of the VAE's tiles, which overlap by a quarter, if it is given.

        Raises:
            ValueError: the VAE's class does not support tiles.
        """
        side = self.vae_options.tile
        if side is None:
            return
        if hasattr(self._vae, "tile_latent_min_size"):
            self._vae.tile_sample_min_size, self._vae.tile_latent_min_size = side, side // self.vae_scale
            self._vae.enable_tiling()
        elif hasattr(self._vae, "tile_sample_min_height"):
            stride = side * 3 // 4
            self._vae.enable_tiling(side, side, stride, stride)
        else:
            raise ValueError(f"{self.folder} has a {type(self._vae).__name__}, which does not work in tiles")

    @contextlib.contextmanager
    def _use_vae(self, *, differentiable: bool) -> Iterator[Any]:
        """Yield the VAE on the device; afterwards offload it again, unless a gradient needs it."""
        if not self.vae_options.on_host:
            yield self.vae
            return
        with VAE_LOCK:
            vae = self.vae.to(self.device)
            try:
                yield vae
            finally:
                if not differentiable:
                    vae.to("cpu")

    def build_scheduler(self) -> Any:
        """Return diffusers' flow-matching scheduler with the folder's settings.

        Raises:
            ValueError: the folder has another scheduler.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler

        if self.parts["scheduler"] != "FlowMatchEulerDiscreteScheduler":
            kind = self.parts["scheduler"]
            raise ValueError(f"{self.folder} has the scheduler {kind}, expected FlowMatchEulerDiscreteScheduler")
        settings = {} if self.shift is None else {"shift": self.shift, "use_dynamic_shifting": False, "shift_terminal": None}
        return FlowMatchEulerDiscreteScheduler.from_pretrained(self.folder / "scheduler", local_files_only=True, **settings)

    def decode_with_vae(self, latents: Tensor) -> Tensor:
        """Decode unscaled latents in chunks; return float32 in [0, 1], on the device of the latents."""
        chunks = latents.to(self.device, self.vae_dtype).split(self.decode_chunk)
        with self._use_vae(differentiable=torch.is_grad_enabled() and latents.requires_grad) as vae:
            images = torch.cat([vae.decode(chunk, return_dict=False)[0] for chunk in chunks])
        return (images.float() * 0.5 + 0.5).clamp(0, 1).to(latents.device)

    @torch.no_grad()
    def encode_with_vae(self, images: Tensor, key: Key | None = None) -> Tensor:
        """Encode images or videos in [0, 1] to unscaled latents in chunks; return float32, on the device of the images.

        Args:
            images, key: see `encode_images`; the images have the dimensions that the VAE takes.

        Raises:
            ValueError: a key is given, but the VAE has no distribution to sample from.
        """
        coloured = images if images.shape[1] == 3 else images.expand(-1, 3, *images.shape[2:])
        chunks = to_device((coloured * 2 - 1).to(self.vae_dtype), self.device).split(self.decode_chunk)
        with self._use_vae(differentiable=False) as vae:
            encoded = [vae.encode(chunk) for chunk in chunks]
        if not hasattr(encoded[0], "latent_dist"):  # a deterministic VAE
            if key is not None:
                raise ValueError(f"{self.folder}'s VAE has no distribution to sample from: use latents mean")
            return torch.cat([each.latent for each in encoded]).float().to(images.device)
        latents = torch.cat([each.latent_dist.mode() for each in encoded]).float().to(images.device)
        if key is None:
            return latents
        std = torch.cat([each.latent_dist.std for each in encoded]).to(latents)
        return latents + std * normal(key, tuple(latents.shape))

    def _read_cache(self, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return an encoded prompt from the cache, or encode it and add it to the cache."""
        if self.cache is None:
            return self._encode(prompt)
        self._fingerprint = self._fingerprint or self._fingerprint_encoders()
        name = hashlib.sha256(f"{self._fingerprint}\n{prompt}".encode()).hexdigest()
        file = self.cache / f"{name}.safetensors"
        if file.is_file():
            try:
                return load_file(file)
            except SafetensorError as error:
                raise ValueError(f"the encoded prompt {file} cannot be read: {error}; delete the file") from error
        texts = self._encode(prompt)
        partial = file.with_suffix(f".{secrets.token_hex(4)}")  # other ranks may write the same prompt
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            save_file(texts, partial)
            os.replace(partial, file)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"encoded prompts cannot be written to {self.cache}: {reason}") from error
        return texts

    def _encode(self, prompt: TextPrompt) -> dict[str, Tensor]:
        self.check_prompt(prompt)
        if self._text is None:
            self._text = self._load_parts(*self.encoders)
            for name in self.parts:
                encoder = getattr(self._text, name, None)
                if not name.startswith(self.encoders) or not isinstance(encoder, nn.Module):
                    continue
                encoder.requires_grad_(False).eval()
                if name.startswith("text_encoder") and self.text_base is not None and has_values(self.device):
                    quantise_linear(encoder, self.text_base, self.dtype)
                encoder.to(self.device)
        with silence():
            texts = self.encode_text(self._text, prompt)
        # Copied together, so that the host waits for the device once.
        copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in texts.items()}
        if is_accelerator(self.device):
            torch.get_device_module(self.device).current_stream().synchronize()
        return {name: tensor.contiguous().clone() for name, tensor in copies.items()}  # out of pinned memory

    def _load_parts(self, *prefixes: str) -> Any:
        """Return diffusers' pipeline with the parts whose names start with a prefix, and the network on the meta device."""
        entries = read_entries(self.folder).items()
        left_out = {name: None for name, kind in entries if kind is None or not name.startswith(prefixes)}
        if not has_values(self.device):
            parts = {name: kind for name, kind in self.parts.items() if name.startswith(prefixes)}
            extra = {self.part: self.build_part(self.part, empty=True)}
            with silence():
                return unfilled.build_pipeline(
                    self.pipeline, parts, self.folder, extra=extra, dtype=self.dtype, base=self.text_base, device=self.device
                )
        # Some pipelines read the settings of the network.
        return self._open_pipeline(**{**left_out, self.part: self.build_part(self.part, empty=True)})

    def _open_pipeline(self, **parts: Any) -> Any:
        """Return diffusers' pipeline with some parts replaced; None leaves a part out."""
        from diffusers import DiffusionPipeline

        options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": self.trust_remote_code}
        components = {**read_processors(self.folder), **parts}
        with silence():
            pipe = DiffusionPipeline.from_pretrained(self.folder, **components, torch_dtype=self.dtype, **options)
            add_tokenizers(pipe, self.folder, parts)
            return pipe

    def _fingerprint_encoders(self) -> str:
        """Return a fingerprint of the tokenizers, text encoders, settings and code that an encoded prompt depends on."""
        base = "" if self.text_base is None else f" {self.text_base}"
        code = f"{describe_encoding_code()} {self.device.type} {type(self).__module__}.{type(self).__qualname__}"
        settings = f"{self.pipeline} {self.dtype} {self.text_tokens}{base} {code}"
        # Settings of the network and of the whole pipeline, and code in the folder, may affect the encoding.
        files = [file for at in ("", "*/") for kind in ("json", "py") for file in self.folder.glob(f"{at}*.{kind}")]
        return self._compute_fingerprint(settings, self.encoders, files)

    def fingerprint_image_encoder(self) -> str:
        """Return a fingerprint of the VAE and the settings that encoded images depend on."""
        tile = "" if self.vae_options.tile is None else f" {self.vae_options.tile}"
        return self._compute_fingerprint(f"{self.pipeline} {self.vae_dtype}{tile}", ("vae",))

    def _compute_fingerprint(self, settings: str, prefixes: tuple[str, ...], files: Iterable[Path] = ()) -> str:
        """Return a fingerprint of settings, of the parts whose names start with one of `prefixes`, and of further files."""
        code = [describe_code(kind) for kind in type(self).__mro__[:-1] if not kind.__module__.startswith("fluvial.")]
        settings = " ".join([settings, *code])  # adapters outside fluvial are identified by their source
        parts = [name for name in self.parts if name.startswith(prefixes)]
        every = [*files, *(file for part in parts for file in (self.folder / part).rglob("*"))]
        digests = {str(file.relative_to(self.folder)): digest_file(file) for file in every if file.is_file()}
        return hashlib.sha256(f"{settings}\n{join_digests(digests)}".encode()).hexdigest()


def pack(x: Tensor) -> Tensor:
    """Rearrange latents `[..., C, H, W]` to tokens `[..., H W / 4, 4 C]`."""
    return rearrange(x, "... c (h p) (w q) -> ... (h w) (c p q)", p=PATCH, q=PATCH)


def unpack(tokens: Tensor, height: int) -> Tensor:
    """Rearrange tokens `[..., H W / 4, 4 C]` to latents `[..., C, H, W]` of a height."""
    return rearrange(tokens, "... (h w) (c p q) -> ... c (h p) (w q)", h=height // PATCH, p=PATCH, q=PATCH)


def check_still(frames: int) -> None:
    """Raise ValueError if frames is not 1."""
    if frames != 1:
        raise ValueError(f"frames is {frames}, expected 1: the model makes images")


def check_size(height: int, width: int, *, multiple: int, most: int | None = None) -> None:
    """Raise ValueError unless height and width are multiples of `multiple` pixels and at most `most`."""

    def round_size(size: int) -> int:
        rounded = max(1, (size + multiple // 2) // multiple) * multiple
        return rounded if most is None else min(rounded, most)

    valid = (round_size(height), round_size(width))
    if valid != (height, width):
        limit = "" if most is None else f", at most {most}"
        raise ValueError(
            f"the size is {height}x{width}, expected multiples of {multiple}{limit}: the nearest is {valid[0]}x{valid[1]}"
        )


def build_flow_schedule(scheduler: Any, steps: int, *, tokens: int, sigmas: Sequence[float] | None = None) -> Schedule:
    """Return the schedule of a flow-matching scheduler, to the bit.

    Args:
        scheduler: diffusers' FlowMatchEulerDiscreteScheduler.
        steps: number of steps.
        tokens: number of the network's tokens for one sample, which shifts the levels of some schedulers.
        sigmas: noise levels before the shift, for pipelines that set them.
    """
    settings = scheduler.config
    options: dict[str, Any] = {"num_inference_steps": steps} if sigmas is None else {"sigmas": list(sigmas)}
    if settings.use_dynamic_shifting:
        slope = (settings.max_shift - settings.base_shift) / (settings.max_image_seq_len - settings.base_image_seq_len)
        # In the same order of operations as diffusers' pipelines, for the same bits.
        options["mu"] = tokens * slope + (settings.base_shift - slope * settings.base_image_seq_len)
    scheduler.set_timesteps(**options)
    return Schedule(from_scheduler(scheduler), scheduler.timesteps)
