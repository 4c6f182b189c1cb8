"""Tiny random pipelines of diffusers, including modular ones, and the arguments of their calls."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fluvial.models.replay.processors import build_processor_without_video
from fluvial.models.tiny import encoders, pipelines
from fluvial.models.tiny.pipelines import TinyCall
from fluvial.models.tiny.settings import LATENT, PACKED, WIDTH, read_table

ENDING = "ModularPipeline"
# Renders a conversation as its text alone; the start of each message gives the empty prompt a token.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{{ c.get('text', '') }}{% endfor %}{% endif %}{% endfor %}"
)
Parts = dict[str, Callable[[], Any]]


class TinyModular(NamedTuple):
    """Properties of a modular pipeline that the types of its parts do not determine."""

    parts: Mapping[str, Callable[[], Any]] = MappingProxyType({})  # by name; a part that is None is left out
    call: Mapping[str, Any] = MappingProxyType({})
    size: int = 16
    frames: int = 1
    like: str = ""  # other pipeline with the same settings of parts; by default the one of the same name
    guided: bool = True  # whether it is tried with guidance
    media: tuple[str, ...] = ()  # arguments that are images or videos


def find_call(name: str) -> TinyCall:
    """Return the arguments of the tiny pipeline of a class."""
    if not pipelines.is_modular(name):
        return pipelines.find_call(name)
    row = _read_rows().get(name, TinyModular())
    scale = 3.0 if row.guided else 1.0
    return TinyCall(tuple(row.media), dict(row.call), scale, "bad" if row.guided else "", row.size, row.frames)


def build(name: str) -> Any:
    """Return the tiny random pipeline of a class; a modular one with its default blocks."""
    import diffusers

    if not pipelines.is_modular(name):
        return pipelines.build(name)
    row, kind = _read_rows().get(name, TinyModular()), getattr(diffusers, name)
    pipe = kind(blocks=getattr(diffusers, kind.default_blocks_name)())
    parts = _build_parts(name, pipe.blocks, row)
    if "enable_safety_checker" in pipe.config:
        pipe.register_to_config(enable_safety_checker=False)
    if "distilled_sigmas" in pipe.config:
        pipe.register_to_config(distilled_sigmas=[0.95, 0.6, 0.25])
    if "reference_image_short_edge" in pipe.config:
        pipe.register_to_config(reference_image_short_edge=row.size)
    pipe.update_components(**parts)
    return pipe


def save(name: str, folder: Path) -> Path:
    """Save the tiny random pipeline of a class, and return the folder."""
    if not pipelines.is_modular(name):
        return pipelines.save(name, folder)
    pipe = pipelines.build_random(partial(build, name), 0.2)
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    index = folder / "modular_model_index.json"
    text = index.read_text(encoding="utf-8")
    index.write_text(text.replace(build_processor_without_video.__module__, "transformers"), encoding="utf-8")
    return folder


def walk_leaves(block: Any) -> Iterator[Any]:
    """Yield the innermost blocks."""
    if not block.sub_blocks:
        yield block
    for each in block.sub_blocks.values():
        yield from walk_leaves(each)


def _build_parts(name: str, blocks: Any, row: TinyModular) -> dict[str, Any]:
    """Return the parts of the blocks, without those of blocks that rewrite prompts."""
    used = {
        spec.name
        for block in walk_leaves(blocks)
        if "prompt" not in {output.name for output in block.intermediate_outputs}
        for spec in block.expected_components
    }
    like = row.like or name.replace("Modular", "")
    hints = {spec.name: spec.type_hint for spec in blocks.expected_components}
    parts = dict[str, Any]()
    for spec in blocks.expected_components:
        part, kind = spec.name, getattr(spec.type_hint, "__name__", "")
        if part in row.parts:
            parts[part] = row.parts[part]()
        elif spec.default_creation_method == "from_config" or part not in used:
            continue
        elif part == "scheduler":
            parts[part] = pipelines._build_scheduler([kind], like)
        elif kind in TOKENIZERS and getattr(hints.get("text_encoder"), "__name__", "") not in pipelines.TOKENIZERS:
            parts[part] = _build_tokenizer()
        else:
            role = "transformer" if part.startswith("transformer") else part
            parts[part] = pipelines._build_part(role, spec.type_hint, like, hints)
    both: Any = parts.get("processor", parts.get("tokenizer"))
    encoder: Any = parts.get("text_encoder")
    if "text_encoder" not in row.parts and hasattr(both, "image_token_id") and hasattr(encoder, "resize_token_embeddings"):
        encoder.resize_token_embeddings(len(both.tokenizer), mean_resizing=False)
        encoder.config.image_token_id = both.image_token_id
    return {part: each for part, each in parts.items() if each is not None}


TOKENIZERS = ("AutoTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerBase")


@cache
def _read_rows() -> dict[str, TinyModular]:
    """Return the pipelines that need other properties than the defaults."""
    parts, known = _list_parts(), read_table()["modular"]
    return {f"{name}{ENDING}": TinyModular(parts.get(name, {}), **known.get(name, {})) for name in {**known, **parts}}


def _list_parts() -> dict[str, Parts]:
    """Return the parts of pipelines that their types do not determine, by the pipeline."""
    import diffusers

    network = pipelines.build_network
    flux3: Parts = {"text_encoder": partial(_build_qwen3_vl, 2), "tokenizer": partial(_build_processor, "Qwen3VLProcessor")}
    klein: Parts = {"text_encoder": partial(_build_language_model, "Qwen3ForCausalLM"), "tokenizer": _build_tokenizer}
    layers36: Parts = {"text_encoder": partial(_build_language_model, "Qwen3VLModel", 36), "tokenizer": _build_tokenizer}
    krea: Parts = {**layers36, "transformer": partial(network, "Krea2Transformer2DModel", num_text_layers=12)}
    helios: Parts = {"transformer": partial(network, "HeliosTransformer3DModel")}
    pyramid: Parts = {**helios, "scheduler": partial(diffusers.FlowMatchEulerDiscreteScheduler, shift=3.0)}
    animate: Parts = {"transformer": partial(network, "WanAnimate2Transformer3DModel"), "image_encoder": _build_clip}
    solver = partial(
        diffusers.UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    images = {"in_channels": 2 * LATENT + 2, "image_dim": WIDTH, "added_kv_proj_dim": WIDTH}
    parts: dict[str, Parts] = {
        "Flux3": flux3,
        "Flux3Distilled": {**flux3, "transformer": partial(network, "Flux3Transformer2DModel", flow_map=True)},
        "Anima": {
            **{"tokenizer": _build_tokenizer, "t5_tokenizer": encoders.build_t5_tokenizer},
            "text_encoder": encoders.build_qwen3_encoder,
        },
        "Cosmos3Distilled": {"transformer": _build_cosmos3, "text_tokenizer": _build_tokenizer},
        "Cosmos3Omni": {
            **{"text_tokenizer": _build_tokenizer, "scheduler": solver},
            "transformer": partial(_build_cosmos3, sound_gen=True, sound_dim=LATENT),
        },
        "ErnieImage": {"text_encoder": partial(_build_language_model, "Mistral3Model"), "tokenizer": _build_tokenizer},
        "Flux2": {
            "text_encoder": partial(_build_language_model, "Mistral3ForConditionalGeneration"),
            "tokenizer": partial(_build_processor, "Qwen2VLProcessor"),
        },
        **{"Flux2Klein": klein, "Flux2KleinBase": klein, "Ideogram4": layers36, "Krea2": krea, "Krea2Turbo": krea},
        "LTX2": {"duration_head": _omit_part},
        "LTX25": {"duration_head": _omit_part, "vae": _omit_part},
        "QwenImage": {"controlnet": _omit_part},
        "WanImage2Video": {"transformer": partial(network, "WanTransformer3DModel", **images)},
        "Helios": {**helios, "scheduler": partial(diffusers.HeliosScheduler, stages=1, use_dynamic_shifting=True)},
        **{"HeliosPyramid": pyramid, "HeliosPyramidDistilled": pyramid},
        **{"WanAnimate2": animate, "WanAnimate2Distilled": animate},
        "Wan22Vace": dict.fromkeys(("transformer", "transformer_2"), partial(network, "WanVACETransformer3DModel")),
        "StableDiffusionXL": {
            "controlnet": _omit_part,
            "scheduler": partial(diffusers.EulerDiscreteScheduler, **read_table()["betas"]),
        },
    }
    if hasattr(diffusers, "MiniMaxH3Scheduler"):
        parts["MiniMaxH3"] = {
            **{"text_encoder": partial(_build_qwen3_vl, 51), "tokenizer": _build_tokenizer},
            "processor": partial(_build_processor, "Qwen3VLProcessor"),
            "scheduler": partial(diffusers.MiniMaxH3Scheduler, shift=12.0),
            "audio_scheduler": partial(diffusers.MiniMaxH3Scheduler, shift=3.0),
        }
    return parts


def _omit_part() -> None:
    """Return None for a part that is left out."""


def _build_language_model(kind: str, layers: int = 2) -> Any:
    import transformers

    return encoders.build_language_model(getattr(transformers, kind), layers=layers)


def _build_tokenizer() -> Any:
    tokenizer = encoders.build_qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": pipelines.VISION})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _build_processor(kind: str) -> Any:
    processor = pipelines._build_qwen_processor(kind)
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
    return processor


def _build_qwen3_vl(layers: int) -> Any:
    """Return a Qwen3-VL that knows the tokenizer's words for images."""
    model, tokenizer = _build_language_model("Qwen3VLForConditionalGeneration", layers), _build_tokenizer()
    model.resize_token_embeddings(len(tokenizer) + 8, mean_resizing=False)
    for name, word in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start")):
        setattr(model.config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{word}|>"))
    return model


def _build_cosmos3(**sound: Any) -> Any:
    turns = {"mrope_section": [2, 1, 1], "rope_type": "default", "mrope_interleaved": True}
    sizes: dict[str, Any] = {"latent_channel": LATENT, "patch_latent_dim": PACKED, "num_hidden_layers": 2}
    sizes |= {"vocab_size": len(encoders.build_qwen_tokenizer()) + 8, "rope_scaling": turns, "dtype": "float32"}
    return pipelines.build_network("Cosmos3OmniTransformer", **sizes, **sound)


def _build_clip() -> Any:
    """Return a CLIP for images of the size that Wan Animate 2 scales them to."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(**{**encoders.choose_vision_settings(), "image_size": 224, "patch_size": 112}))
