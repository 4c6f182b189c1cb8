"""Tiny random pipelines of any class of diffusers, from the types of their parts, and the arguments of their calls."""

import importlib.util
import inspect
import json
import sys
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fluvial.models.replay.capture import SCALES
from fluvial.models.replay.kinds import ARGUMENTS
from fluvial.models.replay.processors import build_processor_without_video
from fluvial.models.tiny import encoders
from fluvial.models.tiny.settings import LATENT, WIDTH, choose_network_settings, choose_vae_settings, look_up, read_table

# Pipelines that are tried without their image: the first overwrites a frame at every step, and the second caches keys of
# the image at its first step.
TEXT_ALONE = ("Kandinsky6TI2VAPipeline", "Flux2KleinKVPipeline")
# Parts of the names of pipelines that are tried with images; other pipelines can do without theirs.
CONDITIONED = (
    *("Img2Img", "Edit", "ToVideo", "I2V", "I2I", "Inpaint", "Fill", "Kontext", "Control", "Image2Video", "Refiner"),
    *("Layered", "VideoToVideo", "VACE", "AudioToAudio", "AceStep", "Flux2"),
)
MOST = 20e6  # largest number of parameters of a part
# Optional media that are not tried.
UNTRIED = (
    *("ip_adapter_image", "last_image", "reference_image", "image_reference"),
    *("images", "input_images", "reference_images", "face_video", "pose_video", "background_video", "mask_video"),
    "src_audio",
)


class UnknownPart(ValueError):
    """No tiny part of a class is known."""


class TinyCall(NamedTuple):
    """Call of a tiny pipeline."""

    media: tuple[str, ...]  # arguments that are images, videos or sounds
    call: dict[str, Any]
    scale: float
    negative: str  # negative prompt; empty if the pipeline takes none
    size: int  # height and width of the images, in pixels
    frames: int
    sounds: bool = False  # whether it makes sounds and no images


# Prefixes of schedulers that are not a flow's.
NO_FLOWS = ("KarrasDiffusionSchedulers", "Amused", "CogVideoX", "EDM", "DDPM", "VQDiffusion")
NO_TEXT = ("audio_tokenizer", "sound_tokenizer")
UNGUIDED = ("AceStepPipeline",)  # guidance has a memory; timesteps are noise levels
INVERTED = ("MochiPipeline", "OmniGenPipeline")  # noise levels rise
# Prefixes of pipelines that scale images to about a megapixel. With less than the published VAEs' factor of 8, the
# attention in the VAE and in the network takes minutes on a CPU.
SCALED = ("QwenImageEdit", "FluxKontext", "LongCatImageEdit")
LISTED = ("Kandinsky5T2IPipeline", "Kandinsky5I2IPipeline")  # images have one of a list of sizes
# Prefixes of pipelines that are tried with images of 32 x 32, the smallest size of some.
LARGE = (
    *("Lumina", "Sana", "Hunyuan", "LTX", "Mochi", "Cosmos", "Kandinsky", "Easy", "PRX", "HiDream", "Helios"),
    *("BriaFibo", "Motif", "QwenImage21"),
)
LARGEST = "Flux2"  # prefix of pipelines that refuse images below 64 x 64


def list_pipelines() -> list[str]:
    """Return the classes of diffusers' pipelines that can be imported, with a transformer or modular, by name."""
    import diffusers

    return [name for name in sorted(dir(diffusers)) if has_transformer(name)]


def is_modular(name: str) -> bool:
    """Return whether the name of a diffusers class is that of a modular pipeline."""
    return name.endswith("ModularPipeline")


def has_transformer(name: str) -> bool:
    """Return whether diffusers has an importable pipeline of that name, with a transformer or modular."""
    import diffusers

    if not name.endswith("Pipeline"):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = getattr(diffusers, name)
    except (AttributeError, RuntimeError):  # diffusers raises RuntimeError for a module that cannot be imported
        return False
    if is_modular(name):
        return bool(getattr(kind, "default_blocks_name", None))
    return inspect.isclass(kind) and "transformer" in inspect.signature(kind.__init__).parameters


def find_other_scheduler(name: str) -> str:
    """Return the name of a pipeline's scheduler if it is not a flow's, by the type of its parameter; else an empty text."""
    import diffusers

    if is_modular(name):
        return str(look_up(name, "scheduler", ""))
    kind = getattr(diffusers, name)
    names = [one.__name__ for one in _list_classes(_read_hints(kind).get("scheduler"))]
    other = " or ".join(names) or "it takes none"
    return str(look_up(name, "scheduler", other if all(one.startswith(NO_FLOWS) for one in names) else ""))


def make_prompt(name: str, text: str) -> str:
    """Return a prompt in a pipeline's form: BRIA's edits take JSON."""
    return json.dumps({"edit_instruction": text}) if name == "BriaFiboEditPipeline" else text


def find_call(name: str) -> TinyCall:
    """Return the call of the tiny pipeline of a class."""
    import diffusers

    takes = inspect.signature(getattr(diffusers, name).__call__).parameters
    conditioned = any(word in name for word in CONDITIONED) and name not in TEXT_ALONE
    media = tuple(
        one
        for one in ARGUMENTS
        if one in takes and ((conditioned and one not in UNTRIED) or takes[one].default is inspect.Parameter.empty)
    )
    known = {"max_sequence_length": 32, "use_resolution_binning": False, "complex_human_instruction": None, "strength": 0.6}
    call = {key: value for key, value in {**known, **look_up(name, "call", {})}.items() if key in takes}
    frames = look_up(name, "frames", 5) if {"num_frames", "frames", "video_length", "video", "pose_video"} & {*takes} else 1
    size = 64 if name.startswith(LARGEST) else 32 if name.startswith(LARGE) else 16
    scale = 3.0 if {*SCALES} & {*takes} and name not in UNGUIDED else 1.0
    negative = "bad" if scale != 1 and "negative_prompt" in takes else ""
    sounds = "height" not in takes and any("duration" in one for one in takes)
    return TinyCall(media, call, scale, negative, size, frames, sounds)


def build(name: str, /, **arguments: Any) -> Any:
    """Return a tiny random pipeline of a class of diffusers.

    Args:
        name: the class.
        arguments: parts and settings of the pipeline in place of tiny ones; a function is called to build its part.

    Raises:
        UnknownPart: a part has a class without a known tiny form.
    """
    import diffusers

    kind = getattr(diffusers, name)
    parameters, hints = inspect.signature(kind.__init__).parameters, _read_hints(kind)
    chosen = {**look_up(name, "own", {}), **arguments}
    parts: dict[str, Any] = {}
    for part, entry in list(parameters.items())[1:]:
        missing = entry.default is inspect.Parameter.empty
        if part in chosen:
            parts[part] = (
                chosen[part]() if inspect.isroutine(chosen[part]) or isinstance(chosen[part], partial) else chosen[part]
            )
        elif part in (*look_up(name, "needed", ()), "transformer", "scheduler"):
            parts[part] = _build_part(part, hints[part], name, hints)
        elif missing:
            parts[part] = None if part in kind._optional_components else _build_part(part, hints[part], name, hints)
    both = parts.get("processor", parts.get("text_processor", parts.get("tokenizer")))
    encoder: Any = parts.get("text_encoder")
    if both is not None and hasattr(both, "image_token_id") and hasattr(encoder, "resize_token_embeddings"):
        if "tokenizer" in parts:
            parts["tokenizer"] = both.tokenizer
        encoder.resize_token_embeddings(len(both.tokenizer))
        encoder.config.image_token_id = both.image_token_id
    return kind(**parts)


def build_network(name: str, **further: Any) -> Any:
    """Return a tiny network or autoencoder of a class of diffusers, with further settings."""
    import diffusers

    kind = getattr(diffusers, name)
    settings = choose_vae_settings(kind, "") if name.startswith("Autoencoder") else choose_network_settings(kind, {})
    return kind(**{**settings, **further})


@contextmanager
def replace_surroundings(name: str, size: int) -> Iterator[None]:
    """Replace functions of a pipeline's module that a tiny pipeline cannot support, inside the context.

    Images keep their size in pipelines that scale them to about a megapixel or have a list of sizes. Cosmos' guardrail, a
    package with separate networks, accepts all prompts and videos.
    """
    import diffusers

    kind = getattr(diffusers, name)
    module = sys.modules[kind.__module__]
    if is_modular(name):  # its blocks are in a sibling module
        beside = f"{kind.__module__.rpartition('.')[0]}.encoders"
        module = importlib.import_module(beside) if importlib.util.find_spec(beside) else module
    replaced: dict[str, Any] = {
        one: vars(module)[one] for one in ("calculate_dimensions", "CosmosSafetyChecker") if one in vars(module)
    }
    if (scaled := replaced.get("calculate_dimensions")) is not None:
        rest = scaled(1024 * 1024, 1.0)[2:]
        module.calculate_dimensions = lambda *_: (size, size, *rest)  # type: ignore[attr-defined]
    if "CosmosSafetyChecker" in replaced:
        module.CosmosSafetyChecker = _AcceptingGuardrail  # type: ignore[attr-defined]
    before = vars(kind).get("resolutions")
    if name in LISTED:
        kind.resolutions = property(lambda self: [(size, size)], lambda self, sizes: None)
    try:
        yield
    finally:
        vars(module).update(replaced)
        if before is not None:
            kind.resolutions = before
        elif name in LISTED:
            del kind.resolutions


class _AcceptingGuardrail:
    """Guardrail that accepts everything."""

    def to(self, *_: Any) -> "_AcceptingGuardrail":
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


class _ZeroEmpty(TorchFunctionMode):
    """Mode in which `torch.empty` returns zeros: some networks create weights with it that only a checkpoint fills."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.zeros if function is torch.empty else function)(*args, **(kwargs or {}))


def build_random(make: Callable[[], Any], scale: float) -> Any:
    """Build a pipeline with random weights that are the same at every call.

    Args:
        make: function that builds the pipeline.
        scale: standard deviation of noise added to each weight of diffusers' parts; zeros and ones would hide errors.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with _ZeroEmpty():
            pipeline = make()
        for part in pipeline.components.values():
            if isinstance(part, nn.Module) and type(part).__module__.startswith("diffusers"):
                for parameter in part.parameters():
                    parameter.data += scale * torch.randn_like(parameter)
    return pipeline


def save(name: str, folder: Path) -> Path:
    """Save a tiny random pipeline of a class of diffusers, and return the folder; for the VAE see `SCALED`."""
    deep = {"vae": partial(_build_deep_vae, name)} if name.startswith(SCALED) else {}
    with replace_surroundings(name, 0):
        return save_pipeline(build_random(partial(build, name, **deep), 0.2), folder)


def _build_deep_vae(pipeline: str) -> Any:
    """Return a tiny VAE with 8 pixels per latent along each side."""
    if pipeline.startswith("QwenImage"):
        return build_network("AutoencoderKLQwenImage", dim_mult=[1] * 4, temperal_downsample=[False] * 3)
    return encoders.build_vae(**{**look_up(pipeline, "vae", {}), "blocks": 4})


def save_pipeline(pipeline: Any, folder: Path) -> Path:
    """Save a tiny pipeline in a form that diffusers opens, and return the folder."""
    if isinstance(getattr(pipeline, "safety_checker", None), _AcceptingGuardrail):
        pipeline.register_modules(safety_checker=None)
    pipeline.save_pretrained(folder)
    index = folder / "model_index.json"
    text = index.read_text(encoding="utf-8").replace(build_processor_without_video.__module__, "transformers")
    names = look_up(type(pipeline).__name__, "own", {}).get("id2label")
    if names is not None:  # diffusers reads them, but does not save them
        text = json.dumps({**json.loads(text), "id2label": names}, indent=2)
    index.write_text(text, encoding="utf-8")
    return folder


def _build_part(part: str, hint: Any, pipeline: str, hints: Mapping[str, Any]) -> Any:
    """Return a tiny part of a pipeline, given the type of its parameter."""
    import diffusers
    import transformers

    names = [one.__name__ for one in _list_classes(hint)]
    if part == "scheduler" and ("unet" in hints or pipeline == "DiTPipeline"):
        return diffusers.DDIMScheduler(**read_table()["betas"])
    if part == "scheduler":
        return _build_scheduler(names, pipeline)
    if part == "unet":
        wider = {**(read_table()["xl"] if "XL" in pipeline else {}), "in_channels": 9 if "Inpaint" in pipeline else LATENT}
        return _check_size(_list_classes(hint)[0], choose_network_settings(_list_classes(hint)[0], wider))
    if part == "transformer":
        kind = next(one for one in _list_classes(hint) if issubclass(one, nn.Module))
        return _check_size(kind, choose_network_settings(kind, look_up(pipeline, "network", {})))
    if part.endswith(("tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4")) and part not in NO_TEXT:
        # The class of a tokenizer follows from its text encoder.
        beside = hints.get(part.replace("tokenizer", "text_encoder"), hints.get("text_encoder"))
        named = [*names, *(one.__name__ for one in _list_classes(beside))]
        side = {"padding_side": "left"} if pipeline.startswith("CogView4") else {}  # as in the pipeline
        return next((make() for name in named if (make := TOKENIZERS.get(name))), encoders.build_qwen_tokenizer(**side))
    if part == "controlnet":
        return _build_controlnet(names[0], pipeline)
    if part == "unconditional_transformer":
        return _build_part("transformer", hints["transformer"], pipeline, hints)
    layers = look_up(pipeline, "layers", 2)
    if part == "text_encoder" and (known := look_up(pipeline, "text_encoder", None)) is not None:
        return encoders.build_language_model(getattr(transformers, known), layers=layers)
    kinds = _list_classes(hint)
    if pipeline in ("SanaVideoPipeline", "SanaImageToVideoPipeline"):
        kinds = [kind for kind in kinds if kind.__name__ == "AutoencoderKLWan"] or kinds
    for kind in kinds:
        if part == "vae" and (sizes := look_up(pipeline, "vae", None)) is not None:
            return encoders.build_vae(**sizes)
        if part == "text_encoder_3" and pipeline.startswith("StableDiffusion3"):
            return encoders.build_t5_encoder(width=2 * WIDTH)  # as wide as both of CLIP's embeddings
        if part == "image_processor" and pipeline == "HunyuanVideoImageToVideoPipeline":
            return _build_image_processor(kind.__name__, encoders.LLAVA_SIZE)
        if kind.__name__ in PARTS:
            return PARTS[kind.__name__]()
        if kind.__name__ in read_table()["autoencoders"] or part.endswith(("vae", "vqvae")):
            return _check_size(kind, choose_vae_settings(kind, pipeline))
        if part.startswith("text_encoder") and issubclass(kind, nn.Module) and hasattr(kind, "config_class"):
            return encoders.build_language_model(kind, layers=layers)
        if part.endswith("guider"):
            return diffusers.ClassifierFreeGuidance() if kind.__name__ == "BaseGuidance" else kind()
        if issubclass(kind, diffusers.ModelMixin):
            return _check_size(kind, choose_network_settings(kind, {}))
    raise UnknownPart(f"no tiny {part} ({' or '.join(names) or hint}) is known")


def _check_size(kind: type, settings: Mapping[str, Any]) -> Any:
    """Build a network of diffusers; UnknownPart if it has more than `MOST` parameters, counted on the meta device."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(**settings).parameters())
    if count > MOST:
        raise UnknownPart(
            f"its {kind.__name__} has {count / 1e6:.0f} million parameters, and no settings that make it tiny are known"
        )
    return kind(**settings)


def _build_controlnet(name: str, pipeline: str) -> Any:
    """Return a control network of a class beside a pipeline's transformer."""
    import diffusers

    kind = getattr(diffusers, name)
    mask = (4 if "Qwen" in name else 1) if "Inpaint" in pipeline else 0  # channels; Qwen-Image packs 2 x 2 of them
    further = {
        "extra_conditioning_channels": mask,
        "extra_condition_channels": mask,
        "control_layers_places": [0],
        "control_in_dim": LATENT,
    }
    known = inspect.signature(kind.__init__).parameters
    settings = choose_network_settings(kind, {key: value for key, value in further.items() if key in known})
    return kind(**settings)


def _read_hints(kind: Any) -> dict[str, Any]:
    """Return the types of a pipeline's parts; names of types are looked up in its module and in diffusers."""
    import diffusers

    try:
        return typing.get_type_hints(kind.__init__, localns=vars(diffusers))
    except (NameError, TypeError):
        parameters = inspect.signature(kind.__init__).parameters
        return {key: entry.annotation for key, entry in parameters.items()}


def _list_classes(hint: Any) -> list[type]:
    """Return the classes of a type hint."""
    if inspect.isclass(hint):
        return [hint]
    return [one for inner in typing.get_args(hint) for one in _list_classes(inner) if one is not type(None)]


def _build_scheduler(names: list[str], pipeline: str) -> Any:
    """Return a scheduler of a type: Euler steps of a flow, or the solver of that type on a flow's levels."""
    import diffusers

    euler = "FlowMatchEulerDiscreteScheduler"
    name = euler if euler in names or not names else names[0]
    kind = getattr(diffusers, name, None) or diffusers.FlowMatchEulerDiscreteScheduler
    if name in ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler"):
        return kind(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    if pipeline in UNGUIDED:
        return kind(num_train_timesteps=1)
    if name == euler and pipeline.startswith("StableAudio3"):
        return kind(shift=1.0)
    if name == euler:
        return kind(shift=1.0, invert_sigmas=True) if pipeline in INVERTED else kind(shift=3.0)
    return (
        kind() if inspect.isclass(kind) and hasattr(kind, "step") else diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    )


VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def _build_qwen_processor(kind: str = "Qwen2VLProcessor") -> Any:
    """Return a processor of Qwen's vision-language models without torchvision."""
    from transformers import Qwen2VLImageProcessorPil

    tokenizer = encoders.build_qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": VISION})
    patch = {"patch_size": 16} if kind.startswith("Qwen3") else {}
    images = Qwen2VLImageProcessorPil(min_pixels=32 * 32, max_pixels=64 * 64, **patch)
    return build_processor_without_video(images, tokenizer, kind)


def _build_transformers_object(name: str, *args: Any, **options: Any) -> Any:
    """Return an object of a class of transformers."""
    import transformers

    return getattr(transformers, name)(*args, **options)


def _build_vision_model(kind: str, ending: str = "") -> Any:
    """Return a vision transformer of transformers, e.g. of CLIP."""
    config = _build_transformers_object(f"{kind}VisionConfig", **encoders.choose_vision_settings())
    return _build_transformers_object(f"{kind}VisionModel{ending}", config)


def _build_image_processor(name: str, side: int = 32) -> Any:
    """Return an image processor of transformers for square images."""
    if name.startswith("Siglip2"):
        return _build_transformers_object(name, patch_size=16, max_num_patches=4)
    return (
        _build_transformers_object(name, size=side, crop_size=side)
        if "CLIP" in name
        else _build_transformers_object(name, size={"height": side, "width": side})
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "CLIPTokenizer": partial(encoders.build_clip_tokenizer, 77),
    "T5EncoderModel": encoders.build_t5_tokenizer,
    "T5Tokenizer": encoders.build_t5_tokenizer,
    "UMT5EncoderModel": encoders.build_t5_tokenizer,
    "GemmaTokenizer": encoders.build_gemma_tokenizer,
    "ByT5Tokenizer": partial(_build_transformers_object, "ByT5Tokenizer"),
    "Qwen2VLProcessor": _build_qwen_processor,
    "LlavaForConditionalGeneration": encoders.build_llava_tokenizer,
}


PARTS: dict[str, Callable[[], Any]] = {
    "AutoencoderKL": encoders.build_vae,
    "CLIPTextModel": partial(encoders.build_clip_encoder, False, width=16),
    "CLIPTextModelWithProjection": partial(encoders.build_clip_encoder, width=16),
    "T5EncoderModel": encoders.build_t5_encoder,
    "UMT5EncoderModel": partial(encoders.build_t5_encoder, "UMT5"),
    "Gemma2PreTrainedModel": encoders.build_gemma_encoder,
    "GemmaPreTrainedModel": encoders.build_gemma_encoder,
    "PreTrainedModel": encoders.build_qwen3_encoder,
    "Qwen2_5_VLForConditionalGeneration": encoders.build_qwen_vl_encoder,
    "Qwen2_5_VLTextModel": lambda: encoders.build_qwen_vl_encoder().model.language_model,
    "LlavaForConditionalGeneration": encoders.build_llava_encoder,
    "CLIPVisionModel": partial(_build_vision_model, "CLIP"),
    "CLIPVisionModelWithProjection": partial(_build_vision_model, "CLIP", "WithProjection"),
    "SiglipVisionModel": partial(_build_vision_model, "Siglip"),
    "CLIPImageProcessorPil": partial(_build_image_processor, "CLIPImageProcessorPil"),
    "SiglipImageProcessorPil": partial(_build_image_processor, "SiglipImageProcessorPil"),
    "Qwen2VLProcessor": _build_qwen_processor,
    "Qwen3VLProcessor": partial(_build_qwen_processor, "Qwen3VLProcessor"),
    "Siglip2VisionModel": partial(_build_vision_model, "Siglip2"),
    "Siglip2ImageProcessorPil": partial(_build_image_processor, "Siglip2ImageProcessorPil"),
    "CLIPProcessor": partial(_build_image_processor, "CLIPImageProcessorPil"),
}
