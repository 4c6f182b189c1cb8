"""Tiny random pipelines of diffusers, modular ones among them, from the parts that blocks expect, and how each is called."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fluvial.models.replay.processors import processor_without_video
from fluvial.models.tiny import encoders, networks, pipelines
from fluvial.models.tiny.networks import LATENT, PACKED, WIDTH
from fluvial.models.tiny.pipelines import TinyCall

ENDING = "ModularPipeline"
HEAD = 8  # width of an attention head
# Renders a conversation as its text alone; the start of each message keeps the empty prompt from being no token.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{{ c.get('text', '') }}{% endfor %}{% endif %}{% endfor %}"
)
Parts = dict[str, Callable[[], Any]]


class TinyModular(NamedTuple):
    """What the types of a pipeline's parts do not tell."""

    parts: Mapping[str, Callable[[], Any]] = MappingProxyType({})  # by name; one that gives None is left out
    call: Mapping[str, Any] = MappingProxyType({})
    size: int = 16
    frames: int = 1
    like: str = ""  # pipeline that is not modular, whose settings of parts it has; by default the one of its name
    guided: bool = True  # whether it is tried with guidance
    media: tuple[str, ...] = ()  # arguments that are images or videos


def find_call(name: str) -> TinyCall:
    """Return how the tiny pipeline of a class is called."""
    if not pipelines.is_modular(name):
        return pipelines.find_call(name)
    row = _rows().get(name, TinyModular())
    scale = 3.0 if row.guided else 1.0
    return TinyCall(row.media, dict(row.call), scale, "bad" if row.guided else "", row.size, row.frames)


def build(name: str) -> Any:
    """Return the tiny random pipeline of a class; a modular one with its default blocks."""
    import diffusers

    if not pipelines.is_modular(name):
        return pipelines.build(name)
    row, kind = _rows().get(name, TinyModular()), getattr(diffusers, name)
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
    pipe = pipelines.random_weights(partial(build, name), 0.2)
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    index = folder / "modular_model_index.json"
    text = index.read_text(encoding="utf-8")
    index.write_text(text.replace(processor_without_video.__module__, "transformers"), encoding="utf-8")
    return folder


def leaves(block: Any) -> Iterator[Any]:
    """Yield the blocks without blocks in them."""
    if not block.sub_blocks:
        yield block
    for each in block.sub_blocks.values():
        yield from leaves(each)


def _build_parts(name: str, blocks: Any, row: TinyModular) -> dict[str, Any]:
    """Return the parts that are loaded for the blocks, apart from those of blocks that rewrite prompts."""
    used = {
        spec.name
        for block in leaves(blocks)
        if "prompt" not in {output.name for output in block.intermediate_outputs}
        for spec in block.expected_components
    }
    like = row.like or name.replace("Modular", "")
    hints = {spec.name: spec.type_hint for spec in blocks.expected_components}
    made = dict[str, Any]()
    for spec in blocks.expected_components:
        part, kind = spec.name, getattr(spec.type_hint, "__name__", "")
        if part in row.parts:
            made[part] = row.parts[part]()
        elif spec.default_creation_method == "from_config" or part not in used:
            continue
        elif part == "scheduler":
            made[part] = pipelines._scheduler([kind], like)
        elif kind in TOKENIZERS and getattr(hints.get("text_encoder"), "__name__", "") not in pipelines.TOKENIZERS:
            made[part] = _tokenizer()
        else:
            role = "transformer" if part.startswith("transformer") else part
            made[part] = pipelines._part(role, spec.type_hint, like, hints)
    both: Any = made.get("processor", made.get("tokenizer"))
    encoder: Any = made.get("text_encoder")
    if "text_encoder" not in row.parts and hasattr(both, "image_token_id") and hasattr(encoder, "resize_token_embeddings"):
        encoder.resize_token_embeddings(len(both.tokenizer), mean_resizing=False)
        encoder.config.image_token_id = both.image_token_id
    return {part: each for part, each in made.items() if each is not None}


TOKENIZERS = ("AutoTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerBase")


def _rows() -> dict[str, TinyModular]:
    """Return the pipelines that are tried in another way than by default."""
    import diffusers

    flow = partial(diffusers.FlowMatchEulerDiscreteScheduler, shift=3.0)
    unipc = partial(
        diffusers.UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    flux3: Parts = {
        "text_encoder": partial(_sees, 2),
        "tokenizer": partial(_processor, "Qwen3VLProcessor"),
        "transformer": _flux3,
    }
    layers = {"text_encoder_out_layers": [1, 2], "max_sequence_length": 512}
    video: dict[str, Any] = {"size": 32, "frames": 5}
    krea: Parts = {
        "text_encoder": partial(_language, "Qwen3VLModel", 36),
        "tokenizer": _tokenizer,
        "transformer": partial(_network, "Krea2Transformer2DModel", num_text_layers=12),
    }
    flux2 = {"text_encoder_out_layers": [0, 1, 2], "max_sequence_length": 64}
    image: dict[str, Any] = {"media": ("image",)}
    ltx: dict[str, Any] = {**video, "like": "LTX2Pipeline"}
    rows = {
        "Flux3": TinyModular(flux3, layers),
        "Flux3Distilled": TinyModular({**flux3, "transformer": partial(_flux3, flow_map=True)}, layers, guided=False),
        "MiniMaxH3": TinyModular(
            {
                "text_encoder": partial(_sees, 51),
                "tokenizer": _tokenizer,
                "processor": partial(_processor, "Qwen3VLProcessor"),
                "vae": _h3_vae,
                "audio_vae": _h3_audio,
                "transformer": _h3,
                "transformer_ref": _h3,
                "scheduler": partial(diffusers.MiniMaxH3Scheduler, shift=12.0),
                "audio_scheduler": partial(diffusers.MiniMaxH3Scheduler, shift=3.0),
            },
            size=32,
            frames=124,
            guided=False,
        )
        if hasattr(diffusers, "MiniMaxH3Scheduler")
        else TinyModular(),
        "Anima": TinyModular(
            {
                "text_conditioner": _anima_conditioner,
                "tokenizer": _tokenizer,
                "t5_tokenizer": encoders.t5_tokenizer,
                "text_encoder": encoders.qwen3_encoder,
                "transformer": partial(
                    _network, "CosmosTransformer3DModel", in_channels=LATENT, concat_padding_mask=False, max_size=(8, 32, 32)
                ),
            }
        ),
        "Cosmos3Distilled": TinyModular(
            {
                "transformer": partial(_cosmos3, sound=False),
                "text_tokenizer": _tokenizer,
                "vae": partial(pipelines.build_network, "AutoencoderKLWan"),
            },
            **video,
            guided=False,
        ),
        "Cosmos3Omni": TinyModular(
            {
                "transformer": partial(_cosmos3, sound=True),
                "text_tokenizer": _tokenizer,
                "vae": partial(pipelines.build_network, "AutoencoderKLWan"),
                "sound_tokenizer": _cosmos_sound,
                "scheduler": unipc,
            },
            **video,
        ),
        "ErnieImage": TinyModular(
            {"text_encoder": partial(_language, "Mistral3Model"), "tokenizer": _tokenizer, "transformer": _ernie}, size=32
        ),
        "Flux2": TinyModular(
            {
                "text_encoder": partial(_language, "Mistral3ForConditionalGeneration"),
                "tokenizer": partial(_processor, "Qwen2VLProcessor"),
            },
            flux2,
            size=64,
            like="Flux2Pipeline",
            guided=False,
        ),
        **{
            f"Flux2Klein{ending}": TinyModular(
                {"text_encoder": partial(_language, "Qwen3ForCausalLM"), "tokenizer": _tokenizer},
                flux2,
                size=64,
                like="Flux2Pipeline",
                guided=bool(ending),
            )
            for ending in ("", "Base")
        },
        "Flux": TinyModular(guided=False),
        "FluxKontext": TinyModular(guided=False),
        "HunyuanVideo15": TinyModular(**video),
        "LTX": TinyModular(size=32, frames=9),
        "LTX2": TinyModular({"duration_head": _nothing}, **ltx),
        "LTX25": TinyModular(
            {"duration_head": _nothing, "vae": _nothing, "diffusion_decoder": _ltx_decoder}, **{**ltx, "frames": 9}
        ),
        "Ideogram4": TinyModular(
            {"text_encoder": partial(_language, "Qwen3VLModel", 36), "tokenizer": _tokenizer},
            {"max_sequence_length": 512, "guidance_schedule": [7.0, 5.0, 3.0]},
            size=32,
            guided=False,
        ),
        "Krea2": TinyModular(krea, like="Krea2Pipeline"),
        "Krea2Turbo": TinyModular(krea, like="Krea2Pipeline", guided=False),
        "QwenImage": TinyModular({"controlnet": _nothing}),
        **{f"QwenImage{kind}": TinyModular(**image) for kind in ("Edit", "EditPlus", "Layered")},
        "QwenImage21": TinyModular(size=32),
        "QwenImage21Turbo": TinyModular(size=32, guided=False),
        "Wan": TinyModular(**video),
        "Wan22": TinyModular(like="WanPipeline", **video),
        "WanImage2Video": TinyModular(
            {
                "transformer": partial(
                    _network, "WanTransformer3DModel", in_channels=2 * LATENT + 2, image_dim=WIDTH, added_kv_proj_dim=WIDTH
                )
            },
            like="WanImageToVideoPipeline",
            **video,
            **image,
        ),
        "Wan22Image2Video": TinyModular(like="WanImageToVideoPipeline", **video, **image),
        "Wan22Vace": TinyModular(dict.fromkeys(("transformer", "transformer_2"), _vace), like="WanVACEPipeline", **video),
        "Echo": TinyModular(call={"sigmas": [1.0, 0.7, 0.4, 0.0]}, size=32, frames=9, like="LTX2Pipeline", guided=False),
        "Helios": TinyModular(
            {"transformer": _helios, "scheduler": partial(diffusers.HeliosScheduler, stages=1, use_dynamic_shifting=True)},
            {"num_latent_frames_per_chunk": 3},
            size=32,
            frames=5,
            like="HeliosPipeline",
        ),
        **{
            f"Helios{kind}": TinyModular(
                {"transformer": _helios, "scheduler": flow}, size=32, frames=9, like="HeliosPipeline", guided=False
            )
            for kind in ("Pyramid", "PyramidDistilled")
        },
        **{
            f"WanAnimate2{kind}": TinyModular(
                {"transformer": _animate, "image_encoder": _clip},
                {"segment_frame_length": 5},
                size=32,
                frames=5,
                like="WanImageToVideoPipeline",
                guided=not kind,
                media=("image", "driving_video"),
            )
            for kind in ("", "Distilled")
        },
        "MiniMaxMusic3": TinyModular(guided=False),
        "StableDiffusionXL": TinyModular(
            {"controlnet": _nothing, "scheduler": partial(diffusers.EulerDiscreteScheduler, **networks.BETAS)}, size=32
        ),
    }
    return {f"{name}{ENDING}": row for name, row in rows.items()}


def _nothing() -> None:
    """Stand for a part that is left out."""


def _network(kind: str, /, **further: Any) -> Any:
    import diffusers

    made = getattr(diffusers, kind)
    return made(**networks.network_settings(made, further))


def _language(kind: str, layers: int = 2) -> Any:
    import transformers

    return encoders.language_model(getattr(transformers, kind), layers=layers)


def _tokenizer() -> Any:
    made = encoders.qwen_tokenizer()
    made.add_special_tokens({"additional_special_tokens": pipelines.VISION})
    made.chat_template = TEMPLATE
    return made


def _processor(kind: str) -> Any:
    made = pipelines._qwen_processor(kind)
    made.chat_template = made.tokenizer.chat_template = TEMPLATE
    return made


def _sees(layers: int) -> Any:
    """Return a Qwen3-VL that knows the words of the tokenizer which stand for images."""
    model, words = _language("Qwen3VLForConditionalGeneration", layers), _tokenizer()
    model.resize_token_embeddings(len(words) + 8, mean_resizing=False)
    for name, word in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start")):
        setattr(model.config, f"{name}_token_id", words.convert_tokens_to_ids(f"<|{word}|>"))
    return model


def _flux3(**further: Any) -> Any:
    from diffusers import Flux3Transformer2DModel

    return Flux3Transformer2DModel(
        in_channels=PACKED,
        cond_in_channels=PACKED,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=HEAD,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        timestep_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        **further,
    )


def _h3() -> Any:
    from diffusers import MiniMaxH3Transformer3DModel

    return MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=HEAD,
        hidden_size=WIDTH,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=2 * WIDTH,
        in_channels=LATENT,
        audio_in_channels=LATENT,
        patch_size=(1, 2, 2),
        text_dim=WIDTH,
        freq_dim=16,
        time_embed_hidden_dim=16,
        time_embed_dim=8,
        rope_freq_dim=1,
    )


def _h3_vae() -> Any:
    from diffusers import AutoencoderKLMiniMaxH3

    return AutoencoderKLMiniMaxH3(
        latent_channels=LATENT,
        block_out_channels=(8,) * 6,
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=(0.1, -0.2, 0.3, 0.0),
        latents_std=(1.2, 0.8, 1.5, 1.0),
    )


def _h3_audio() -> Any:
    from diffusers import AutoencoderKLMiniMaxH3Audio

    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        encoder_rates=(2, 2),
        latent_dim=8,
        latent_channels=LATENT,
        num_attention_heads=2,
        decoder_dim=16,
        decoder_rates=(2, 2),
        decoder_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
        sampling_rate=160,
        latents_mean=[0.1, 0.0, -0.1, 0.2],
        latents_std=[1.1, 0.9, 1.0, 1.3],
    )


def _anima_conditioner() -> Any:
    from diffusers import AnimaTextConditioner

    return AnimaTextConditioner(
        source_dim=WIDTH,
        target_dim=WIDTH,
        model_dim=WIDTH,
        num_layers=1,
        num_attention_heads=2,
        target_vocab_size=128,
        min_sequence_length=16,
    )


def _cosmos3(*, sound: bool) -> Any:
    from diffusers import Cosmos3OmniTransformer

    return Cosmos3OmniTransformer(
        dtype="float32",
        head_dim=HEAD,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        latent_channel=LATENT,
        patch_latent_dim=PACKED,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        vocab_size=len(encoders.qwen_tokenizer()) + 8,
        rope_scaling={"mrope_section": [2, 1, 1], "rope_type": "default", "mrope_interleaved": True},
        **({"sound_gen": True, "sound_dim": LATENT} if sound else {}),
    )


def _cosmos_sound() -> Any:
    from diffusers import Cosmos3AVAEAudioTokenizer

    return Cosmos3AVAEAudioTokenizer(
        sampling_rate=400,
        vocoder_input_dim=LATENT,
        dec_dim=8,
        dec_c_mults=(1, 1),
        dec_strides=(2, 4),
        enc_dim=8,
        enc_intermediate_dim=16,
        enc_num_layers=1,
        enc_num_blocks=1,
        enc_n_fft=8,
        enc_hop_length=2,
        enc_latent_dim=8,
        enc_c_mults=(1, 1),
        enc_strides=(2, 2),
    )


def _ltx_decoder() -> Any:
    from diffusers import LTX2VideoDiffusionDecoderModel

    return LTX2VideoDiffusionDecoderModel(
        latent_channels=LATENT,
        decoder_head_dim=HEAD,
        decoder_stage_channels=(WIDTH,) * 5,
        decoder_stage_depths=(1,) * 5,
        decoder_stage_kernels=((1, 1, 1),) * 4,
        decoder_upsample_channel_reductions=(1,) * 4,
        decoder_stage5_kernel=(1, 3, 3),
        decoder_t_emb_dim=WIDTH,
    )


def _ernie() -> Any:
    from diffusers import ErnieImageTransformer2DModel

    return ErnieImageTransformer2DModel(
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=2 * WIDTH,
        in_channels=PACKED,
        out_channels=PACKED,
        text_in_dim=WIDTH,
        rope_axes_dim=(2, 2, 4),
    )


def _helios() -> Any:
    from diffusers import HeliosTransformer3DModel

    return HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=HEAD,
        in_channels=LATENT,
        out_channels=LATENT,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=2 * WIDTH,
        num_layers=1,
        rope_dim=(4, 2, 2),
    )


def _animate() -> Any:
    return _network("WanAnimate2Transformer3DModel", in_dim=2 * LATENT + 4, out_dim=LATENT)


def _clip() -> Any:
    """Return a CLIP for images of the size that Wan Animate 2 scales them to."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(**{**encoders.vision_settings(), "image_size": 224, "patch_size": 112}))


def _vace() -> Any:
    return _network("WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=2 * LATENT + 4)
